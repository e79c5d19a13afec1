"""``proxyd version``: ours and those of what we stand on, for bug reports."""

from __future__ import annotations

import argparse
import json
import platform
from importlib import metadata

from proxyd import __version__

_PACKAGES = ("grpcio", "protobuf", "uvloop", "pydantic", "numpy", "xxhash", "torch")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object, with kernel and packages")


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def run(args: argparse.Namespace) -> int:
    if args.json:
        packages = {package: _installed(package) for package in _PACKAGES}
        about = {"python": platform.python_version(), "kernel": platform.release(), "packages": packages}
        print(json.dumps({"proxyd": __version__, **about}))
    else:
        print(f"proxyd {__version__}")
    return 0
