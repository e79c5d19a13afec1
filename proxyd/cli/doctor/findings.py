"""What a check answers, and how many of them are run at once without one holding up the rest."""

from __future__ import annotations

import dataclasses
import enum
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from proxyd import __version__

if TYPE_CHECKING:
    from proxyd.cli.doctor.subject import Subject


class Status(enum.StrEnum):
    """From harmless to worst."""

    SKIP = "skip"
    """It could not be looked at, or there is nothing to look at; the detail says why."""
    OK = "ok"
    WARN = "warn"
    """It works, and less well or not for long."""
    FAIL = "fail"
    """It does not work, or will not."""


_RANKS = {status: rank for rank, status in enumerate(Status)}


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    :param fix: what to do, where possible a command to paste; "" when there is nothing to do.
    """

    name: str
    status: Status
    detail: str
    fix: str = ""


def ok(name: str, detail: str) -> Finding:
    """It is as it should be."""
    return Finding(name, Status.OK, detail)


def skip(name: str, why: str) -> Finding:
    """It was not looked at."""
    return Finding(name, Status.SKIP, why)


def warn(name: str, detail: str, fix: str) -> Finding:
    """See :attr:`Status.WARN`."""
    return Finding(name, Status.WARN, detail, fix)


def fail(name: str, detail: str, fix: str) -> Finding:
    """See :attr:`Status.FAIL`."""
    return Finding(name, Status.FAIL, detail, fix)


def worst(findings: Iterable[Finding]) -> Status:
    """The worst status among them; OK for none."""
    return max((one.status for one in findings), key=_RANKS.__getitem__, default=Status.OK)


def counts(findings: Sequence[Finding]) -> dict[str, int]:
    """How many of each status."""
    return {status.value: sum(one.status is status for one in findings) for status in reversed(Status)}


def as_plain(subject: Subject, findings: Sequence[Finding]) -> dict[str, Any]:
    """For programs."""
    return {
        "proxyd": __version__,
        "configurations": list(subject.paths),
        "status": worst(findings).value,
        "counts": counts(findings),
        "checks": [
            {"name": one.name, "status": one.status.value, "detail": one.detail, "fix": one.fix} for one in findings
        ],
    }


Task = tuple[str, Callable[[], Sequence[Finding]]]
"""The name of a check, for when it doesn't answer, and the check."""


def run_bounded(tasks: Sequence[Task], timeout_s: float) -> list[Finding]:
    """All at once, in the order of the tasks. What has not answered after ``timeout_s`` is a finding itself.

    Threads that hang (a name server, a dead NFS server) are left behind: they are daemons, and the process ends.
    """
    answers: queue.Queue[tuple[int, Sequence[Finding]]] = queue.Queue()

    def work(number: int, name: str, check: Callable[[], Sequence[Finding]]) -> None:
        try:
            found = check()
        except Exception as error:  # noqa: BLE001 # one check that breaks must not take the report along
            text = f"the check itself broke: {type(error).__name__}: {error}"
            found = [fail(name, text, "proxyd bugreport, and report it")]
        answers.put((number, found))

    for number, (name, check) in enumerate(tasks):
        threading.Thread(target=work, args=(number, name, check), name=f"doctor {name}", daemon=True).start()
    results: dict[int, Sequence[Finding]] = {}
    deadline_s = time.monotonic() + timeout_s
    while len(results) < len(tasks):
        try:
            number, found = answers.get(timeout=max(0.0, deadline_s - time.monotonic()))
        except queue.Empty:
            break
        results[number] = found
    findings: list[Finding] = []
    for number, (name, _) in enumerate(tasks):
        findings += results.get(number) or (
            []
            if number in results
            else [
                fail(
                    name,
                    f"no answer within {timeout_s:g} s: what it asks hangs",
                    f"Look at it by hand, or give it longer: proxyd doctor --timeout-s {4 * timeout_s:g}",
                )
            ]
        )
    return findings
