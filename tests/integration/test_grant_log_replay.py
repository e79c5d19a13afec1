"""The grant log of a real coordinator: written beside the work, it replays and tells why."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from proxyd.cli.cluster import Cluster, LinkFigures
from proxyd.cli.main import main
from proxyd.runtime.grant_log import open_log
from proxyd.runtime.replay import replay
from tests.integration.relay_rig import content, endpoints

NBYTES = 4 << 20


def why(capsys: pytest.CaptureFixture[str], *options: str) -> Any:
    """What ``proxyd why`` says for programs, times rounded to microseconds."""
    capsys.readouterr()
    assert main(["why", "--json", *options]) == 0
    return json.loads(capsys.readouterr().out, parse_float=lambda text: round(float(text), 6))


def burst(cluster: Cluster, rounds: int) -> None:
    """Three trainers at a send to one at b at once, ``rounds`` times."""
    places = [(cluster.agent("a", n % 2), n) for n in range(3)]
    with endpoints((cluster.agent("b"), 9), *places, job="log") as (receiver, *senders):
        for tag in range(rounds):
            handles = [sender.isend(content(NBYTES, rank), dst=9, tag=tag) for rank, sender in enumerate(senders)]
            for rank in range(3):
                message = receiver.recv(src=rank, tag=tag, timeout_s=30)
                assert np.array_equal(message.array, content(NBYTES, rank))
                del message
            for handle in handles:
                handle.wait(timeout_s=30)


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_a_real_run_replays(end: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "grants.log"
    figures = LinkFigures(capacity="2Gbit", rtt="1ms", buffer="1bdp")
    links = {("a", "b"): figures, ("b", "a"): figures}
    with Cluster({"a": 2, "b": 1}, links=links, coordinator={"grant_log": str(path)}) as cluster:
        burst(cluster, 4)
        time.sleep(0.5)  # more than what is written later at most
        transfer = why(capsys, "--log", str(path))[0]["transfer"]
        live = why(capsys, transfer, "--coordinator", cluster.coordinator.address)
        cluster.kill(cluster.coordinator, end)
    result = replay(open_log(path))
    assert result.difference is None
    assert result.grants >= 4 * 3
    assert main(["replay", str(path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["identical"] is True
    assert told["grants"] == result.grants
    # The same story from the log; its clock ends with its last event, not with the question.
    logged = why(capsys, transfer, "--log", str(path))
    assert logged == live
    assert live["over"] is True
    assert live["wanted_bytes"] == live["granted_bytes"] == NBYTES
    assert live["waited_seconds"] < live["total_seconds"]
