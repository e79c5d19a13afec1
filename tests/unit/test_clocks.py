"""No lease, pace or time-out is reckoned by the wall clock, which people and NTP set."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
WALL = {("time", "time"), ("time", "time_ns"), ("datetime", "now"), ("datetime", "utcnow"), ("date", "today")}
WALL |= {("time", "localtime"), ("time", "gmtime"), ("time", "strftime"), ("time", "ctime")}
ALLOWED = {
    "proxyd/agent/tcp.py": "the kernel's own note of when bytes came is of the wall clock; an age beyond 1 s is none",
    "proxyd/coordinator/daemon.py": "the epoch's number, which is only compared for equality",
    "proxyd/coordinator/grant_log.py": "when a log was begun, for people",
    "proxyd/coordinator/kubernetes_lock.py": "a text in the Lease, for people",
    "proxyd/coordinator/policy_keeper.py": "calendars count in wall clock time: that is what they are",
    "proxyd/core/policy.py": "the same",
    "proxyd/runtime/logs.py": "time stamps of log lines",
    "proxyd/runtime/reloading.py": "when the file in force was read, for people: a metric in Unix time",
    "proxyd/runtime/tls.py": "certificates are valid from one date to another",
}


def wall_clock_calls(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
            name = node.value.id if isinstance(node.value, ast.Name) else node.value.attr
            if (name, node.attr) in WALL:
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {name}.{node.attr}")
        if isinstance(node, ast.ImportFrom) and node.module == "time":
            found += [f"{path.relative_to(ROOT)}:{node.lineno}" for name in node.names if ("time", name.name) in WALL]
    return found


def test_the_wall_clock_is_read_only_where_it_means_something() -> None:
    rooms = ["proxyd/agent", "proxyd/coordinator", "proxyd/core", "proxyd/runtime", "proxyd/wire", "client"]
    calls = [call for room in rooms for path in sorted((ROOT / room).rglob("*.py")) for call in wall_clock_calls(path)]
    assert [call for call in calls if call.partition(":")[0] not in ALLOWED] == []


def test_the_search_finds_what_it_looks_for() -> None:
    daemon = ROOT / "proxyd" / "coordinator" / "daemon.py"
    assert any("time.time_ns" in call for call in wall_clock_calls(daemon))
