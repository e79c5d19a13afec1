"""All tests, group by group (see :mod:`tests.groups`): ``python -m tests [OPTIONS OF PYTEST]``; ``make test`` runs it.

Ends with one line for all groups and the names of what failed. Exit code 0: at least one test ran and none failed.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

from tests.groups import GROUPS, TESTS

ROOT = TESTS.parent
MAX_PROCESSORS = 7
"""More would only wait: the longest test takes a third of what all of them take on one processor."""
NONE_SELECTED = 5
"""What pytest says when no test is left to run."""


def options_of(group: str) -> list[str]:
    """How pytest runs a group."""
    processors = min(len(os.sched_getaffinity(0)), MAX_PROCESSORS)
    # One more than there are processors, because some tests wait.
    workers = {"together": processors + 1, "a_few": 3, "by_file": 2, "alone": 1}[group] if processors > 1 else 1
    # A worker that has no more to do takes over what waits behind a long test of another one.
    spread = "loadfile" if group == "by_file" else "worksteal"
    return ["--group", group, *(["-n", str(workers), "--dist", spread] if workers > 1 else [])]


def reporting(report: Path) -> list[str]:
    """Options that make pytest write what :func:`results_of` reads."""
    return [f"--junitxml={report}", "-o", "junit_family=xunit1"]


def results_of(report: Path) -> tuple[Counter[str], list[str]]:
    """How many tests ended how, and which of them failed. Nothing where pytest came to no result."""
    counts: Counter[str] = Counter()
    bad = []
    for case in ElementTree.parse(report).iter("testcase") if report.exists() else ():
        kinds = {child.tag for child in case} & {"failure", "error", "skipped"}
        counts.update(kinds or {"passed"})
        if kinds & {"failure", "error"}:
            bad.append(f"{case.get('file')}::{case.get('name')}")
    return counts, bad


def said(counts: Counter[str]) -> str:
    """In pytest's words."""
    words = {"failure": "failed", "passed": "passed", "skipped": "skipped", "error": "errors"}
    return ", ".join(f"{counts[kind]} {word}" for kind, word in words.items() if counts[kind]) or "no tests"


def processor_s() -> float:
    """What all that was started here, and has ended, has used. A group whose share of it is low waits."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def code_of(codes: list[int]) -> int:
    """One exit code for all: the first that is bad; that nothing was selected is bad only if it is so everywhere."""
    bad = [code for code in codes if code not in (0, NONE_SELECTED)]
    return bad[0] if bad else min(codes)


def main(arguments: list[str]) -> int:
    """See the module's text."""
    begun_s = time.monotonic()
    total: Counter[str] = Counter()
    codes: list[int] = []
    failed: list[str] = []
    lines: list[str] = []
    with tempfile.TemporaryDirectory(prefix="proxyd-tests-") as directory:
        for group in GROUPS:
            report = Path(directory, f"{group}.xml")
            options = [*options_of(group), *arguments]
            print(f"\n##### tests that run {group.replace('_', ' ')}: pytest {' '.join(options)}", flush=True)
            group_begun_s, used_s = time.monotonic(), processor_s()
            command = [sys.executable, "-m", "pytest", *options, *reporting(report)]
            codes.append(subprocess.run(command, cwd=ROOT).returncode)
            counts, bad = results_of(report)
            total += counts
            failed += bad
            took_s, used_s = time.monotonic() - group_begun_s, processor_s() - used_s
            lines.append(f"##### {group}: {said(counts)} in {took_s:.0f} s ({used_s:.0f} s of processors)")
            if codes[-1] not in (0, NONE_SELECTED) and {"-x", "--exitfirst"} & set(arguments):
                break
    print("", *lines, *(f"FAILED {name}" for name in failed), sep="\n")
    print(f"===== {said(total)} in {time.monotonic() - begun_s:.2f}s =====", flush=True)
    return code_of(codes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
