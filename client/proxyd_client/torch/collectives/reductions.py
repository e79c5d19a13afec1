"""Sums over a group: allreduce, reduce, reduce_scatter.

**Large tensors.** Chunk after chunk: the ranks of a site swap shards (all to all), so that each holds its shard of
every mate's chunk, and adds them in rank order; it exchanges that partial sum with whoever has the same elements at
the other sites; adds the sites' partial sums in site order; and the site's ranks swap the results (all-gather).
Chunks follow each other without waiting, so the WAN works while the sites do. From three sites on each chunk's last
sum is done by one site, its owner, and comes back from there (:func:`layout.has_owners`).

**Small ones** go through one rank per site, its first: gathered, added, exchanged, added, told.

**Order.** Every element is added up as ``(r0 + r1 + ...) + (r4 + r5 + ...) + ...``: ranks within their site, then
sites. No rank adds up a different way, or what another one has added up already, so all end with the same bits, and a
rerun does too. gloo's ring starts each chunk's sum at another rank: floating-point sums differ from its by rounding,
integers not at all.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from proxyd_client.errors import MismatchError
from proxyd_client.torch.collectives import layout
from proxyd_client.torch.collectives.arithmetic import Reduction
from proxyd_client.torch.collectives.call import RECORD_BYTES, Call, record_of, run, text_of
from proxyd_client.torch.collectives.layout import Span
from proxyd_client.torch.collectives.team import DATA, RESULTS, Received, Team, bytes_of

Tensor = Any


def allreduce(team: Team, tensor: Tensor, op: Any, timeout_s: float | None = None) -> None:
    """``tensor`` (contiguous) becomes the reduction of everybody's, the same bits on all ranks."""
    flat = tensor.detach().reshape(-1)
    reduction = Reduction(op, flat.dtype, team.size)

    def body(call: Call) -> None:
        if flat.numel() * flat.element_size() <= layout.SMALL_BYTES:
            total = _small(call, flat, reduction, None)
            if total is not None:
                flat.copy_(total)
        else:
            _Chunked(call, flat, reduction).allreduce()

    run(team, f"allreduce {reduction.name} {_kind(flat)}", body, timeout_s)


def reduce(team: Team, tensor: Tensor, root: int, op: Any, timeout_s: float | None = None) -> None:
    """``tensor`` (contiguous) of group rank ``root`` becomes the reduction of everybody's; the others' stay."""
    flat = tensor.detach().reshape(-1)
    reduction = Reduction(op, flat.dtype, team.size)

    def body(call: Call) -> None:
        if flat.numel() * flat.element_size() <= layout.SMALL_BYTES:
            total = _small(call, flat, reduction, root)
            if total is not None and team.rank == root:
                flat.copy_(total)
        else:
            _Chunked(call, flat, reduction).reduce(root)

    run(team, f"reduce {reduction.name} to {root} {_kind(flat)}", body, timeout_s)


def reduce_scatter(team: Team, out: Tensor, rows: Sequence[Tensor], op: Any, timeout_s: float | None = None) -> None:
    """``out`` becomes the reduction of everybody's ``rows[rank]``.

    :param rows: one flat contiguous tensor per group rank, each of ``out``'s size.
    """
    flat = out.detach().reshape(-1)
    reduction = Reduction(op, flat.dtype, team.size)

    def body(call: Call) -> None:
        sites, place, mates = team.sites, team.place, len(team.mates)
        # What each of my site's ranks sums up and passes on: for itself, and for its counterparts elsewhere.
        handled = [
            [site[at] for site in sites for at in range(len(site)) if at % mates == who and site is not team.mates]
            + [team.mates[who]]
            for who in range(mates)
        ]
        data = torch.cat([reduction.prepare(rows[rank]) for group in handled for rank in group])
        row_bytes = flat.numel() * flat.element_size()
        mine = handled[place]
        got = torch.empty(mates * len(mine) * flat.numel(), dtype=flat.dtype)
        wait = call.shuffle(
            bytes_of(got),
            bytes_of(data),
            [len(mine) * row_bytes] * mates,
            [len(group) * row_bytes for group in handled],
        )
        wait()
        partial = torch.empty(len(mine) * flat.numel(), dtype=flat.dtype)
        reduction.fold(got.view(mates, -1), partial)
        sums = partial.view(len(mine), flat.numel())
        own = sums[-1]
        sources = {at: sites[at][place % len(sites[at])] for at in team.others}
        parts = {at: torch.empty_like(own) for at in team.others}
        with call.verdict():
            call.swap(
                [(dst, sums[row]) for row, dst in enumerate(mine[:-1])],
                [(sources[at], parts[at]) for at in team.others],
            )
        parts[team.site] = own
        total = parts[0]
        for at in range(1, len(sites)):
            reduction.into(total, parts[at])
        flat.copy_(reduction.finish(total))

    run(team, f"reduce_scatter {reduction.name} {_kind(flat)}", body, timeout_s)


