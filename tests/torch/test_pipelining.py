"""torch.distributed.pipelining through two sites' agents: the same numbers as over gloo, bit for bit, and under grants.

``PIPELINES=full pytest tests/torch/test_pipelining.py`` runs every schedule over all four ranks as well.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from proxyd.cli.scrape import scrape
from tests.torch import pipes

if TYPE_CHECKING:
    from proxyd.cli.cluster import Cluster

    from .worlds import World

pytestmark = pytest.mark.needs_torch

ACROSS = (1, 2)
"""One rank at each site: every message of the pipeline crosses."""
ALL = (0, 1, 2, 3)
FULL = os.environ.get("PIPELINES") == "full"
CASES = [
    pytest.param(schedule, dtype, static, id=f"{schedule}-{dtype}-{'static' if static else 'dynamic'}")
    for schedule, dtype, static in itertools.product(pipes.SCHEDULES, ("float32", "bfloat16"), (True, False))
]
WIDE = CASES if FULL else [CASES[2], CASES[21]]
"""1F1B with bfloat16, and a V-shaped one with float32."""
BYTES = {"float32": pipes.ROWS * pipes.FEATURES * 4, "bfloat16": pipes.ROWS * pipes.FEATURES * 2}


def both(world: World, schedule: str, dtype: str, static: bool, ranks: tuple[int, ...], *more: Any) -> list[Any]:
    """Run over gloo and over proxyd; what the ranks of the pipeline say of the latter."""
    microbatches = 2 * len(ranks)
    want = world.run(pipes.run, "gloo", schedule, dtype, static, ranks, microbatches)
    got = world.run(pipes.run, "proxyd", schedule, dtype, static, ranks, microbatches, *more)
    for rank in ranks:
        assert got[rank]["gradients"], "each stage has some"
        assert got[rank]["gradients"] == want[rank]["gradients"]
        assert got[rank]["losses"] == want[rank]["losses"]
        assert want[rank]["attached"] == 0, "stages of other backends aren't touched"
    assert sum(len(got[rank]["losses"]) for rank in ranks) == pipes.STEPS * microbatches
    return [got[rank] for rank in ranks]


@pytest.mark.parametrize(("schedule", "dtype", "static"), CASES)
def test_losses_and_gradients_are_those_of_gloo(world: World, schedule: str, dtype: str, static: bool) -> None:
    for told in both(world, schedule, dtype, static, ACROSS):
        assert told["attached"] == (1 if schedule in pipes.SINGLE else 2)
        assert told["tags"]
        assert told["announced"] == told["fulfilled"] > 0
        assert told["resized"] == told["unsent"] == 0


@pytest.mark.parametrize(("schedule", "dtype", "static"), WIDE)
def test_the_same_over_two_ranks_at_each_site(world: World, schedule: str, dtype: str, static: bool) -> None:
    outer, inner, *_ = both(world, schedule, dtype, static, ALL)
    assert inner["announced"] > 0
    if schedule in (*pipes.SINGLE, *pipes.V_SHAPED):  # the others go on from the last rank to the first, across sites
        assert outer["announced"] == 0, "only what crosses is announced"


def test_each_byte_that_crosses_was_granted_and_passed_two_agents(world: World, cluster: Cluster) -> None:
    both(world, "1F1B", "float32", True, ACROSS)  # groups are made, connections warm

    def counts() -> dict[str, float]:
        a, b = (scrape(cluster.agent(site).metrics) for site in "ab")
        return {
            "granted a": a.total("proxyd_granted_bytes_total", link="a->b"),
            "granted b": b.total("proxyd_granted_bytes_total", link="b->a"),
            "received a": a.total("proxyd_received_bytes_total"),
            "received b": b.total("proxyd_received_bytes_total"),
            "alone": a.total("proxyd_fallback_bytes_total") + b.total("proxyd_fallback_bytes_total"),
            "too many": scrape(cluster.coordinator.metrics).total("proxyd_window_violations_total"),
        }

    before = counts()
    microbatches = 4
    world.run(pipes.run, "proxyd", "1F1B", "float32", True, ACROSS, microbatches)
    crossed = pipes.STEPS * microbatches * BYTES["float32"]  # activations one way, as many bytes of gradients the other
    give_up_s = time.monotonic() + 10
    while True:
        grown = {name: value - before[name] for name, value in counts().items()}
        if grown["granted a"] >= crossed <= grown["granted b"] or time.monotonic() > give_up_s:
            break
    assert grown["granted a"] == grown["granted b"] == crossed
    small = 10_000  # what stages say to each other before the first step goes unscheduled
    assert crossed <= grown["received a"] <= crossed + small
    assert crossed <= grown["received b"] <= crossed + small
    assert grown["alone"] == grown["too many"] == 0


def test_where_one_member_uses_no_tags_nobody_does(world: World) -> None:
    for modes in (("on", "on", "off", "on"), ("off",) * 4):
        for told in both(world, "Interleaved1F1B", "float32", True, ACROSS, modes):
            assert not told["tags"]


def by_hand(rank: int) -> Any:
    """Attach to a stage of a group that said "off", and detach."""
    import torch
    from torch.distributed.pipelining import PipelineStage

    from proxyd_client.torch import pipelining

    group = pipes.pipe_group("proxyd", ALL, ("off",) * 4)
    stage = PipelineStage(torch.nn.Linear(2, 2), rank, 4, torch.device("cpu"), group=group)
    before = set(vars(stage)), pipelining.hints_of(stage)
    hints = pipelining.attach(stage)
    again = pipelining.attach(stage) is hints
    unknown = hints.eta_s("forward", 3), hints.eta_s("backward", 3)
    pipelining.detach(stage)
    pipelining.detach(stage)
    return before[1], again, hints.tags, unknown, set(vars(stage)) == before[0]


def test_a_stage_can_be_attached_and_detached_by_hand(world: World) -> None:
    assert world.run(by_hand) == [(None, True, False, (None, None), True)] * 4


def test_an_unknown_mode_is_refused_with_the_known_ones() -> None:
    pytest.importorskip("torch")
    from proxyd_client.errors import ConfigError
    from proxyd_client.torch.membership import Options, _pipelining

    with pytest.raises(ConfigError, match=r"'yes'.*PROXYD_PIPELINING.*off.*tags.*on"):
        _pipelining(Options(pipelining="yes"))


def test_tags_without_announcements(world: World) -> None:
    for told in both(world, "ZBVZeroBubble", "float32", True, ACROSS, ("tags",) * 4):
        assert told["tags"]
        assert told["announced"] == 0


def test_a_wrong_plan_changes_nothing_but_a_count(world: World, cluster: Cluster) -> None:
    def resized() -> float:
        agents = (scrape(cluster.agent(site).metrics) for site in "ab")
        return sum(agent.total("proxyd_announcements_total", outcome="resized") for agent in agents)

    before = resized()
    told = both(world, "1F1B", "bfloat16", True, ACROSS, (), True)
    assert all(one["announced"] == one["resized"] > 0 for one in told)
    assert resized() - before == sum(one["resized"] for one in told)


def plan_and_reality(rank: int) -> list[list[Any]]:
    """Ten announced: seven sent, then twelve, another order, another dtype, a short last one (case 26)."""
    import torch
    import torch.distributed as dist

    from proxyd_client.torch import ProcessGroupProxyd

    group = dist.group.WORLD
    assert isinstance(group, ProcessGroupProxyd)
    plans: list[list[tuple[int, str, int]]] = [
        [(n, "float32", 1 << 18) for n in range(7)],
        [(n, "float32", 1 << 18) for n in range(12)],
        [(n, "float32", 1 << 18) for n in (9, 3, 1, 0, 2, 8, 7, 6, 5, 4)],
        [(n, "bfloat16", 1 << 19) for n in range(10)],
        [(n, "float32", 1 << 18 if n < 9 else 1 << 15) for n in range(10)],
    ]
    got: list[list[Any]] = []
    for round_, plan in enumerate(plans):
        if rank == 1:
            for n in range(10):
                group.p2p.announce(2, 100 + n, 1 << 20, 0.001 * n)
            works = []
            for n, dtype, count in plan:
                values = torch.arange(count, dtype=torch.float32).remainder(97).add(n + 10 * round_)
                works.append(dist.isend(values.to(getattr(torch, dtype)), 2, tag=100 + n))
            for work in works:
                assert work is not None
                work.wait()
        elif rank == 2:
            wrong = []
            for n, dtype, count in sorted(plan):
                out = torch.zeros(count, dtype=getattr(torch, dtype))
                dist.recv(out, 1, tag=100 + n)
                want = torch.arange(count, dtype=torch.float32).remainder(97).add(n + 10 * round_).to(out.dtype)
                if not torch.equal(out, want):
                    wrong.append((round_, n))
            got.append(wrong)
    return got


def test_plans_that_turn_out_otherwise(world: World) -> None:
    assert world.run(plan_and_reality)[2] == [[]] * 5


def foresee(rank: int) -> Any:
    """Rank 1 announces, waits for the word, sends; rank 2 asks."""
    import torch
    import torch.distributed as dist

    import proxyd_client.torch
    from proxyd_client.torch import ProcessGroupProxyd

    group = dist.group.WORLD
    assert isinstance(group, ProcessGroupProxyd)
    if rank == 1:
        group.p2p.announce(2, 77, 8 << 20, 5.0)
        dist.recv(torch.zeros(1), 2, tag=1)
        dist.send(torch.ones(2 << 20), 2, tag=77)
        return proxyd_client.torch.link_state(2)
    if rank == 2:
        before = None
        give_up_s = time.monotonic() + 10
        while before is None and time.monotonic() < give_up_s:
            before = proxyd_client.torch.eta_s(1, 77)
        dist.send(torch.zeros(1), 1, tag=1)
        out = torch.zeros(2 << 20)
        work = dist.irecv(out, 1, tag=77)
        assert work is not None
        work.wait()
        return before, work.eta_s(), float(out.sum())  # type: ignore[attr-defined]
    return None


def test_a_prediction_before_there_is_a_tensor(world: World) -> None:
    _, link, (before, after, total), _ = world.run(foresee)
    assert 4 < before < 6
    assert (after, total) == (0.0, float(2 << 20))
    assert link.link == "a->b"
    assert link.rate_bytes_per_s > 0
    assert 0 < link.confidence <= 1
    assert link.age_ns >= 0


def test_no_two_messages_of_a_pipeline_share_a_tag() -> None:
    pytest.importorskip("torch")
    from proxyd_client.torch.pipelining import Direction, tag_of

    tags = {
        tag_of(direction, sender, sender + step, batch)
        for direction, steps in ((Direction.FORWARD, (1, 2, 31)), (Direction.BACKWARD, (-1, -2, -31)))
        for step in steps
        for sender in (31, 32, 500, 991)
        for batch in (0, 1, 255, (1 << 14) - 1)
    }
    assert len(tags) == 2 * 3 * 4 * 4
    assert all(1 << 30 <= tag < 1 << 31 for tag in tags), "torch hands tags on as 32-bit integers"
    assert tag_of(Direction.FORWARD, 5000, 9000, 1 << 20) < 1 << 31


HOOK = """
import sys
import torch.distributed as dist
import proxyd_client.torch as ours
assert "torch.distributed.pipelining" not in sys.modules, "it costs seconds"
ours.pipelining.install()
finders = [finder for finder in sys.meta_path if type(finder).__module__ == ours.pipelining.__name__]
assert len(finders) == 1
import torch
from torch.distributed.pipelining import PipelineStage, stage
assert not [finder for finder in sys.meta_path if type(finder).__module__ == ours.pipelining.__name__]
assert type(stage.__spec__.loader) is type(dist.__spec__.loader), "its loader is the usual one again"
base = stage._PipelineStageBase
patched = base.__init__
ours.pipelining.install()
assert base.__init__ is patched
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
plain = PipelineStage(torch.nn.Linear(2, 2), 0, 1, torch.device("cpu"))
assert ours.pipelining.hints_of(plain) is None
assert "get_fwd_send_ops" not in vars(plain)
try:
    ours.pipelining.attach(plain)
except ours.pipelining.ArgumentError as error:
    assert "ProcessGroup" in str(error)
else:
    raise AssertionError("not ours")
ours.pipelining.uninstall()
assert base.__init__ is not patched
ours.pipelining.install()
assert base.__init__ is not patched and hasattr(base.__init__, "_proxyd_original")
print("well")
"""


def test_the_hook_waits_for_torchs_module_and_leaves_others_alone() -> None:
    pytest.importorskip("torch")
    done = subprocess.run([sys.executable, "-c", HOOK], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "well", done.stderr
