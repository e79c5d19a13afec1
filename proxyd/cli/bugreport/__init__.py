"""``proxyd bugreport``: one archive with what a report needs, and without secrets.

In it: versions, the doctor's findings, configurations (as values, without comments), status and metrics of the daemons
that answer, their last log lines, the network's sysctls. What is secret is left out twice: a configuration's values are
kept only where their form shows that they are none, and every file is searched for the contents of all token and key
files, for what was masked, and for what looks like a secret (:mod:`proxyd.cli.bugreport.masking`).
"""

from __future__ import annotations

import argparse
import io
import os
import platform
import re
import sys
import tarfile
import time

from proxyd.core.errors import EXIT_OK, ConfigError

FILE_MODE = 0o600
LOG_LINES = 2000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config",
        metavar="FILE",
        action="append",
        help="configuration of a daemon here, may be given twice; default: $PROXYD_CONFIG, else /etc/proxyd/*.toml",
    )
    parser.add_argument("--coordinator", metavar="ADDRESS", help="ask this coordinator too")
    parser.add_argument(
        "--log",
        metavar="FILE",
        action="append",
        help="take a log from this file, not from the journal; may be repeated",
    )
    parser.add_argument(
        "--log-lines", type=int, default=LOG_LINES, metavar="N", help="the last lines of each (default: %(default)s)"
    )
    parser.add_argument("--output", metavar="FILE", help="default: proxyd-bugreport-HOST-TIME.tar.gz, here")


def run(args: argparse.Namespace) -> int:
    from proxyd.cli.bugreport.collect import collect

    if args.log_lines < 0:
        raise ConfigError(f"--log-lines {args.log_lines}", why="it must be 0 or more")
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    host = re.sub(r"[^A-Za-z0-9.-]", "-", platform.node()) or "host"
    path = args.output or f"proxyd-bugreport-{host}-{stamp}.tar.gz"
    files = collect(args.config, args.coordinator, args.log or [], args.log_lines)
    _write(path, files, os.path.basename(path).removesuffix(".gz").removesuffix(".tar"))
    print(path)
    print("Look into it before you pass it on: tar tzf, tar xzOf", path, file=sys.stderr)
    return EXIT_OK


def _write(path: str, files: dict[str, str], directory: str) -> None:
    """An archive that only its owner may read; never over a file that exists."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE)
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}", why=error.strerror or str(error), next_step="Choose another name with --output"
        ) from error
    now_s = int(time.time())
    with os.fdopen(fd, "wb") as raw, tarfile.open(fileobj=raw, mode="w:gz") as archive:
        for name, text in sorted(files.items()):
            content = text.encode("utf-8", "replace")
            entry = tarfile.TarInfo(f"{directory}/{name}")
            entry.size, entry.mtime, entry.mode = len(content), now_s, FILE_MODE
            archive.addfile(entry, io.BytesIO(content))
