"""What one stage hears and sends in one step: the surroundings of :class:`proxyd_client.schedule.step.Step`."""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from proxyd_client.errors import ProxydError, TransferTimeout
from proxyd_client.schedule.offload import Move
from proxyd_client.schedule.step import Arrived, Event, Foreseen, Moved
from proxyd_client.schedule.tasks import Kind, Task
from proxyd_client.torch import pipelining
from proxyd_client.torch.errors import for_torch
from proxyd_client.torch.group import ProcessGroupProxyd
from proxyd_client.torch.offload import ActivationStore
from proxyd_client.torch.pipeline.alarm import LOOK_EVERY_S, Alarm
from proxyd_client.torch.pipeline.arrivals import Arrivals
from proxyd_client.torch.pipeline.compute import Computation
from proxyd_client.torch.pipeline.errors import PipelineError

MOST_SENDS = 16
"""Sends of other backends that may be under way: each keeps its tensor, and they don't tell when they are done."""
LINK_STATE_TIMEOUT_S = 0.05
"""For a figure that makes predictions better: no step waits for it longer."""
NO_CONFIDENCE = 0.5
"""Where it isn't known."""


class Traffic:
    """One step of one stage.

    :param timeout_s: so long nothing has to happen before the step is given up.
    :param store: where activations are saved that may leave the device.
    """

    def __init__(
        self,
        stage: Any,
        group: Any,
        arrivals: Arrivals,
        alarm: Alarm,
        timeout_s: float,
        store: ActivationStore | None = None,
    ) -> None:
        self.computation: Computation | None = None
        self._stage = stage
        self._group = group
        self._arrivals = arrivals
        self._alarm = alarm
        self._timeout_s = timeout_s
        self._hints = pipelining.hints_of(stage)
        self._confidence = -1.0
        self._store = store
        self._heard: deque[Event] = deque()
        self._moved: deque[Moved] = deque()
        """By the store's threads."""
        self._sends: deque[Any] = deque()

    # -- the surroundings of a step ----------------------------------------------------------------------------------

    def now_ns(self) -> int:
        return time.monotonic_ns()

    def heard(self) -> Iterable[Event]:
        self._look()
        heard, self._heard = self._heard, deque()
        return heard

    def _look(self) -> bool:
        index = self._stage.stage_index
        self._heard += [Arrived(kind, index, number) for kind, number in self._arrivals.here()]
        while self._moved:
            self._heard.append(self._moved.popleft())
        return bool(self._heard)

    def wait(self, until_ns: int) -> None:
        begun_ns = now_ns = time.monotonic_ns()
        look_ns = begun_ns + int(LOOK_EVERY_S * 1e9)
        over_ns = begun_ns + int(self._timeout_s * 1e9)
        while not self._look():
            if until_ns and now_ns >= until_ns:
                return
            if now_ns >= over_ns:
                raise self._timed_out()
            if now_ns >= look_ns:
                self.listen()
                look_ns = time.monotonic_ns() + int(LOOK_EVERY_S * 1e9)
            next_ns = min(look_ns, over_ns, until_ns or over_ns)
            self._arrivals.wait(max(0, next_ns - now_ns) / 1e9)
            now_ns = time.monotonic_ns()

    def foresee(self, kind: Kind, stage: int, micro_batch: int) -> Foreseen | None:
        if self._hints is None:
            return None
        direction = pipelining.Direction.FORWARD if kind == Kind.F else pipelining.Direction.BACKWARD
        left_s = self._hints.eta_s(direction, micro_batch)
        if left_s is None:
            return None
        if self._confidence < 0:
            self._confidence = self._ask_confidence()
        return Foreseen(time.monotonic_ns() + int(left_s * 1e9), self._confidence)

    def _ask_confidence(self) -> float:
        """Of the path to a neighbour at another site, once a step. The way from there counts, and can't be asked."""
        membership, stage = self._group.membership, self._stage
        members = [membership.members[stage.stage_index_to_group_rank[peer]] for peer in _neighbours(stage)]
        here = membership.members[membership.rank].site
        rank = next((member.rank for member in members if member.site != here), members[0].rank)
        try:
            said = membership.endpoint.link_state(rank, timeout_s=LINK_STATE_TIMEOUT_S)
        except ProxydError:
            return NO_CONFIDENCE
        return float(said.confidence)

    def can_split(self, stage: int, micro_batch: int) -> bool:
        return self.computation is not None and self.computation.can_split(micro_batch)

    def compute(self, task: Task, whole: bool) -> None:
        if self.computation is not None:
            self.computation.run(task, whole)

    def move(self, move: Move) -> None:
        if self._store is None:
            raise RuntimeError("a move without a store")  # unreachable: the step has an offload policy only with one
        over = functools.partial(self._over, Moved(move.outwards, move.stage, move.micro_batch))
        if move.outwards:
            self._store.leave(move.micro_batch, over)
        else:
            self._store.come_back(move.micro_batch, over)

    def _over(self, event: Moved) -> None:
        self._moved.append(event)
        self._arrivals.wake()

    def settle(self, stage: int, micro_batch: int, keep: bool) -> bool:
        # One whose W has run while it was copied is dropped already.
        if self._store is None or (keep and not self._store.bytes_of(micro_batch)):
            return False
        return self._store.settle(micro_batch, keep)

    def wait_for(self, kind: Kind, number: int) -> None:
        """Until an input is here; it is not heard of again."""
        wanted = Arrived(kind, self._stage.stage_index, number)
        others: list[Event] = []
        while True:
            heard = list(self.heard())
            others += [event for event in heard if event != wanted]
            if wanted in heard:
                self._heard.extendleft(reversed(others))
                return
            self.wait(0)

    # -- around it ---------------------------------------------------------------------------------------------------

    def post(self, micro_batches: int, backward: bool) -> None:
        """Post all receives: torch's stages have a buffer for each, so an early message has where to go."""
        stage = self._stage
        ways: list[tuple[Kind, Callable[[int], list[Any]]]] = []
        if not stage.is_first:
            ways.append((Kind.F, stage.get_fwd_recv_ops))
        if backward and not stage.is_last:
            ways.append((Kind.B, stage.get_bwd_recv_ops))
        for kind, ops_of in ways:
            inputs = []
            for number in range(micro_batches):
                works = [op.op(op.tensor, group=op.group, tag=op.tag, group_src=op.group_peer) for op in ops_of(number)]
                inputs.append((number, works))
            self._arrivals.post(kind, inputs)

    def send(self, ops: list[Any]) -> None:
        """Send without waiting."""
        sends = self._sends
        for op in ops:
            sends.append(op.op(op.tensor, group=op.group, tag=op.tag, group_dst=op.group_peer))
        while sends and sends[0].is_completed():
            sends.popleft().wait()
        if not isinstance(self._group, ProcessGroupProxyd):
            while len(sends) > MOST_SENDS:
                sends.popleft().wait()

    def finish(self) -> int:
        """Wait until everything that was sent is out of the stage's tensors; nanoseconds that it took."""
        begun_ns = time.monotonic_ns()
        while self._sends:
            self._sends.popleft().wait()
        return time.monotonic_ns() - begun_ns

    def give_up(self) -> None:
        """Leave nothing posted, as far as the group can do that."""
        self._sends.clear()
        self._arrivals.give_up()
        if self._store is not None:
            self._store.drop_all()

    def fallback(self, predictions: int) -> str:
        """Why no prediction was there; empty: there was one."""
        stage = self._stage
        if predictions:
            return ""
        if self._arrivals.reason:
            return self._arrivals.reason
        if self._hints is None:
            return "the stage is not attached (PROXYD_PIPELINING=off), so nothing is announced"
        members, ranks = self._group.membership.members, stage.stage_index_to_group_rank
        here = members[ranks[stage.stage_index]].site
        if all(members[ranks[peer]].site == here for peer in _neighbours(stage)):
            return "its neighbours are at the same site: nothing is announced, for nothing takes long"
        return "no prediction was there: nothing was announced yet (the first step), or nothing had to be waited for"

    def listen(self) -> None:
        """Raise what another stage gave up for, if one did."""
        try:
            text = self._alarm.heard()
        except RuntimeError as error:
            raise PipelineError(
                "the group's store is gone",
                why=str(error),
                next_step="Its process (rank 0, or torchrun) has ended: start the job again",
            ) from error
        if text:
            raise PipelineError(
                "the step was given up by another stage",
                why=text,
                next_step="See that rank; then make group, stages and schedule again",
            )

    def _timed_out(self) -> ProxydError:
        index = self._stage.stage_index
        missing = []
        for kind, number in self._arrivals.awaits():
            peer = index - 1 if kind == Kind.F else index + 1
            rank = self._stage.stage_index_to_group_rank.get(peer)
            missing.append(f"the input of {kind.name}{number} from stage {peer} (rank {rank})")
        what = f"stage {index} has waited {self._timeout_s:g} s for {' and '.join(missing) or 'nothing that can come'}"
        error = TransferTimeout(what, next_step="Look whether that rank computes, or give the schedule more timeout_s")
        return for_torch(error, "")


def _neighbours(stage: Any) -> list[int]:
    """The stages before and after."""
    return [peer for peer in (stage.stage_index - 1, stage.stage_index + 1) if 0 <= peer < stage.num_stages]
