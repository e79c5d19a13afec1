"""What the kernel makes of a ceiling that changes, and that agents' ways around it work: real TCP, a long link.

Found as dips of the carried rate while the estimate and the pace were right; each is a fact about Linux that holds
proxyd back only if it is forgotten.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest

from proxyd.core.striping import least_pace
from proxyd.wan import LinkSpec, Wan, available

REASON = available()
pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(REASON is not None and os.environ.get("CI") != "true", reason=f"no emulated WAN: {REASON}"),
    pytest.mark.timeout(60),
]
PROBE = str(Path(__file__).with_name("kernel_probe.py"))
RATE, ONE_WAY_NS, MTU = 50_000_000, 30_000_000, 9000
BDP = 3_000_000


@pytest.fixture
def wan() -> Iterator[Wan]:
    spec = LinkSpec(RATE, None, ONE_WAY_NS, BDP)
    with Wan({"a": 1, "b": 1}, {("a", "b"): spec, ("b", "a"): spec}, mtu=MTU, slow_start_after_idle=False) as wan:
        yield wan


def probe(wan: Wan, port: int, what: str, value: int) -> dict[str, Any]:
    """Run one kind of sender on a, with a receiver of its own on b."""
    there = wan.host("b", 0)
    receiver = there.popen([sys.executable, PROBE, "receive", str(port)], stdout=PIPE, text=True)
    try:
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == "listening\n"
        argv = [sys.executable, PROBE, "send", str(port), there.address, what, str(value)]
        sender = wan.host("a", 0).popen(argv, stdin=PIPE, stdout=PIPE, text=True)
        assert sender.stdin is not None
        assert sender.stdout is not None
        line = sender.stdout.readline()
        if line == "lossy\n":
            wan.set_link("a", "b", loss=0.0)
            line = sender.communicate("go on\n", timeout=20)[0]
        result: dict[str, Any] = json.loads(line)
        assert sender.wait(10) == 0
    finally:
        receiver.kill()
        receiver.communicate()
    return result


def test_a_window_that_losses_left_small_is_reopened(wan: Wan) -> None:
    windows = {}
    for port, reopen in ((5001, 0), (5002, 1)):
        wan.set_link("a", "b", loss=0.02)
        seen = probe(wan, port, "narrow_window", reopen)
        windows[reopen] = seen["window_bytes"]
        assert seen["slow_start_was_over"]
        assert seen["congestion_control"] == "cubic"
        if reopen and not seen["reopened"] and os.environ.get("CI") != "true":
            pytest.skip("bbr may not be used here")
        assert seen["slow_start_goes_on"] is bool(reopen)
    assert windows[1] > 40_000_000 * 0.06, "wide enough for the ceiling within a second"
    assert windows[1] > 2 * windows[0]


def test_a_ceiling_that_rises_over_a_silence_acts_at_once_when_it_was_lifted_before(wan: Wan) -> None:
    """Else it acts with the first acknowledgement: one round trip late, at the rate of the last slot's end."""
    kept, lifted = probe(wan, 5001, "raised_after_silence", 0), probe(wan, 5002, "raised_after_silence", 1)
    assert lifted["left_bytes"] > 4 * kept["left_bytes"], f"{lifted} against {kept} within 45 ms"


def test_a_ceiling_is_never_so_low_that_it_can_not_be_taken_back(wan: Wan) -> None:
    """The wait for two packets at the old ceiling goes on under the new one."""
    floor = least_pace(MTU - 52, RATE)
    assert probe(wan, 5001, "raised_in_time", floor)["seconds"] < 0.5
    assert probe(wan, 5002, "raised_in_time", 4000)["seconds"] > 2, "if this fails, the kernel has become better"
