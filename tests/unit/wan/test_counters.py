from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from proxyd.wan import counters
from proxyd.wan.counters import CounterPage, page_bytes, quantile_ns


@pytest.fixture
def page() -> Iterator[CounterPage]:
    fd = os.memfd_create("test")
    os.ftruncate(fd, page_bytes(2, 8))
    page = CounterPage(fd, 2, 8)
    yield page
    page.close()
    os.close(fd)


def test_links_do_not_overlap(page: CounterPage) -> None:
    for link in (0, 1):
        base = page.link_base(link)
        for word in range(counters.LINK_WORDS):
            page.words[base + word] = 100 * (link + 1) + word
        for word in range(counters.SAMPLE_WORDS * page.samples):
            page.words[page.ring_base(link) + word] = -1
    first, second = page.read_link(0), page.read_link(1)
    assert first.passed_packets == 100
    assert first.queue_peak_bytes == 107
    assert second.dropped_packets == 202
    assert second.capacity_bytes == 211
    assert second.since(first).dropped_packets == 100
    assert second.since(first).queue_bytes == second.queue_bytes
    assert sum(page.words[counters.HEADER_WORDS : page.link_base(0)].tolist()) == 0


def test_the_queue_ring_keeps_the_newest(page: CounterPage) -> None:
    base, ring = page.link_base(1), page.ring_base(1)
    for number in range(21):
        for word in range(counters.SAMPLE_WORDS):
            page.words[ring + counters.SAMPLE_WORDS * (number % 8) + word] = number * 10**word
        page.words[base + counters.SAMPLES] = number + 1
    history = page.read_history(1)
    assert history.times_ns.tolist() == [14, 15, 16, 17, 18, 19, 20]  # one short of full: the writer may be in it
    assert history.peak_bytes.tolist() == [time * 10 for time in history.times_ns]
    assert history.dropped_packets.tolist() == [time * 10**5 for time in history.times_ns]
    assert page.read_history(0).times_ns.tolist() == []


def test_quantiles_of_the_histogram() -> None:
    bins = [0] * 10
    assert quantile_ns(bins, 0.5) == 0
    bins[0], bins[9] = 99, 1
    assert quantile_ns(bins, 0.5) == counters.HISTOGRAM_BIN_NS
    assert quantile_ns(bins, 0.99) == counters.HISTOGRAM_BIN_NS
    assert quantile_ns(bins, 1.0) == 10 * counters.HISTOGRAM_BIN_NS
