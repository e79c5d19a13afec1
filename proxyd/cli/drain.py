"""``proxyd drain``: no new transfer begins at an agent or a coordinator; what is under way is finished.

Nothing is lost: what is held waits, and goes on after ``proxyd undrain`` or with the daemon's next life.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import TYPE_CHECKING

from proxyd.cli.asking import TIMEOUT_S, add_agent, add_coordinator, ask_agent, ask_coordinator
from proxyd.core.errors import EXIT_DEGRADED, EXIT_OK, ConfigError
from proxyd.runtime.json_values import as_plain

if TYPE_CHECKING:
    from proxyd.v1 import admin_pb2

POLL_S = 0.1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_whom(parser)
    parser.add_argument(
        "--wait",
        metavar="TIME",
        help='until what was under way is finished, at most so long, like "60s"; exit code 3 when it was not enough',
    )


def add_whom(parser: argparse.ArgumentParser) -> None:
    """The options that drain and undrain share."""
    whom = parser.add_mutually_exclusive_group()
    add_agent(whom)
    add_coordinator(whom)
    parser.add_argument("--json", action="store_true", help="everything, for programs")


def run(args: argparse.Namespace) -> int:
    from proxyd.core.units import parse_duration

    wait_ns = 0 if args.wait is None else parse_duration(args.wait)
    answer = change(args, drain=True)
    deadline_s = time.monotonic() + wait_ns / 1e9
    while wait_ns and answer.under_way_transfers and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
        answer = change(args, drain=True)
    tell(args, answer)
    return EXIT_DEGRADED if wait_ns and answer.under_way_transfers else EXIT_OK


def change(args: argparse.Namespace, *, drain: bool) -> admin_pb2.DrainResponse:
    """Say it to the daemon that the options name; saying it again changes nothing and tells how far it is.

    :raises ConfigError: the options name none.
    """
    from proxyd.v1 import admin_pb2

    request = admin_pb2.DrainRequest(drain=drain)
    answer: admin_pb2.DrainResponse
    if args.coordinator is not None:
        answer = ask_coordinator(args.coordinator, lambda stub: stub.Drain(request, timeout=TIMEOUT_S))
    elif args.agent is not None:
        answer = ask_agent(args.agent, lambda stub: stub.Drain(request, timeout=TIMEOUT_S))
    else:
        raise ConfigError(
            "no daemon is named", next_step="Say --agent (this host's), --agent SOCKET, or --coordinator ADDRESS"
        )
    return answer


def tell(args: argparse.Namespace, answer: admin_pb2.DrainResponse) -> None:
    """Print how far it is."""
    if args.json:
        print(json.dumps(as_plain(answer), indent=2))
        return
    who = "the coordinator" if args.coordinator is not None else "the agent"
    if not answer.draining:
        print(f"{who} takes new transfers; {answer.under_way_transfers} are under way")
        return
    print(f"{who} drains: {answer.under_way_transfers} transfers under way, {answer.held_transfers} held")
    if answer.arriving_transfers:
        print(f"{answer.arriving_transfers} messages of other agents are arriving; those are not held")
    if not answer.under_way_transfers:
        print("nothing of its own is under way: it may be stopped", file=sys.stderr)
