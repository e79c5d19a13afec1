"""The report for people: what is wrong first, each with its fix, then what is well in few words."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from proxyd.cli.doctor.findings import Finding, Status, counts
from proxyd.cli.doctor.subject import Subject
from proxyd.cli.terminal import paint, width

_MARKS = {Status.FAIL: ("FAIL", "red"), Status.WARN: ("WARN", "yellow"), Status.OK: ("ok", "green")}
_SKIP = ("skip", "dim")


def report(subject: Subject, findings: Sequence[Finding], *, everything: bool) -> str:
    """All of it, as it is printed."""
    columns = width()
    lines: list[str] = []
    for status in (Status.FAIL, Status.WARN):
        for one in findings:
            if one.status is status:
                lines += _in_full(one, columns)
    well = [one for one in findings if one.status in (Status.OK, Status.SKIP)]
    if everything:
        for one in well:
            lines += _in_full(one, columns)
    else:
        for status in (Status.OK, Status.SKIP):
            if names := [one.name for one in well if one.status is status]:
                lines += _list(status, names, columns)
    found = counts(findings)
    number = found["fail"] + found["warn"]
    summary = f"{len(findings)} checks: {', '.join(f'{count} {name}' for name, count in found.items() if count)}."
    if number:
        summary += f" {number} {'thing' if number == 1 else 'things'} to do above."
    if not everything and well:
        summary += " --all shows the rest in full."
    return "\n".join([*lines, "", summary]) + "\n"


def _mark(status: Status) -> str:
    text, colour = _MARKS.get(status, _SKIP)
    return paint(f"{text:<4}", colour)


def _in_full(one: Finding, columns: int) -> list[str]:
    body = _wrapped(one.detail, columns) or [""]
    lines = [f"{_mark(one.status)}  {paint(one.name, 'bold')}", *(f"      {line}" for line in body)]
    if one.fix and one.status in (Status.FAIL, Status.WARN):
        lines.append(f"      {paint('fix:', 'cyan')} {one.fix}")  # not wrapped: it is to be copied
    return lines


def _wrapped(text: str, columns: int) -> list[str]:
    """Words and paths stay whole: they are to be copied."""
    return textwrap.wrap(text, columns - 6, break_long_words=False, break_on_hyphens=False)


def _list(status: Status, names: Sequence[str], columns: int) -> list[str]:
    body = _wrapped(", ".join(names), columns)
    return [f"{_mark(status)}  {body[0]}", *(f"      {line}" for line in body[1:])]
