"""``proxyd policy show``: the policy that a running coordinator applies."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from proxyd.cli.asking import TIMEOUT_S, add_coordinator, ask_coordinator
from proxyd.core.errors import EXIT_OK
from proxyd.core.units import format_rate
from proxyd.runtime.json_values import as_plain

if TYPE_CHECKING:
    from proxyd.v1 import admin_pb2

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_coordinator(parser)
    parser.add_argument("--json", action="store_true", help="everything, for programs")


def run(args: argparse.Namespace) -> int:
    from proxyd.v1 import admin_pb2

    policy: admin_pb2.GetPolicyResponse = ask_coordinator(
        args.coordinator, lambda stub: stub.GetPolicy(admin_pb2.GetPolicyRequest(), timeout=TIMEOUT_S)
    )
    print(json.dumps(as_plain(policy), indent=2) if args.json else "\n".join(_lines(policy)))
    return EXIT_OK


def _lines(policy: admin_pb2.GetPolicyResponse) -> list[str]:
    day, minute = divmod(policy.minute_of_week, 24 * 60)
    again = f"read again {policy.reloads} times, refused {policy.reloads_refused} times"
    lines = [
        f"policy of {policy.file or 'a coordinator without a file'}, {again}",
        f"it is {DAYS[day]} {minute // 60:02}:{minute % 60:02} ({policy.time_zone or 'time zone of the host'})",
    ]
    for link in policy.links:
        now, cap = _rate(link.limit_bytes_per_s, "no limit"), _rate(link.cap_bytes_per_s)
        name = f"{link.link.src_site}->{link.link.dst_site}"
        lines.append(f"link {name}: {now} now, cap {cap}, {100 * link.fifo_share:g} % for the longest waiter")
        lines.extend(f"    {window}" for window in link.calendar)
    for job in policy.jobs:
        floor, cap = _rate(job.floor_bytes_per_s), _rate(job.cap_bytes_per_s)
        lines.append(f"job {job.name}: weight {job.weight:g}, floor {floor}, cap {cap}")
    lines.append(f"{'any other' if policy.jobs else 'every'} job: weight 1, no floor, no cap")
    for one in as_plain(policy)["classes"]:
        how = "one agent at a time" if one["share"] == "one" else "all agents at once, at equal shares"
        lines.append(f"class {one['traffic']}: {how}")
    return lines


def _rate(rate_bytes_per_s: int, nothing: str = "none") -> str:
    return format_rate(rate_bytes_per_s) if rate_bytes_per_s else nothing
