"""What an operator promised is kept: weights, floors, caps, calendars, and nobody starves.

Fluid senders obey their grants exactly, so what is measured is the policy's, not TCP's.
"""

from __future__ import annotations

import dataclasses
import random

import pytest

from proxyd.core.bandwidth import LinkSettings
from proxyd.core.coordinator import CoordinatorConfig, CoordinatorMachine
from proxyd.core.events import LocalTime, PolicyChanged, SessionMessage
from proxyd.core.ids import AgentName, LinkName, TransferId
from proxyd.core.messages import Request
from proxyd.core.policy import JobPolicy, LinkPolicy, Policy, Sharing, parse_window
from proxyd.sim.fluid import FluidSender, FluidWorld
from proxyd.wire.envelope import TrafficClass

LINK = LinkName("a", "b")
RATE = 125_000_000
PAYLOAD = RATE * 8948 // 9000
RTT_NS = 60_000_000
SECOND = 1_000_000_000
MS = 1_000_000


class World:
    """One link, and jobs that have senders of their own."""

    def __init__(self, policy: Policy, senders: dict[str, int], *, control_ns: int = 500_000) -> None:
        settings = LinkSettings(LINK, RATE, RTT_NS, 750_000, mtu_bytes=9000)
        self.machine = CoordinatorMachine(CoordinatorConfig(links=(settings,), control_rtt_ns=2 * control_ns), epoch=1)
        self.machine.handle(PolicyChanged(policy), 0)
        self.job_of: dict[int, str] = {}
        self.sent = 0
        for job, number in senders.items():
            for _ in range(number):
                self.job_of[len(self.job_of) + 1] = job
        fluids = [FluidSender(AgentName("a", f"host{i}"), LINK, RTT_NS) for i in self.job_of]
        self.world = FluidWorld(self.machine, fluids, control_ns=control_ns, check=self._check)
        self.world.run(50 * MS)

    def _check(self, now_ns: int) -> None:
        assert self.machine.audit(now_ns) == ""

    def send(self, session: int, nbytes: int, traffic: TrafficClass, deadline_ns: int = 0) -> TransferId:
        if not deadline_ns:
            return self.world.send(session, nbytes, traffic, self.job_of[session])
        self.sent += 1
        transfer = TransferId(session, 1_000_000 + self.sent)
        self.world.senders[session].wanted_bytes[transfer] = nbytes
        request = Request(
            transfer,
            LINK,
            AgentName("b", "gw"),
            self.job_of[session],
            traffic,
            nbytes,
            deadline_in_ns=deadline_ns,
        )
        self.world._post(session, request)
        return transfer

    def backlog(self, traffic: dict[str, TrafficClass], seconds: float, nbytes: int = 8 << 20) -> dict[str, float]:
        """Keep every sender's queue full; bytes that left each job's senders, per second."""
        world = self.world
        begin = {session: sender.left_bytes for session, sender in world.senders.items()}
        end_ns = world.now_ns + int(seconds * SECOND)
        asked = dict.fromkeys(world.senders, 0)
        while world.now_ns < end_ns:
            for session, sender in world.senders.items():
                job = self.job_of[session]
                if job in traffic and asked[session] - (sender.left_bytes - begin[session]) < 60 << 20:
                    self.send(session, nbytes, traffic[job])
                    asked[session] += nbytes
            world.run(world.now_ns + 20 * MS)
        rates: dict[str, float] = {}
        for session, sender in world.senders.items():
            job = self.job_of[session]
            rates[job] = rates.get(job, 0.0) + (sender.left_bytes - begin[session]) / seconds
        return rates


@pytest.mark.parametrize("traffic", list(TrafficClass))
@pytest.mark.parametrize("seed", range(4))
def test_weights_hold_within_5_percent_over_10_seconds(seed: int, traffic: TrafficClass) -> None:
    rng = random.Random(seed)
    jobs = {f"job{i}": JobPolicy(rng.choice([0.5, 1, 1, 2, 3, 5])) for i in range(rng.randrange(2, 5))}
    world = World(Policy(jobs), {job: rng.randrange(1, 4) for job in jobs})
    rates = world.backlog(dict.fromkeys(jobs, traffic), 1)
    rates = world.backlog(dict.fromkeys(jobs, traffic), 10)
    total, weight = sum(rates.values()), sum(job.weight for job in jobs.values())
    assert total > 0.93 * PAYLOAD
    for name, job in jobs.items():
        assert rates[name] == pytest.approx(total * job.weight / weight, rel=0.05), (rates, jobs)


