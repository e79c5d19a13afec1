"""What one seed does: the world's shape, and which faults it has, how often.

Not every fault in every run: a seed draws which are on (swarm testing, Groce et al., ISSTA 2012). With all of them on
nothing gets far enough to show the rarer mistakes, and one fault often hides another.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable

MS = 1_000_000
SECOND = 1_000 * MS
KIB = 1 << 10

FAULTS: dict[str, str] = {
    "agent_crash": "an agent's process ends, without a word or in order; it comes back later, and its trainers go on",
    "power_loss": "an agent's host goes dark with all on it: nobody is told; it comes back later",
    "agent_stop": "an agent's process is stopped (SIGSTOP) and goes on",
    "host_suspend": "a host stands still, its clock too, and goes on",
    "coordinator_crash": "a coordinator ends and comes back in another life, its epoch not always higher",
    "coordinator_stop": "a coordinator is stopped (SIGSTOP) and goes on",
    "coordinator_twice": "a new life of a coordinator begins beside the old one, which doesn't know yet",
    "cut_session": "a control session breaks",
    "cut_peer": "the connections from one agent to another break",
    "partition_control": "an agent and a coordinator don't reach each other, in one direction or both",
    "partition_peers": "two agents don't reach each other, in one direction or both",
    "late": "single messages are late by up to 0.3 s, and what is behind them on their connection",
    "flip_header": "a bit of a chunk's header is flipped",
    "flip_payload": "a bit of a chunk's payload is flipped",
    "flip_frame": "a bit of a control frame is flipped",
    "stale_grant": "a coordinator's grant or pace is heard when another life of it has spoken",
    "repeat_report": "a report reaches the coordinator twice",
    "lose_report": "a report never reaches the coordinator",
    "client_death": "a trainer's process ends",
    "client_close": "a trainer closes in order, with messages under way",
    "cancel": "a trainer gives a message up",
    "full_receiver": "a trainer takes nothing for a while, and keeps what it has",
}
"""By name: what happens."""
PER_MESSAGE = frozenset(
    ("late", "flip_header", "flip_payload", "flip_frame", "stale_grant", "repeat_report", "lose_report")
)
"""Faults that hit a message with some probability; the others happen at moments."""

NEW_LIVES = frozenset(("coordinator_crash", "coordinator_twice"))


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """The world of one seed."""

    agents: tuple[str, ...]
    trainers: int
    coordinators: int
    """1: one owns every link; 2: one for each site's links."""
    rate_bytes_per_s: int
    rtt_ns: int
    live: bool
    """The links' rates are found, not configured."""
    eager_bytes: int
    memory_bytes: int
    streams: int
    post_every_ns: int
    """Mean time between two messages of one trainer."""
    most_bytes: int
    windows: bool
    """The agents know TCP's windows."""


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """All that a run depends on, besides the code."""

    seed: int
    shape: Shape
    chaos_ns: int
    """For so long things break; then nothing does any more, and all must heal."""
    faults: tuple[tuple[str, float], ...]
    """(name, how often): a second for moments, a message for the others."""

    def rate(self, fault: str) -> float:
        """How often; 0: never."""
        return dict(self.faults).get(fault, 0.0)

    def only(self, faults: Iterable[str]) -> Plan:
        """The same world with only these of its faults."""
        keep = set(faults)
        return dataclasses.replace(self, faults=tuple(one for one in self.faults if one[0] in keep))

    def text(self) -> str:
        """In words."""
        shape = self.shape
        world = (
            f"seed {self.seed}: agents {' '.join(shape.agents)}, {shape.trainers} trainers, "
            f"{shape.coordinators} coordinators, {shape.rate_bytes_per_s / 1e6:.0f} MB/s "
            f"({'found' if shape.live else 'configured'}), {shape.rtt_ns / MS:.0f} ms, eager {shape.eager_bytes // KIB}"
            f" KiB, memory {shape.memory_bytes // KIB} KiB, faults for {self.chaos_ns / SECOND:.1f} s"
        )
        rates = (
            f"  {name}: {rate:.3g} a {'message' if name in PER_MESSAGE else 'second'}" for name, rate in self.faults
        )
        return "\n".join((world, *rates))


def draw(seed: int) -> Plan:
    """The plan of a seed."""
    rng = random.Random(f"plan {seed}")
    agents = rng.choice((("a/0", "b/0"), ("a/0", "b/0"), ("a/0", "a/1", "b/0"), ("a/0", "b/0", "b/1")))
    most_bytes = rng.choice((200, 500, 1500)) * KIB
    shape = Shape(
        agents=agents,
        trainers=rng.randint(len(agents), 5),
        coordinators=rng.choice((1, 1, 1, 2)),
        rate_bytes_per_s=rng.choice((3, 10, 30)) * 1_000_000,
        rtt_ns=rng.choice((2, 20, 60)) * MS,
        live=rng.random() < 0.25,
        eager_bytes=rng.choice((0, 300 * KIB, 64 << 20)),
        memory_bytes=max(most_bytes, rng.choice((700 * KIB, 4 << 20))),
        streams=rng.randint(1, 3),
        post_every_ns=rng.choice((150, 300, 700)) * MS,
        most_bytes=most_bytes,
        windows=rng.random() < 0.5,
    )
    kind = rng.random()
    share = 0.0 if kind < 0.03 else 1.0 if kind > 0.95 else rng.choice((0.1, 0.25, 0.5))
    faults: list[tuple[str, float]] = []
    for name in FAULTS:
        if rng.random() < share:
            often = 10 ** rng.uniform(-3.0, -1.3) if name in PER_MESSAGE else 10 ** rng.uniform(-0.9, 0.3)
            faults.append((name, often))
    drawn = {name for name, _ in faults}
    if "stale_grant" in drawn and not drawn & NEW_LIVES:
        faults.append((rng.choice(sorted(NEW_LIVES)), 1.0))  # else it would have nothing to say
    return Plan(seed, shape, rng.randint(1500, 4000) * MS, tuple(faults))
