"""Over the emulated WAN: real TCP, long and shallow (case 28, and the burst that all of this is for)."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import xxhash

from proxyd.cli.cluster import LinkFigures
from proxyd.wan import LinkSpec, Wan
from proxyd_client import PeerLost
from tests.e2e.rig import MIB, Net, pattern, until

pytestmark = [pytest.mark.netns, pytest.mark.timeout(90)]


Figures = dict[tuple[str, str], LinkFigures]
MakeWan = Callable[..., tuple[Wan, Figures]]


@pytest.fixture
def make_wan() -> Iterator[MakeWan]:
    """Makes a WAN, and what its coordinator is told of it: the same. Ask for it before ``start``: it outlives that."""
    with ExitStack() as stack:

        def make_wan(
            sites: dict[str, int], rate_mbit: int, rtt_ms: int, buffer_bdp: float, **options: Any
        ) -> tuple[Wan, Figures]:
            rate, half_ns = rate_mbit * 125_000, rtt_ms * 500_000
            buffer_bytes = int(rate * rtt_ms / 1000 * buffer_bdp)
            pairs = [("a", "b"), ("b", "a")]
            links = {pair: LinkSpec(rate, None, half_ns, buffer_bytes, seed=seed) for seed, pair in enumerate(pairs, 1)}
            wan = stack.enter_context(Wan(sites, links, **options))
            figures = LinkFigures(f"{rate_mbit}Mbit", f"{rtt_ms}ms", f"{buffer_bdp:g}bdp", mtu=wan.mtu)
            return wan, dict.fromkeys(pairs, figures)

        yield make_wan


def socket_memory(wan: Wan, site: str, field: str) -> int:
    """Largest value of a ``skmem`` field among a host's TCP sockets, as ``ss -tmi`` shows it."""
    text = wan.host(site, 0).run(["ss", "-tmi"]).stdout
    return max((int(value) for value in re.findall(rf"\b{field}(\d+)", text)), default=0)