def test_weights_hold_while_one_link_serves_several_jobs_of_one_agent() -> None:
    """Two jobs behind the same two agents: their lanes are shared, the weights are not."""
    policy = Policy({"x": JobPolicy(3), "y": JobPolicy(1)})
    for traffic in TrafficClass:
        world = World(policy, {"x": 2}).world
        got = {"x": 0, "y": 0}
        jobs: dict[TransferId, str] = {}
        for _ in range(400):
            for session in (1, 2):
                for job in ("x", "y"):
                    jobs[world.send(session, 2 << 20, traffic, job)] = job
        begin_ns = world.now_ns
        world.run(begin_ns + 10 * SECOND)
        for _, _, grant in world.grants:
            got[jobs[grant.transfer]] += grant.nbytes
        assert got["x"] == pytest.approx(3 * got["y"], rel=0.05), (traffic, got)


@pytest.mark.parametrize("seed", range(4))
def test_floors_and_caps_hold_within_5_percent(seed: int) -> None:
    """A bulk job's floor holds below saturating pipeline traffic, a cap holds on a link that has room."""
    rng = random.Random(seed)
    floor, cap = rng.choice([5, 15, 30]) * RATE // 100, rng.choice([3, 10, 25]) * RATE // 100
    policy = Policy({"low": JobPolicy(1, floor), "capped": JobPolicy(50, 0, cap)})
    world = World(policy, {"low": 1, "capped": rng.randrange(1, 3), "high": 2})
    traffic = {"low": TrafficClass.BULK, "capped": rng.choice(list(TrafficClass)), "high": TrafficClass.PIPELINE}
    world.backlog(traffic, 1)
    rates = world.backlog(traffic, 10)
    assert sum(rates.values()) > 0.9 * PAYLOAD
    assert rates["low"] > 0.95 * floor
    assert rates["low"] < floor + 0.08 * PAYLOAD, "the rest of the link is the pipeline's, but for the oldest"
    assert rates["capped"] < 1.05 * cap
    if traffic["capped"] is TrafficClass.PIPELINE:
        assert rates["capped"] > 0.95 * cap
    alone = World(policy, {"capped": 1})
    alone.backlog({"capped": TrafficClass.SYNC}, 1)
    assert alone.backlog({"capped": TrafficClass.SYNC}, 10)["capped"] == pytest.approx(cap, rel=0.05)


