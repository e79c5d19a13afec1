"""The emulated WAN against its description, with real sockets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from proxyd.wan import Host, LinkSpec, PolicerSpec, RateSteps, SharedSpec, Wan, WanError, available
from proxyd.wan.cross import CrossTraffic
from proxyd.wan.trace import write_trace

REASON = available()
pytestmark = [
    pytest.mark.netns,
    # In CI a machine without namespaces is a broken machine: fail there, skip elsewhere.
    pytest.mark.skipif(REASON is not None and os.environ.get("CI") != "true", reason=f"no emulated WAN: {REASON}"),
]

RATE = 25_000_000
DELAY_NS = 20_000_000

SINK = """
import json, socket, sys, time
server = socket.create_server(("0.0.0.0", 5001))
print("up", flush=True)
while True:
    peer, _ = server.accept()
    count, half_count, half_ns, first = 0, 0, None, None
    while data := peer.recv(1 << 20):
        first = first or (len(data), time.monotonic_ns())
        count += len(data)
        if half_ns is None and count >= int(sys.argv[1]) // 2:
            half_count, half_ns = count, time.monotonic_ns()
    now = time.monotonic_ns()
    whole = (count - first[0]) * 1e9 / (now - first[1])
    print(json.dumps([count, whole, (count - half_count) * 1e9 / (now - half_ns)]), flush=True)
"""
SOURCE = """
import socket, sys, time
address, count, pace = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
peer = socket.socket()
peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
if pace:
    peer.setsockopt(socket.SOL_SOCKET, 47, pace.to_bytes(8, "little"))
peer.connect((address, 5001))
print(time.monotonic_ns())
peer.sendall(bytes(count))
peer.close()
"""
# One datagram every 5 ms, carrying the clock; the other end answers with the delays.
PINGS = """
import socket, sys, time
peer = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for _ in range(int(sys.argv[2])):
    peer.sendto(time.monotonic_ns().to_bytes(8, "little") + bytes(int(sys.argv[3])), (sys.argv[1], 5002))
    time.sleep(float(sys.argv[4]))
"""
PONGS = """
import json, socket, sys, time
peer = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
peer.bind(("0.0.0.0", 5002))
peer.settimeout(2.0)
print("up", flush=True)
delays = []
try:
    while True:
        data = peer.recv(65536)
        delays.append(time.monotonic_ns() - int.from_bytes(data[:8], "little"))
except TimeoutError:
    print(json.dumps(delays))
