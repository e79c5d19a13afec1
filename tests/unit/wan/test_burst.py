from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxyd.wan import WanError
from proxyd.wan import burst as burst_module
from proxyd.wan.burst import busy_seconds, ideal_cct_seconds, payload_rate, summarise, wire_bytes

WORKER = str(Path(burst_module.__file__).with_name("_worker.py"))


def test_ideal_of_the_demo() -> None:
    """8 x 8 MiB at 400 Mbit/s, one way 30 ms: 1.38 s."""
    assert ideal_cct_seconds(8, 8 << 20, 50_000_000, 30_000_000, 9000) == pytest.approx(1.380, abs=0.001)


@given(st.integers(1, 10**9), st.integers(576, 9000))
def test_wire_bytes_adds_one_header_per_packet(tensor_bytes: int, mtu: int) -> None:
    headers, rest = divmod(wire_bytes(tensor_bytes, mtu) - tensor_bytes, 52)
    assert rest == 0
    assert (headers - 1) * (mtu - 52) < tensor_bytes <= headers * (mtu - 52)


def test_payload_rate_leaves_room_for_headers() -> None:
    assert payload_rate(50_000_000, 1500) == 48_266_666
    assert wire_bytes(payload_rate(50_000_000, 9000), 9000) == pytest.approx(50_000_000, abs=9000)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=300))
def test_summary_is_ordered_and_within_the_data(values: list[float]) -> None:
    summary = summarise(values)
    assert min(values) <= summary["p50"] <= summary["p95"] <= summary["p99"] <= summary["max"] == max(values)
    assert min(values) <= summary["mean"] * (1 + 1e-12) + 1e-12
    assert summary["mean"] <= max(values) * (1 + 1e-12) + 1e-12


def test_summary_interpolates() -> None:
    assert summarise([4.0, 1.0, 3.0, 2.0]) == pytest.approx(
        {"mean": 2.5, "p50": 2.5, "p95": 3.85, "p99": 3.97, "max": 4.0}
    )
    with pytest.raises(WanError, match="nothing to summarise"):
        summarise([])


def test_busy_time_counts_overlaps_once() -> None:
    assert busy_seconds([(0, 10), (5, 20), (30, 40), (32, 33)]) == 30 / 1e9


@pytest.fixture
def pair() -> tuple[subprocess.Popen[str], subprocess.Popen[str]]:  # type: ignore[misc]
    """A receiver and a sender on loopback."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    base = [sys.executable, "-I", "-S", WORKER]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    receiver = subprocess.Popen([*base, "receive", str(port)], **pipes)  # type: ignore[call-overload]
    assert json.loads(receiver.stdout.readline()) == {"event": "listening"}
    sender = subprocess.Popen([*base, "send", "7"], **pipes)  # type: ignore[call-overload]
    sender.stdin.write(
        json.dumps(
            {"op": "connect", "address": "127.0.0.1", "port": port, "congestion": "reno", "notsent_lowat_bytes": 16384}
        )
        + "\n"
    )
    assert json.loads(sender.stdout.readline()) == {"event": "connected"}
    yield receiver, sender
    for process in (receiver, sender):
        process.kill()
        process.communicate()


@pytest.mark.skipif(not os.path.exists("/proc/sys/net/ipv4/tcp_allowed_congestion_control"), reason="needs Linux TCP")
def test_a_worker_pair_carries_messages_of_any_size(
    pair: tuple[subprocess.Popen[str], subprocess.Popen[str]],
) -> None:
    receiver, sender = pair
    assert sender.stdin is not None
    assert sender.stdout is not None
    assert receiver.stdout is not None
    for sequence, size in enumerate((1, 0, 3_000_000, 65_536)):
        now = time.monotonic_ns()
        order = {"op": "send", "sequence": sequence, "bytes": size, "at_ns": now, "leaving_bytes": 0}
        sender.stdin.write(json.dumps(order) + "\n")
        got = json.loads(receiver.stdout.readline())
        assert (got["event"], got["sender"], got["sequence"], got["bytes"]) == ("received", 7, sequence, size)
        assert now <= got["first_ns"] <= got["last_ns"] <= time.monotonic_ns()
        assert json.loads(sender.stdout.readline()) == {"event": "leaving", "sequence": sequence}
        assert json.loads(sender.stdout.readline())["event"] == "sent"
    sender.stdin.write('{"op": "info"}\n')
    info = json.loads(sender.stdout.readline())
    assert info["congestion"] == "reno"
    assert info["cwnd_packets"] > 0
    assert info["retransmits"] >= 0
