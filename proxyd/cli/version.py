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


def about() -> dict[str, object]:
    """Versions of proxyd, Python, the kernel and packages."""
    packages = {package: _installed(package) for package in _PACKAGES}
    return {
        "proxyd": __version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "packages": packages,
    }


def run(args: argparse.Namespace) -> int:
    if args.json:
        print(json.dumps(about()))
    else:
        print(f"proxyd {__version__}")
    return 0
