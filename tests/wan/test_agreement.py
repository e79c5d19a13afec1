"""The same burst through the simulator and over the emulated WAN: mean and 99th percentile of FCT agree within 10 %.

Four senders of 4 MiB each, 200 Mbit/s, RTT 60 ms, one BDP of buffer, a closed loop with pauses of 0.35 s, counted from
the very first burst: cold connections, and a link that nobody told the coordinator about (or that it was told of). The
simulator runs the same machines on modelled links and TCP; the WAN runs the daemons on real sockets.

A machine that does other things too only ever makes a real run slower, so there are several tries.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import replace

import pytest

from proxyd.cli.demo.measure import measure
from proxyd.cli.demo.net import NetnsNet
from proxyd.cli.demo.scenario import Mode, Scenario
from proxyd.cli.demo.traffic import ProxydTraffic
from proxyd.sim.burst import BurstSpec, burst_fct
from proxyd.wan import available
from proxyd.wan.burst import summarise

REASON = available()
pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(REASON is not None and os.environ.get("CI") != "true", reason=f"no emulated WAN: {REASON}"),
    pytest.mark.timeout(120),
]

BURSTS = 6
TRIES = 4
TOLERANCE = 0.10
SCENARIO = Scenario(
    name="agreement",
    rate_bytes_per_s=25_000_000,
    rtt_ns=60_000_000,
    buffer_bytes=1_500_000,
    senders=4,
    tensor_bytes=4 << 20,
)


def simulated(configured: bool) -> dict[str, float]:
    """FCT on modelled links, summarised as the demo does."""
    spec = BurstSpec(
        senders=SCENARIO.senders,
        message_bytes=SCENARIO.tensor_bytes,
        rate_bytes_per_s=SCENARIO.rate_bytes_per_s,
        rtt_ns=SCENARIO.rtt_ns,
        buffer_bytes=SCENARIO.buffer_bytes,
        mtu_bytes=SCENARIO.mtu,
        bursts=BURSTS,
    )
    return summarise(burst_fct(spec, told=configured).ordered())


def emulated(configured: bool) -> dict[str, float]:
    """The same through agents on the emulated WAN, without a warm-up."""
    scenario = replace(SCENARIO, configured=configured)
    with ExitStack() as ending:
        net = ending.enter_context(NetnsNet(scenario))
        cluster = net.cluster(ending)
        traffic = ending.enter_context(ProxydTraffic(net, scenario, cluster, ("a", "b")))
        result = measure(net, scenario, Mode("proxyd", None, BURSTS), traffic, warmup=0)
    return summarise(result.fct_seconds)


@pytest.mark.parametrize("configured", [True, False], ids=["told", "unknown"])
def test_simulator_and_wan_agree(configured: bool) -> None:
    model = simulated(configured)
    # Nobody beats the link.
    assert model["max"] >= SCENARIO.ideal_cct_seconds * 0.99
    seen = []
    for _ in range(TRIES):
        real = emulated(configured)
        seen.append(real)
        if all(real[name] == pytest.approx(model[name], rel=TOLERANCE) for name in ("mean", "p99")):
            return
    texts = [f"mean {one['mean']:.3f} p99 {one['p99']:.3f}" for one in (model, *seen)]
    pytest.fail(f"simulated {texts[0]}; on real sockets {'; '.join(texts[1:])}")
