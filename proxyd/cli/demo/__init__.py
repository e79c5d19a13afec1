"""``proxyd demo``: the same bursts over plain TCP and through proxyd, on an emulated WAN.

docs/demo.md says what is measured and how. Where to look: :mod:`.scenario` (what is sent over what), :mod:`.traffic`
(who sends it), :mod:`.measure` (one mode), :mod:`.session` (all of them), :mod:`.table` and :mod:`.picture`.
"""

from __future__ import annotations

import argparse
import signal
from pathlib import Path

from proxyd.core.errors import EXIT_FAILED, EXIT_OK, ConfigError

CONFIGURED = False
"""Whether the coordinator is told of the link, unless an option says otherwise."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", metavar="FILE.json", type=Path, help="write all figures there")
    parser.add_argument("--plot", metavar="FILE.png", type=Path, help="draw them (needs the 'report' extra)")
    known = parser.add_mutually_exclusive_group()
    known.add_argument(
        "--capacity", dest="capacity", action="store_true", help="configure the links' capacity, round trip and buffer"
    )
    known.add_argument(
        "--no-capacity", dest="capacity", action="store_false", help="configure nothing: the coordinator finds it out"
    )
    parser.set_defaults(capacity=CONFIGURED)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="fewer bursts: under a minute, percentiles are rough")
    size.add_argument(
        "--full",
        action="store_true",
        help="also other rates, round trips, sizes, loss, a deep buffer, both directions, open load (takes long)",
    )


def run(args: argparse.Namespace) -> int:
    for path in (args.out, args.plot):
        if path is not None and not path.resolve().parent.is_dir():
            raise ConfigError(f"cannot write {path}", why=f"there is no directory {path.parent}")
    from rich.console import Console

    from proxyd.cli.demo.session import Session, write_json
    from proxyd.cli.demo.table import print_extras, print_report

    if args.plot is not None:
        # Now, not after minutes of measuring.
        import matplotlib  # noqa: F401

        from proxyd.cli.demo.picture import draw

    # SIGTERM unwinds like Ctrl-C: daemons, trainers and namespaces end in order.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    console, errors = Console(), Console(stderr=True)
    session = Session(errors, quick=args.quick, full=args.full, configured=args.capacity)
    session.run()
    # Files first: what follows may be piped into something that stops reading.
    if args.out is not None:
        write_json(args.out, session.to_json())
    if args.plot is not None:
        draw(args.plot, session.scenario, session.results, session.kind)
    print_report(console, session.scenario, session.results, session.kind)
    print_extras(console, session.extra_results)
    for name, path in (("Figures", args.out), ("Picture", args.plot)):
        if path is not None:
            console.print(f"{name}: {path}", highlight=False, soft_wrap=True)
    return EXIT_FAILED if session.failures else EXIT_OK
