"""The run-time schedule on real stages: the numbers of 1F1B and of one process, bit for bit, and ends that are told."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.torch import run_time_pipes as pipes

if TYPE_CHECKING:
    from proxyd.cli.cluster import Cluster

    from .worlds import World

pytestmark = pytest.mark.needs_torch

ACROSS = (1, 2)
"""One rank at each site."""
ALL = (0, 1, 2, 3)
KEPT = ("losses", "gradients", "outputs")


@pytest.fixture(scope="module")
def references(world: World) -> Any:
    """By dtype and ranks: what torch's 1F1B over gloo gives, which is what one process gives."""
    known: dict[tuple[str, tuple[int, ...]], Any] = {}

    def of(dtype: str, ranks: tuple[int, ...]) -> Any:
        if (dtype, ranks) not in known:
            told = world.run(pipes.train, "gloo", "1F1B", dtype, ranks)
            single = world.run(pipes.alone, dtype, len(ranks), ranks=[0])[0]
            for rank, mine in zip(ranks, single, strict=True):
                assert {key: told[rank][key] for key in KEPT} == mine
            known[dtype, ranks] = told
        return known[dtype, ranks]

    return of


def same(got: Any, want: Any, ranks: tuple[int, ...]) -> list[list[dict[str, Any]]]:
    """Nothing differs; the reports of each stage."""
    for rank in ranks:
        assert len(got[rank]["gradients"]) == 6 * pipes.STEPS
        for key in KEPT:
            assert got[rank][key] == want[rank][key], f"{key} of rank {rank}"
    assert len(got[ranks[-1]]["losses"]) == pipes.STEPS * pipes.MICRO_BATCHES
    return [got[rank]["reports"] for rank in ranks]


