"""The client's pure parts: the block allocator against a bitmap, the matcher against a naive twin."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from proxyd.wire.arena import PAGE_BYTES, page_round_up
from proxyd.wire.envelope import Envelope, TransferId
from proxyd_client.arena import BlockAllocator
from proxyd_client.matching import Incoming, Matcher, Outcome, Posted


class Allocation(RuleBasedStateMachine):
    """Blocks never overlap, bytes are conserved, and room that is there is found."""

    @initialize(pages=st.integers(0, 40))
    def start(self, pages: int) -> None:
        self.pages = pages
        self.allocator = BlockAllocator(PAGE_BYTES, (1 + pages) * PAGE_BYTES)
        self.taken: dict[int, int] = {}

    def free_runs(self) -> list[int]:
        used = {page for at, size in self.taken.items() for page in range(at // PAGE_BYTES, (at + size) // PAGE_BYTES)}
        runs, run = [], 0
        for page in range(1, self.pages + 2):
            if page <= self.pages and page not in used:
                run += 1
            else:
                runs.append(run)
                run = 0
        return runs

    @rule(nbytes=st.integers(1, 12 * PAGE_BYTES))
    def allocate(self, nbytes: int) -> None:
        size = page_round_up(nbytes)
        fits = max(self.free_runs(), default=0) * PAGE_BYTES >= size
        offset = self.allocator.allocate(nbytes)
        assert (offset is not None) == fits
        if offset is not None:
            assert offset % PAGE_BYTES == 0
            assert PAGE_BYTES <= offset <= offset + size <= (1 + self.pages) * PAGE_BYTES
            assert all(offset + size <= at or at + length <= offset for at, length in self.taken.items())
            self.taken[offset] = size

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.taken)))
        self.allocator.free(offset)
        del self.taken[offset]

    @invariant()
    def bytes_are_conserved(self) -> None:
        if hasattr(self, "allocator"):
            assert self.allocator.used_bytes == sum(self.taken.values())
            assert self.allocator.used_bytes + self.allocator.free_bytes == self.allocator.capacity_bytes


class Matching(RuleBasedStateMachine):
    """After each step the pairing is what scanning both lists in order gives."""

    def __init__(self) -> None:
        super().__init__()
        self.matcher = Matcher()
        self.messages: list[Incoming] = []  # not handed over, in offered order
        self.receives: list[Posted] = []  # not ended, in posted order
        self.sequence = 0

    def take(self, outcome: Outcome) -> None:
        for receive, message, _ in outcome.misfits:
            assert not fits(receive, message)
            self.receives.remove(receive)
        for receive, message in outcome.matched:
            assert receive.incoming is message
            assert message.receive is receive

    @rule(src=st.integers(0, 2), tag=st.integers(0, 1), dtype=st.sampled_from(["a", "b"]))
    def offer(self, src: int, tag: int, dtype: str) -> None:
        self.sequence += 1
        message = Incoming(TransferId(src, self.sequence), Envelope("j", src, 9, "", tag, 0, 1, dtype, (1,)))
        self.messages.append(message)
        self.take(self.matcher.offer(message))

    @rule(src=st.none() | st.integers(0, 2), tag=st.integers(0, 1), only=st.sampled_from(["", "a"]))
    def post(self, src: int | None, tag: int, only: str) -> None:
        receive = Posted(src, "", tag, lambda envelope: "" if only in ("", envelope.dtype) else f"not {only}")
        self.receives.append(receive)
        self.take(self.matcher.post(receive))

    @precondition(lambda self: self.receives)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        receive = data.draw(st.sampled_from(self.receives))
        self.receives.remove(receive)
        self.take(self.matcher.withdraw(receive))

    @precondition(lambda self: self.messages)
    @rule(data=st.data())
    def retract(self, data: st.DataObject) -> None:
        message = data.draw(st.sampled_from(self.messages))
        self.messages.remove(message)
        self.take(self.matcher.retract(message))

    @precondition(lambda self: any(m.receive for m in self.messages))
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        message = data.draw(st.sampled_from([m for m in self.messages if m.receive is not None]))
        receive = message.receive
        assert receive is not None
        self.messages.remove(message)
        self.receives.remove(receive)
        self.matcher.finished(message)

    @invariant()
    def nobody_waits_for_what_is_there(self) -> None:
        for receive in self.receives:
            if receive.incoming is None:
                assert not [m for m in self.messages if m.receive is None and receive.wants(m.envelope)]
        waiting = [receive for receive in self.receives if receive.incoming is None]
        assert self.matcher.all_waiting() == waiting

    @invariant()
    def queues_are_in_offered_order(self) -> None:
        for src in (None, 0, 1, 2):
            for tag in (0, 1):
                queued = [
                    m
                    for m in self.messages
                    if m.receive is None and m.envelope.tag == tag and src in (None, m.envelope.src_rank)
                ]
                assert list(self.matcher.queued(src, "", tag)) == queued


def fits(receive: Posted, message: Incoming) -> bool:
    return receive.misfit(message.envelope) == ""


TestAllocation = Allocation.TestCase
TestAllocation.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestMatching = Matching.TestCase
TestMatching.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
