"""The schedule itself: torch's ``step`` around :class:`proxyd_client.schedule.step.Step`."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from proxyd_client.errors import ArgumentError, ProxydError
from proxyd_client.schedule.offload import Offload
from proxyd_client.schedule.policy import Online, Policy
from proxyd_client.schedule.step import SENDS, Step
from proxyd_client.schedule.tasks import Kind, Stage, Task
from proxyd_client.schedule.worker import Worker
from proxyd_client.torch.group import ProcessGroupProxyd
from proxyd_client.torch.offload import ActivationStore, OffloadReport
from proxyd_client.torch.pipeline.alarm import Alarm, alarm_of
from proxyd_client.torch.pipeline.arrivals import arrivals_for
from proxyd_client.torch.pipeline.compute import Computation, Gauge
from proxyd_client.torch.pipeline.errors import PipelineError
from proxyd_client.torch.pipeline.report import StepReport, moves_of, report_of
from proxyd_client.torch.pipeline.traffic import Traffic

DEFAULT_ACTIVATIONS = 8
TIMEOUT_S = 1800.0
"""Where the group doesn't say: torch's own for groups."""
_LONGEST_REASON = 2000


class ScheduleRunTime(PipelineScheduleSingle):
    """A pipeline schedule that chooses at run time, in place of torch's ``Schedule1F1B``.

    Each stage runs what its inputs, its memory and the predictions of proxyd allow, B first, then F, then W. Losses and
    gradients are those of 1F1B, bit for bit, whatever the network does. One stage per rank. Over other backends than
    proxyd arrivals alone decide.

    :param stage: of ``torch.distributed.pipelining`` (or a list with the one).
    :param activations: most micro-batches whose activations are kept at once on this stage; may differ by stage.
    :param memory_bytes: the same in bytes, in place of ``activations``: the first forward of the first step shows what
        a micro-batch keeps.
    :param offload: so many bytes of host memory for activations that wait, or an
        :class:`~proxyd_client.torch.offload.ActivationStore` for this stage's module (a file, other limits).
    :param weight_parts: a W is cut into so many parts (by groups of parameters); between two of them what is urgent
        may run. The first stage, whose W is its whole backward, and modules that bring a ``dw_builder`` have one.
    :param split: whether backwards are split into B and W: None decides for each (docs/scheduling.md), True and False
        wherever that is possible.
    :param quotas: most micro-batches between F and B, by stage.
    :param holds_back: wait for a predicted gradient rather than start something long right before it.
    :param policy: another one than :class:`~proxyd_client.schedule.Online`, made for each step.
    :param timeout_s: a step is given up when nothing has happened for so long; default: the group's timeout.
    :raises ArgumentError: what can't be.
    """

    def __init__(
        self,
        stage: Any,
        n_microbatches: int,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        args_chunk_spec: tuple[Any, ...] | None = None,
        kwargs_chunk_spec: dict[str, Any] | None = None,
        output_merge_spec: dict[str, Any] | tuple[Any] | None = None,
        scale_grads: bool = True,
        *,
        activations: int | None = None,
        memory_bytes: int | None = None,
        offload: ActivationStore | int | None = None,
        weight_parts: int = 1,
        split: bool | None = None,
        quotas: Mapping[int, int] | None = None,
        holds_back: bool = True,
        policy: Callable[[Worker], Policy] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        stage = _only(stage)
        _check(n_microbatches, activations, memory_bytes, weight_parts, timeout_s)
        super().__init__(
            stage=stage,
            n_microbatches=n_microbatches,
            loss_fn=loss_fn,
            args_chunk_spec=args_chunk_spec,
            kwargs_chunk_spec=kwargs_chunk_spec,
            output_merge_spec=output_merge_spec,
            scale_grads=scale_grads,
        )
        self.report: StepReport | None = None
        """Of the last training step that ended well."""
        self._group = stage.group if stage.group is not None else dist.group.WORLD
        self._activations = DEFAULT_ACTIVATIONS if activations is None else activations
        self._memory_bytes = memory_bytes
        self._weight_parts = 1 if stage.is_first or stage.dw_builder is not None else weight_parts
        self._split = split
        self._policy = policy or (lambda _: Online(quotas, holds_back=holds_back))
        if policy is None:
            Online(quotas)  # refuses bad quotas now
        self._timeout_s = timeout_s or _timeout_s(self._group)
        self._alarm: Alarm = alarm_of(self._group)
        self._steps = 0
        self._activation_bytes = 0
        self._worker: Worker | None = None
        """Of the last step: what it has learned goes on."""
        self._error_ns = 0
        self._store, self._host_bytes = _store_of(offload, stage.submod)

    def close(self) -> None:
        """End the threads that move activations, where there are any, and give their memory back."""
        if self._store is not None:
            self._store.close()

    # -- one step ----------------------------------------------------------------------------------------------------

    def _step_microbatches(
        self,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """What torch's ``step`` and ``eval`` call."""
        if self._alarm.raised:
            raise PipelineError(
                "this group carries no more pipeline steps, for messages of one that was given up may be under way",
                why=self._alarm.raised,
                next_step="Destroy it, then make group, stages and schedule again",
            )
        stage = self._stage
        traffic = Traffic(stage, self._group, arrivals_for(self._group), self._alarm, self._timeout_s, self._store)
        try:
            args, kwargs = self._check_inputs(arg_mbs, kwarg_mbs, target_mbs, losses)
            self._internal_losses.clear()
            self._initialize_stage(args[0], kwargs[0], target_mbs[0] if target_mbs else None, loss_kwargs)

            def forward(number: int) -> None:
                output = stage.forward_one_chunk(
                    number, args[number], kwargs[number], save_forward_output=return_outputs
                )
                self._maybe_compute_loss(stage, output, target_mbs, number, loss_kwargs)

            if self._has_backward:
                self._train(traffic, forward)
            else:
                self._evaluate(traffic, forward)
            self._update_losses(stage, losses)
            if self._has_backward:
                stage.perform_reduce_grad(self._n_microbatches if self.scale_grads else 1)
        except BaseException as error:
            what = f"stage {stage.stage_index} (rank {stage.group_rank}), step {self._steps}"
            self._alarm.ring(f"{what}: {_reason(error)}")
            traffic.give_up()
            raise
        self._steps += 1

    def _train(self, traffic: Traffic, forward: Callable[[int], None]) -> None:
        stage, store, begun_ns = self._stage, self._store, time.monotonic_ns()
        before = OffloadReport()
        if store is not None:
            store.reset_peak()
            before = store.report
        computation = Computation(
            stage,
            self._n_microbatches,
            self._weight_parts,
            forward,
            lambda number: self._maybe_get_loss(stage, number),
            traffic.send,
            self._store,
        )
        traffic.computation = computation
        traffic.post(self._n_microbatches, backward=True)
        worker = self._first_worker(traffic, computation) if self._worker is None else self._next_worker(self._worker)
        run = Step(
            worker,
            self._policy(worker),
            traffic,
            offload=self._offload(),
            splits=self._split,
            error_ns=self._error_ns,
        )
        run.run()
        run.record.waits_ns[SENDS] = traffic.finish()
        self._worker, self._error_ns = worker, run.record.error_ns
        self.report = report_of(
            run.record,
            step=self._steps,
            nanoseconds=time.monotonic_ns() - begun_ns,
            activation_bytes=self._activation_bytes,
            peak_bytes=worker.peak_bytes,
            memory_bytes=worker.memory_bytes,
            whole_because=computation.whole_because,
            fallback=traffic.fallback(run.record.predictions),
            offload=moves_of(store, before, run.record) if store is not None else None,
        )

    def _offload(self) -> Offload | None:
        if self._store is None:
            return None
        return Offload(self._host_bytes, int(self._activation_bytes * 1e9 / self._store.transfer_bytes_per_s))

    def _first_worker(self, traffic: Traffic, computation: Computation) -> Worker:
        """Run the first forward, which is the first task of any order, to see what a micro-batch keeps."""
        stage = self._stage
        if not stage.is_first:
            traffic.wait_for(Kind.F, 0)
        begun_ns = time.monotonic_ns()
        first = Task(Kind.F, stage.stage_index, 0)
        if self._store is not None:
            computation.run(first, False)
            nbytes = self._store.bytes_of(0)
        else:
            with Gauge(stage.submod) as gauge:
                computation.run(first, False)
            nbytes = gauge.nbytes
        self._activation_bytes = max(1, nbytes)
        worker = self._next_worker(None)
        if not stage.is_first:
            worker.arrived(Kind.F, stage.stage_index, 0, begun_ns)
        worker.start(first, begun_ns)
        worker.finish(time.monotonic_ns())
        return worker

    def _next_worker(self, earlier: Worker | None) -> Worker:
        stage, nbytes = self._stage, self._activation_bytes
        limit = self._memory_bytes if self._memory_bytes is not None else self._activations * nbytes
        worker = Worker(
            [
                Stage(
                    stage.stage_index,
                    first=stage.is_first,
                    last=stage.is_last,
                    activation_bytes=nbytes,
                    weight_parts=self._weight_parts,
                )
            ],
            self._n_microbatches,
            limit,
        )
        if earlier is not None:
            worker.carry_over(earlier)
        return worker

    def _evaluate(self, traffic: Traffic, forward: Callable[[int], None]) -> None:
        """Forwards alone: there is nothing to choose."""
        stage = self._stage
        traffic.post(self._n_microbatches, backward=False)
        for number in range(self._n_microbatches):
            if not stage.is_first:
                traffic.wait_for(Kind.F, number)
            forward(number)
            traffic.send(stage.get_fwd_send_ops(number))
        traffic.finish()