@pytest.mark.parametrize("ranks", [ACROSS, ALL], ids=["two", "four"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("backend", ["gloo", "proxyd"])
def test_losses_and_gradients_are_those_of_1f1b_and_of_one_process(
    world: World, references: Any, backend: str, dtype: str, ranks: tuple[int, ...]
) -> None:
    want = references(dtype, ranks)
    for seed, options in enumerate(({}, {"split": True, "weight_parts": 3}, {"activations": 2}), start=1):
        reports = same(world.run(pipes.train, backend, "run-time", dtype, ranks, options, seed), want, ranks)
        for steps in reports:
            for report in steps:
                assert report["peak_activations"] <= options.get("activations", 8)
                assert report["peak_bytes"] <= report["memory_bytes"]
                assert ("gloo" in report["fallback"]) == (backend == "gloo")
        if options.get("split"):
            assert all(steps[-1]["split_backwards"] == pipes.MICRO_BATCHES for steps in reports[1:])


def test_predictions_of_the_next_gradient_come_from_the_other_site(world: World, references: Any) -> None:
    got = world.run(pipes.train, "proxyd", "run-time", "float32", ACROSS, {}, 9)
    first, _ = same(got, references("float32", ACROSS), ACROSS)
    assert first[-1]["predictions"] > 0, "in the first step nothing is announced, in the last one it is"
    assert first[-1]["fallback"] == ""


def test_memory_in_bytes_is_measured_and_kept_to(world: World, references: Any) -> None:
    want = references("float32", ACROSS)
    free = same(world.run(pipes.train, "gloo", "run-time", "float32", ACROSS), want, ACROSS)
    nbytes = free[0][0]["activation_bytes"]
    # Input, output of the norm, input and output of the activation function, and what the norm keeps of each row.
    assert nbytes >= pipes.ROWS * pipes.WIDTH * 4 * (1 + 1 + 4 + 4)
    limit = {"memory_bytes": 2 * nbytes + nbytes // 2}
    for steps in same(world.run(pipes.train, "gloo", "run-time", "float32", ACROSS, limit, 3), want, ACROSS):
        for report in steps:
            assert report["peak_activations"] <= 2
            assert report["peak_bytes"] <= limit["memory_bytes"]
    assert max(report["peak_activations"] for report in free[0]) > 2, "without the limit there are more"


def test_eval_gives_what_torchs_gives(world: World) -> None:
    want = world.run(pipes.train, "gloo", "1F1B", "float32", ACROSS, (), 0, 2, True)
    got = world.run(pipes.train, "gloo", "run-time", "float32", ACROSS, (), 0, 2, True)
    assert got[2]["evaluated"] == want[2]["evaluated"]
    assert len(got[2]["evaluated"]) == 2 * (1 + pipes.MICRO_BATCHES)


# -- offload ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "dtype", "ranks", "options"),
    [
        pytest.param("proxyd", "float32", ACROSS, {"activations": 2}, id="proxyd"),
        pytest.param("gloo", "bfloat16", ALL, {"activations": 2, "split": True, "weight_parts": 2}, id="four"),
    ],
)
def test_offload_changes_no_bit(
    world: World, references: Any, backend: str, dtype: str, ranks: tuple[int, ...], options: dict[str, Any]
) -> None:
    got = world.run(pipes.train, backend, "run-time", dtype, ranks, {**options, "offload": 1 << 24}, 11)
    first, *_ = same(got, references(dtype, ranks), ranks)
    assert sum(report["offload"]["moved_out"] for report in first) > 0
    assert max(report["offload"]["host_peak_bytes"] for report in first) > 0
    for report in first:
        assert report["offload"]["failed"] == report["offload"]["stayed"] == 0
        assert report["peak_activations"] <= 2, "counted as on the device; outside there are more"


def clumsy(rank: int) -> Any:
    """A store whose moves fail."""
    import torch

    from proxyd_client.torch.offload import ActivationStore
    from proxyd_client.torch.pipeline import ScheduleRunTime

    group = pipes.pipe_group("gloo", ACROSS)
    if rank not in ACROSS:
        return None
    index = ACROSS.index(rank)
    stage = pipes.make_stage(index, 2, torch.float32, group)
    store = ActivationStore(host_bytes=1 << 24, module=stage.submod)
    schedule = ScheduleRunTime(stage, pipes.MICRO_BATCHES, loss_fn=pipes.loss_of, activations=2, offload=store)
    settle = store.settle
    store.settle = lambda number, keep: settle(number, True)  # type: ignore[method-assign]
    batch, target = next(pipes.data(torch.float32))
    losses: list[Any] = []
    with pipes.late(stage, 5):
        schedule.step(*((batch,) if index == 0 else ()), **({"target": target, "losses": losses} if index else {}))
    assert schedule.report is not None
    assert schedule.report.offload is not None
    told = schedule.report.offload.stayed, schedule.report.offload.moved_out
    schedule.close()
    return [pipes.to_bytes(p.grad) for p in stage.submod.parameters()], told


def test_a_move_that_fails_costs_memory_and_neither_the_step_nor_a_bit(world: World, references: Any) -> None:
    got = world.run(clumsy)
    want = references("float32", ACROSS)
    for rank in ACROSS:
        assert got[rank][0] == want[rank]["gradients"][:6]
    assert got[ACROSS[0]][1] == (1, 0), "one that failed, and none after it"


# -- modules that can't be split, arguments that can't be -----------------------------------------------------------


def odd_modules(rank: int) -> dict[str, Any]:
    """For each kind of module whose backward can't be split: gradients by 1F1B and by us, and why."""
    import torch
    from torch import nn
    from torch.distributed.pipelining import Schedule1F1B
    from torch.utils.checkpoint import checkpoint

    from proxyd_client.torch.pipeline import ScheduleRunTime

    group = pipes.pipe_group("gloo", ACROSS)
    if rank not in ACROSS:
        return {}
    index = ACROSS.index(rank)

    class View(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = pipes.module_of(5, torch.float32)

        def forward(self, x: Any) -> Any:
            return self.inner(x).view(x.shape)

    class Aside(View):
        """A parameter that a layer uses is a part of the output as well."""

        def forward(self, x: Any) -> Any:
            return torch.cat([self.inner(x)[:1], self.inner.wide.weight[: len(x) - 1]])

    class Tied(View):
        """The same layers twice."""

        def forward(self, x: Any) -> Any:
            return self.inner(self.inner(x))

    class Deaf(View):
        """Its output depends on a parameter alone."""

        def forward(self, x: Any) -> Any:
            return self.inner.wide.weight[: len(x)] * 2

    class Recomputed(View):
        def forward(self, x: Any) -> Any:
            return checkpoint(self.inner, x, use_reentrant=True)

    def hooked() -> Any:
        made = View()
        made.inner.wide.weight.register_hook(lambda grad: grad * 2)
        made.forward = made.inner.forward  # type: ignore[method-assign]
        return made

    def of_view(output: Any, target: Any) -> Any:
        return pipes.loss_of(output, target).view(())

    told = {}
    for name, make, loss in (
        ("aside", Aside, pipes.loss_of),
        ("tied", Tied, pipes.loss_of),
        ("view", View, of_view),
        ("deaf", Deaf, pipes.loss_of),
        ("checkpoint", Recomputed, pipes.loss_of),
        ("hooks", hooked, pipes.loss_of),
    ):
        gradients: list[list[bytes]] = []
        why, splits = "", 0
        for ours in (False, True):
            torch.manual_seed(3)
            stage = pipes.make_stage(index, 2, torch.float32, group, make() if index else None)
            schedule: Any
            if ours:
                schedule = ScheduleRunTime(stage, pipes.MICRO_BATCHES, loss_fn=loss, split=True)
            else:
                schedule = Schedule1F1B(stage, pipes.MICRO_BATCHES, loss_fn=loss)
            batch, target = next(pipes.data(torch.float32))
            schedule.step(*((batch,) if index == 0 else ()), **({"target": target} if index else {}))
            gradients.append([pipes.to_bytes(p.grad) if p.grad is not None else b"" for p in stage.submod.parameters()])
            if ours:
                why, splits = schedule.report.whole_because, schedule.report.split_backwards
        told[name] = gradients[0] == gradients[1], splits, why
    return told


def test_gradients_of_odd_modules_are_right_and_what_cannot_be_split_runs_whole(world: World) -> None:
    _, _, told, _ = world.run(odd_modules)
    assert all(equal for equal, _, _ in told.values()), told
    for name in ("aside", "tied"):
        assert told[name][1:] == (pipes.MICRO_BATCHES, "")
    for name, word in (
        ("view", "view"),
        ("deaf", "does not depend"),
        ("checkpoint", "CheckpointFunction"),
        ("hooks", "has hooks"),
    ):
        assert told[name][1] == 0
        assert word in told[name][2]


def refusals(rank: int) -> list[str]:
    from proxyd_client.errors import ArgumentError
    from proxyd_client.torch.pipeline import ScheduleRunTime

    group = pipes.pipe_group("gloo", ACROSS)
    if rank not in ACROSS:
        return []
    import torch

    stage = pipes.make_stage(ACROSS.index(rank), 2, torch.float32, group)
    said = []
    for arguments in (
        {"activations": 0},
        {"activations": 2, "memory_bytes": 5},
        {"memory_bytes": 0},
        {"weight_parts": 0},
        {"timeout_s": 0},
        {"timeout_s": float("nan")},
        {"quotas": {0: 0}},
        {"n_microbatches": 0},
        {"offload": -1},
        {"stage": [stage, stage]},
    ):
        try:
            ScheduleRunTime(**{"stage": stage, "n_microbatches": 4, "loss_fn": pipes.loss_of, **arguments})
        except ArgumentError as error:
            said.append(str(error))
    return said


def test_arguments_that_cannot_be_are_refused_before_a_step(world: World) -> None:
    said = world.run(refusals)[ACROSS[0]]
    assert len(said) == 10, said
    assert "can't be below 0" in said.pop(8)
    words = ("activations=0", "give one", "memory_bytes=0", "weight_parts=0", "timeout_s=0", "nan", "one micro-batch")
    assert len(said) == 9, said
    for word, text in zip((*words, "at least one micro-batch, got 0", "one stage per rank, got 2"), said, strict=True):
        assert word in text


# -- ends -----------------------------------------------------------------------------------------------------------


def _posted(group: Any) -> list[Any]:
    """Receives that wait in this process, whoever posted them: it has one endpoint for all of its groups."""
    membership = getattr(group, "membership", None)
    return [] if membership is None else list(membership.endpoint._session.receiver._matcher.all_waiting())


def breaks(rank: int, how: str, breaker: int, ranks: tuple[int, ...] = ALL) -> tuple[str, str, str, float]:
    """A step in which one stage raises, dies, stands still or has no memory: what each rank gets, then and after."""
    import torch
    import torch.distributed as dist

    from proxyd_client.torch.pipeline import ScheduleRunTime

    # A new one each time: it carries no more steps afterwards, while others of the same ranks do.
    group = dist.new_group(list(ranks), backend="gloo" if how == "raises over gloo" else "proxyd")
    index = ranks.index(rank)
    module = pipes.module_of(index, torch.float32)
    calls = []
    plain = module.forward

    def forward(x: Any) -> Any:
        if x.device.type != "meta":
            calls.append(x)
        if rank == breaker and len(calls) == 3:
            if how == "dies":
                os.kill(os.getpid(), 9)
            if how == "stands still":
                time.sleep(2.5)
            elif how != "no memory":
                raise ZeroDivisionError("a fault of the user's")
        return plain(x)

    module.forward = forward
    stage = pipes.make_stage(index, len(ranks), torch.float32, group, module)
    more: dict[str, Any] = {"timeout_s": 0.8 if how == "stands still" else 20}
    if how == "no memory" and rank == breaker:
        more["memory_bytes"] = 1000
    schedule = ScheduleRunTime(stage, pipes.MICRO_BATCHES, loss_fn=pipes.loss_of, **more)
    batch, target = next(pipes.data(torch.float32))
    arguments = ((batch,) if index == 0 else ()), ({"target": target} if index == len(ranks) - 1 else {})
    others = _posted(group)
    begun_s = time.monotonic()
    texts = []
    for _ in range(2):
        try:
            schedule.step(*arguments[0], **arguments[1])
            texts.append("no error")
        except Exception as error:  # noqa: BLE001 - what it is, the test says
            texts.append(f"{type(error).__name__}: {error}")
    took_s = time.monotonic() - begun_s
    if how != "raises over gloo":  # which can't take a receive back
        left = [one for one in _posted(group) if not any(one is other for other in others)]
        assert not left, "nothing is left that could write to a tensor"
    return texts[0], texts[1], texts[0].split(":")[0], took_s


def test_one_stage_that_raises_ends_the_step_of_all_with_its_reason(world: World) -> None:
    for how in ("raises", "raises over gloo"):
        for rank, (first, second, kind, took_s) in enumerate(world.run(breaks, how, 2)):
            assert kind == ("RuntimeError" if rank == 2 else "PipelineError"), first
            assert ("failed to run forward" if rank == 2 else "stage 2 (rank 2), step 0: ZeroDivisionError") in first
            assert rank == 2 or "a fault of the user's" in first
            assert "carries no more pipeline steps" in second
            assert took_s < 10


def test_a_stage_that_dies_ends_the_step_of_all(cluster: Cluster) -> None:
    from .worlds import World

    a, b = cluster.agent("a").socket, cluster.agent("b").socket
    with World(4, [a, a, b, b]) as small:
        chosen = small.start(breaks, "dies", 2)
        small.processes[2].join(30)
        answers = small.finish([rank for rank in chosen if rank != 2], 30)
    for rank, told in zip((0, 1, 3), answers, strict=True):
        first, second, kind, took_s = told
        assert kind == ("PipelineError" if rank == 0 else kind), first
        assert kind in ("PipelineError", "PeerLost"), first
        assert "rank 2" in first
        assert "carries no more pipeline steps" in second
        assert took_s < 15


def test_a_stage_that_stands_still_ends_the_step_of_all_after_the_timeout(world: World) -> None:
    told = world.run(breaks, "stands still", 1)
    kinds = {kind for _, _, kind, _ in told}
    assert kinds <= {"PipelineError", "TransferTimeout"}
    assert any("has waited 0.8 s for the input of" in first for first, _, _, _ in told)
    for _, second, _, took_s in told:
        assert "carries no more pipeline steps" in second
        assert took_s < 10


def test_a_limit_below_one_micro_batch_ends_the_first_step_before_any_gradient(world: World) -> None:
    for rank, (first, second, kind, _) in enumerate(world.run(breaks, "no memory", 2)):
        assert kind == ("ArgumentError" if rank == 2 else "PipelineError"), first
        assert "memory limit of 1000 bytes is impossible: one micro-batch needs" in first
        assert "carries no more pipeline steps" in second
