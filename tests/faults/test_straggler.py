"""One of eight data connections carries a tenth of the others' rate: the rest goes over those that can.

What all eight can carry is seven shares and a tenth. Both runs are of the same cluster, one after the other, so what a
busy machine takes is in both.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.e2e.rig import MIB, Net, pattern, until
from tests.faults.proxy import FlakyProxy
from tests.faults.test_resume import behind

pytestmark = pytest.mark.timeout(90)

STREAMS = 8
SIZE = 20 * MIB
LEAST = 0.85
"""Of what all eight can carry together."""

Start = Callable[..., Net]


def seconds(net: Net, sender: Any, receiver: Any, count: int, tag: int, nbytes: int) -> float:
    """How long so many messages take, all of them posted at once."""
    begun_s = time.monotonic()
    receives = [receiver.irecv(src=0, tag=tag) for _ in range(count)]
    handles = [sender.isend(pattern(nbytes, 0, number), dst=1, tag=tag) for number in range(count)]
    for number, receive in enumerate(receives):
        assert np.array_equal(receive.wait(40).array, pattern(nbytes, 0, number))
    for handle in handles:
        handle.wait(10)
    return time.monotonic() - begun_s


@pytest.mark.parametrize(("count", "nbytes"), [(1, SIZE), (10, SIZE // 10)], ids=["one message", "ten messages"])
def test_one_stripe_of_eight_at_a_tenth(proxy: FlakyProxy, start: Start, count: int, nbytes: int) -> None:
    net = behind(proxy, start, agent={"streams": STREAMS})
    sender, receiver = net.pair()
    sender.knows(1)
    until(lambda: proxy.connections == 1 + STREAMS, "all connections stand")
    whole_s = seconds(net, sender, receiver, count, 1, nbytes)
    share = count * nbytes / whole_s / STREAMS
    proxy.slow(STREAMS // 2, int(share / 10))
    slow_s = seconds(net, sender, receiver, count, 2, nbytes)
    carried = whole_s / slow_s / ((STREAMS - 1 + 0.1) / STREAMS)
    print(f"{whole_s:.2f} s without, {slow_s:.2f} s with a slow one: {carried:.2f} of what all eight can carry")
    assert carried >= LEAST
