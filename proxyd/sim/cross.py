"""A download that isn't ours: an endless TCP connection on a link, unpaced, driven by its losses."""

from __future__ import annotations

import random

from proxyd.sim.clock import Clock
from proxyd.sim.link import CrossPort, Link
from proxyd.sim.tcp import Stream

CHUNK_BYTES = 1 << 20


def start_cross_tcp(clock: Clock, link: Link, rtt_ns: int, rng: random.Random) -> Stream:
    """It begins within a round trip or two."""
    stream = Stream(
        clock,
        CrossPort(link),
        rtt_ns - link.model.one_way_ns,
        slow_start_after_idle=False,
        ask=lambda: (None, CHUNK_BYTES, False),
        arrived=lambda chunk: None,
    )
    clock.after(rng.randrange(rtt_ns, 2 * rtt_ns), stream.pump)
    return stream
