"""The process between the sites: reads packets from one TUN device, holds them back, writes them to another.

One loop, one thread, ``select.select`` (epoll and asyncio round timeouts up to a millisecond). Each directed link is a
:class:`~proxyd.wan.bottleneck.Bottleneck`; this file adds the clock, the descriptors, random loss and the counters.

Started by the keeper with a JSON argument; live changes arrive as JSON lines on stdin; end of file ends the process.
"""

from __future__ import annotations

import gc
import json
import os
import random
import select
import signal
import sys
import time
from typing import Any

from proxyd.wan import counters as page
from proxyd.wan.bottleneck import Bottleneck
from proxyd.wan.counters import CounterPage
from proxyd.wan.faults import LinkFaults, Tamperer
from proxyd.wan.netns import PR_SET_PDEATHSIG, PR_SET_TIMERSLACK, prctl
from proxyd.wan.policer import Policer, PolicerSpec
from proxyd.wan.spec import LinkSpec
from proxyd.wan.trace import FixedRate, Line, RateSteps, TraceLine, read_trace

PACKETS_PER_WAKE = 64
IDLE_WAIT_S = 0.05
REALTIME_PRIORITY = 50


def line_of(spec: LinkSpec, origin_ns: int) -> Line:
    """The service line that a specification describes."""
    if spec.rate_bytes_per_s is not None:
        return FixedRate(spec.rate_bytes_per_s, origin_ns)
    if spec.rates is not None:
        return spec.rates.line(origin_ns)
    assert spec.trace is not None, "LinkSpec holds exactly one of rate, rates and trace"
    return TraceLine(read_trace(spec.trace), origin_ns)


def changed_line(change: dict[str, Any], now_ns: int) -> Line | None:
    """The line that a live change asks for, from now on; None: the line stays."""
    if change.get("rate_bytes_per_s") is not None:
        return FixedRate(change["rate_bytes_per_s"], now_ns)
    if change.get("rates") is not None:
        return RateSteps.from_json(change["rates"]).line(now_ns)
    return None


class Link:
    """One direction: bottleneck, loss, and the counters that are copied to the shared page once per wake-up."""

    def __init__(self, index: int, spec: LinkSpec, out_fd: int, now_ns: int) -> None:
        self.index = index
        self.out_fd = out_fd
        self.shared: Shared | None = None
        self.bottleneck: Bottleneck[Any] = Bottleneck(
            line_of(spec, now_ns), buffer_bytes=spec.buffer_bytes, delay_ns=spec.one_way_delay_ns
        )
        self.line_origin_ns = now_ns
        self.policer = None if spec.policer is None else Policer(spec.policer, now_ns)
        self.loss = spec.loss
        self.random = random.Random(spec.seed)
        self.down = False
        self.tamperer = Tamperer()
        self.tampers = False
        """Whether it has anything to do: most links never need it, and a packet costs enough as it is."""
        self.passed_packets = self.passed_bytes = 0
        self.dropped_packets = self.dropped_bytes = 0
        self.lost_packets = self.lost_bytes = 0
        self.policed_packets = self.policed_bytes = 0
        self.accepted_packets = 0
        self.peak_bytes = 0  # since the last sample
        self.peak_ever_bytes = 0
        self.samples = 0

    def offer(self, packet: Any, length: int, now_ns: int) -> None:
        """A packet from the sending site."""
        if self.down or (self.tampers and not (self.tamperer.fits(length) and self.tamperer.knows(packet, now_ns))):
            self.lost_packets += 1
            self.lost_bytes += length
        elif self.policer is not None and not self.policer.admits(length, now_ns):
            self.policed_packets += 1
            self.policed_bytes += length
        elif self.bottleneck.offer(packet, length, now_ns):
            self.accepted_packets += 1
            queue_bytes = self.bottleneck.queue_bytes(now_ns)
            if queue_bytes > self.peak_bytes:
                self.peak_bytes = queue_bytes
        else:
            self.dropped_packets += 1
            self.dropped_bytes += length

    def survives(self, length: int) -> bool:
        """Whether a packet that has crossed is delivered; counts it either way."""
        if self.down or (self.loss > 0.0 and self.random.random() < self.loss):
            self.lost_packets += 1
            self.lost_bytes += length
            return False
        self.passed_packets += 1
        self.passed_bytes += length
        return True

    def next_due_ns(self) -> int | None:
        """When the next packet arrives at the far end, late ones included; None if nothing is under way."""
        due_ns = self.bottleneck.next_due_ns()
        late_ns = self.tamperer.next_due_ns() if self.tampers else None
        return due_ns if late_ns is None else late_ns if due_ns is None else min(due_ns, late_ns)


