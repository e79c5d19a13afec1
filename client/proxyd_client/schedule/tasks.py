"""The words of a schedule: stages, tasks, decisions. Plain values.

A pipeline is a row of *stages*. Each micro-batch goes through all of them forward (``F``), then through all of them
backward; backward is split into ``B`` (gradient of the input, on which the stage before waits) and ``W`` (gradient of
the weights, on which nobody waits). ``W`` may be split into parts (by layer): a part is short, so a stage can stop
between two of them when something urgent has come.

Per stage, each kind runs in the order of the micro-batches. So sums of gradients have one order, whatever the
network did: two runs give bitwise the same gradients.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import NamedTuple

from proxyd_client.errors import ArgumentError


class Kind(enum.IntEnum):
    """What a task computes."""

    F = 0
    """Forward."""
    B = 1
    """Backward, gradient of the input."""
    W = 2
    """Backward, gradient of the weights."""


class Task(NamedTuple):
    """One piece of work of one stage."""

    kind: Kind
    stage: int
    micro_batch: int
    part: int = 0
    """Of a split W: 0, 1, ..."""

    def __str__(self) -> str:
        part = f".{self.part}" if self.part else ""
        return f"{self.kind.name}{self.micro_batch}{part}@{self.stage}"


class Decision(NamedTuple):
    """What a policy says: a task, or to wait."""

    task: Task | None
    reason: str
    until_ns: int = 0
    """Waiting: ask again at this time at the latest; 0: only when something has happened."""


@dataclasses.dataclass(frozen=True, slots=True)
class Stage:
    """One stage, as its worker knows it. Durations are a first guess; they are learned as tasks end."""

    index: int
    first: bool
    """No stage before it: the inputs of its F are all there."""
    last: bool
    """No stage after it: the input of its B is the result of its own F."""
    forward_ns: int = 0
    backward_ns: int = 0
    weight_ns: int = 0
    """Of a whole W, all parts together."""
    activation_bytes: int = 1
    """Kept for one micro-batch from the start of its F to the end of its W."""
    weight_parts: int = 1

    def __post_init__(self) -> None:
        if self.index < 0 or min(self.forward_ns, self.backward_ns, self.weight_ns) < 0:
            raise ArgumentError(f"stage {self.index}: durations and index must not be negative")
        if self.activation_bytes < 1 or self.weight_parts < 1:
            raise ArgumentError(f"stage {self.index}: an activation has at least one byte, a W at least one part")

    def nominal_ns(self, kind: Kind, part: int = 0) -> int:
        """The guess for one task. Parts of a W are alike, but that the first one has what is left over."""
        if kind == Kind.W:
            share_ns, rest_ns = divmod(self.weight_ns, self.weight_parts)
            return share_ns if part else share_ns + rest_ns
        return self.backward_ns if kind == Kind.B else self.forward_ns

    @property
    def period_ns(self) -> int:
        """Compute time of one micro-batch."""
        return self.forward_ns + self.backward_ns + self.weight_ns


class Order(NamedTuple):
    """A fixed schedule of one worker, and what it keeps."""

    tasks: tuple[Task, ...]
    peak_activations: int
    """Most activations held at once, those of all its stages together."""
