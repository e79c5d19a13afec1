"""A hundred transfers of real daemons while their coordinator is killed, or stands still; and back again."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import numpy as np
import pytest

from proxyd.cli.cluster import LinkFigures
from proxyd.cli.scrape import scrape
from tests.e2e.arrivals import Arrivals
from tests.e2e.rig import KIB, MIB, Net, pattern, until

pytestmark = [pytest.mark.faults, pytest.mark.timeout(90)]

FIGURES = LinkFigures("80Mbit", "10ms", "1bdp", estimate="fixed")
SLOW = {("a", "b"): FIGURES, ("b", "a"): FIGURES}
COUNT, SIZE = 100, 512 * KIB
AWAY_S = 2.5


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_hundred_transfers_outlive_it(start: Callable[..., Net], how: str) -> None:
    net = start(links=SLOW)
    net.injects_fault(f"the coordinator is {how} for {AWAY_S} s")
    cluster = net.cluster
    sender, receiver = net.pair()
    with Arrivals(cluster, COUNT * SIZE) as arrivals:
        handles = [sender.isend(pattern(SIZE, 0, number), dst=1, tag=number) for number in range(COUNT)]
        until(lambda: net.moved().received > MIB, "payload is under way")
        if how == "killed":
            cluster.kill(cluster.coordinator)
        else:
            cluster.coordinator.process.send_signal(signal.SIGSTOP)
        time.sleep(AWAY_S)
        if how == "killed":
            cluster.start_coordinator()
        else:
            cluster.coordinator.process.send_signal(signal.SIGCONT)
        for number, handle in enumerate(handles):
            assert np.array_equal(receiver.recv(src=0, tag=number, timeout_s=30).array, pattern(SIZE, 0, number))
            handle.wait(10)
    print(f"\n{how}: longest stall {arrivals.longest_stall_s:.2f} s")
    # The bar is 1 s (0.5 s of silence, and then a slot); twice that on a busy machine.
    assert arrivals.longest_stall_s <= 2.0, f"{arrivals.longest_stall_s:.2f} s"
    agents = [scrape(agent.metrics) for agent in cluster.agents]
    assert sum(agent.total("proxyd_transfer_bytes_total", link="a->b") for agent in agents) == COUNT * SIZE
    assert sum(agent.total("proxyd_received_bytes_total") for agent in agents) == COUNT * SIZE, "not a byte twice"
    assert sum(agent.total("proxyd_fallback_bytes_total") for agent in agents) > 5 * MIB
    assert scrape(cluster.coordinator.metrics).total("proxyd_window_violations_total") == 0
    log = (cluster.directory / "a-0.log").read_text()
    assert "coordinator is silent: going on at the fallback rate" in log
    assert "coordinator is heard: going on under grants" in log