def _kind(flat: Tensor) -> str:
    return f"{str(flat.dtype).removeprefix('torch.')} x{flat.numel()}"


def _small(call: Call, flat: Tensor, reduction: Reduction, root: int | None) -> Tensor | None:
    """One rank per site speaks for it. The result: where ``root`` wants it, or everywhere."""
    team = call.team
    own = reduction.prepare(flat)
    mates = len(team.mates)
    leads = team.place == 0
    gathered = torch.empty(mates * flat.numel(), dtype=flat.dtype) if leads else None
    call.collect(None if gathered is None else bytes_of(gathered), bytes_of(own))()
    result = torch.empty_like(flat)
    target = None if root is None else next(at for at, site in enumerate(team.sites) if root in site)
    refused: MismatchError | None = None
    if gathered is not None:
        partial = torch.empty_like(flat)
        if mates == 1:
            partial.copy_(own)
        else:
            reduction.fold(gathered.view(mates, -1), partial)
        for at in team.others:
            if target in (None, at):
                call.post(partial, team.sites[at][0])
        if target in (None, team.site):
            try:
                for at, site in enumerate(team.sites):
                    if at == team.site:
                        part = partial
                    else:
                        part = torch.empty_like(flat)
                        call.take_into(part, site[0])
                    result.copy_(part) if at == 0 else reduction.into(result, part)
                reduction.finish(result)
            except MismatchError as error:
                refused = error
    if target not in (None, team.site):
        return None
    told = torch.empty(RECORD_BYTES + result.numel() * result.element_size(), dtype=torch.uint8)
    if leads:
        told[:RECORD_BYTES] = record_of("" if refused is None else refused.why or refused.what)
        told[RECORD_BYTES:] = bytes_of(result)
    call.tell(told)()
    if refused is not None:
        raise refused
    if text := text_of(told[:RECORD_BYTES]):
        raise call.refused_by(team.mates[0], text)
    bytes_of(result).copy_(told[RECORD_BYTES:])
    return result


