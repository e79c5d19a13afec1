"""Which tests may run side by side, and which need the machine for themselves.

``together``: whatever measures no time. Their result doesn't depend on who else uses the machine, so there is one more
at once than there are processors. ``a_few``: real daemons that wait most of their time, with bars of seconds that
leave a busy machine room; three at once. ``by_file``: the same, but the tests of a file share what takes long to start
(trainers with torch), so two files at once. ``alone``: rates, bursts, and what a host or an emulated link can carry.

A test is in the group of its file, or of its room, a directory below ``tests``; a mark with the name of a group wins.
What nobody has judged is ``alone``: that is slow, and never wrong. So every test is in exactly one group.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

TESTS = Path(__file__).parent

GROUPS = {
    "together": ("unit", "property", "sim", "fuzz"),
    "a_few": (
        "e2e/test_abuse.py",
        "e2e/test_accounting.py",
        "e2e/test_addresses.py",
        "e2e/test_coordinator_away.py",
        "e2e/test_delivery.py",
        "e2e/test_demo.py",
        "e2e/test_failover.py",
        "e2e/test_faults.py",
        "e2e/test_first_run.py",
        "e2e/test_forward.py",
        "e2e/test_life.py",
        "e2e/test_membership.py",
        "e2e/test_messages.py",
        "e2e/test_prometheus.py",
        "e2e/test_status_page.py",
        "e2e/test_timeouts.py",
        "e2e/test_workers.py",
        "faults/test_full_disk.py",
        "faults/test_links.py",
        "faults/test_middle_boxes.py",
        "faults/test_proxy.py",
        "faults/test_restart.py",
        "faults/test_resume.py",
        "faults/test_signals.py",
        "faults/test_verdicts.py",
        "faults/test_watchdog.py",
        "integration/test_bad_input.py",
        "integration/test_control_away.py",
        "integration/test_control_process.py",
        "integration/test_control_session.py",
        "integration/test_damaged_connections.py",
        "integration/test_gateway.py",
        "integration/test_gateway_token.py",
        "integration/test_grant_log_replay.py",
        "integration/test_job_permissions.py",
        "integration/test_job_tokens.py",
        "integration/test_local.py",
        "integration/test_locks.py",
        "integration/test_owns.py",
        "integration/test_operating.py",
        "integration/test_policy_reload.py",
        "integration/test_relay.py",
        "integration/test_shadow.py",
        "integration/test_strangers.py",
        "integration/test_tls.py",
        "wan/test_bench_commands.py",
        "wan/test_wan_cleanup.py",
    ),
    "by_file": ("torch",),
    "alone": (),
}
"""In the order in which they run: a broken core shows in seconds, not after the emulated WAN has run."""


def room_of(path: Path) -> str:
    """The directory right below ``tests`` in which a test file is; empty for one that is elsewhere."""
    return path.relative_to(TESTS).parts[0] if path.is_relative_to(TESTS) else ""


def group_of(path: Path, marks: Collection[str]) -> str:
    """The group of a test, from its file and the names of its marks, the closest first."""
    for mark in marks:
        if mark in GROUPS:
            return mark
    if path.is_relative_to(TESTS):
        names = (room_of(path), path.relative_to(TESTS).as_posix())
        for group, judged in GROUPS.items():
            if any(name in judged for name in names):
                return group
    return "alone"


def may_hold(path: Path, group: str) -> bool:
    """Whether a test file can hold tests of a group: it is judged so, or names the group's mark. To collect all files
    in each worker of each group would take half a minute."""
    return group_of(path, ()) == group or f"mark.{group}" in path.read_text(encoding="utf-8")
