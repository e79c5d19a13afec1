"""Which tests may run side by side, and which need the machine for themselves.

``together``: whatever measures no time. Their result doesn't depend on who else uses the machine, so there are as many
at once as there are cores. ``alone``: real daemons and sockets with bars in seconds or bytes per second, one at a time.

A test is in the group of its room, a directory below ``tests``; the mark ``together`` or ``alone`` on it wins. A room
that nobody has judged is ``alone``: that is slow, and never wrong. So every test is in exactly one group.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

GROUPS = ("together", "alone")
"""In the order in which they run: a broken core shows in seconds, not after the emulated WAN has run."""

TESTS = Path(__file__).parent
_TOGETHER = ("unit", "property", "sim", "fuzz")


def room_of(path: Path) -> str:
    """The directory right below ``tests`` in which a test file is; empty for one that is elsewhere."""
    return path.relative_to(TESTS).parts[0] if path.is_relative_to(TESTS) else ""


def group_of(path: Path, marks: Collection[str]) -> str:
    """The group of a test, from its file and the names of its marks, the closest first."""
    for mark in marks:
        if mark in GROUPS:
            return mark
    return "together" if room_of(path) in _TOGETHER else "alone"
