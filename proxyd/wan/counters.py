"""Live counters of the emulator in shared memory: reading them costs the emulator nothing.

The page is an array of signed 64-bit words. The emulator is its only writer; a word is written whole, so a reader sees
each counter as it was at some instant (two counters may be an instant apart).
"""

from __future__ import annotations

import mmap
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from proxyd.wan.history import History

HEADER_WORDS = 16
HISTOGRAM_BINS = 2048
HISTOGRAM_BIN_NS = 5_000
LINK_WORDS = 24

# Header words.
GENERATION, WAKEUPS, UNROUTABLE, LATE_MAX_NS, FIFO, READY = 0, 1, 2, 3, 4, 5
# Words of one link.
PASSED_PACKETS, PASSED_BYTES, DROPPED_PACKETS, DROPPED_BYTES = 0, 1, 2, 3
LOST_PACKETS, LOST_BYTES, QUEUE_BYTES, QUEUE_PEAK_BYTES = 4, 5, 6, 7
POLICED_PACKETS, POLICED_BYTES, CARRIED_BYTES, CAPACITY_BYTES = 8, 9, 10, 11
CORRUPTED_PACKETS, DUPLICATED_PACKETS, REORDERED_PACKETS, RESET_PACKETS, OVERSIZED_PACKETS = 12, 13, 14, 15, 16
COUNTERS = 17
"""The first words of a link are the fields of :class:`LinkCounters`, in order."""
SAMPLES, LINE_ORIGIN_NS = 17, 18
# Words of one sample.
SAMPLE_WORDS = 7


@dataclass(frozen=True)
class LinkCounters:
    """One direction since the WAN was built. Bytes are IP packets with their headers.

    ``passed`` crossed the link and were delivered; ``dropped`` found the buffer full; ``lost`` fell to random loss or
    to a link that was down; ``policed`` exceeded the policer's contract. ``queue_bytes`` is the queue now,
    ``queue_peak_bytes`` the longest so far. ``carried_bytes`` have left the queue, ``capacity_bytes`` would have, had
    there always been some: their quotient is how much of the link was used. The last five count what
    :class:`~proxyd.wan.faults.LinkFaults` did; ``oversized`` packets are also ``lost``.
    """

    passed_packets: int
    passed_bytes: int
    dropped_packets: int
    dropped_bytes: int
    lost_packets: int
    lost_bytes: int
    queue_bytes: int
    queue_peak_bytes: int
    policed_packets: int = 0
    policed_bytes: int = 0
    carried_bytes: int = 0
    capacity_bytes: int = 0
    corrupted_packets: int = 0
    duplicated_packets: int = 0
    reordered_packets: int = 0
    reset_packets: int = 0
    oversized_packets: int = 0

    def since(self, earlier: LinkCounters) -> LinkCounters:
        """What was added after ``earlier`` was read; the two queue values stay as they are now."""
        added = {
            field.name: getattr(self, field.name) - getattr(earlier, field.name)
            for field in fields(self)
            if not field.name.startswith("queue")
        }
        return replace(self, **added)


@dataclass(frozen=True)
class Fidelity:
    """How late the emulator handed packets over, compared with its own virtual clock."""

    packets: int
    late_p50_ns: int
    late_p99_ns: int
    late_max_ns: int
    wakeups: int
    realtime: bool
    """True if the process runs under SCHED_FIFO; without it expect a p99 above a millisecond on a busy machine."""


def page_bytes(links: int, samples: int) -> int:
    """Size of the shared page for this many links, each with a ring of ``samples`` queue samples."""
    return 8 * (HEADER_WORDS + HISTOGRAM_BINS + links * (LINK_WORDS + SAMPLE_WORDS * samples))


class CounterPage:
    """The page, mapped. The emulator writes through :attr:`words`; everybody else uses the methods."""

    def __init__(self, fd: int, links: int, samples: int) -> None:
        self.links = links
        self.samples = samples
        self._map = mmap.mmap(fd, page_bytes(links, samples))
        self.words = memoryview(self._map).cast("q")

    def close(self) -> None:
        """Unmap the page."""
        self.words.release()
        self._map.close()

    def link_base(self, link: int) -> int:
        """First word of a link's counters."""
        return HEADER_WORDS + HISTOGRAM_BINS + link * LINK_WORDS

    def ring_base(self, link: int) -> int:
        """First word of a link's ring of samples; see :class:`~proxyd.wan.history.History` for the fields of each."""
        return HEADER_WORDS + HISTOGRAM_BINS + self.links * LINK_WORDS + link * SAMPLE_WORDS * self.samples

    def read_link(self, link: int) -> LinkCounters:
        """A copy of one link's counters."""
        base = self.link_base(link)
        return LinkCounters(*self.words[base : base + COUNTERS].tolist())

    def read_history(self, link: int) -> History:
        """The samples of one link, oldest first."""
        base, ring = self.link_base(link), self.ring_base(link)
        end = self.words[base + SAMPLES]
        raw = self.words[ring : ring + SAMPLE_WORDS * self.samples].tolist()
        # The writer may have gone on while we copied: leave out what it can have overwritten.
        start = max(0, self.words[base + SAMPLES] + 1 - self.samples)
        columns = [array("q") for _ in range(SAMPLE_WORDS)]
        for number in range(start, end):
            slot = SAMPLE_WORDS * (number % self.samples)
            for column, value in zip(columns, raw[slot : slot + SAMPLE_WORDS], strict=True):
                column.append(value)
        return History(*columns)

    def line_origin_ns(self, link: int) -> int:
        """When the link's present rate, rates or trace began."""
        return self.words[self.link_base(link) + LINE_ORIGIN_NS]

    def read_fidelity(self) -> Fidelity:
        """The emulator's own lateness so far."""
        bins = self.words[HEADER_WORDS : HEADER_WORDS + HISTOGRAM_BINS].tolist()
        return Fidelity(
            packets=sum(bins),
            late_p50_ns=quantile_ns(bins, 0.50),
            late_p99_ns=quantile_ns(bins, 0.99),
            late_max_ns=self.words[LATE_MAX_NS],
            wakeups=self.words[WAKEUPS],
            realtime=bool(self.words[FIFO]),
        )


def quantile_ns(bins: Sequence[int], share: float) -> int:
    """Upper edge, in ns, of the histogram bin that holds this share of all packets; 0 without packets."""
    wanted = share * sum(bins)
    seen = 0
    if wanted <= 0:
        return 0
    for index, count in enumerate(bins):
        seen += count
        if seen >= wanted:
            return (index + 1) * HISTOGRAM_BIN_NS
    return len(bins) * HISTOGRAM_BIN_NS
