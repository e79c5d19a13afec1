"""``proxyd why``: how long a transfer waited for what, from a running coordinator or from its grant log."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proxyd.cli.asking import TIMEOUT_S, add_coordinator, ask_coordinator
from proxyd.core.errors import EXIT_OK, ConfigError, RemoteError
from proxyd.core.units import format_duration, format_size
from proxyd.wire.envelope import TransferId

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proxyd.coordinator.story import Stories
    from proxyd.runtime.translate_admin import Told, WaitTold

SENDING = "sending"
LONGEST = 20
MAX_STORIES = 1_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "transfer",
        metavar="TRANSFER",
        nargs="?",
        help="as proxyd status prints it: INCARNATION-N; none, with --log: those that waited longest",
    )
    add_coordinator(parser)
    parser.add_argument("--log", metavar="FILE", help="read the story from this grant log; no coordinator is asked")
    parser.add_argument("--json", action="store_true", help="everything, for programs")


def run(args: argparse.Namespace) -> int:
    """Exit code 1 when the transfer is not known."""
    if args.log:
        if args.transfer is None:
            return longest_of_log(Path(args.log), as_json=args.json)
        return why_of_log(args.transfer, Path(args.log), as_json=args.json)
    if args.transfer is None:
        raise ConfigError(
            "which transfer?",
            next_step="proxyd status prints those that wait; --log FILE lists those of a grant log",
        )
    return why_of_coordinator(args.transfer, args.coordinator, as_json=args.json)


def why_of_coordinator(name: str, coordinator: str | None, *, as_json: bool) -> int:
    """Ask a running coordinator. Raises RemoteError when it doesn't know."""
    transfer = parse_transfer(name)
    from proxyd.runtime.translate_admin import read_why, why_request

    told = ask_coordinator(coordinator, lambda stub: read_why(stub.Why(why_request(transfer), timeout=TIMEOUT_S)))
    return _print(told, as_json=as_json)


def why_of_log(name: str, path: Path, *, as_json: bool) -> int:
    """Replay a grant log and tell what happened in it. Raises RemoteError when the transfer is not in it."""
    transfer = parse_transfer(name)
    stories, last_ns = _replayed(path, transfer)
    told = stories.of(transfer, last_ns)
    if told is None:
        raise RemoteError(
            f"transfer {transfer} is not in {path}",
            next_step="Small messages (64 KiB and less) ask for no grant and leave no trace, and older parts are "
            "deleted; without a TRANSFER this command lists what is there",
        )
    return _print(told, as_json=as_json)


def longest_of_log(path: Path, *, as_json: bool) -> int:
    """The transfers of a grant log that waited longest."""
    stories, last_ns = _replayed(path, None)
    found = [told for transfer in stories.transfers() if (told := stories.of(transfer, last_ns)) is not None]
    found.sort(key=lambda told: -_waited_ns(told.waits))
    if as_json:
        print(json.dumps([as_plain(told) for told in found[:LONGEST]], indent=2))
        return EXIT_OK
    print(f"{len(found)} transfers asked for grants; these waited longest:")
    for told in found[:LONGEST]:
        causes = [wait for wait in told.waits if wait.cause != SENDING][:1]
        why = f": {_list(causes)}" if causes else ""
        print(f"{format_duration(_waited_ns(told.waits)):>10}  {_head(told)}{why}")
    return EXIT_OK


def _replayed(path: Path, only: TransferId | None) -> tuple[Stories, int]:
    """The stories of a log, and the time of its last event."""
    from proxyd.coordinator.story import Stories
    from proxyd.runtime.grant_log import open_log
    from proxyd.runtime.replay import replay

    stories = Stories(only=only, most=MAX_STORIES)
    last_ns = 0

    def before(machine: Any, now_ns: int, event: Any) -> None:
        nonlocal last_ns
        last_ns = now_ns
        stories.watch(machine)
        stories.saw(now_ns, event)

    result = replay(open_log(path), before, lambda machine, now_ns, effects: stories.performed(now_ns, effects))
    notes = list(result.notes)
    if result.difference is not None:
        notes.append(
            f"the log does not replay beyond {result.difference.part}, record {result.difference.number}; what came "
            "later is left out (proxyd replay shows the difference)"
        )
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    return stories, last_ns


