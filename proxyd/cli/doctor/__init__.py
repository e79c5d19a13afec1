"""``proxyd doctor``: what of this host, its configuration and its daemons will get in the way, each with its fix.

Nothing is changed and nothing is sent but connections and questions that daemons answer anyway. It needs no root (what
only root can see is skipped, with the reason), no configuration and no running daemon. Each check runs on a thread of
its own and has a time limit, so a name server or a daemon that hangs costs that one check.

Exit code: 0 when all is well, 3 when something is not as it should be, 1 when something will not work.
"""

from __future__ import annotations

import argparse
import json

from proxyd.core.errors import EXIT_DEGRADED, EXIT_FAILED, EXIT_OK

TIMEOUT_S = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config",
        metavar="FILE",
        action="append",
        help="configuration of a daemon here, may be given twice; default: $PROXYD_CONFIG, else /etc/proxyd/*.toml",
    )
    parser.add_argument(
        "--coordinator", metavar="ADDRESS", help="ask this coordinator too (host:port or unix:/path on its own host)"
    )
    parser.add_argument("--rate", metavar="RATE", help='judge buffers by a link of this rate, like "4Gbit"; with --rtt')
    parser.add_argument("--rtt", metavar="TIME", help='and this round trip, like "60ms"')
    parser.add_argument("--timeout-s", type=float, default=TIMEOUT_S, help="for each check (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help='{"checks": [{name, status, detail, fix}], ...}')
    parser.add_argument("--all", action="store_true", help="also show what is well or was skipped in full")


def run(args: argparse.Namespace) -> int:
    """See the module's text."""
    from proxyd.cli.doctor.checks import examine
    from proxyd.cli.doctor.findings import Status, as_plain, worst
    from proxyd.cli.doctor.subject import make_subject

    subject = make_subject(
        args.config, coordinator=args.coordinator, rate=args.rate, rtt=args.rtt, timeout_s=args.timeout_s
    )
    findings = examine(subject)
    verdict = worst(findings)
    if args.json:
        print(json.dumps(as_plain(subject, findings), indent=2))
    else:
        from proxyd.cli.doctor.show import report

        print(report(subject, findings, everything=args.all), end="")
    return {Status.FAIL: EXIT_FAILED, Status.WARN: EXIT_DEGRADED}.get(verdict, EXIT_OK)