class _Chunked:
    """A reduction of a large tensor, chunk by chunk."""

    def __init__(self, call: Call, flat: Tensor, reduction: Reduction) -> None:
        self.call = call
        self.team = call.team
        self.flat = flat
        self.reduction = reduction
        sizes = [len(site) for site in self.team.sites]
        self.chunks = layout.chunks(flat.numel(), flat.element_size(), sizes)
        self.owned = layout.has_owners(flat.numel(), flat.element_size(), sizes)
        self.ahead = layout.ahead(self.chunks[0], flat.element_size(), len(self.team.mates))
        self.partials: dict[int, Tensor] = {}
        self.shuffling: deque[tuple[Tensor, Callable[[], None]]] = deque()
        self.spreading: list[tuple[Callable[[], None], Tensor, Span, Tensor]] = []
        self.scratch = self.team.scratch

    # -- the sum inside my site ----------------------------------------------------------------------------------------

    def mine(self, chunk: int) -> Span:
        """What of it I hold of my site's partial sum."""
        return layout.shard(self.chunks[chunk], len(self.team.mates), self.team.place)

    def shuffle(self, chunk: int) -> None:
        """Start swapping shards of a chunk; the next but one is prepared while this one is on its way."""
        span = self.chunks[chunk]
        data = self.reduction.prepare(self.flat[span.start : span.stop])
        mates, itemsize = len(self.team.mates), self.flat.element_size()
        lengths = [layout.shard(span, mates, place).length * itemsize for place in range(mates)]
        own = lengths[self.team.place]
        got = self.scratch.take(own // itemsize * mates, self.flat.dtype)
        equal = len(set(lengths)) == 1
        sizes = (None, None) if equal else ([own] * mates, lengths)
        self.shuffling.append((got, self.call.shuffle(bytes_of(got), bytes_of(data), *sizes)))

    def partial(self, chunk: int) -> Tensor:
        """My shard of my site's sum of a chunk."""
        while len(self.shuffling) < 2 and (ahead := chunk + len(self.shuffling)) < len(self.chunks):
            self.shuffle(ahead)
        got, wait = self.shuffling.popleft()
        wait()
        mates = len(self.team.mates)
        if mates == 1:
            return got
        out = self.scratch.take(got.numel() // mates, got.dtype)
        self.reduction.fold(got.view(mates, -1), out)
        self.scratch.give(got)
        return out

    # -- across sites --------------------------------------------------------------------------------------------------

    def send(self, chunk: int, part: Tensor, site: int, lane: int = DATA) -> None:
        """My shard, to those of another site who hold the same elements."""
        mine = self.mine(chunk)
        members = self.team.sites[site]
        for place, span in layout.crossings(self.chunks[chunk], mine, len(members)):
            self.call.post(part[span.start - mine.start : span.stop - mine.start], members[place], lane)

    def receive(self, chunk: int, site: int, lane: int = DATA) -> Iterator[tuple[Span, Received]]:
        """The same from them; spans count from the beginning of my shard."""
        mine = self.mine(chunk)
        members = self.team.sites[site]
        for place, span in layout.crossings(self.chunks[chunk], mine, len(members)):
            received = self.call.take(members[place], span.length * self.flat.element_size(), lane)
            yield Span(span.start - mine.start, span.stop - mine.start), received

    def total(self, chunk: int) -> Tensor:
        """All sites' partial sums of my shard, added in the order of the sites."""
        own = self.partials.pop(chunk)
        site, dtype = self.team.site, own.dtype
        total = own
        if site == 1:  # where exactly one site comes before mine its sum is added from where it landed
            for span, received in self.receive(chunk, 0):
                self.reduction.onto(received.view(dtype), own[span.start : span.stop])
        elif site:
            total = self.scratch.take(own.numel(), dtype)
            for at in range(site):
                for span, received in self.receive(chunk, at):
                    there = total[span.start : span.stop]
                    theirs = received.view(dtype)
                    there.copy_(theirs) if at == 0 else self.reduction.into(there, theirs)
            self.reduction.into(total, own)
            self.scratch.give(own)
        for at in range(site + 1, len(self.team.sites)):
            for span, received in self.receive(chunk, at):
                self.reduction.into(total[span.start : span.stop], received.view(dtype))
        # Piece by piece, as what went before: the other site does the same.
        mine = self.mine(chunk)
        for _, span in layout.crossings(self.chunks[chunk], mine, len(self.team.sites[self.team.others[0]])):
            self.reduction.finish(total[span.start - mine.start : span.stop - mine.start])
        return total

    def result(self, chunk: int, owner: int) -> Tensor:
        """What the owner of a chunk made of it."""
        part = self.partials.pop(chunk)
        for span, received in self.receive(chunk, owner, RESULTS):
            part[span.start : span.stop].copy_(received.view(part.dtype))
        return part

    # -- the results inside my site ------------------------------------------------------------------------------------

    def spread(self, chunk: int, part: Tensor) -> None:
        """Start swapping results."""
        span, mates = self.chunks[chunk], len(self.team.mates)
        there = self.flat[span.start : span.stop]
        size = -(-span.length // mates)
        if size * mates == span.length:
            self.spreading.append((self.call.spread(bytes_of(there), bytes_of(part)), there, span, part))
            return
        padded = part.new_zeros(size)
        padded[: part.numel()] = part
        out = part.new_empty(size * mates)
        self.spreading.append((self.call.spread(bytes_of(out), bytes_of(padded)), out, span, part))

    def gather(self, chunk: int, part: Tensor, place: int) -> None:
        """Start bringing results to one rank."""
        span, mates = self.chunks[chunk], len(self.team.mates)
        size = -(-span.length // mates)
        padded = part
        if part.numel() != size:
            padded = part.new_zeros(size)
            padded[: part.numel()] = part
        out = part.new_empty(size * mates) if place == self.team.place else None
        wait = self.call.collect(None if out is None else bytes_of(out), bytes_of(padded), place)
        if out is not None:
            self.spreading.append((wait, out, span, part))
        else:
            self.spreading.append((wait, self.flat[span.start : span.start], Span(span.start, span.start), part))

    def finish(self, left: int = 0) -> None:
        """Wait until at most so many chunks' results are still being swapped."""
        while len(self.spreading) > left:
            wait, out, span, part = self.spreading.pop(0)
            wait()
            self.scratch.give(part)
            there = self.flat[span.start : span.stop]
            if span.length and out.data_ptr() != there.data_ptr():
                there.copy_(out[: span.length])

    # -- the whole -----------------------------------------------------------------------------------------------------

    def allreduce(self) -> None:
        """Everybody's sum for everybody."""
        # Per round one chunk, or one per owner: those that are sent, and later those whose sums are taken.
        width = len(self.team.sites) if self.owned else 1
        rounds = [range(at, min(at + width, len(self.chunks))) for at in range(0, len(self.chunks), width)]
        lag = max(1, self.ahead // width)
        first = True
        for at in range(len(rounds) + lag):
            for chunk in rounds[at] if at < len(rounds) else ():
                part = self.partials[chunk] = self.partial(chunk)
                for site in self.team.others:
                    if not self.owned or chunk % width == site:
                        self.send(chunk, part, site)
            if 0 <= at - lag < len(rounds):
                self._sums(rounds[at - lag], first)
                first = False
                self.finish(4)
        self.finish()

    def _sums(self, chunks: range, first: bool) -> None:
        sums: dict[int, Tensor] = {}
        with self.call.verdict() if first else contextlib.nullcontext():
            for chunk in chunks:
                if not self.owned:
                    sums[chunk] = self.total(chunk)
                elif chunk % len(self.team.sites) == self.team.site:
                    sums[chunk] = self.total(chunk)
                    for site in self.team.others:
                        self.send(chunk, sums[chunk], site, RESULTS)
            for chunk in chunks:
                if chunk not in sums:
                    sums[chunk] = self.result(chunk, chunk % len(self.team.sites))
        for chunk in chunks:
            self.spread(chunk, sums[chunk])

    def reduce(self, root: int) -> None:
        """Everybody's sum for one: the other sites send, its own site adds."""
        target = next(at for at, site in enumerate(self.team.sites) if root in site)
        if target != self.team.site:
            for chunk in range(len(self.chunks)):
                part = self.partial(chunk)
                self.send(chunk, part, target)
                self.scratch.give(part)
            return
        place = self.team.mates.index(root)
        for chunk in range(len(self.chunks)):
            self.partials[chunk] = self.partial(chunk)
            with self.call.verdict() if chunk == 0 else contextlib.nullcontext():
                total = self.total(chunk)
            self.gather(chunk, total, place)
            self.finish(4)
        self.finish()
