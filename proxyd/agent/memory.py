"""The agent's memory: one cap over all arenas, and each endpoint's arenas within it.

Arenas are sparse: address space costs nothing, pages do. What counts against the cap is what an arena *may* fill. An
extra receive arena (for a burst, or for one message larger than an arena) stays warm for a while after its last block
was freed, then its pages go back and it no longer counts; it is used again before a new one is made, because a client
keeps every arena mapped that it was ever given.

Send arenas take at most half of the cap. Without that, two hosts that send to each other could fill theirs with
messages that neither has room left to receive, and wait for ever.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from proxyd.agent.arenas import Arena, Block, BlockAllocator, make_receive_block, receive_block_bytes
from proxyd.core.errors import ProxydError
from proxyd.wire.arena import PAGE_BYTES, page_round_up
from proxyd.wire.client import ArenaKind
from proxyd.wire.codec import WireError
from proxyd.wire.envelope import TransferId

MIN_ARENA_BYTES = 1 << 20
MAX_ARENAS_PER_ENDPOINT = 64
IDLE_NS = 5_000_000_000
"""How long an empty extra arena keeps its pages: zeroing them again costs 1 s/GB."""


class MemoryLimitError(ProxydError):
    """The agent's memory cap, or the system's memory, leaves no room."""

    code = "memory-limit"


class MemoryBudget:
    """The cap. Arenas take from it; idle ones give back when somebody is short."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.send_bytes = 0
        """The part of ``used_bytes`` in send arenas."""
        self._members: dict[int, EndpointMemory] = {}
        self._numbers = itertools.count(1)

    def next_number(self) -> int:
        """An arena number that this agent never used before."""
        return next(self._numbers)

    def take(self, nbytes: int, *, sending: bool = False) -> bool:
        """Reserve; asks everybody to let idle arenas go when there is too little."""
        if sending and 2 * (self.send_bytes + nbytes) > self.limit_bytes:
            return False
        if self.used_bytes + nbytes > self.limit_bytes:
            for member in list(self._members.values()):
                member.reclaim(older_than_ns=None)
        if self.used_bytes + nbytes > self.limit_bytes:
            return False
        self.used_bytes += nbytes
        self.send_bytes += nbytes if sending else 0
        return True

    def give(self, nbytes: int, *, sending: bool = False) -> None:
        """Undo :meth:`take`."""
        self.used_bytes -= nbytes
        self.send_bytes -= nbytes if sending else 0

    def join(self, member: EndpointMemory) -> None:
        """``member`` may hold idle arenas."""
        self._members[id(member)] = member

    def leave(self, member: EndpointMemory) -> None:
        """``member`` holds nothing any more."""
        self._members.pop(id(member), None)

    def reclaim(self, older_than_ns: int) -> None:
        """Let arenas go that have been empty since ``older_than_ns``."""
        for member in list(self._members.values()):
            member.reclaim(older_than_ns=older_than_ns)


class _Region:
    """An arena and the blocks in it."""

    def __init__(self, arena: Arena, *, extra: bool) -> None:
        self.arena = arena
        self.blocks = BlockAllocator(PAGE_BYTES, arena.size_bytes)
        self.extra = extra
        self.counted = True
        self.idle_since_ns: int | None = None