def test_one_large_transfer_fills_the_link_with_shipped_defaults(make_wan: MakeWan, start: Callable[..., Net]) -> None:
    rate_mbit, rtt_ms, nbytes = 200, 100, 72 * MIB
    bdp = rate_mbit * 125 * rtt_ms
    wan, figures = make_wan({"a": 1, "b": 1}, rate_mbit, rtt_ms, 1.0)
    net = start(links=figures, wan=wan)
    sender, receiver = net.pair()
    out = np.empty(nbytes, np.uint8)
    rates = []
    while len(rates) < 3 and max(rates, default=0) < 0.8 * rate_mbit:  # a busy machine may hold up one
        arrived = net.moved().received
        data = pattern(nbytes, 0, len(rates))
        receive = receiver.irecv_into(out, src=0, tag=1)
        handle = sender.isend(data, dst=1, tag=1)
        until(lambda base=arrived: net.moved().received - base >= nbytes // 3, "start-up is over", 30)
        begun_s, begun_bytes = time.monotonic(), wan.counters()["a->b"].passed_bytes
        until(lambda base=arrived: net.moved().received - base >= nbytes * 5 // 6, "most has arrived", 30)
        passed_bytes = wan.counters()["a->b"].passed_bytes - begun_bytes
        rates.append(passed_bytes * 8 / 1e6 / (time.monotonic() - begun_s))
        # Autotuning is on: nobody has set a buffer by hand, so both have grown beyond what the path holds.
        receive_buffer, send_buffer = socket_memory(wan, "b", "rb"), socket_memory(wan, "a", "tb")
        assert receive.wait(30) == nbytes
        handle.wait(10)
        assert xxhash.xxh3_64_digest(out) == xxhash.xxh3_64_digest(data)
        assert receive_buffer > 2 * bdp, f"{receive_buffer} bytes; two BDP are {2 * bdp}"
        assert send_buffer > bdp, f"{send_buffer} bytes; the BDP is {bdp}"
    assert max(rates) >= 0.8 * rate_mbit, f"{rates} of {rate_mbit} Mbit/s after start-up"


@pytest.mark.slow
@pytest.mark.parametrize(("estimate", "wanted"), [("fixed", 4), (None, 1)])
def test_three_senders_at_once_over_a_shallow_buffer(
    make_wan: MakeWan, start: Callable[..., Net], estimate: str | None, wanted: int
) -> None:
    """Where the capacity is believed, four bursts in a row without a single drop, once connections are warm. Where it
    is but the estimate's beginning, the gateway's 25 packets are probed as well, and half of the bursts are clean. A
    machine that does other things too holds an agent up now and then, so there are several tries; but drops stay rarer
    than one in two hundred (1 in 10,000 to 1.5 in 1,000 were seen; plain TCP loses some percent there)."""
    senders, nbytes, warmup, most = 3, 2 * MIB, 2, 20
    wan, figures = make_wan({"a": senders, "b": 1}, 100, 30, 0.1, mtu=1500, slow_start_after_idle=False)
    figures = {link: dataclasses.replace(told, estimate=estimate) for link, told in figures.items()}
    net = start({"a": senders, "b": 1}, links=figures, wan=wan)
    receiver = net.connect(100, "b")
    endpoints = [net.connect(rank, "a", rank) for rank in range(senders)]
    clean, before, warm = 0, wan.counters()["a->b"], wan.counters()["a->b"]
    for burst in range(warmup + most):
        handles = [
            endpoint.isend(pattern(nbytes, rank, burst), dst=100, tag=burst) for rank, endpoint in enumerate(endpoints)
        ]
        for rank in range(senders):
            got = receiver.recv(src=rank, tag=burst, timeout_s=20)
            assert np.array_equal(got.array, pattern(nbytes, rank, burst))
            del got
        for handle in handles:
            handle.wait(10)
        now = wan.counters()["a->b"]
        assert now.since(before).passed_bytes > senders * nbytes, "it did not cross this link"
        clean = clean + 1 if burst >= warmup and now.dropped_packets == before.dropped_packets else 0
        before = now
        if burst == warmup - 1:
            warm = now
        if clean >= wanted and burst >= warmup + 5:
            break
    assert clean >= wanted, f"never {wanted} bursts in a row without a drop in {most}"
    since = before.since(warm)
    assert since.dropped_packets <= since.passed_packets / 200


def test_a_cut_link_is_an_error_in_bounded_time_and_heals(make_wan: MakeWan, start: Callable[..., Net]) -> None:
    wan, figures = make_wan({"a": 1, "b": 1}, 100, 20, 1.0)
    net = start(links=figures, wan=wan, agent={"peer_timeout": "3s"})
    net.injects_fault("the link is cut both ways")
    sender, receiver = net.pair()
    handle = sender.isend(pattern(60 * MIB), dst=1, tag=1)
    receive = receiver.irecv(src=0, tag=1)
    until(lambda: net.moved().received > MIB, "payload is under way")
    wan.set_link("a", "b", down=True)
    wan.set_link("b", "a", down=True)
    begun_s = time.monotonic()
    with pytest.raises(PeerLost, match=r"agent b/b-0.*of 62914560 bytes"):
        handle.wait(20)
    with pytest.raises(PeerLost, match=r"agent a/a-0.*of 62914560 bytes"):
        receive.wait(20)
    assert time.monotonic() - begun_s < 10
    wan.set_link("a", "b", down=False)
    wan.set_link("b", "a", down=False)
    handle = sender.isend(pattern(2 * MIB, 0, 2), dst=1, tag=2)
    assert np.array_equal(receiver.recv(src=0, tag=2, timeout_s=20).array, pattern(2 * MIB, 0, 2))
    handle.wait(10)


def test_ss_is_there() -> None:
    """What the first test reads."""
    assert subprocess.run(["ss", "-V"], capture_output=True, check=False).returncode == 0