def test_weights_split_what_floors_leave() -> None:
    policy = Policy({"x": JobPolicy(1, RATE // 4), "y": JobPolicy(1), "z": JobPolicy(2)})
    world = World(policy, {"x": 1, "y": 1, "z": 1})
    traffic = dict.fromkeys("xyz", TrafficClass.BULK)
    world.backlog(traffic, 1)
    rates = world.backlog(traffic, 10)
    rest = sum(rates.values()) - RATE // 4
    assert rates["x"] == pytest.approx(RATE // 4 + rest / 4, rel=0.05)
    assert rates["y"] == pytest.approx(rest / 4, rel=0.05)
    assert rates["z"] == pytest.approx(rest / 2, rel=0.05)


def test_a_job_that_cannot_use_its_share_leaves_it_and_claims_nothing_back() -> None:
    policy = Policy({"slow": JobPolicy(10)})
    world = World(policy, {"slow": 1, "x": 1, "y": 1})
    world.world.senders[1].limit_bytes_per_s = RATE // 10
    traffic = dict.fromkeys(("slow", "x", "y"), TrafficClass.BULK)
    world.backlog(traffic, 3)
    rates = world.backlog(traffic, 10)
    assert rates["slow"] == pytest.approx(RATE / 10, rel=0.1)
    assert rates["x"] == pytest.approx(rates["y"], rel=0.05)
    assert sum(rates.values()) > 0.88 * PAYLOAD


@pytest.mark.parametrize("weight", [3, 20])
def test_weights_hold_where_no_single_sender_fills_the_link(weight: int) -> None:
    """Each can send at 60 % of the rate: the next in line always gets something beside the one whose turn it is."""
    world = World(Policy({"x": JobPolicy(weight)}), {"x": 2, "y": 1})
    for sender in world.world.senders.values():
        sender.limit_bytes_per_s = RATE * 6 // 10
    for session in world.world.senders:
        world.send(session, 8 << 30, TrafficClass.BULK)
    fluid = world.world
    fluid.run(fluid.now_ns + 3 * SECOND)
    before = {session: sender.left_bytes for session, sender in fluid.senders.items()}
    fluid.run(fluid.now_ns + 20 * SECOND)
    x1, x2, y = (sender.left_bytes - before[session] for session, sender in fluid.senders.items())
    assert x1 + x2 == pytest.approx((x1 + x2 + y) * weight / (weight + 1), rel=0.05)


@pytest.mark.parametrize("urgent", ["class", "deadline", "job"])
def test_small_urgent_messages_pass_a_saturating_bulk_job_at_the_next_slot(urgent: str) -> None:
    """p99 of a 256 KiB message under a backlogged bulk job: at most 2 round trips and one slot."""
    world = World(Policy(), {"bulk": 2, "small": 1})
    fluid = world.world
    if urgent == "deadline":
        world.job_of[3] = "bulk"
    traffic = TrafficClass.PIPELINE if urgent == "class" else TrafficClass.BULK
    for session in (1, 2):
        for _ in range(300):
            world.send(session, 8 << 20, TrafficClass.BULK)
    fluid.run(fluid.now_ns + SECOND)
    times: list[int] = []
    rng = random.Random(1)
    for _ in range(60):
        begin_ns, goal = fluid.now_ns, fluid.senders[3].left_bytes + (256 << 10)
        world.send(3, 256 << 10, traffic, 50 * MS if urgent == "deadline" else 0)
        while fluid.senders[3].left_bytes < goal:
            fluid.run(fluid.now_ns + MS)
            assert fluid.now_ns - begin_ns < SECOND
        times.append(fluid.now_ns - begin_ns + RTT_NS)  # there and acknowledged
        fluid.run(fluid.now_ns + rng.randrange(50, 200) * MS)
    times.sort()
    assert times[int(len(times) * 0.99)] <= 2 * RTT_NS + 20 * MS, times[-5:]


def test_earlier_deadlines_go_first_and_those_without_do_not_starve() -> None:
    world = World(Policy(), {"job": 2})
    fluid = world.world
    patient = world.send(1, 1 << 30, TrafficClass.BULK)
    fluid.run(fluid.now_ns + 500 * MS)
    end_ns = fluid.now_ns + 10 * SECOND
    while fluid.now_ns < end_ns:
        for deadline_ns in (400 * MS, 200 * MS):
            world.send(2, 3 << 20, TrafficClass.BULK, deadline_ns)
        fluid.run(fluid.now_ns + 45 * MS)
    got = sum(grant.nbytes for issued_ns, _, grant in fluid.grants if grant.transfer == patient and issued_ns > SECOND)
    everything = sum(grant.nbytes for issued_ns, _, grant in fluid.grants if issued_ns > SECOND)
    assert 0.03 * everything < got < 0.1 * everything
    urgent = [grant.reason for _, _, grant in fluid.grants if "wanted in" in grant.reason]
    assert urgent


@pytest.mark.parametrize(("share", "low", "high"), [(0.0, 0.0, 0.0), (0.05, 0.03, 0.08), (0.2, 0.16, 0.26)])
def test_the_part_for_the_longest_waiter_is_as_configured(share: float, low: float, high: float) -> None:
    world = World(Policy(links={LINK: LinkPolicy(fifo_share=share)}), {"urgent": 2, "bulk": 1})
    traffic = {"urgent": TrafficClass.PIPELINE, "bulk": TrafficClass.BULK}
    world.backlog(traffic, 1)
    rates = world.backlog(traffic, 10)
    assert low <= rates["bulk"] / sum(rates.values()) <= high
    assert sum(rates.values()) > 0.88 * PAYLOAD


def test_a_calendar_limits_the_link_in_its_windows_at_once() -> None:
    windows = (parse_window("mon 09:00-10:00 100Mbit"), parse_window("mon 10:00-11:00 400Mbit"))
    world = World(Policy(links={LINK: LinkPolicy(0, windows)}), {"job": 2})
    fluid, traffic = world.world, {"job": TrafficClass.PIPELINE}
    world.backlog(traffic, 1)
    assert world.backlog(traffic, 3)["job"] == pytest.approx(12_500_000, rel=0.05), "no time yet: the strictest"

    def say(minute: int) -> None:
        fluid._deliver(LocalTime(minute))
        fluid.run(fluid.now_ns + 300 * MS)

    for minute, rate in [(600, 50_000_000), (659, 50_000_000), (660, RATE), (540, 12_500_000), (0, RATE)]:
        say(minute)
        assert world.backlog(traffic, 3)["job"] == pytest.approx(rate, rel=0.06), minute


def test_a_policy_changes_at_once_and_without_a_gap() -> None:
    world = World(Policy({"x": JobPolicy(3)}), {"x": 1, "y": 1})
    traffic = dict.fromkeys("xy", TrafficClass.BULK)
    world.backlog(traffic, 4)
    world.world._deliver(PolicyChanged(Policy({"y": JobPolicy(3)}, {LINK: LinkPolicy(RATE // 2)})))
    rates = world.backlog(traffic, 10)
    assert rates["y"] == pytest.approx(3 * rates["x"], rel=0.08)
    assert sum(rates.values()) == pytest.approx(RATE / 2, rel=0.06)


def test_classes_are_served_as_the_policy_says() -> None:
    for sharing, least, most in ((Sharing.EQUAL, 3, 3), (Sharing.ONE, 1, 2)):
        world = World(Policy(sharing={TrafficClass.BULK: sharing}), {"job": 3})
        world.backlog({"job": TrafficClass.BULK}, 1)
        lanes = world.machine.status(world.world.now_ns).links[0].lanes
        sending = [lane for lane in lanes if lane.rate_bytes_per_s and not lane.leaving]
        assert least <= len(sending) <= most, sharing


@pytest.mark.parametrize(("senders", "nbytes"), [(2, 8 << 20), (4, 8 << 20), (4, 1 << 20)])
def test_far_agents_keep_the_link_as_full_as_near_ones(senders: int, nbytes: int) -> None:
    """Control messages take 45 ms each way: hand-overs would be late, so the agents send together."""
    used: dict[int, float] = {}
    for control_ns in (500_000, 45 * MS):
        world = World(Policy(), {"job": senders}, control_ns=control_ns)
        world.backlog({"job": TrafficClass.PIPELINE}, 2, nbytes)
        used[control_ns] = world.backlog({"job": TrafficClass.PIPELINE}, 6, nbytes)["job"]
    assert used[45 * MS] > 0.95 * used[500_000]


def test_reasons_say_job_weight_and_what_it_is_behind() -> None:
    world = World(Policy({"llama": JobPolicy(3), "late": JobPolicy(1, 10_000_000)}), {"llama": 1, "bert": 1, "late": 1})
    world.backlog(dict.fromkeys(("llama", "bert", "late"), TrafficClass.BULK), 3)
    reasons = {grant.reason.partition(";")[0] for _, _, grant in world.world.grants}
    assert any(reason.startswith("bulk: job llama: weight 3 of 5, ") for reason in reasons), sorted(reasons)[:20]
    assert any("behind its share" in reason for reason in reasons)
    assert any(reason.startswith("job late: its floor of 80 Mbit/s owes it ") for reason in reasons)


def test_the_same_events_give_the_same_grants() -> None:
    runs = []
    for _ in range(2):
        world = World(Policy({"x": JobPolicy(2, 1_000_000, 90_000_000)}), {"x": 2, "y": 2})
        world.backlog({"x": TrafficClass.BULK, "y": TrafficClass.SYNC}, 1)
        runs.append([dataclasses.astuple(grant) for _, _, grant in world.world.grants])
    assert runs[0] == runs[1]


def test_a_request_may_bring_any_deadline() -> None:
    world = World(Policy(), {"job": 1})
    for sequence, deadline_ns in enumerate((1, 2**63, 2**64 - 1, -5), 1):
        request = Request(
            TransferId(1, sequence),
            LINK,
            AgentName("b", "gw"),
            "job",
            TrafficClass.SYNC,
            1000,
            deadline_in_ns=deadline_ns,
        )
        world.world._deliver(SessionMessage(1, request))
    assert len(world.world.grants) >= 1
