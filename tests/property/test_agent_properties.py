"""Invariants of the agent machine under random histories.

Two machines are driven through each other while grants come in odd sizes and orders, chunks get corrupted, memory is
denied, messages are cancelled, coordinators and trainers come and go. Whatever happens: every message ends exactly
once, order per sender holds, every block that was allocated is freed once, and the accounts add up.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from proxyd.core import effects as fx
from proxyd.core import events as ev
from proxyd.core.ids import AgentName, EndpointName, TransferId
from proxyd.core.messages import CancelRequest, Grant, Report, Request, TransferDone
from proxyd.wire.envelope import TrafficClass
from tests.unit.core.agent_world import COORDINATOR, LINK, MS, World

SEEDS = range(60)
STEPS = 120


class History:
    """One random history over two sites, with a coordinator that keeps books."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.world = World("a/0", "b/0", eager_bytes=self.random.choice([0, 1 << 20, 64 << 20]))
        self.world.attach("a/0", 0)
        self.world.attach("b/0", 1)
        self.world.attach("b/0", 2)
        self.epoch = 1
        self.world.connect(self.epoch)
        self.sequence = 0
        self.posted: dict[TransferId, int] = {}
        self.unfilled: dict[TransferId, int] = {}
        self.granted_bytes = 0
        self.granted_to: Counter[TransferId] = Counter()
        self.seen = 0
        self.releasable: set[tuple[TransferId, EndpointName]] = set()

    # ------------------------------------------------------------------------------------------- steps

    def post(self) -> None:
        self.sequence += 1
        nbytes = self.random.choice([0, 1, 1000, 64 << 10, (64 << 10) + 1, 700_000, 3 << 20])
        filled = self.random.choice([0, nbytes, nbytes // 2])
        transfer = self.world.post(
            "a/0",
            self.sequence,
            0,
            self.random.choice([1, 2]),
            nbytes,
            filled=filled,
            tag=self.random.choice([0, 1]),
            traffic=self.random.choice(list(TrafficClass)),
        )
        self.posted[transfer] = nbytes
        if filled < nbytes:
            self.unfilled[transfer] = filled

    def fill(self) -> None:
        if self.unfilled:
            transfer = self.random.choice(sorted(self.unfilled))
            nbytes = self.posted[transfer]
            filled = min(nbytes, self.unfilled[transfer] + self.random.choice([1, 300_000, nbytes]))
            self.unfilled[transfer] = filled
            if filled == nbytes:
                del self.unfilled[transfer]
            self.world.put("a/0", ev.SendFilled(transfer, filled))

    def wanted(self) -> dict[TransferId, int]:
        """What the agent's requests of this epoch still want, by transfer."""
        need: dict[TransferId, int] = {}
        for _, message in self.world.asked[self.seen :]:
            if isinstance(message, Request):
                need[message.transfer] = max(need.get(message.transfer, 0), message.wanted_bytes)
            elif isinstance(message, CancelRequest | TransferDone):
                need[message.transfer] = -1
        return {t: n - self.granted_to[t] for t, n in need.items() if n > self.granted_to[t]}

    def grant(self) -> None:
        wanted = self.wanted()
        if not wanted:
            return
        transfer = self.random.choice(sorted(wanted))
        chunks = self.random.choice([1, 2, 8]) * (256 << 10)
        nbytes = min(wanted[transfer], chunks)
        self.give(transfer, nbytes, start_ms=self.random.choice([0, 0, 5]), ttl_ms=self.random.choice([10, 2000]))

    def give(self, transfer: TransferId, nbytes: int, *, start_ms: int = 0, ttl_ms: int = 2000) -> None:
        self.granted_bytes += nbytes
        self.granted_to[transfer] += nbytes
        message = Grant(1, transfer, LINK, nbytes, 48_000_000, start_ms * MS, ttl_ms * MS, self.epoch, 5 * MS, "turn")
        self.world.put("a/0", ev.CoordinatorSaid(COORDINATOR, message))

    def stray_grant(self) -> None:
        self.give(TransferId(100, 9_000_000 + self.random.randrange(5)), 256 << 10)

    def corrupt(self) -> None:
        if self.posted:
            self.world.corrupt.add((self.random.choice(sorted(self.posted)), self.random.choice([0, 256 << 10])))

    def deny(self) -> None:
        if self.world.deny:
            self.world.deny.clear()
            for rank in (1, 2):
                self.world.put("b/0", ev.MemoryFreed(EndpointName("job", rank)))
        else:
            self.world.deny = {TransferId(100, self.sequence + i) for i in range(1, 4)} | set(self.posted)

    def accept(self) -> None:
        for effect in self.world.tells(fx.TellOffered):
            if not effect.has_memory:
                self.world.put("b/0", ev.RecvAccepted(effect.transfer))

    def release(self) -> None:
        for effect in self.world.tells(fx.TellLanded):
            if effect.nbytes == self.posted.get(effect.transfer) and self.random.random() < 0.5:
                self.world.put("b/0", ev.RecvReleased(effect.transfer))

    def cancel(self) -> None:
        if self.posted:
            self.world.put("a/0", ev.SendCancelled(self.random.choice(sorted(self.posted))))

    def wait(self) -> None:
        self.world.advance(self.random.choice([1, 7, 30]))

    def deliver(self) -> None:
        self.world.delivered("a/0", "b/0")

    def restart_coordinator(self) -> None:
        self.epoch += 1
        self.granted_bytes = 0
        self.granted_to.clear()
        self.seen = len(self.world.asked)
        self.world.connect(self.epoch)

    def step(self) -> None:
        choices = [
            (self.post, 6),
            (self.fill, 6),
            (self.grant, 12),
            (self.stray_grant, 1),
            (self.corrupt, 1),
            (self.deny, 1),
            (self.accept, 3),
            (self.release, 3),
            (self.cancel, 1),
            (self.wait, 3),
            (self.deliver, 3),
            (self.restart_coordinator, 1),
        ]
        action = self.random.choices([c for c, _ in choices], [w for _, w in choices])[0]
        action()

    # -------------------------------------------------------------------------------------- invariants

    def check(self) -> None:
        machine = self.world.agent("a/0")
        book = machine.sender.asking.links[LINK]
        accounted = book._returned_bytes + book._taken_bytes + sum(h.left_bytes for h in book.grants if not h.fallback)
        assert accounted == book._granted_bytes == self.granted_bytes, "granted = returned + taken + untaken"
        for out in machine.sender.transfers.values():
            held = sum(h.left_bytes for h in book.grants if h.transfer == out.transfer)
            assert out.held_bytes == held
            assert out.taken_bytes <= out.granted_bytes or out.free
            assert out.lent_bytes >= 0
            assert out.owed_bytes >= 0
            if out.requested:
                to_coordinator = out.granted_bytes - out.session_base_bytes + out.lent_bytes - out.owed_bytes
                assert to_coordinator == self.granted_to[out.transfer], "each job is charged what it sends"
        lent = sum(out.lent_bytes for out in machine.sender.transfers.values())
        assert lent <= sum(out.owed_bytes for out in machine.sender.transfers.values())
        ends = Counter(e.transfer for _, e in self.world.told if isinstance(e, fx.TellSendDone | fx.TellSendFailed))
        assert all(count == 1 for count in ends.values()), "a message ends once"
        told = [e for _, e in self.world.told if isinstance(e, fx.TellOffered)]
        for rank in (1, 2):
            order = [e.transfer.sequence for e in told if e.endpoint.rank == rank]
            assert order == sorted(set(order)), "told in the order of posting, once"
        done = {e.transfer for e in self.world.tells(fx.TellSendDone)}
        landed = {e.transfer for e in self.world.tells(fx.TellLanded) if e.nbytes == self.posted[e.transfer]}
        assert done <= landed, "acknowledged means that the receiver has all of it"

    def finish(self) -> None:
        """Let everything that can end, end."""
        self.world.deny.clear()
        for rank in (1, 2):
            self.world.put("b/0", ev.MemoryFreed(EndpointName("job", rank)))
        self.world.corrupt.clear()
        while self.unfilled:
            self.fill()
        for _ in range(200):
            self.accept()
            for transfer, nbytes in sorted(self.wanted().items()):
                self.give(transfer, nbytes)
            self.world.advance(1)
            if not self.world.agent("a/0").sender.transfers:
                break
        for effect in self.world.tells(fx.TellLanded):
            self.world.put("b/0", ev.RecvReleased(effect.transfer))


@pytest.mark.parametrize("seed", SEEDS)
def test_random_histories_keep_the_books(seed: int) -> None:
    history = History(seed)
    for _ in range(STEPS):
        history.step()
        history.check()
    history.finish()
    history.check()
    world = history.world
    ended = {e.transfer for _, e in world.told if isinstance(e, fx.TellSendDone | fx.TellSendFailed)}
    assert ended == set(history.posted), "every message ended"
    assert not world.agent("b/0").receiver.transfers, "nothing is left at the receiver"
    freed = Counter(e.transfer for e in world.tells(fx.FreeBlock))
    assert all(count == 1 for count in freed.values()), "a block is freed once"
    assert set(freed) == world.allocated, "every block that was allocated was freed"
    world.delivered("a/0", "b/0")
    book = world.agent("a/0").sender.asking.links[LINK]
    last = world.asks(Report)[-1]
    assert last.delivered_bytes + last.returned_bytes == history.granted_bytes, "nothing stays outstanding"
    assert not book.asked


@pytest.mark.parametrize("seed", range(10))
def test_a_trainer_that_dies_leaves_nothing_behind(seed: int) -> None:
    history = History(1000 + seed)
    for _ in range(STEPS):
        history.step()
    world = history.world
    name, endpoint, incarnation = (
        ("a/0", EndpointName("job", 0), 100) if seed % 2 else ("b/0", EndpointName("job", 1), 101)
    )
    world.put(name, ev.ClientDetached(endpoint, incarnation, "killed", False))
    machine = world.agent(name)
    left = [
        *(o for o in machine.sender.transfers.values() if o.envelope.source == endpoint),
        *(i for i in machine.receiver.transfers.values() if i.envelope.destination == endpoint),
    ]
    assert not left
    book = world.agent("a/0").sender.asking.links[LINK]
    if name == "a/0":
        assert book.untaken_bytes == 0
        assert AgentName("b", "0") in book.peers or not world.chunks
