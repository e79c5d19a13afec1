"""Shadow mode tells the truth: what it reckons is what grants really give, in the same scenario with the same seed."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Callable
from functools import partial

import pytest

from proxyd.core.bandwidth import LinkSettings
from proxyd.core.coordinator import CoordinatorConfig
from proxyd.core.coordinator_status import LinkStatus
from proxyd.core.effects import CoordinatorEffect
from proxyd.core.events import CoordinatorEvent, SessionMessage
from proxyd.core.ids import AgentName, EndpointName, LinkName, TransferId
from proxyd.core.messages import Request, TransferDone
from proxyd.core.shadow import Distribution, ShadowStatus
from proxyd.sim.link import LinkModel
from proxyd.sim.world import CoordinatorHost, World
from proxyd.wire.envelope import TrafficClass

MS = 1_000_000
AB, BA = LinkName("a", "b"), LinkName("b", "a")
RATE = 50_000_000
RTT_NS = 30 * MS
BDP = RATE * RTT_NS // 1_000_000_000
SENDERS = 8
WARM_NS = 6000 * MS
"""Until then TCP's windows are cold, which the shadow doesn't model."""
WARM_BYTES = 12 << 20
ROUNDS = 10


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """One way."""

    fct_ns: list[int]
    """Request until end as the coordinator saw it, of what was asked for after the warm-up; sorted."""
    drops: int
    link: LinkStatus
    warm: ShadowStatus | None
    """What shadow mode had found when the warm-up was over."""

    def since_warm(self, read: Callable[[ShadowStatus], Distribution]) -> Distribution:
        """What shadow mode found after the warm-up."""
        assert self.link.shadow is not None
        assert self.warm is not None
        return _minus(read(self.link.shadow), read(self.warm))

    @property
    def mean_ns(self) -> float:
        return sum(self.fct_ns) / len(self.fct_ns)

    def percentile_ns(self, share: float) -> int:
        return self.fct_ns[min(len(self.fct_ns) - 1, int(share * len(self.fct_ns)))]


def _minus(later: Distribution, earlier: Distribution) -> Distribution:
    counts = [a - b for a, b in zip(later.counts, earlier.counts, strict=True)]
    return Distribution(counts, later.count - earlier.count, later.sum_ns - earlier.sum_ns, later.most_ns)


def run(*, observe: bool, seed: int, traffic: TrafficClass, buffer: float, rounds: int = ROUNDS) -> Outcome:
    """Bursts of eight messages of different sizes, at times that depend on the seed alone."""
    model = LinkModel(RATE, RTT_NS // 2, int(BDP * buffer), mtu_bytes=9000)
    world = World(seed, {AB: model, BA: model})
    links = tuple(
        LinkSettings(name, RATE, RTT_NS, model.buffer_bytes, mtu_bytes=9000, observe=observe) for name in (AB, BA)
    )
    coordinator = world.start_coordinator("c:1", CoordinatorConfig(links=links, control_rtt_ns=800_000), 1)
    for number in range(SENDERS):
        for site, first in (("a", 0), ("b", 100)):
            host = world.start_agent(AgentName(site, f"host{number}"), ("c:1",), 1 << 30)
            world.start_trainer(host, EndpointName("job", first + number))
    asked: dict[TransferId, int] = {}
    took: list[int] = []
    handle = coordinator.machine.handle

    def watched(event: CoordinatorEvent, now_ns: int) -> list[CoordinatorEffect]:
        match event:
            case SessionMessage(_, Request(transfer)):
                asked.setdefault(transfer, now_ns)
            case SessionMessage(_, TransferDone(transfer)) if asked[transfer] >= WARM_NS:
                took.append(now_ns - asked[transfer])
            case _:
                pass
        return handle(event, now_ns)

    coordinator.machine.handle = watched  # type: ignore[method-assign]
    chance = random.Random(seed)
    # Large ones first: they open TCP's windows.
    for number in range(SENDERS):
        world.clock.at(
            1000 * MS, partial(world.trainers[EndpointName("job", number)].send, 100 + number, WARM_BYTES, traffic)
        )
    at_ns = WARM_NS + 100 * MS
    for _ in range(rounds):
        for number in range(SENDERS):
            nbytes = chance.randrange(1 << 20, 6 << 20)

            def post(number: int = number, nbytes: int = nbytes) -> None:
                world.trainers[EndpointName("job", number)].send(100 + number, nbytes, traffic)

            world.clock.at(at_ns + chance.randrange(20 * MS), post)
        at_ns += chance.randrange(700, 1300) * MS
    world.clock.run(WARM_NS)
    warm = copy.deepcopy(_status(coordinator).shadow)
    world.clock.run(at_ns + 8000 * MS)
    return Outcome(sorted(took), world.link("a", "b").dropped, _status(coordinator), warm)


def _status(coordinator: CoordinatorHost) -> LinkStatus:
    machine = coordinator.machine
    return next(one for one in machine.links_status(coordinator.now_ns) if one.link == AB)


@pytest.mark.parametrize(
    ("traffic", "buffer", "seed"),
    [(TrafficClass.PIPELINE, 1.0, 1), (TrafficClass.PIPELINE, 0.1, 2), (TrafficClass.SYNC, 1.0, 3)],
)
def test_what_is_reckoned_is_what_grants_give(traffic: TrafficClass, buffer: float, seed: int) -> None:
    granted = run(observe=False, seed=seed, traffic=traffic, buffer=buffer)
    observed = run(observe=True, seed=seed, traffic=traffic, buffer=buffer)
    assert granted.link.shadow is None
    found = observed.link.shadow
    assert found is not None
    assert observed.link.totals.grants == 0
    assert found.classes[0].real.count == found.classes[0].shadow.count == (ROUNDS + 1) * SENDERS
    assert (found.open, found.behind, found.abandoned) == (0, 0, 0)
    # The positive proof.
    shadow = observed.since_warm(lambda status: status.classes[0].shadow)
    assert shadow.mean_ns == pytest.approx(granted.mean_ns, rel=0.1)
    assert shadow.percentile_ns(0.5) == pytest.approx(granted.percentile_ns(0.5), rel=0.1)
    assert shadow.percentile_ns(0.9) == pytest.approx(granted.percentile_ns(0.9), rel=0.1)
    # And what really happens is what the coordinator sees: worse.
    real = observed.since_warm(lambda status: status.classes[0].real)
    assert real.mean_ns == pytest.approx(observed.mean_ns, rel=0.05)
    assert observed.mean_ns > granted.mean_ns
    assert observed.drops > granted.drops
    assert found.real_queue.percentile_ns(0.99) > 2 * found.shadow_queue.percentile_ns(0.99)


def test_it_is_the_same_in_each_run() -> None:
    first, second = (run(observe=True, seed=5, traffic=TrafficClass.BULK, buffer=0.5, rounds=9) for _ in range(2))
    assert first == second
