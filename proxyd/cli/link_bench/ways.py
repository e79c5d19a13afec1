"""Where the coordinator stands, both directions at once, and who goes first: what ``proxyd bench ways`` measures.

Every part builds a WAN of three sites: a and b exchange data, c is far from both. All hosts are real network
namespaces, and agents reach a coordinator over the network, also over the very link that carries the data.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from proxyd.cli.cluster import Cluster
from proxyd.cli.demo.net import ARENA, NetnsNet, told
from proxyd.cli.demo.traffic import ProxydTraffic
from proxyd.cli.link_bench.backlog import Backlog, Flow
from proxyd.cli.link_bench.figures import percentile
from proxyd.cli.link_bench.scenario import LinkScenario
from proxyd.cli.link_bench.watch import Look, Watch
from proxyd.core.errors import ProxydError
from proxyd.core.units import NS_PER_S
from proxyd.wan import LinkSpec, SharedSpec

FORWARD, BACK, ASIDE = ("a", "b"), ("b", "a"), ("a", "c")
EGRESS = "a-out"
CONTROL_RATE_BYTES_PER_S = 125_000_000
URGENT_PAUSE_S = 0.1
URGENT_WARMUP = 3
"""Messages that open the urgent sender's TCP window, in no figure."""
WEIGHED_NS = 10 * NS_PER_S
WEIGHED_MESSAGE_BYTES = 512 << 10
WEIGHED_DEPTH = 16
SETTLE_RTTS = 20
"""Of each phase, in no figure."""