def _reason(error: BaseException) -> str:
    """For the other ranks. torch puts the error of a stage's module into one of its own, with all inputs."""
    while not isinstance(error, ProxydError) and error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"[:_LONGEST_REASON]


def _store_of(offload: ActivationStore | int | None, module: torch.nn.Module) -> tuple[ActivationStore | None, int]:
    """The store, and how much it may hold."""
    if offload is None or offload == 0:
        return None, 0
    store = offload if isinstance(offload, ActivationStore) else ActivationStore(host_bytes=offload, module=module)
    if store.transfer_bytes_per_s <= 1:  # measured here, before a step
        raise ArgumentError(f"nothing can be moved out: {store.report.trouble}")
    return store, store.host_bytes


def _only(stage: Any) -> Any:
    stages: Sequence[Any] = stage if isinstance(stage, (list, tuple)) else (stage,)
    if len(stages) != 1:
        raise ArgumentError(
            f"ScheduleRunTime takes one stage per rank, got {len(stages)}",
            next_step="Make each rank's layers one stage: two stages per rank cross the WAN twice as often",
        )
    return stages[0]


def _check(
    micro_batches: int, activations: int | None, memory_bytes: int | None, weight_parts: int, timeout_s: float | None
) -> None:
    if micro_batches < 1:
        raise ArgumentError(f"a step has at least one micro-batch, got {micro_batches}")
    if activations is not None and memory_bytes is not None:
        raise ArgumentError("activations and memory_bytes say the same in two ways: give one of them")
    if activations is not None and activations < 1:
        raise ArgumentError(
            f"activations={activations} is impossible: a micro-batch's activation is kept from its forward to its end",
            next_step="Allow one at least; as many as a round trip takes micro-batches hide it",
        )
    if memory_bytes is not None and memory_bytes < 1:
        raise ArgumentError(f"memory_bytes={memory_bytes} is impossible: one micro-batch needs more")
    if weight_parts < 1:
        raise ArgumentError(f"weight_parts={weight_parts}: a W has one part at least")
    if timeout_s is not None and not timeout_s > 0:
        raise ArgumentError(f"timeout_s={timeout_s}: a step needs some time")


def _timeout_s(group: Any) -> float:
    if isinstance(group, ProcessGroupProxyd):
        return group.membership.timeout.total_seconds()
    for device in group._device_types:
        timeout = getattr(getattr(group._get_backend(device), "options", None), "_timeout", None)
        if isinstance(timeout, datetime.timedelta):
            return timeout.total_seconds()
    return TIMEOUT_S