class Shared(Link):
    """A line that several links share: what it lets through is offered to the packet's own link."""

    def __init__(self, index: int, rate_bytes_per_s: int, buffer_bytes: int, now_ns: int) -> None:
        super().__init__(index, LinkSpec(rate_bytes_per_s, None, 0, buffer_bytes), -1, now_ns)

    def forward(self, now_ns: int) -> None:
        """Hand on what has passed, at the instant at which it did."""
        while (popped := self.bottleneck.pop_due(now_ns)) is not None:
            due_ns, (link, packet) = popped
            self.passed_packets += 1
            self.passed_bytes += len(packet)
            link.offer(packet, len(packet), due_ns)


class Emulator:
    """The loop. ``tuns[i]`` is the descriptor of the site whose addresses are 10.77.(i+1).*."""

    def __init__(self, config: dict[str, Any]) -> None:
        count = len(config["links"]) + len(config["shared"])
        self.page = CounterPage(config["page_fd"], count, config["samples"])
        self.words = self.page.words
        self.tuns: list[int] = config["tuns"]
        self.packet_bytes = config["mtu"] + 64
        self.sample_ns: int = config["sample_ns"]
        now_ns = time.monotonic_ns()
        self.links: list[Link] = []
        # route[source tun][third octet of the destination] -> link
        self.route: dict[int, dict[int, Link]] = {fd: {} for fd in self.tuns}
        for index, entry in enumerate(config["links"]):
            link = Link(index, LinkSpec.from_json(entry["spec"]), self.tuns[entry["to"]], now_ns)
            self.links.append(link)
            self.words[self.page.link_base(index) + page.LINE_ORIGIN_NS] = now_ns
            self.route[self.tuns[entry["from"]]][entry["to"] + 1] = link
        self.shared: list[Shared] = []
        for entry in config["shared"]:
            shared = Shared(len(self.links) + len(self.shared), entry["rate"], entry["buffer"], now_ns)
            self.shared.append(shared)
            for index in entry["links"]:
                self.links[index].shared = shared
        self.lines: list[Link] = [*self.links, *self.shared]
        self.late_bins = [0] * page.HISTOGRAM_BINS
        self.late_max_ns = 0
        self.unroutable = 0
        self.wakeups = 0
        self.next_sample_ns = now_ns
        self.control = b""
        self.blocked: set[bytes] = set()
        """Source and destination address, as in the packet, of hosts whose packets vanish."""

    def run(self) -> None:
        """Until stdin ends."""
        readers = [*self.tuns, 0]
        while True:
            now_ns = time.monotonic_ns()
            wait_s = IDLE_WAIT_S
            for link in self.lines:
                due_ns = link.next_due_ns()
                if due_ns is not None:
                    wait_s = min(wait_s, max(0, due_ns - now_ns) / 1e9)
                    wait_s = min(wait_s, max(0, self.next_sample_ns - now_ns) / 1e9)
            ready, _, _ = select.select(readers, [], [], wait_s)
            for fd in ready:
                if fd == 0:
                    if not self.read_control():
                        return
                else:
                    self.read_packets(fd)
            self.deliver()
            self.wakeups += 1
            self.publish()

    def read_packets(self, fd: int) -> None:
        """Take up to 64 packets from one site: more would hold up what is due meanwhile."""
        route = self.route[fd]
        size = self.packet_bytes
        for _ in range(PACKETS_PER_WAKE):
            try:
                packet = os.read(fd, size)
            except BlockingIOError:
                return
            # IPv4 only; byte 18 is the third octet of the destination.
            link = route.get(packet[18]) if len(packet) >= 20 and packet[0] >> 4 == 4 else None
            if link is None:
                self.unroutable += 1
            elif self.blocked and packet[12:20] in self.blocked:
                link.lost_packets += 1
                link.lost_bytes += len(packet)
            elif link.shared is None:
                link.offer(packet, len(packet), time.monotonic_ns())
            else:
                link.shared.offer((link, packet), len(packet), time.monotonic_ns())

    def deliver(self) -> None:
        """Hand over everything that is due."""
        bins, last = self.late_bins, page.HISTOGRAM_BINS - 1
        for shared in self.shared:
            shared.forward(time.monotonic_ns())
        for link in self.links:
            while True:
                now_ns = time.monotonic_ns()
                popped = link.bottleneck.pop_due(now_ns)
                if popped is None:
                    break
                due_ns, packet = popped
                if link.survives(len(packet)):
                    if link.tampers:
                        for arriving in link.tamperer.deliver(packet, now_ns):
                            os.write(link.out_fd, arriving)
                    else:
                        os.write(link.out_fd, packet)
                    late_ns = now_ns - due_ns
                    bins[min(late_ns // page.HISTOGRAM_BIN_NS, last)] += 1
                    if late_ns > self.late_max_ns:
                        self.late_max_ns = late_ns
            if link.tampers:
                while (packet := link.tamperer.pop_due(time.monotonic_ns())) is not None:
                    os.write(link.out_fd, packet)

    def publish(self) -> None:
        """Copy the counters to the shared page, and the queues if a sample is due."""
        words = self.words
        now_ns = time.monotonic_ns()
        sampling = now_ns >= self.next_sample_ns
        words[page.WAKEUPS] = self.wakeups
        for link in self.lines:
            base = self.page.link_base(link.index)
            queue_bytes = link.bottleneck.queue_bytes(now_ns)
            words[base + page.PASSED_PACKETS] = link.passed_packets
            words[base + page.PASSED_BYTES] = link.passed_bytes
            words[base + page.DROPPED_PACKETS] = link.dropped_packets
            words[base + page.DROPPED_BYTES] = link.dropped_bytes
            words[base + page.LOST_PACKETS] = link.lost_packets
            words[base + page.LOST_BYTES] = link.lost_bytes
            words[base + page.QUEUE_BYTES] = queue_bytes
            words[base + page.POLICED_PACKETS] = link.policed_packets
            words[base + page.POLICED_BYTES] = link.policed_bytes
            words[base + page.CARRIED_BYTES] = link.bottleneck.accepted_bytes - queue_bytes
            words[base + page.CAPACITY_BYTES] = link.bottleneck.capacity_bytes(now_ns)
            if link.tampers:
                tamperer = link.tamperer
                words[base + page.CORRUPTED_PACKETS] = tamperer.corrupted_packets
                words[base + page.DUPLICATED_PACKETS] = tamperer.duplicated_packets
                words[base + page.REORDERED_PACKETS] = tamperer.reordered_packets
                words[base + page.RESET_PACKETS] = tamperer.reset_packets
                words[base + page.OVERSIZED_PACKETS] = tamperer.oversized_packets
            if link.peak_bytes > link.peak_ever_bytes:
                link.peak_ever_bytes = link.peak_bytes
                words[base + page.QUEUE_PEAK_BYTES] = link.peak_ever_bytes
            if sampling:
                slot = self.page.ring_base(link.index) + page.SAMPLE_WORDS * (link.samples % self.page.samples)
                words[slot] = now_ns
                words[slot + 1] = max(link.peak_bytes, queue_bytes)
                words[slot + 2] = queue_bytes
                words[slot + 3] = words[base + page.CARRIED_BYTES]
                words[slot + 4] = words[base + page.CAPACITY_BYTES]
                words[slot + 5] = link.dropped_packets + link.policed_packets
                words[slot + 6] = link.accepted_packets
                link.samples += 1
                words[base + page.SAMPLES] = link.samples
                link.peak_bytes = 0
        if sampling:
            self.next_sample_ns = now_ns + self.sample_ns
            first, bins = page.HEADER_WORDS, self.late_bins
            for index in range(page.HISTOGRAM_BINS):
                if bins[index]:
                    words[first + index] = bins[index]
            words[page.LATE_MAX_NS] = self.late_max_ns
            words[page.UNROUTABLE] = self.unroutable

    def read_control(self) -> bool:
        """Apply the changes that have come; False at the end of the file."""
        data = os.read(0, 65536)
        if not data:
            return False
        *lines, self.control = (self.control + data).split(b"\n")
        for line in lines:
            change = json.loads(line)
            if "blocked" in change:
                self.blocked = {bytes(pair) for pair in change["blocked"]}
            else:
                self.apply(self.lines[change["link"]], change, time.monotonic_ns())
            self.words[page.GENERATION] = change["generation"]
        return True

    def apply(self, link: Link, change: dict[str, Any], now_ns: int) -> None:
        """One change of one line."""
        new_line = changed_line(change, now_ns)
        if new_line is not None:
            link.bottleneck.change_line(new_line, now_ns)
            self.words[self.page.link_base(link.index) + page.LINE_ORIGIN_NS] = link.line_origin_ns = now_ns
        if "policer" in change:
            spec = change["policer"]
            link.policer = None if spec is None else Policer(PolicerSpec(**spec), now_ns)
        if change.get("loss") is not None:
            link.loss = change["loss"]
        if change.get("down") is not None:
            link.down = change["down"]
        if change.get("faults") is not None:
            link.tamperer.set(LinkFaults.from_json(change["faults"]))
            link.tampers = True
        if change.get("reset") is not None:
            link.tamperer.reset(change["reset"])
            link.tampers = True


def main() -> int:
    """Entry point of ``python -m proxyd.wan.emulator CONFIG``."""
    config = json.loads(sys.argv[1])
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != config["parent"]:
        return 1
    prctl(PR_SET_TIMERSLACK, 1)
    emulator = Emulator(config)
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(REALTIME_PRIORITY))
        emulator.words[page.FIFO] = 1
    except PermissionError:
        pass  # works without, later at the 99th percentile; the fidelity report says so
    # Nothing here makes reference cycles, and a collection would hold packets up.
    gc.disable()
    gc.freeze()
    emulator.words[page.READY] = 1
    emulator.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
