"""Which activation moves to host memory, and when it must start to come back. Pure.

**Out**: when fewer than :data:`FREE_PLACES` places are free, the resident activation that is needed last, if it is
not needed for longer than three transfers and two compute periods: after a shorter wait it would be called back as soon
as it is out, or, while a gradient is overdue, again and again. A slow network makes gradients late, so waits long and
places scarce: then much moves. A fast one leaves free places, and nothing does.

When all of these are needed soon, one of which only W is left goes: nobody waits for a W, and with its activation out
of the way the F and B of others come first, for which somebody waits.

**Back**: two transfers and two periods before it is needed, the one needed first before others. So the bus may be busy
with another one, and the prediction a period wrong, and it is still there in time. Whatever was predicted, the one that
the next B needs comes back whenever there is room, and then the one that the next W needs: a prediction that is missing
or wrong costs time, never the step.

**No deadlock**: while anything is out, an F leaves a place free on the device (:mod:`.policy`), and what moves out
leaves one outside. So of all places two are free: when the device is full and the next W lies outside, something can
still go out, and that W's activation come in; the W runs, and a place is free for good.

**A slower tier** (an SSD) is optional. It is for what the host has no room for, and for long waits only: more than a
way out, two ways back and two periods, so that nothing turns round as soon as it is there. What only W is left of stays
off it, but in need. Moves to and from it go straight from and to the device, on ways of their own. The argument above
holds for the places of both tiers together, for in need the last one of either is taken; and who comes back from one
tier leaves the last free place on the device to the next B or W, when that lies on the other.

*Needed* is when its B can start. The next B's input is predicted, or it is reckoned from the learned time between an F
and its gradient; the ones behind it follow at one period each. Without either nothing comes back early except the next
in line.
"""

from __future__ import annotations

from typing import NamedTuple

from proxyd_client.errors import ArgumentError
from proxyd_client.schedule.worker import Place, StageProgress, Worker

FREE_PLACES = 2
"""One for the F that is to start, one for what comes back."""
NOT_BEFORE_NS = 1 << 62


class Move(NamedTuple):
    """One activation across the bus."""

    outwards: bool
    stage: int
    micro_batch: int
    reason: str
    far: bool = False
    """To or from the slower tier."""


class Tier(NamedTuple):
    """Slower memory behind the host's."""

    nbytes: int
    """Most that may lie there."""
    out_ns: int
    """Time of one activation there."""
    back_ns: int


