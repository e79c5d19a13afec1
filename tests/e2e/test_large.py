"""Lengths beyond 31 and 32 bits (case 37). Slow: gigabytes through shared memory, TCP and shared memory again."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import numpy as np
import pytest
import xxhash

from tests.e2e.rig import MIB, Net, Trainer, rss_bytes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(110)]

LARGE, SMALLER = 2**32 + 17, 2**31 + 17
NEEDED_BYTES = 20 << 30
"""Sender, receiver and both agents hold it at once: four times its size, and some room for everybody else."""


def size_bytes() -> int:
    """What this machine has room for now: at the time of collection it may have had more."""
    with open("/proc/meminfo", encoding="ascii") as file:
        fields = dict(line.split(":") for line in file)
    return LARGE if int(fields["MemAvailable"].split()[0]) << 10 > NEEDED_BYTES else SMALLER


RECEIVER = """
import xxhash
hear()
out = np.empty({nbytes}, np.uint8)
out[::4096] = 1  # the tensor itself is resident; what comes on top is counted
say('posted')
ep.recv_into(out, src=0, tag=1, timeout_s=100)
say(xxhash.xxh3_64_hexdigest(out))
hear()
"""


def test_lengths_beyond_31_and_32_bits(start: Callable[..., Net]) -> None:
    """Equal by hash; the agents hold no more than the arenas that it takes, and the receiving trainer little on top."""
    gc.collect()  # arenas of endpoints that other tests closed are kept by reference cycles until then
    nbytes = size_bytes()
    memory = 12 << 30
    net = start(agent={"memory": str(memory), "arena": "64MiB"})
    sender = net.connect(0, "a")
    receiver = Trainer(net, 1, "b", RECEIVER.format(nbytes=nbytes))
    block = np.random.default_rng(nbytes).integers(0, 256, 61 * MIB + 3, np.uint8)
    data = np.resize(block, nbytes)  # repeats with an odd period: a shift by any power of two shows
    wanted = xxhash.xxh3_64_hexdigest(data)
    receiver.say()
    assert receiver.hear() == "posted"
    pids = [net.agent("a").pid, net.agent("b").pid]
    before = [rss_bytes(pid, "RssAnon") for pid in pids]
    client_before = rss_bytes(receiver.process.pid)
    handle = sender.isend(data, dst=1, tag=1, timeout_s=60)
    del data, block
    peak, stop = [0], threading.Event()

    def watch() -> None:
        while not stop.wait(0.05):
            peak[0] = max(peak[0], rss_bytes(receiver.process.pid))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        digest = receiver.hear()
    finally:
        stop.set()
        thread.join()
    assert digest == wanted
    handle.wait(20)
    net.also_sent("a->b")
    for pid, anon in zip(pids, before, strict=True):
        assert rss_bytes(pid, "RssAnon") - anon < 64 * MIB, "hidden copies"
        assert rss_bytes(pid, "VmHWM") < nbytes + 512 * MIB
    assert peak[0] - client_before < 64 * MIB + 64 * MIB, f"{(peak[0] - client_before) >> 20} MiB on top of the tensor"
