"""``proxyd completion SHELL``: what makes the shell complete commands, options and files."""

from __future__ import annotations

import argparse

SHELLS = ("bash", "zsh", "tcsh")
"""What shtab writes for."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="bash: source <(proxyd completion bash)")


def run(args: argparse.Namespace) -> int:
    import shtab

    from proxyd.cli.main import whole_parser

    parser = whole_parser()
    _complete_files(parser)
    print(shtab.complete(parser, args.shell))
    return 0


def _complete_files(parser: argparse.ArgumentParser) -> None:
    """Options whose value is a path complete to paths."""
    import shtab

    places = {"FILE": shtab.FILE, "SOCKET": shtab.FILE, "DIR": shtab.DIRECTORY}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                _complete_files(inner)
        elif action.metavar in places:
            action.complete = places[str(action.metavar)]  # type: ignore[attr-defined] # shtab looks for it