class Offload:
    """The policy of one worker with one stage.

    :param host_bytes: most that may lie in host memory; 0: nothing moves.
    :param transfer_ns: time of one activation across the bus, one way.
    :param ssd: a slower tier. Without room in host memory for one activation it isn't used.
    """

    def __init__(self, host_bytes: int, transfer_ns: int, ssd: Tier | None = None) -> None:
        if host_bytes < 0 or transfer_ns < 0:
            raise ArgumentError(
                f"{host_bytes} bytes of host memory and {transfer_ns} ns per transfer: neither may be below 0"
            )
        if ssd is not None and min(ssd) < 0:
            raise ArgumentError(f"a slower tier of {ssd.nbytes} bytes, {ssd.out_ns} ns there and {ssd.back_ns} ns back")
        self.host_bytes = host_bytes
        self.transfer_ns = transfer_ns
        self.ssd = ssd

    def needed_ns(self, progress: StageProgress, micro_batch: int, now_ns: int) -> int:
        """When the B of a micro-batch can start, as far as that can be told; far away when it can't."""
        first = progress.next[1]
        period_ns = progress.period_ns
        if first < progress.arrived[1]:
            return now_ns + (micro_batch - first) * period_ns
        said = progress.foretold[1].get(first)
        if said is not None:
            first_ns = said[0] - said[1]
        else:
            done_ns = progress.forward_done_ns.get(first)
            if done_ns is None or not progress.round_trip_ns:
                return NOT_BEFORE_NS
            first_ns = done_ns + progress.round_trip_ns
        return max(now_ns, first_ns) + (micro_batch - first) * period_ns

    def out(self, worker: Worker, now_ns: int) -> Move | None:
        """An activation that should leave now, the way out being free."""
        progress = self._only(worker)
        nbytes = progress.stage.activation_bytes
        if worker.free_bytes >= FREE_PLACES * nbytes:
            return None
        # The last place outside is for making room in need: see the module's text.
        stuck = worker.free_bytes < nbytes and progress.places.get(progress.next[2]) == Place.OUT
        if worker.out_bytes - worker.far_bytes + (1 if stuck else 2) * nbytes > self.host_bytes:
            return None
        running = worker.running
        busy = running.micro_batch if running is not None else -1
        newest = self._last_here(progress, progress.next[1] + 1, progress.next[0], busy)
        if newest is not None:
            wait_ns = self.needed_ns(progress, newest, now_ns) - now_ns
            if wait_ns > self.transfer_ns + self.lead_ns(progress):
                said = f"needed in {wait_ns / 1e6:.0f} ms" if wait_ns < NOT_BEFORE_NS // 2 else "nothing says when"
                return Move(True, progress.stage.index, newest, f"memory is short, and it is needed last: {said}")
        waiting = self._last_here(progress, progress.next_whole_weight + 1, progress.next[1], busy)
        if waiting is not None:
            return Move(True, progress.stage.index, waiting, "memory is short, and only its W is left to do")
        if stuck and newest is not None:
            return Move(True, progress.stage.index, newest, "the next W needs a place on the device")
        return None

    def out_far(self, worker: Worker, now_ns: int) -> Move | None:
        """An activation that should leave for the slower tier now, the way there being free."""
        if self.ssd is None:
            return None
        progress = self._only(worker)
        nbytes = progress.stage.activation_bytes
        if worker.free_bytes >= FREE_PLACES * nbytes or worker.far_bytes + nbytes > self.ssd.nbytes:
            return None
        room_bytes = self.host_bytes - (worker.out_bytes - worker.far_bytes)
        if room_bytes >= 2 * nbytes or self.host_bytes < nbytes:
            return None
        running = worker.running
        busy = running.micro_batch if running is not None else -1
        newest = self._last_here(progress, progress.next[1] + 1, progress.next[0], busy)
        if newest is not None:
            wait_ns = self.needed_ns(progress, newest, now_ns) - now_ns
            if self.ssd.out_ns + self.lead_ns(progress, far=True) < wait_ns < NOT_BEFORE_NS // 2:
                said = f"host memory is full, and it is needed last: in {wait_ns / 1e6:.0f} ms"
                return Move(True, progress.stage.index, newest, said, far=True)
        if room_bytes < nbytes and worker.free_bytes < nbytes and progress.places.get(progress.next[2]) == Place.OUT:
            if newest is None:
                newest = self._last_here(progress, progress.next_whole_weight + 1, progress.next[1], busy)
            if newest is not None:
                said = "the next W needs a place on the device, and host memory is full"
                return Move(True, progress.stage.index, newest, said, far=True)
        return None

    def back(self, worker: Worker, now_ns: int, *, far: bool = False) -> Move | None:
        """An activation that should come back now from host memory (far: from the slower tier), the way being free."""
        if not (worker.far_bytes if far else worker.out_bytes):
            return None
        progress = self._only(worker)
        index, free = progress.stage.index, worker.free_bytes // progress.stage.activation_bytes
        first, weight = progress.next[1], progress.next[2]
        urgent = [(first, "its B is the next one")]
        urgent += [(one, "its W is the next one") for one in range(weight, min(progress.next_whole_weight + 1, first))]
        for number, why in urgent:
            if progress.places.get(number) == Place.OUT:
                if (number in progress.far) == far:
                    return Move(False, index, number, why, far) if free else None
                free -= 1  # for this one, which comes from the other tier
        if free < 1:
            return None
        near = self._first_out(progress, first + 1, progress.next[0], far)
        if near is not None and self.needed_ns(progress, near, now_ns) - now_ns <= self.lead_ns(progress, far=far):
            return Move(False, index, near, "its B is near", far)
        near = self._first_out(progress, weight + 1, first, far)
        if near is not None and free >= FREE_PLACES and progress.next[0] == worker.micro_batches:
            return Move(False, index, near, "no F is left, so its W is near", far)
        return None

    def lead_ns(self, progress: StageProgress, *, far: bool = False) -> int:
        """So long before its B an activation starts to come back."""
        way_ns = self.ssd.back_ns if far and self.ssd is not None else self.transfer_ns
        return 2 * way_ns + 2 * progress.period_ns

    def next_ns(self, worker: Worker, now_ns: int) -> int:
        """When to ask for :meth:`back` again though nothing happened; 0: no need."""
        if not worker.out_bytes:
            return 0
        progress = self._only(worker)
        found = [self._next_ns(progress, now_ns, far) for far in ((False, True) if worker.far_bytes else (False,))]
        return min((due_ns for due_ns in found if due_ns), default=0)

    def _next_ns(self, progress: StageProgress, now_ns: int, far: bool) -> int:
        number = self._first_out(progress, progress.next[1], progress.next[0], far)
        if number is None:
            return 0
        lead_ns = self.lead_ns(progress, far=far)
        due_ns = self.needed_ns(progress, number, now_ns) - lead_ns
        # Of a gradient that is overdue nothing is known, then as now: its arrival will say. Asking before were polling.
        if not now_ns < due_ns < NOT_BEFORE_NS // 2 or self.needed_ns(progress, number, due_ns) - due_ns > lead_ns:
            return 0
        return due_ns

    @staticmethod
    def _last_here(progress: StageProgress, begin: int, end: int, busy: int) -> int | None:
        """The last micro-batch of a range whose activation is on the device and that no running task uses."""
        places = progress.places
        for number in range(end - 1, begin - 1, -1):
            if number != busy and places.get(number) == Place.DEVICE and number not in progress.moving:
                return number
        return None

    @staticmethod
    def _first_out(progress: StageProgress, begin: int, end: int, far: bool) -> int | None:
        places = progress.places
        for number in range(begin, end):
            if places.get(number) == Place.OUT and (number in progress.far) == far:
                return number
        return None

    def _only(self, worker: Worker) -> StageProgress:
        if len(worker.stages) != 1:
            raise ArgumentError("offload is for workers with one stage")
        return next(iter(worker.stages.values()))
