"""One mode on one link: build the network, fill the link, look at it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack

from proxyd.cli.demo.activity import total_segments
from proxyd.cli.demo.net import NetnsNet
from proxyd.cli.demo.scenario import Mode
from proxyd.cli.demo.traffic import PlainTraffic, ProxydTraffic, Traffic
from proxyd.cli.link_bench.backlog import Backlog
from proxyd.cli.link_bench.figures import LinkRun
from proxyd.cli.link_bench.scenario import LinkScenario
from proxyd.cli.link_bench.watch import Watch
from proxyd.wan.cross import CrossTraffic

LINK = ("a", "b")
MODES = {"proxyd": None, "cubic": "cubic", "bbr": "bbr"}
"""Congestion control of plain TCP; None: through agents and a coordinator."""


def run_link(scenario: LinkScenario, mode: str) -> LinkRun:
    """All senders at once for ``scenario.seconds``, on a network of their own.

    Raises WanError, ClusterError, DemoError if it can't be run to its end, or if proxyd's counters don't prove that the
    bytes went under grants.
    """
    with ExitStack() as ending:
        net = ending.enter_context(NetnsNet(scenario))
        watch: Watch | None = None
        traffic: Traffic
        kind = Mode(mode, MODES[mode], 0)
        if kind.congestion_control is not None:
            traffic = ending.enter_context(PlainTraffic(net, scenario, kind, LINK))
        else:
            cluster = net.cluster(ending)
            traffic = ending.enter_context(ProxydTraffic(net, scenario, cluster, LINK))
            watch = ending.enter_context(Watch(cluster.coordinator_socket, LINK))
        cross = cross_traffic(net, scenario, ending)
        return fill(scenario, mode, net, traffic, watch, cross)


def cross_traffic(net: NetnsNet, scenario: LinkScenario, ending: ExitStack) -> CrossTraffic | None:
    """Somebody else's hosts: the last of each site."""
    if not scenario.has_cross:
        return None
    sites = scenario.sites
    return ending.enter_context(CrossTraffic(net.wan, ("a", sites["a"] - 1), ("b", sites["b"] - 1)))


def fill(
    scenario: LinkScenario,
    mode: str,
    net: NetnsNet,
    traffic: Traffic,
    watch: Watch | None,
    cross: CrossTraffic | None,
) -> LinkRun:
    """The measurement itself."""
    pids = traffic.pids()
    backlog = Backlog(traffic, scenario.senders, scenario.depth)
    net.wan.set_link(*LINK, rates=scenario.rate_steps())
    origin_ns = net.wan.line_origin_ns(*LINK)
    start_ns = backlog.start()
    end_ns = start_ns + int(scenario.seconds * 1e9)
    stretches: list[tuple[int, Callable[[], object]]] = []
    segments = (0, 0)

    def warm() -> None:
        nonlocal segments
        segments = total_segments(pids)

    stretches.append((start_ns + scenario.warmup_ns, warm))
    if cross is not None:
        quarter_ns = (end_ns - start_ns) // 4
        stretches.append((start_ns + quarter_ns, lambda: begin_cross(scenario, cross)))
        stretches.append((start_ns + 3 * quarter_ns, lambda: end_cross(cross)))
    for until_ns, act in sorted(stretches, key=lambda stretch: stretch[0]):
        backlog.run(until_ns)
        act()
    backlog.run(end_ns)
    first, again = total_segments(pids)
    history = net.wan.history(*LINK)
    messages = backlog.drain()
    looks = [] if watch is None else list(watch.looks)
    return LinkRun(
        mode=mode,
        start_ns=start_ns,
        origin_ns=origin_ns,
        end_ns=min(end_ns, time.monotonic_ns()),
        history=history,
        flows=backlog.flows,
        segments=first - segments[0],
        retransmits=again - segments[1],
        looks=looks,
        counters=traffic.finish(messages),
        late_p99_ns=net.late_p99_ns(),
    )


def begin_cross(scenario: LinkScenario, cross: CrossTraffic) -> None:
    """Somebody else begins."""
    cross.flood(scenario.cross_flood_bytes_per_s)
    cross.tcp(scenario.cross_tcp)


def end_cross(cross: CrossTraffic) -> None:
    """Somebody else ends."""
    cross.flood(0)
    cross.tcp("")
