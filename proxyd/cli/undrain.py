"""``proxyd undrain``: a daemon that was drained takes new transfers again, first those that it held."""

from __future__ import annotations

import argparse

from proxyd.cli.drain import add_whom, change, tell
from proxyd.core.errors import EXIT_OK


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_whom(parser)


def run(args: argparse.Namespace) -> int:
    tell(args, change(args, drain=False))
    return EXIT_OK
