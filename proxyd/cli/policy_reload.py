"""``proxyd policy reload``: make a running coordinator read its own file again."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from proxyd.cli.asking import TIMEOUT_S, add_coordinator, ask_coordinator
from proxyd.core.errors import EXIT_OK, EXIT_USAGE, ConfigError
from proxyd.runtime.json_values import as_plain

if TYPE_CHECKING:
    from proxyd.v1 import admin_pb2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_coordinator(parser)
    parser.add_argument("--json", action="store_true", help="everything, for programs")


def run(args: argparse.Namespace) -> int:
    """Exit code 2 when the file is wrong; the old policy then stays in force."""
    from proxyd.v1 import admin_pb2

    answer: admin_pb2.ReloadPolicyResponse = ask_coordinator(
        args.coordinator, lambda stub: stub.ReloadPolicy(admin_pb2.ReloadPolicyRequest(), timeout=TIMEOUT_S)
    )
    if args.json:
        print(json.dumps(as_plain(answer), indent=2))
        return EXIT_OK if answer.applied else EXIT_USAGE
    if not answer.applied:
        raise ConfigError(f"the old policy stays in force: {answer.message}")
    print(answer.message)
    if answer.needs_restart:
        print(f"needs a restart, and stays as it was: {', '.join(answer.needs_restart)}")
    return EXIT_OK
