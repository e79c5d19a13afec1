"""The machines under faults, seed by seed: nothing lost, nothing twice, no byte unaccounted, and all heals.

A failing seed prints its plan, what happened last, and the command that plays it again. CI plays the same thousand
seeds each time, so that a failure is the change's; ``proxyd simulate faults --first N`` plays others.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from proxyd.core.agent import AgentMachine
from proxyd.core.asking import Asking
from proxyd.core.away import Away
from proxyd.core.fallback import FallbackRates
from proxyd.core.grants import LinkGranter
from proxyd.core.linkbook import LinkBook
from proxyd.core.messages import Grant
from proxyd.core.receiving import Receiver
from proxyd.core.remembering import Memory
from proxyd.core.transfer import Incoming
from proxyd.core.window import Account
from proxyd.sim.faults.plan import FAULTS, PER_MESSAGE, Plan, draw
from proxyd.sim.faults.runs import Outcome, play, shrink
from proxyd.wire import peer as wire
from proxyd.wire.fence import Fate, Fence

SEEDS = 1000
PART = 125


def fails(seeds: range, faults: tuple[str, ...] = ()) -> Outcome | None:
    """The first run that fails; with some of the faults only, where ``faults`` names any."""
    for seed in seeds:
        plan = draw(seed)
        outcome = play(plan.only(faults) if faults else plan)
        if outcome.problem:
            return outcome
    return None


@pytest.mark.parametrize("first", range(0, SEEDS, PART))
def test_nothing_is_lost_and_all_heals(first: int) -> None:
    outcome = fails(range(first, first + PART))
    if outcome is not None:
        pytest.fail(outcome.text(), pytrace=False)


def test_a_seed_replays_exactly() -> None:
    lines: list[list[str]] = [[], []]
    for trace in lines:
        assert not play(draw(17), trace.append).problem
    assert lines[0] == lines[1]
    assert len(lines[0]) > 1000


def test_seeds_draw_each_fault_and_none() -> None:
    drawn = [{name for name, _ in draw(seed).faults} for seed in range(SEEDS)]
    assert set().union(*drawn) == set(FAULTS)
    assert all(sum(name in one for one in drawn) > SEEDS // 10 for name in FAULTS)
    assert set() in drawn
    assert set(FAULTS) in drawn
    assert set(FAULTS) > PER_MESSAGE


def test_without_faults_every_message_arrives() -> None:
    for seed in range(10):
        outcome = play(draw(seed).only(()))
        assert not outcome.problem, outcome.text()
        assert outcome.done == outcome.messages


# ------------------------------------------------------------------------------- what it has to find
# Each of these breaks one rule of the machines. A simulator that sees nothing then proves nothing.


def accepts_any_epoch(self: Asking, address: str, grant: Grant, now_ns: int) -> None:
    _granted(self, address, dataclasses.replace(grant, epoch=self.book(grant.link).epoch), now_ns)


def forgets_what_was_returned(self: LinkBook, held: Any, now_ns: int) -> None:
    self.report_due_ns = now_ns


def marks_damaged_chunks(
    self: Receiver, peer: Any, transfer: Any, offset: int, length: int, good: bool, ns: int
) -> None:
    _chunk(self, peer, transfer, offset, length, True, ns)


def loses_acknowledgements(self: Receiver, peer: Any, transfer: Any, frame: wire.Frame) -> None:
    if not isinstance(frame, wire.Ack) or transfer.sequence % 7:
        _answer(self, peer, transfer, frame)


def forgets_what_was_delivered(self: Fence, sequence: int) -> Fate:
    return Fate.NEW


def leaves_blocks_of_dead_clients(self: Receiver, endpoint: Any, reason: str) -> None:
    pass


def asks_no_trainer_what_it_knows(self: Memory, *args: Any) -> None:
    pass


def goes_on_when_told_to_stop(self: AgentMachine, event: Any) -> None:
    _stopping(self, event)
    self._stopped = False


def answers_prefix_of_all(self: Incoming) -> int:
    return self.nbytes if self.landed_bytes else 0


def grants_twice_what_it_counts(self: Account, nbytes: int, *args: Any) -> None:
    _grant(self, nbytes // 2, *args)


def keeps_nothing_free(self: LinkGranter, pace: int, now_ns: int) -> None:
    self._room_bytes_per_s = pace


def shares_what_others_keep(self: FallbackRates, sessions: Any, reserved: int = 0, keep: Any = (), **beat: int) -> None:
    _share(self, sessions, 0, (), **beat)


def takes_beats_for_heard(self: FallbackRates, session: int) -> int:
    return self.of(session)


def lets_idle_receives_wait(self: Away, now_ns: int) -> None:
    self._due_ns = None


def takes_nothing_back(self: Away, peer: Any) -> None:
    self.connected.add(peer)
    self._silences.pop(peer, None)


def counts_from_the_start(self: Away, event: Any, now_ns: int) -> None:
    _closed(self, event, now_ns)
    for silence in self._silences.values():
        silence.since_ns = 0


def tells_out_of_order(self: AgentMachine, transfer: Any) -> None:
    incoming = self.receiver.transfers.get(transfer)
    if incoming is not None:
        for waiting in self.receiver._untold.values():
            waiting.reverse()
    _allocated(self, transfer)


_granted, _chunk, _answer, _grant = Asking.granted, Receiver.chunk, Receiver._answer, Account.grant
_allocated, _stopping, _share = AgentMachine._allocated, AgentMachine._stopping, FallbackRates.share
_closed = Away.closed


@pytest.mark.parametrize(
    ("owner", "name", "mistake", "seeds"),
    [
        (Asking, "granted", accepts_any_epoch, range(60)),
        (LinkBook, "give_back", forgets_what_was_returned, range(60)),
        (Receiver, "chunk", marks_damaged_chunks, range(100)),
        (Receiver, "_answer", loses_acknowledgements, range(20)),
        (Fence, "fate", forgets_what_was_delivered, range(60)),
        (Receiver, "client_gone", leaves_blocks_of_dead_clients, range(60)),
        (Incoming, "prefix_bytes", property(answers_prefix_of_all), range(20)),
        (Account, "grant", grants_twice_what_it_counts, range(20)),
        (LinkGranter, "_make_room", keeps_nothing_free, range(120)),
        (FallbackRates, "share", shares_what_others_keep, range(180, 250)),
        (FallbackRates, "may_hold", takes_beats_for_heard, range(150)),
        (AgentMachine, "_allocated", tells_out_of_order, range(250)),
        (Memory, "resumed", asks_no_trainer_what_it_knows, range(100)),
        (AgentMachine, "_stopping", goes_on_when_told_to_stop, range(100)),
        (Away, "tick", lets_idle_receives_wait, range(60)),
        (Away, "opened", takes_nothing_back, range(80, 150)),
        (Away, "closed", counts_from_the_start, range(60)),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_mistake_in_a_machine_is_found(
    owner: type, name: str, mistake: Any, seeds: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where dozens of seeds before see nothing of it, they are left out."""
    monkeypatch.setattr(owner, name, mistake)
    assert fails(seeds) is not None, f"{len(seeds)} seeds saw nothing of it"


def test_a_failure_says_all_that_its_reader_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Receiver, "chunk", marks_damaged_chunks)
    found = fails(range(100))
    assert found is not None
    smaller = shrink(found.plan)
    assert smaller.problem
    left = [name for name, _ in smaller.plan.faults]
    assert "flip_payload" in left
    assert len(left) < len(found.plan.faults)
    text = smaller.text()
    assert f"--seed {found.plan.seed} --faults {','.join(left)} --trace" in text
    assert "ChunkArrived" in text
    assert replayed(smaller.plan).problem == smaller.problem


def replayed(plan: Plan) -> Outcome:
    """As the command that a failure prints does it."""
    return play(draw(plan.seed).only(name for name, _ in plan.faults))
