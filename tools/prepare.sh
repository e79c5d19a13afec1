#!/usr/bin/env bash
# Brings in what pip cannot: the venv module and the `ip` command of a bare Debian or Ubuntu.
#   tools/prepare.sh venv PYTHON    make sure that PYTHON can make a virtual environment, or say what to install
#   tools/prepare.sh net            make sure that `ip` is there; without it the emulated WAN is replaced by loopback
#   tools/prepare.sh image          make sure that an image can be built without a registry
#   tools/prepare.sh monitoring     make sure that promtool and prometheus are there, or fail and say what to install
#   tools/prepare.sh tests          net, and libfaketime, etcd, Prometheus, systemd-analyze, Chromium and curl; without them tests of
#                                   wall clock steps, of a coordinator's standby, of dashboards, units and forwarding skip
set -euo pipefail

apt_install() {
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1 || return 1
    echo "proxyd: installing $* with apt-get" >&2
    DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "$@" </dev/null >/dev/null 2>&1 && return 0
    # A fresh image has no package lists yet.
    apt-get update -q </dev/null >/dev/null 2>&1 || true
    DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "$@" </dev/null >&2
}

have_prometheus() {
    for program in promtool prometheus; do
        command -v "$program" >/dev/null 2>&1 || [ -x "build/tools/$program" ] || return 1
    done
}

# The programs alone: the package would also start a server.
fetch_prometheus() {
    local into="$PWD/build/tools" unpacked
    command -v apt-get >/dev/null 2>&1 && command -v dpkg-deb >/dev/null 2>&1 || return 1
    echo "proxyd: fetching prometheus and promtool with apt-get" >&2
    unpacked="$(mktemp -d)"
    (
        cd "$unpacked"
        apt-get download -q prometheus >/dev/null 2>&1 ||
            { apt-get update -q >/dev/null 2>&1 && apt-get download -q prometheus >/dev/null 2>&1; } || exit 1
        dpkg-deb -x prometheus_*.deb . && mkdir -p "$into" && cp usr/bin/promtool usr/bin/prometheus "$into/"
    )
    local code=$?
    rm -rf "$unpacked"
    return $code
}

case "${1:-}" in
venv)
    python="${2:-}"
    if [ -z "$python" ]; then
        echo "proxyd needs Python 3.11, 3.12 or 3.13 and found none on PATH." >&2
        echo "Install one (Debian 12, Ubuntu 24.04: apt-get install python3 python3-venv) or say: make PYTHON=/path/to/python3" >&2
        exit 2
    fi
    if ! "$python" -c 'import sys; raise SystemExit(not (3, 11) <= sys.version_info[:2] < (3, 14))' >/dev/null 2>&1; then
        echo "proxyd needs Python 3.11, 3.12 or 3.13; '$python' is $("$python" --version 2>&1 | head -n 1)." >&2
        exit 2
    fi
    if ! "$python" -c 'import ensurepip, venv' >/dev/null 2>&1; then
        version="$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
        apt_install "python$version-venv" || apt_install python3-venv || true
        if ! "$python" -c 'import ensurepip, venv' >/dev/null 2>&1; then
            echo "'$python' cannot make a virtual environment: its modules venv and ensurepip are missing." >&2
            echo "As root: apt-get install python$version-venv, then run make again." >&2
            exit 2
        fi
    fi
    ;;
image)
    if ! { command -v buildah && command -v mmdebstrap; } >/dev/null 2>&1 && ! apt_install buildah mmdebstrap; then
        echo "proxyd: the image needs buildah and mmdebstrap. As root: apt-get install buildah mmdebstrap" >&2
        exit 2
    fi
    ;;
net | tests)
    # Debian keeps ip in /usr/sbin, which an ordinary user's PATH may lack.
    PATH="$PATH:/usr/sbin:/sbin"
    if ! command -v ip >/dev/null 2>&1 && ! { apt_install iproute2 && command -v ip >/dev/null 2>&1; }; then
        echo "proxyd: the command 'ip' is missing (package iproute2), so the emulated WAN cannot be built here." >&2
        echo "        As root: apt-get install iproute2. Going on: the demo falls back to loopback, WAN tests skip." >&2
    fi
    if [ "$1" = tests ] && ! ls /usr/lib/*/faketime/libfaketimeMT.so.1 >/dev/null 2>&1 && ! apt_install faketime; then
        echo "proxyd: libfaketime is missing (package faketime): the test of wall clock steps skips." >&2
    fi
    if [ "$1" = tests ] && ! command -v systemd-analyze >/dev/null 2>&1 && ! apt_install systemd; then
        echo "proxyd: systemd-analyze is missing (package systemd): the tests of the unit files skip." >&2
    fi
    if [ "$1" = tests ] && ! command -v etcd >/dev/null 2>&1 && ! apt_install etcd-server; then
        echo "proxyd: etcd is missing (package etcd-server): the tests of a standby coordinator skip." >&2
    fi
    if [ "$1" = tests ] && ! command -v chromium >/dev/null 2>&1 && ! apt_install chromium; then
        echo "proxyd: chromium is missing (package chromium): the tests of the status pages skip." >&2
    fi
    if [ "$1" = tests ] && ! command -v curl >/dev/null 2>&1 && ! apt_install curl; then
        echo "proxyd: curl is missing (package curl): the test of forwarding for curl skips." >&2
    fi
    if [ "$1" = tests ] && ! have_prometheus && ! fetch_prometheus; then
        echo "proxyd: prometheus is missing (package prometheus): the test of the dashboards skips." >&2
    fi
    ;;
monitoring)
    if ! have_prometheus && ! fetch_prometheus; then
        echo "proxyd: promtool and prometheus are missing, and couldn't be fetched." >&2
        echo "        On Debian or Ubuntu: apt-get install prometheus (or apt-get update, then this again)." >&2
        echo "        Elsewhere: put both programs of Prometheus 2.42 or later on PATH, or into build/tools." >&2
        exit 2
    fi
    ;;
*)
    echo "usage: $0 venv PYTHON | net | image | monitoring | tests" >&2
    exit 2
    ;;
esac
