"""``proxyd replay``: feed a grant log through a fresh machine and check that the same effects come out."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from proxyd.core.errors import EXIT_FAILED, EXIT_OK
from proxyd.core.units import format_duration


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("log", metavar="LOG", help="a grant log ([coordinator] grant_log); older parts are found by it")
    parser.add_argument("--json", action="store_true", help="the result for programs")


def run(args: argparse.Namespace) -> int:
    """Exit code 1 when anything came out otherwise than it was logged."""
    from proxyd.runtime.grant_log import open_log
    from proxyd.runtime.replay import replay

    parts = open_log(Path(args.log))
    result = replay(parts)
    difference = result.difference
    if args.json:
        value = {
            "parts": result.parts,
            "events": result.events,
            "effects": result.effects,
            "grants": result.grants,
            "span_seconds": result.span_ns / 1e9,
            "notes": result.notes,
            "identical": difference is None,
            "difference": None if difference is None else str(difference),
        }
        print(json.dumps(value, indent=2))
        return EXIT_OK if difference is None else EXIT_FAILED
    for note in result.notes:
        print(f"note: {note}")
    head = (
        f"{result.events} events and {result.effects} effects ({result.grants} grants) over "
        f"{format_duration(result.span_ns)}, {result.parts} part{'s' if result.parts > 1 else ''}"
    )
    if difference is None:
        print(f"{head}: identical")
        return EXIT_OK
    print(f"{head}: identical so far. The first difference:\n{difference}")
    return EXIT_FAILED
