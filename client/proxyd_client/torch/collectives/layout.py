"""Who holds which part of a tensor, in what pieces it crosses. Pure: numbers in, numbers out, the same on all ranks.
ranks.

A tensor is cut into chunks, one after another, so that the work inside the sites hides behind the WAN. Each site cuts
a chunk into one shard per rank of its own. Two sites of one size thus have the same shards, and each rank exchanges
its own with one counterpart; sites of other sizes exchange the overlaps of their shards, so that every rank (and
every host's agent) of both sites takes part, whatever the sizes, a site of one rank included.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

SMALL_BYTES = 32 << 10
"""Up to here one rank per site speaks for it: latency counts, and one message per site is kinder to everybody."""

PIECE_BYTES = 1 << 20
"""What one message of a reduction carries, about: 20 ms of a 400 Mbit/s link, a third of a 60 ms round trip."""

OWNED_BYTES = 1 << 20
"""From here three and more sites share the sums out instead of each doing all: see :func:`owners`."""

AHEAD_BYTES = 64 << 20
"""A rank has at most about so much under way before it takes what has come: the agents' memory is bounded."""

ROUNDS_AHEAD = 2
"""Pieces that are sent to each rank before the first one from it is taken: one on the link, one behind it."""


class Span(NamedTuple):
    """Elements from ``start`` up to, not including, ``stop``."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        """How many."""
        return self.stop - self.start


class Crossing(NamedTuple):
    """Elements that one rank of mine and one of another site hold both."""

    place: int
    """The other rank's place in its site."""
    span: Span


def shard(whole: Span, parts: int, part: int) -> Span:
    """The part's share of ``whole``: all are of one size, except that the last ones may be shorter, or empty."""
    size = -(-whole.length // parts)
    return Span(*(min(whole.start + size * at, whole.stop) for at in (part, part + 1)))


def crossings(whole: Span, mine: Span, parts: int) -> list[Crossing]:
    """The overlaps of ``mine`` with each non-empty shard that a site of ``parts`` ranks has of ``whole``, in order."""
    if not mine.length:
        return []
    size = -(-whole.length // parts)
    first, last = (mine.start - whole.start) // size, (mine.stop - 1 - whole.start) // size
    found = []
    for place in range(first, last + 1):
        theirs = shard(whole, parts, place)
        found.append(Crossing(place, Span(max(mine.start, theirs.start), min(mine.stop, theirs.stop))))
    return found


def chunks(count: int, itemsize: int, sizes: Sequence[int]) -> list[Span]:
    """Cut ``count`` elements: every rank of the largest site then sends messages of about PIECE_BYTES.

    :param sizes: ranks per site.
    """
    if not count:
        return []
    wanted = -(-count * itemsize // (PIECE_BYTES * max(sizes)))
    if has_owners(count, itemsize, sizes):
        wanted = -(-wanted // len(sizes)) * len(sizes)
    size = -(-count // wanted)
    # Shards of one size where that is possible at all: what isn't needs a copy.
    step = math.lcm(*sizes)
    if step < size // 8:
        size = -(-size // step) * step
    return [Span(start, min(start + size, count)) for start in range(0, count, size)]


def has_owners(count: int, itemsize: int, sizes: Sequence[int]) -> bool:
    """Whether each chunk of a sum over all has one site that does it, chunk after chunk another.

    With n sites of S bytes each, sending everything to everybody takes S (n - 1) bytes of each site's uplink and one
    way across. Sending each chunk to its owner, and the sum back, takes 2 S (n - 1) / n and two ways. For two sites
    that saves nothing; for three and more it does, as soon as the bytes weigh more than one more way across.

    Three and more sites of different sizes always have owners: they hold different shards, and torch rounds some things
    (complex products) differently where it works in vectors and at the ends of a tensor. Two sites add up the same
    pieces, those that they exchange.
    """
    return len(sizes) > 2 and (count * itemsize >= OWNED_BYTES or len(set(sizes)) > 1)


def ahead(span: Span, itemsize: int, parts: int) -> int:
    """How many chunks like this one a rank sends before it takes the first one from the others."""
    return max(2, AHEAD_BYTES * parts // max(1, span.length * itemsize))


def pieces(nbytes: int) -> list[Span]:
    """A message in pieces that leave the agents' memory room for others; one (empty) piece for an empty message."""
    step = AHEAD_BYTES // 16
    return [Span(start, min(start + step, nbytes)) for start in range(0, max(nbytes, 1), step)]
