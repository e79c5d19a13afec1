"""``proxyd top``: links and transfers as they are now: who sends, who waits, and for what.

On a terminal the picture is drawn anew in place until Ctrl-C. Without one (a pipe, a log) each picture is printed after
the other, without colours; ``--json`` prints one JSON object a picture. Rates are what was delivered between two looks.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from proxyd.cli.asking import add_agent, add_coordinator
from proxyd.core.errors import EXIT_OK, ConfigError, RemoteError

if TYPE_CHECKING:
    from proxyd.cli.top.frames import Frame


def add_arguments(parser: argparse.ArgumentParser) -> None:
    whom = parser.add_mutually_exclusive_group()
    add_coordinator(whom)
    add_agent(whom)
    parser.add_argument(
        "--interval-s", type=float, default=1.0, metavar="S", help="between looks (default: %(default)s)"
    )
    parser.add_argument(
        "--rows", type=int, default=20, metavar="N", help="transfers that are shown (default: %(default)s)"
    )
    parser.add_argument("--once", action="store_true", help="one picture, after one interval, and no more")
    parser.add_argument("--count", type=int, default=0, metavar="N", help="so many pictures (default: until Ctrl-C)")
    parser.add_argument("--json", action="store_true", help="one JSON object a picture, for programs")


def run(args: argparse.Namespace) -> int:
    """Ends by Ctrl-C (exit code 0), or after --once or --count."""
    if not 0.1 <= args.interval_s <= 3600 or args.rows < 0 or args.count < 0:
        raise ConfigError("--interval-s goes from 0.1 to 3600; --rows and --count are no less than 0")
    count = 1 if args.once else args.count
    frames = _frames(args, count)
    try:
        if args.json:
            for frame in frames:
                print(json.dumps(frame.plain()), flush=True)
        elif sys.stdout.isatty() and not args.once:
            _live(frames, args.rows)
        else:
            _printed(frames, args.rows)
    except KeyboardInterrupt:
        return EXIT_OK  # that is how one leaves it
    return EXIT_OK


def _frames(args: argparse.Namespace, count: int) -> Iterator[Frame]:
    """Pictures, the first after two looks: rates need both. A daemon that goes away for a while is waited for, once it
    was there."""
    from proxyd.cli.top.frames import look_at_agent, look_at_coordinator

    look: Callable[[], Frame] = (
        (lambda: look_at_coordinator(args.coordinator)) if args.agent is None else (lambda: look_at_agent(args.agent))
    )
    frame = look()
    shown = 0
    while not count or shown < count:
        time.sleep(args.interval_s)
        try:
            frame = look().since(frame)
        except RemoteError as error:
            if count:
                raise
            frame = frame.without_answer(str(error))
        yield frame
        shown += 1


def _live(frames: Iterator[Frame], rows: int) -> None:
    from rich.console import Console
    from rich.live import Live

    from proxyd.cli.top.frames import picture

    with Live(console=Console(highlight=False), screen=True, auto_refresh=False) as live:
        for frame in frames:
            live.update(picture(frame, rows), refresh=True)


def _printed(frames: Iterator[Frame], rows: int) -> None:
    from rich.console import Console

    from proxyd.cli.terminal import PIPE_COLUMNS
    from proxyd.cli.top.frames import picture

    console = Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_COLUMNS)
    for frame in frames:
        console.print(picture(frame, rows))