"""


@pytest.fixture
def wan() -> Iterator[Wan]:
    spec = LinkSpec(RATE, None, DELAY_NS, 200_000)
    with Wan({"a": 2, "b": 1, "c": 1}, {("a", "b"): spec, ("b", "a"): spec, ("c", "a"): spec}) as wan:
        yield wan


def start(host: Host, script: str, *arguments: str) -> subprocess.Popen[str]:
    """Run a script that says "up" when it listens."""
    process = host.popen([sys.executable, "-c", script, *arguments], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process


def one_way_delays(src: Host, dst: Host, count: int, extra_bytes: int, gap_s: float) -> list[int]:
    receiver = start(dst, PONGS)
    src.run([sys.executable, "-c", PINGS, dst.address, str(count), str(extra_bytes), str(gap_s)])
    out, _ = receiver.communicate(timeout=30)
    return sorted(json.loads(out))


def transfer_rate(wan: Wan, count: int, pace: int = 0) -> tuple[float, float]:
    """Payload bytes/s of one TCP transfer from a to b as the receiver sees it: all of it, and its second half.

    The second half leaves out slow start; after losses it can exceed the link: a filled hole frees much at once.
    """
    sink = start(wan.host("b", 0), SINK, str(count))
    assert sink.stdout is not None
    wan.host("a", 0).run([sys.executable, "-c", SOURCE, wan.host("b", 0).address, str(count), str(pace)])
    received, whole, half = json.loads(sink.stdout.readline())
    assert received == count
    sink.kill()
    sink.communicate()
    return whole, half


def test_a_paced_transfer_gets_its_rate_and_drops_nothing(wan: Wan) -> None:
    _, rate = transfer_rate(wan, 20_000_000, pace=RATE * 9 // 10)
    assert rate == pytest.approx(RATE * 0.9, rel=0.05)
    counters = wan.counters()["a->b"]
    assert counters.dropped_packets == 0
    assert counters.passed_bytes > 20_000_000
    assert wan.unroutable_packets() == 0


def test_a_shallow_buffer_drops_and_the_queue_is_seen(wan: Wan) -> None:
    assert transfer_rate(wan, 20_000_000)[0] <= RATE
    counters = wan.counters()["a->b"]
    assert counters.dropped_packets > 0
    assert 150_000 < counters.queue_peak_bytes <= 200_000
    times, queues = wan.queue_samples("a", "b")
    assert max(queues) == counters.queue_peak_bytes
    assert list(times) == sorted(times)
    assert all(0 <= queue <= 200_000 for queue in queues)
    history = wan.history("a", "b")
    p50, p99 = history.queue_quantiles([0.5, 0.99], times[0], times[-1])
    assert p50 <= p99 <= 200_000
    assert history.drops(times[0], times[-1]) == counters.dropped_packets
    # What has left the queue is on its way or there.
    assert counters.carried_bytes >= counters.passed_bytes
    assert 0 < history.used(times[0], times[-1]) <= 1


def test_one_way_delay(wan: Wan) -> None:
    delays = one_way_delays(wan.host("a", 0), wan.host("b", 0), 100, 0, 0.005)
    assert len(delays) == 100
    assert delays[0] >= DELAY_NS
    assert delays[50] < DELAY_NS + 2_000_000


def test_hosts_of_one_site_are_close_and_sites_without_a_link_are_cut(wan: Wan) -> None:
    # Well under the WAN's delay even on a loaded machine; docs/wan.md has the figure of an idle one.
    assert one_way_delays(wan.host("a", 0), wan.host("a", 1), 50, 0, 0.001)[25] < 2_000_000
    assert one_way_delays(wan.host("b", 0), wan.host("c", 0), 5, 0, 0.001) == []
    assert wan.unroutable_packets() == 5


def test_random_loss_and_a_cut_are_live_and_counted(wan: Wan) -> None:
    a, b = wan.host("a", 0), wan.host("b", 0)
    wan.set_link("a", "b", loss=0.2)
    arrived = len(one_way_delays(a, b, 1000, 100, 0.0005))
    # Five standard deviations around 800.
    assert 736 <= arrived <= 864
    assert wan.counters()["a->b"].lost_packets == 1000 - arrived
    wan.set_link("a", "b", loss=0.0, down=True)
    assert one_way_delays(a, b, 20, 0, 0.001) == []
    wan.set_link("a", "b", down=False)
    assert len(one_way_delays(a, b, 20, 0, 0.001)) == 20


def test_a_live_change_of_rate(wan: Wan) -> None:
    wan.set_link("a", "b", rate_bytes_per_s=RATE // 5)
    assert transfer_rate(wan, 4_000_000, pace=RATE)[0] <= RATE // 5


def test_rates_that_change_by_themselves(wan: Wan) -> None:
    """Full, then a quarter from 1 s on: the link's own account of what it could carry and did."""
    pieces = ((1_000_000_000, RATE), (1_000_000_000, RATE // 4))
    with CrossTraffic(wan, ("a", 0), ("b", 0)) as cross:
        cross.flood(RATE // 2)
        wan.set_link("a", "b", rates=RateSteps(pieces, repeat=False))
        start_ns = wan.line_origin_ns("a", "b")
        time.sleep(2.1)
        history = wan.history("a", "b")
    second = 1_000_000_000
    assert history.capacity(start_ns, start_ns + second) == pytest.approx(RATE, rel=0.01)
    assert history.capacity(start_ns + second, start_ns + 2 * second) == pytest.approx(RATE / 4, rel=0.01)
    # Unpaced by anybody: half of the fast link, all of the slow one.
    assert history.used(start_ns, start_ns + second) == pytest.approx(0.5, abs=0.1)
    assert history.used(start_ns + second + second // 10, start_ns + 2 * second) > 0.95
    assert history.drops(start_ns, start_ns + second) == 0
    assert history.drops(start_ns + second, start_ns + 2 * second) > 0


def test_a_policer_drops_without_a_queue_and_can_be_taken_away(wan: Wan) -> None:
    contract = PolicerSpec(RATE // 5, 100_000)
    wan.set_link("a", "b", policer=contract)
    before = wan.counters()["a->b"]
    with CrossTraffic(wan, ("a", 0), ("b", 0)) as cross:
        cross.flood(RATE // 2)
        time.sleep(1.0)
        policed = wan.counters()["a->b"].since(before)
        wan.set_link("a", "b", policer=None)
        before = wan.counters()["a->b"]
        time.sleep(0.5)
        free = wan.counters()["a->b"].since(before)
    assert policed.policed_packets > 0
    assert policed.dropped_packets == policed.lost_packets == 0
    share = policed.policed_bytes / (policed.policed_bytes + policed.carried_bytes)
    # Three fifths of the stream exceed the contract, but for the burst.
    assert 0.4 < share < 0.65
    assert free.policed_packets == 0
    assert free.carried_bytes > 0


def test_links_that_share_a_line_share_its_rate() -> None:
    """Two links of 25 MB/s behind a line of 10: it drops, they don't, and each keeps its own delay."""
    spec = LinkSpec(RATE, None, DELAY_NS, 200_000)
    pairs = [("a", "b"), ("a", "c")]
    shared = {"a-out": SharedSpec(tuple(pairs), 10_000_000, 100_000)}
    with Wan({"a": 2, "b": 1, "c": 1}, dict.fromkeys(pairs, spec), shared=shared) as wan, ExitStack() as stack:
        for number, (_, site) in enumerate(pairs):
            cross = stack.enter_context(CrossTraffic(wan, ("a", number), (site, 0)))
            cross.flood(8_000_000)
        time.sleep(0.3)
        before = wan.counters()
        time.sleep(1.0)
        added = {name: counters.since(before[name]) for name, counters in wan.counters().items()}
        history = wan.shared_history("a-out")
    assert added["a-out"].carried_bytes == pytest.approx(added["a-out"].capacity_bytes, rel=0.02)
    assert added["a-out"].dropped_packets > 0
    assert added["a->b"].dropped_packets == added["a->c"].dropped_packets == 0
    both = added["a->b"].carried_bytes + added["a->c"].carried_bytes
    assert both == pytest.approx(10_000_000, rel=0.1)
    assert max(history.peak_bytes) > 90_000
    with pytest.raises(WanError, match="there is no such link"):
        Wan({"a": 1, "b": 1}, {("a", "b"): spec}, shared={"x": SharedSpec((("b", "a"),), 1, 1)})


def test_cross_traffic_takes_its_part(wan: Wan) -> None:
    with CrossTraffic(wan, ("a", 1), ("b", 0)) as cross:
        cross.tcp("cubic")
        time.sleep(1.5)
        before = wan.counters()["a->b"]
        time.sleep(0.5)
        alone = wan.counters()["a->b"].since(before)
        cross.tcp("")
        time.sleep(0.3)
        before = wan.counters()["a->b"]
        time.sleep(0.3)
        assert wan.counters()["a->b"].since(before).carried_bytes < 10_000
    assert alone.carried_bytes > 0.5 * alone.capacity_bytes


def test_a_trace_sets_the_rate(tmp_path: Path) -> None:
    trace = tmp_path / "link.trace"
    write_trace(trace, [8e6, 4e6], step_ms=100)
    forward = LinkSpec(None, trace, 5_000_000, 2_000_000)
    back = LinkSpec(RATE, None, 5_000_000, 200_000)
    with Wan({"a": 1, "b": 1}, {("a", "b"): forward, ("b", "a"): back}, mtu=1500) as wan:
        assert transfer_rate(wan, 6_000_000)[0] == pytest.approx(6e6, rel=0.1)


def test_sysctls_are_per_wan_and_live(wan: Wan) -> None:
    host = wan.host("a", 1)
    read = [sys.executable, "-c", "print(open('/proc/sys/net/ipv4/tcp_slow_start_after_idle').read())"]
    before = Path("/proc/sys/net/ipv4/tcp_slow_start_after_idle").read_text()
    assert host.run(read).stdout.strip() == "1"
    wan.set_slow_start_after_idle(False)
    assert host.run(read).stdout.strip() == "0"
    assert Path("/proc/sys/net/ipv4/tcp_slow_start_after_idle").read_text() == before


def test_the_congestion_control_of_connections_between_sites_is_per_wan_and_live(wan: Wan) -> None:
    serve = (
        "import socket; server = socket.create_server(('0.0.0.0', 5002)); print(flush=True); peer = server.accept()[0];"
        "print(peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b'\\0').decode())"
    )
    connect = (
        f"import socket; peer = socket.create_connection(('{wan.host('b', 0).address}', 5002));"
        "print(peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b'\\0').decode())"
    )
    default = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    for name in ("cubic", "reno", None):
        wan.set_congestion_control(name)
        server = wan.host("b", 0).popen([sys.executable, "-c", serve], stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        server.stdout.readline()
        near = wan.host("a", 0).run([sys.executable, "-c", connect]).stdout.strip()
        far = server.stdout.readline().strip()
        server.wait(10)
        server.stdout.close()
        assert near == far == (name or default)


def test_an_inherited_socket_stays_in_the_outer_namespace(wan: Wan) -> None:
    import socket

    server = socket.create_server(("127.0.0.1", 0))
    script = f"import socket; s = socket.socket(fileno={server.fileno()}); c, _ = s.accept(); c.sendall(b'from a host')"
    process = wan.host("a", 0).popen([sys.executable, "-c", script], pass_fds=(server.fileno(),))
    with server, socket.create_connection(server.getsockname(), timeout=10) as peer:
        assert peer.recv(100) == b"from a host"
    assert process.wait(timeout=10) == 0


def test_misuse_is_named(wan: Wan) -> None:
    with pytest.raises(WanError, match="no host a-7"):
        wan.host("a", 7)
    with pytest.raises(WanError, match=r"no link b->c; the links are a->b"):
        wan.set_link("b", "c", down=True)
    with pytest.raises(WanError, match=r"ended with status 127.*no-such-command"):
        wan.host("a", 0).run(["no-such-command"])
    wan.close()
    with pytest.raises(WanError, match="closed"):
        wan.counters()