@dataclass(frozen=True)
class WaysScenario(LinkScenario):
    """Two sites with ``senders`` agents each, a host for a coordinator beside them, and a third site far away."""

    control_rtt_ns: int = 90_000_000
    both_directions: bool = True

    @property
    def agents(self) -> dict[str, int]:
        """By site; one more than there are senders, for an urgent one."""
        return {"a": self.senders + 1, "b": self.senders + 1}

    @property
    def sites(self) -> dict[str, int]:
        return {**{site: count + 1 for site, count in self.agents.items()}, "c": 1}

    def links(self) -> dict[tuple[str, str], LinkSpec]:
        links = super().links()
        half_ns = self.control_rtt_ns // 2
        spec = LinkSpec(CONTROL_RATE_BYTES_PER_S, None, half_ns, CONTROL_RATE_BYTES_PER_S // 10)
        for site in ("a", "b"):
            links[(site, "c")] = links[("c", site)] = spec
        return links

    @property
    def settle_ns(self) -> int:
        """What a phase takes to find its rates."""
        return SETTLE_RTTS * self.rtt_ns


@dataclass(frozen=True)
class ThreeSites(WaysScenario):
    """a sends to b and to c, over links of the full rate each, behind one line of a's that has that rate too."""

    @property
    def agents(self) -> dict[str, int]:
        return {"a": 2 * self.senders, "b": 1, "c": 1}

    def links(self) -> dict[tuple[str, str], LinkSpec]:
        links = super().links()
        links[("a", "c")] = replace(links[("a", "b")], seed=self.seed + 2)
        links[("c", "a")] = replace(links[("b", "a")], seed=self.seed + 3)
        return links

    @property
    def sites(self) -> dict[str, int]:
        return {"a": 2 * self.senders + 1, "b": 1, "c": 1}

    @property
    def shared(self) -> dict[str, SharedSpec]:
        # The links have room to spare: the line out of a is the bottleneck of both.
        return {EGRESS: SharedSpec((FORWARD, ASIDE), self.rate_bytes_per_s, self.buffer_bytes)}

    @property
    def told_of_egress(self) -> str:
        """For the coordinator: that there is such a line, and with ``configured`` what it carries."""
        capacity = f'capacity = "{self.rate_bytes_per_s * 8}bit"\n' if self.configured else ""
        return f'[[bottleneck]]\nsite = "a"\ndirection = "egress"\n{capacity}'


BESIDE = {"central": ("a", -1)}
"""A coordinator in the sender's site. -1: the site's last host."""
FAR = {"central": ("c", -1)}
PER_SITE = {"left": ("a", -1), "right": ("b", -1)}
OWNS = {"central": ["*->*"], "left": ["a->*"], "right": ["b->*"]}


class Ways:
    """One WAN with daemons whose coordinators stand in given places. A context manager."""

    def __init__(self, scenario: WaysScenario, places: dict[str, tuple[str, int]], extra: str = "") -> None:
        self.scenario = scenario
        self._ending = ExitStack()
        try:
            self.net = self._ending.enter_context(NetnsNet(scenario))
            sites = scenario.sites
            self.cluster = self._ending.enter_context(
                Cluster(
                    scenario.agents,
                    links={
                        pair: figures for pair, figures in told(scenario).items() if set(pair) <= set(scenario.agents)
                    },
                    coordinators={name: OWNS[name] for name in places},
                    coordinator_hosts={name: (site, sites[site] + back) for name, (site, back) in places.items()},
                    coordinator_extra=extra,
                    wan=self.net.wan,
                    agent={"arena": ARENA},
                    log_level="warning",
                )
            )
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Ways:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End everything."""
        self._ending.close()

    def stream(self, link: tuple[str, str], **options: Any) -> Stream:
        """Backlogged senders in one direction; see :class:`ProxydTraffic` for the options."""
        scenario = replace(self.scenario, senders=options.pop("senders", self.scenario.senders))
        traffic = self._ending.enter_context(ProxydTraffic(self.net, scenario, self.cluster, link, **options))
        return Stream(self.net, link, traffic, Backlog(traffic, scenario.senders, scenario.depth))

    def watch(self, link: tuple[str, str], *beside: tuple[str, str]) -> Watch:
        """Of the coordinator that owns the link; ``beside``: other links of it, in the same instants."""
        owners = [
            one for one in self.cluster.coordinators.values() if f"{link[0]}->*" in one.owns or "*->*" in one.owns
        ]
        return self._ending.enter_context(Watch(owners[0].socket, link, beside=beside))


@dataclass
class Stream:
    """Backlogged senders of one direction."""

    net: NetnsNet
    link: tuple[str, str]
    traffic: ProxydTraffic
    backlog: Backlog

    def used(self, seconds: float, settle_ns: int) -> float:
        """Fill the link for ``settle_ns`` and then ``seconds``; answers the share of it that was used in those."""
        start_ns = self.backlog.start()
        warm_ns = start_ns + settle_ns
        end_ns = warm_ns + int(seconds * NS_PER_S)
        self.backlog.run(end_ns)
        history = self.net.wan.history(*self.link)
        self.backlog.drain()
        return round(history.used(warm_ns, end_ns), 4)

    def finish(self) -> None:
        """Proof by counters. Raises DemoError."""
        self.traffic.finish(self.backlog.messages)


def at_once(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run them beside each other; the first error of any is raised when all have ended."""
    results: list[Any] = [None] * len(calls)
    failed: list[ProxydError] = []

    def one(number: int) -> None:
        try:
            results[number] = calls[number]()
        except ProxydError as error:
            failed.append(error)

    threads = [threading.Thread(target=one, args=(number,), name=f"bench-{number}") for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return results


def far(scenario: WaysScenario) -> dict[str, Any]:
    """One direction, with the coordinator beside the senders and far from everybody."""
    found: dict[str, Any] = {}
    for name, places in (("beside", BESIDE), ("far", FAR)):
        with Ways(scenario, places) as ways:
            stream = ways.stream(FORWARD)
            found[name] = stream.used(scenario.seconds, scenario.settle_ns)
            stream.finish()
    return {
        "control_rtt_seconds": scenario.control_rtt_ns / 1e9,
        "used_beside": found["beside"],
        "used_far": found["far"],
        "far_over_beside": ratio(found["far"], found["beside"]),
    }


def two_way(scenario: WaysScenario) -> dict[str, Any]:
    """Each direction alone, then both at once, with a central coordinator (in site a) and with one in each site."""
    found: dict[str, Any] = {}
    for name, places in (("central", BESIDE), ("per_site", PER_SITE)):
        with Ways(scenario, places) as ways:
            streams = [ways.stream(FORWARD), ways.stream(BACK)]
            alone = [stream.used(scenario.seconds, scenario.settle_ns) for stream in streams]
            both = at_once([partial(stream.used, scenario.seconds, scenario.settle_ns) for stream in streams])
            found[name] = {
                "->".join(stream.link): {
                    "used_alone": one,
                    "used_both_ways": other,
                    "both_over_alone": ratio(other, one),
                }
                for stream, one, other in zip(streams, alone, both, strict=True)
            }
            for stream in streams:
                stream.finish()
    return found


def urgent(scenario: WaysScenario, sizes: Sequence[int]) -> dict[str, Any]:
    """Small messages of the first class under senders that saturate the link with the last."""
    found: dict[str, Any] = {}
    with Ways(scenario, BESIDE) as ways:
        watch = ways.watch(FORWARD)
        bulk = ways.stream(FORWARD, traffic="bulk", job="bulk")
        for nbytes in sizes:
            small = replace(scenario, senders=1, tensor_bytes=nbytes)
            with ProxydTraffic(
                ways.net, small, ways.cluster, FORWARD, job=f"urgent-{nbytes}", first_host=scenario.senders
            ) as pings:
                warm_ns = bulk.backlog.start() + scenario.settle_ns
                end_ns = warm_ns + int(scenario.seconds * NS_PER_S)
                flows = at_once([partial(ping, pings, warm_ns, end_ns), partial(bulk.backlog.run, end_ns)])[0]
                history = ways.net.wan.history(*FORWARD)
                bulk.backlog.drain()
            looks = [look for look in watch.looks if warm_ns <= look.time_ns <= end_ns]
            found[str(nbytes)] = urgent_figures(scenario, flows, looks, history.used(warm_ns, end_ns))
        bulk.finish()
    return found


def ping(traffic: ProxydTraffic, after_ns: int, until_ns: int) -> list[Flow]:
    """One message after another, with pauses; answers those after the warm-up."""
    time.sleep(max(0, after_ns - time.monotonic_ns()) / 1e9)
    one = Backlog(traffic, 1, 1)
    while time.monotonic_ns() < until_ns:
        one.start()
        one.drain()
        time.sleep(URGENT_PAUSE_S)
    traffic.finish(one.messages)
    return one.flows[URGENT_WARMUP:]


def urgent_figures(scenario: WaysScenario, flows: Sequence[Flow], looks: Sequence[Look], used: float) -> dict[str, Any]:
    """Against two round trips and the longest slot that the coordinator gave in that time."""
    slot_s = max((look.slot_bytes / look.pace_bytes_per_s for look in looks if look.pace_bytes_per_s), default=0.0)
    bound_s = 2 * scenario.rtt_ns / 1e9 + slot_s
    seconds = [flow.seconds for flow in flows]
    return {
        "messages": len(seconds),
        "p50_seconds": round(percentile(seconds, 0.5), 4),
        "p99_seconds": round(percentile(seconds, 0.99), 4),
        "slot_seconds": round(slot_s, 4),
        "bound_seconds": round(bound_s, 4),
        "link_used": round(used, 4),
    }


def three_sites(scenario: WaysScenario) -> dict[str, Any]:
    """a->b and a->c at once, both backlogged: how full a's line is, its queue, and what was granted in all."""
    fields = {field.name: getattr(scenario, field.name) for field in dataclasses.fields(scenario)}
    three = ThreeSites(**fields)
    with Ways(three, BESIDE, three.told_of_egress) as ways:
        watch = ways.watch(FORWARD, ASIDE)
        streams = [ways.stream(link, first_host=n * three.senders) for n, link in enumerate((FORWARD, ASIDE))]
        warm_ns = max(stream.backlog.start() for stream in streams) + three.settle_ns
        end_ns = warm_ns + int(three.seconds * NS_PER_S)
        at_once([partial(stream.backlog.run, end_ns) for stream in streams])
        history = ways.net.wan.shared_history(EGRESS)
        at_once([stream.backlog.drain for stream in streams])
        for stream in streams:
            stream.finish()
    granted = granted_together(watch.looks, warm_ns, end_ns)
    payload = three.payload_rate_bytes_per_s()
    p99 = history.queue_quantiles([0.99], warm_ns, end_ns)[0]
    return {
        "egress_used": round(history.used(warm_ns, end_ns), 4),
        "egress_queue_p99_bdp": round(p99 / three.bdp_bytes, 4),
        "egress_loss": round(history.loss(warm_ns, end_ns), 6),
        "granted_p50_over_line": round(percentile(granted, 0.5) / payload, 4),
        "granted_max_over_line": round(max(granted, default=0) / payload, 4),
    }


def granted_together(looks: Sequence[Look], start_ns: int, end_ns: int) -> list[int]:
    """The sums of what links are granted that were looked at in the same instants."""
    sums: dict[int, int] = {}
    for look in looks:
        if start_ns <= look.time_ns <= end_ns:
            sums[look.time_ns] = sums.get(look.time_ns, 0) + look.granted_bytes_per_s
    return list(sums.values())


def weights(scenario: WaysScenario) -> dict[str, Any]:
    """Two jobs, one of three times the other's weight, both backlogged: what each got over ten seconds."""
    jobs = {"heavy": 3, "light": 1}
    tables = "".join(f'[[job]]\nname = "{job}-a-b"\nweight = {weight}\n' for job, weight in jobs.items())
    one = replace(scenario, senders=1, tensor_bytes=WEIGHED_MESSAGE_BYTES, depth=WEIGHED_DEPTH)
    with Ways(replace(one, senders=2), BESIDE, tables) as ways:
        streams = [ways.stream(FORWARD, senders=1, job=job, first_host=host) for host, job in enumerate(jobs)]
        start_ns = max(stream.backlog.start() for stream in streams)
        warm_ns = start_ns + scenario.settle_ns
        end_ns = warm_ns + WEIGHED_NS
        at_once([partial(stream.backlog.run, end_ns) for stream in streams])
        used = ways.net.wan.history(*FORWARD).used(warm_ns, end_ns)
        at_once([stream.backlog.drain for stream in streams])
        got = [
            sum(flow.end_ns - warm_ns > 0 and flow.end_ns <= end_ns for flow in stream.backlog.flows)
            * WEIGHED_MESSAGE_BYTES
            for stream in streams
        ]
        for stream in streams:
            stream.finish()
    wanted = jobs["heavy"] / sum(jobs.values())
    share = ratio(got[0], sum(got))
    return {
        "heavy_bytes": got[0],
        "light_bytes": got[1],
        "heavy_share": share,
        "wanted_share": wanted,
        "off_by": round(max(abs(share / wanted - 1), abs((1 - share) / (1 - wanted) - 1)), 4),
        "link_used": round(used, 4),
    }


def ratio(one: float, other: float) -> float:
    """0 where there is nothing to compare with."""
    return round(one / other, 4) if other else 0.0
