"""What a step of the run-time schedule tells of itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from proxyd_client.schedule.step import Record, Taken
from proxyd_client.torch.offload import ActivationStore, OffloadReport


@dataclasses.dataclass(frozen=True, slots=True)
class Moves:
    """What offload did in a step."""

    moved_out: int
    """Activations that left the device."""
    moved_bytes: int
    void: int
    """Copies that were thrown away, for the activation was used meanwhile."""
    surprises: int
    """Backwards that found their activation outside, and waited for it."""
    failed: int
    stayed: int
    """Moves after which the activation was on the device still: after the first one none is tried in this step."""
    trouble: str
    """Why the last move that failed did."""
    host_peak_bytes: int
    device_peak_bytes: int
    """The most that saved tensors really held on the device, stage inputs and outputs among them."""
    transfer_bytes_per_s: float
    """As learned, of the slower direction."""


@dataclasses.dataclass(frozen=True, slots=True)
class StepReport:
    """One step, as one stage saw it. Times are seconds since the stage's step began."""

    step: int
    """From 0, of this schedule."""
    seconds: float
    decisions: tuple[Taken, ...]
    """The last ones, at most :data:`~proxyd_client.schedule.step.MOST_KEPT`, with their reasons."""
    decisions_made: int
    decision_p50_us: float
    decision_p99_us: float
    activation_bytes: int
    """What one micro-batch keeps, as the first forward showed; torch's own receive buffers are not in it."""
    peak_activations: int
    peak_bytes: int
    memory_bytes: int
    """The limit."""
    busy_s: Mapping[str, float]
    """By kind of task: ``F``, ``B`` (whole backwards among them) and ``W``."""
    waits_s: Mapping[str, float]
    """By reason."""
    split_backwards: int
    whole_backwards: int
    whole_because: str
    """Why they could not be split; empty where that was a choice."""
    predictions: int
    """Decisions before which it was known when the next input would come."""
    prediction_error_s: float
    """By how much that was off, lately; 0: not known."""
    held_back: int
    """Waits by choice, for what is predicted."""
    fallback: str
    """Why arrivals alone decided; empty: predictions were there, or none are needed here."""
    offload: Moves | None


def report_of(
    record: Record,
    *,
    step: int,
    nanoseconds: int,
    activation_bytes: int,
    peak_bytes: int,
    memory_bytes: int,
    whole_because: str,
    fallback: str,
    offload: Moves | None,
) -> StepReport:
    """The report of what was recorded."""
    times = sorted(record.decided_ns) or [0]
    return StepReport(
        step=step,
        seconds=nanoseconds / 1e9,
        decisions=tuple(record.decisions),
        decisions_made=len(record.decided_ns),
        decision_p50_us=times[len(times) // 2] / 1e3,
        decision_p99_us=times[min(len(times) - 1, len(times) * 99 // 100)] / 1e3,
        activation_bytes=activation_bytes,
        peak_activations=-(-peak_bytes // activation_bytes),
        peak_bytes=peak_bytes,
        memory_bytes=memory_bytes,
        busy_s={name: ns / 1e9 for name, ns in zip("FBW", record.busy_ns, strict=True)},
        waits_s={why: ns / 1e9 for why, ns in record.waits_ns.items()},
        split_backwards=record.split,
        whole_backwards=record.whole,
        whole_because=whole_because,
        predictions=record.predictions,
        prediction_error_s=record.error_ns / 1e9,
        held_back=record.held_back,
        fallback=fallback,
        offload=offload,
    )


def moves_of(store: ActivationStore, before: OffloadReport, record: Record) -> Moves:
    """What a store did since ``before``."""
    now = store.report
    return Moves(
        moved_out=now.moved_out - before.moved_out,
        moved_bytes=now.moved_bytes - before.moved_bytes,
        void=now.void - before.void,
        surprises=now.surprises - before.surprises,
        failed=now.failed - before.failed,
        stayed=record.moves_failed,
        trouble=now.trouble if now.failed > before.failed else "",
        host_peak_bytes=record.host_peak_bytes,
        device_peak_bytes=store.peak_device_bytes,
        transfer_bytes_per_s=store.transfer_bytes_per_s,
    )
