"""Feeding a grant log through a machine again: the same events must give the same effects.

This is the proof that nothing but its events moves the coordinator (no clock, no chance, no order of a hash table), and
the way to look at a decision afterwards: a visitor sees the machine before and after every event.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from proxyd import __version__
from proxyd.core.coordinator import CoordinatorMachine
from proxyd.core.effects import CoordinatorEffect, ToAgent
from proxyd.core.errors import ProxydError
from proxyd.core.events import CoordinatorEvent
from proxyd.core.messages import Grant
from proxyd.runtime.grant_log import Part

Before = Callable[[CoordinatorMachine, int, CoordinatorEvent], None]
"""(machine that has not seen the event yet, monotonic ns, event)."""
After = Callable[[CoordinatorMachine, int, Sequence[CoordinatorEffect]], None]
"""(machine, monotonic ns, recorded effects)."""
_BUGS = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError, ProxydError)


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """Where the replay left the log for the first time."""

    part: str
    number: int
    """Of the record within its part, from 1."""
    at_ns: int
    event: CoordinatorEvent
    place: int
    """Of the first effect that differs."""
    recorded: CoordinatorEffect | None
    replayed: CoordinatorEffect | None
    failure: str = ""
    """What the machine raised instead."""

    def __str__(self) -> str:
        head = f"{self.part}, record {self.number}, {self.at_ns / 1e9:.6f} s: {self.event}"
        if self.failure:
            return f"{head}\n  the machine failed: {self.failure}"
        return (
            f"{head}\n  effect {self.place} recorded: {self.recorded or 'none'}\n"
            f"  effect {self.place} replayed: {self.replayed or 'none'}"
        )


@dataclasses.dataclass(slots=True)
class Replayed:
    """How far a replay came."""

    parts: int = 0
    events: int = 0
    effects: int = 0
    grants: int = 0
    span_ns: int = 0
    """From the first event to the last."""
    notes: list[str] = dataclasses.field(default_factory=list)
    difference: Difference | None = None


def replay(parts: Sequence[Part], before: Before | None = None, after: After | None = None) -> Replayed:
    """Replay the parts of one life, oldest first, until the end or the first difference. Raises GrantLogError."""
    result = Replayed()
    machine: CoordinatorMachine | None = None
    last: Part | None = None
    first_ns: int | None = None
    for part in parts:
        header = part.header
        if last is None or last.torn or header.part != last.header.part + 1:
            if last is not None:
                result.notes.append(f"{part.path}: goes on from its checkpoint, the part before is not whole")
            machine = header.machine()
            if header.version != __version__:
                result.notes.append(f"written by proxyd {header.version}, replayed by {__version__}")
        assert machine is not None
        result.parts += 1
        for number, (at_ns, event, effects) in enumerate(part.records(), 1):
            now_ns = header.start_ns + at_ns
            first_ns = at_ns if first_ns is None else first_ns
            if before is not None:
                before(machine, now_ns, event)
            found: Sequence[CoordinatorEffect] = ()
            failure = ""
            try:
                found = machine.handle(event, now_ns)
            except _BUGS as error:
                # A log may end with the event that a bug was met at: to show that is what a replay is for.
                failure = f"{type(error).__name__}: {error}"
            if failure or (tuple(found) != effects):
                place = next(
                    (i for i, (a, b) in enumerate(zip(found, effects, strict=False)) if a != b),
                    min(len(found), len(effects)),
                )
                result.difference = Difference(
                    str(part.path), number, at_ns, event, place, _at(effects, place), _at(found, place), failure
                )
                return result
            result.events += 1
            result.effects += len(effects)
            result.grants += sum(isinstance(e, ToAgent) and isinstance(e.message, Grant) for e in effects)
            result.span_ns = at_ns - first_ns
            if after is not None and effects:
                after(machine, now_ns, effects)
        if part.torn:
            result.notes.append(part.torn)
        last = part
    return result


def _at(effects: Sequence[CoordinatorEffect], place: int) -> CoordinatorEffect | None:
    return effects[place] if place < len(effects) else None
