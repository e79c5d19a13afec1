"""``proxyd example data-parallel``: see :mod:`proxyd.cli.example`."""

from __future__ import annotations

import argparse

from proxyd.cli.example import add_example_arguments, run_example


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_example_arguments(parser)


def run(args: argparse.Namespace) -> int:
    return run_example("data_parallel", args)