class EndpointMemory:
    """All arenas of one attached trainer.

    :param granted: told of each new arena that the trainer must map, before a block in it is named.
    :param clock: monotonic nanoseconds, for the age of idle arenas.
    """

    def __init__(
        self,
        budget: MemoryBudget,
        *,
        arena_bytes: int,
        endpoint_incarnation: int,
        agent_incarnation: int,
        granted: Callable[[Arena], None],
        clock: Callable[[], int],
    ) -> None:
        self._budget = budget
        self._arena_bytes = page_round_up(arena_bytes)
        self._endpoint_incarnation = endpoint_incarnation
        self._agent_incarnation = agent_incarnation
        self.granted = granted
        self._clock = clock
        self._send: dict[int, _Region] = {}
        self._receive: list[_Region] = []
        self._region_of: dict[int, _Region] = {}
        self._closed = False
        budget.join(self)

    def open(self) -> tuple[Arena, Arena]:
        """The first SEND and RECEIVE arena; smaller ones when the cap is near. Raises MemoryLimitError."""
        size = self._arena_bytes
        while size > MIN_ARENA_BYTES and self._budget.used_bytes + 2 * size > self._budget.limit_bytes:
            size = page_round_up(size // 2)
        self._arena_bytes = max(size, MIN_ARENA_BYTES)
        send = self._new(ArenaKind.SEND, self._arena_bytes, extra=False)
        receive = self._new(ArenaKind.RECEIVE, self._arena_bytes, extra=False) if send else None
        if send is None or receive is None:
            self.close()
            raise MemoryLimitError(
                f"no memory for another client: {self._budget.used_bytes} of {self._budget.limit_bytes} bytes taken",
                next_step="Raise [agent] memory, or attach fewer ranks to this agent",
            )
        return send.arena, receive.arena

    # -- sending side ------------------------------------------------------------------------------------------------

    def want_send_arena(self, nbytes: int) -> Arena:
        """One more SEND arena that can hold a block of ``nbytes``. Raises MemoryLimitError."""
        need = page_round_up(nbytes) + PAGE_BYTES
        region = None
        if len(self._send) < MAX_ARENAS_PER_ENDPOINT:
            region = self._new(ArenaKind.SEND, max(need, self._arena_bytes), extra=True)
            if region is None and need < self._arena_bytes:
                region = self._new(ArenaKind.SEND, need, extra=True)
        if region is None:
            raise MemoryLimitError(
                f"no memory for a send of {nbytes} bytes: {self._budget.used_bytes} of {self._budget.limit_bytes} bytes"
                f" are taken, {self._budget.send_bytes} for sending (at most half is), and {len(self._send)} of"
                f" {MAX_ARENAS_PER_ENDPOINT} arenas",
                next_step="Wait for earlier sends, or raise [agent] memory",
            )
        return region.arena

    def send_block(self, transfer: TransferId, arena: int, offset: int, nbytes: int) -> Block:
        """The block that a client names. Raises WireError when it lies outside its own SEND arenas."""
        if nbytes == 0:
            return Block(transfer, None, 0, 0, 0, 1)
        region = self._send.get(arena)
        if region is None:
            raise WireError(f"arena {arena} is no SEND arena of this client")
        if offset < PAGE_BYTES or offset + nbytes > region.arena.size_bytes:
            raise WireError(
                f"a block of {nbytes} bytes at offset {offset} lies outside arena {arena} "
                f"({region.arena.size_bytes} bytes)"
            )
        return Block(transfer, region.arena, offset, offset, nbytes, 1)

    def allocate_send_block(self, transfer: TransferId, nbytes: int) -> Block:
        """A send block that the agent itself fills (TCP clients). Raises MemoryLimitError."""
        if nbytes == 0:
            return Block(transfer, None, 0, 0, 0, 1)
        for region in self._send.values():
            at = region.blocks.allocate(nbytes)
            if at is not None:
                return self._send_block_at(transfer, region, at, nbytes)
        number = self.want_send_arena(nbytes).number
        region = self._send[number]
        at = region.blocks.allocate(nbytes)
        if at is None:
            raise AssertionError("a new arena holds the block that it was made for")
        return self._send_block_at(transfer, region, at, nbytes)

    def _send_block_at(self, transfer: TransferId, region: _Region, at: int, nbytes: int) -> Block:
        block = Block(transfer, region.arena, at, at, nbytes, 1)
        self._region_of[id(block)] = region
        return block

    # -- receiving side ----------------------------------------------------------------------------------------------

    def allocate(self, transfer: TransferId, nbytes: int, chunk_bytes: int) -> Block | None:
        """Memory for an incoming message; None when there is none now."""
        if nbytes == 0:
            return Block(transfer, None, 0, 0, 0, chunk_bytes)
        if self._closed:
            return None
        for region in self._receive:
            if region.counted and (block := self._place(region, transfer, nbytes, chunk_bytes)) is not None:
                return block
        need = receive_block_bytes(nbytes, chunk_bytes) + PAGE_BYTES
        for region in self._receive:
            # Dormant: its address space is still mapped on both sides, only the pages went.
            if not region.counted and region.arena.size_bytes >= need and self._budget.take(region.arena.size_bytes):
                region.counted = True
                return self._place(region, transfer, nbytes, chunk_bytes)
        if len(self._receive) >= MAX_ARENAS_PER_ENDPOINT:
            self._forget_dormant()
        if len(self._receive) >= MAX_ARENAS_PER_ENDPOINT:
            return None
        made = self._new(ArenaKind.RECEIVE, max(need, self._arena_bytes), extra=True)
        if made is None and need < self._arena_bytes:
            made = self._new(ArenaKind.RECEIVE, need, extra=True)
        return None if made is None else self._place(made, transfer, nbytes, chunk_bytes)

    def can_ever_hold(self, nbytes: int, chunk_bytes: int) -> bool:
        """Whether a message fits under the cap at all."""
        need = receive_block_bytes(nbytes, chunk_bytes) + PAGE_BYTES
        return need <= max(self._budget.limit_bytes - 2 * MIN_ARENA_BYTES, self._arena_bytes)

    def _place(self, region: _Region, transfer: TransferId, nbytes: int, chunk_bytes: int) -> Block | None:
        block = make_receive_block(transfer, region.arena, region.blocks, nbytes, chunk_bytes)
        if block is not None:
            region.idle_since_ns = None
            self._region_of[id(block)] = region
        return block

    def free(self, block: Block) -> None:
        """The message is no longer needed. Freeing twice is harmless."""
        region = self._region_of.pop(id(block), None)
        block.release()
        if region is None:
            return
        region.blocks.free(block.extent)
        if region.extra and region.blocks.is_empty:
            region.idle_since_ns = self._clock()

    # -- all ---------------------------------------------------------------------------------------------------------

    def reclaim(self, *, older_than_ns: int | None) -> None:
        """Let the pages of empty extra receive arenas go; None: of all of them."""
        for region in self._receive:
            since_ns = region.idle_since_ns
            if since_ns is not None and (older_than_ns is None or since_ns <= older_than_ns):
                region.idle_since_ns = None
                region.counted = False
                region.arena.drop_pages()
                self._budget.give(region.arena.size_bytes)

    def _forget_dormant(self) -> None:
        for region in [region for region in self._receive if not region.counted]:
            self._receive.remove(region)
            region.arena.close()

    def _new(self, kind: ArenaKind, size_bytes: int, *, extra: bool) -> _Region | None:
        size_bytes = page_round_up(size_bytes)
        sending = kind is ArenaKind.SEND
        if self._closed or not self._budget.take(size_bytes, sending=sending):
            return None
        try:
            arena = Arena(
                self._budget.next_number(),
                kind,
                size_bytes,
                endpoint_incarnation=self._endpoint_incarnation,
                agent_incarnation=self._agent_incarnation,
            )
        except (OSError, ValueError, OverflowError):
            # The system's own limit (descriptors, address space) is one more way to have no memory.
            self._budget.give(size_bytes, sending=sending)
            return None
        try:
            self.granted(arena)
        except OSError:
            # No descriptor is left to pass it on with.
            arena.close()
            self._budget.give(size_bytes, sending=sending)
            return None
        region = _Region(arena, extra=extra)
        if kind is ArenaKind.SEND:
            self._send[arena.number] = region
        else:
            self._receive.append(region)
        return region

    def close(self) -> None:
        """The trainer is gone and no stream needs its blocks: everything goes back."""
        if self._closed:
            return
        self._closed = True
        for region in [*self._send.values(), *self._receive]:
            if region.counted:
                self._budget.give(region.arena.size_bytes, sending=region.arena.kind is ArenaKind.SEND)
            region.arena.close()
        self._send.clear()
        self._receive.clear()
        self._region_of.clear()
        self._budget.leave(self)
