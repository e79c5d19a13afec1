#!/usr/bin/env bash
# Builds the image of the Dockerfile where no container registry and no Docker engine is reachable: its base is made from
# Debian's packages and tagged with the base image's name, wheels come from wherever pip gets them on this host.
#   tools/image.sh build [TAG]      as root; needs buildah and mmdebstrap (apt-get install buildah mmdebstrap)
#   tools/image.sh run TAG ARG...   `proxyd ARG...` inside it, as the image's user, on this host's network
# With a registry at hand: docker build -t proxyd .
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

BASE="$(awk 'toupper($1) == "FROM" {print $2; exit}' Dockerfile)"
WORK=build/image
# The vfs driver needs no support of the host's kernel; images stay in a directory of ours.
store() { buildah --root "$PWD/$WORK/root" --runroot "$PWD/$WORK/runroot" --storage-driver vfs "$@"; }

build() {
    local tag="$1" container python=.venv/bin/python
    for program in buildah mmdebstrap; do
        command -v "$program" >/dev/null 2>&1 || {
            echo "tools/image.sh: $program is missing. As root: apt-get install buildah mmdebstrap" >&2
            exit 2
        }
    done
    [ "$(id -u)" = 0 ] || { echo "tools/image.sh: a base image can be made by root only" >&2; exit 2; }
    [ -x "$python" ] || python=python3
    mkdir -p "$WORK"
    if ! store inspect --type image "docker.io/library/$BASE" >/dev/null 2>&1; then
        # python:3.11-slim-bookworm is Debian 12 with Python 3.11; so is this.
        mmdebstrap --quiet --variant=apt --include=python3,python3-venv,passwd \
            --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
            --dpkgopt='path-exclude=/usr/share/locale/*' "${BASE##*-}" "$WORK/base.tar"
        container="$(store from scratch)"
        store add -q "$container" "$WORK/base.tar" / >/dev/null
        store commit -q "$container" "docker.io/library/$BASE" >/dev/null
        store rm "$container" >/dev/null
        rm "$WORK/base.tar"
    fi
    "$python" -m pip --disable-pip-version-check download -q --only-binary :all: --python-version 3.11 \
        --dest "$WORK/wheels" "hatchling>=1.24" $(extras) 2>&1 | { grep -v '^WARNING: Location' || true; } >&2
    # HEALTHCHECK is of Docker's format, not of OCI's.
    store bud -q --format docker --isolation chroot --pull-never --volume "$PWD/$WORK/wheels:/wheels:ro" \
        --build-arg PIP_NO_INDEX=1 --build-arg PIP_FIND_LINKS=/wheels --tag "$tag" .
}

# What the image installs, from pyproject.toml itself.
extras() {
    python3 - <<'PYTHON'
import tomllib

project = tomllib.load(open("pyproject.toml", "rb"))["project"]
wanted = project["dependencies"] + [one for extra in ("daemon", "ha") for one in project["optional-dependencies"][extra]]
print(*(one.replace(" ", "") for one in wanted))
PYTHON
}

run() {
    local tag="$1" container code=0
    shift
    container="$(store from --pull-never "$tag")"
    # shellcheck disable=SC2064
    trap "store rm '$container' >/dev/null" EXIT
    store run --isolation chroot ${PROXYD_IMAGE_VOLUMES:-} "$container" -- proxyd "$@" || code=$?
    return $code
}

case "${1:-}" in
build) build "${2:-proxyd}" ;;
run) shift && run "$@" ;;
*)
    echo "usage: $0 build [TAG] | run TAG ARG..." >&2
    exit 2
    ;;
esac