def parse_transfer(name: str) -> TransferId:
    """A transfer as status and logs print it. Raises ConfigError."""
    try:
        return TransferId.parse(name)
    except ValueError as error:
        raise ConfigError(f"{name!r} names no transfer", next_step="Write it like 00c0ffee00c0ffee-17") from error


def _print(told: Told, *, as_json: bool) -> int:
    if as_json:
        print(json.dumps(as_plain(told), indent=2))
    else:
        for line in story_lines(told):
            print(line)
    return EXIT_OK


def as_plain(told: Told) -> dict[str, Any]:
    """For programs: times in seconds since the request."""
    return {
        "transfer": str(told.transfer),
        "link": None if told.link is None else str(told.link),
        "agent": None if told.agent is None else str(told.agent),
        "destination": None if told.destination is None else str(told.destination),
        "job": told.job,
        "traffic_class": None if told.traffic is None else told.traffic.label,
        "wanted_bytes": told.wanted_bytes,
        "granted_bytes": told.granted_bytes,
        "over": told.over_ago_ns is not None,
        "total_seconds": _total_ns(told) / 1e9,
        "waited_seconds": _waited_ns(told.waits) / 1e9,
        "waits": _plain_waits(told.waits),
        "timeline": [
            {
                "at_seconds": (told.requested_ago_ns - one.age_ns) / 1e9,
                "what": one.what,
                "reason": one.reason,
                "waits": _plain_waits(one.waits),
            }
            for one in told.decisions
        ],
        "now": told.now,
    }


def _plain_waits(waits: Sequence[WaitTold]) -> list[dict[str, Any]]:
    return [{"cause": one.cause, "seconds": one.waited_ns / 1e9, "words": one.words} for one in waits]


def story_lines(told: Told) -> list[str]:
    """For people."""
    lines = [_head(told)]
    for one in told.decisions:
        at = format_duration(max(0, told.requested_ago_ns - one.age_ns))
        lines.append(f"{at:>10}  {one.what:<9}  {one.reason}")
        if waited := [wait for wait in one.waits if wait.cause != SENDING]:
            lines.append(f"{'':>10}  {'':<9}  before that it waited {_list(waited)}")
    total_ns = _total_ns(told)
    total = f"{format_duration(total_ns)} from the request " + ("to its end" if told.over_ago_ns is not None else "on")
    waited_ns = _waited_ns(told.waits)
    causes = [wait for wait in told.waits if wait.cause != SENDING]
    if not causes:
        lines.append(f"waited for nothing; {total}")
    else:
        share = f" ({100 * waited_ns / total_ns:.0f} %)" if total_ns else ""
        lines.append(f"waited {format_duration(waited_ns)}{share} of {total}:")
        lines += [f"{format_duration(wait.waited_ns):>10}  {wait.words}" for wait in causes]
    if told.over_ago_ns is not None:
        lines.append(
            f"{format_duration(max(0, total_ns - waited_ns)):>10}  on its way: leaving, crossing, acknowledged"
        )
    elif told.now:
        lines.append(f"now: {told.now}")
    return lines


def _head(told: Told) -> str:
    if told.link is None or told.traffic is None:
        return f"{told.transfer} (how it began is not known any more)"
    return (
        f"{told.transfer}: {format_size(told.wanted_bytes)}, {told.traffic.label}, job {told.job!r}, "
        f"from {told.agent or 'an agent'} to {told.destination} over {told.link}"
    )


def _list(waits: Sequence[WaitTold]) -> str:
    return "; ".join(f"{format_duration(wait.waited_ns)}: {wait.words}" for wait in waits)


def _waited_ns(waits: Sequence[WaitTold]) -> int:
    return sum(wait.waited_ns for wait in waits if wait.cause != SENDING)


def _total_ns(told: Told) -> int:
    return max(0, told.requested_ago_ns - (told.over_ago_ns or 0))
