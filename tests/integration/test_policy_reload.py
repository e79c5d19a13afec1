"""A running coordinator reads its policy again: by signal, by command, and never a wrong one."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from proxyd.cli.cluster import Cluster, LinkFigures
from proxyd.cli.main import main
from proxyd.v1 import admin_pb2
from proxyd.v1.admin_pb2_grpc import AdminStub

POLICY = """
[[job]]
name = "llama"
weight = 3
floor = "10Mbit"
"""


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    links = {("a", "b"): LinkFigures("400Mbit", "60ms", "0.1bdp", 9000)}
    with Cluster({"a": 0, "b": 0}, links=links, coordinator_extra=POLICY) as one:
        yield one


@pytest.fixture
def file(cluster: Cluster) -> Path:
    return cluster.directory / f"{cluster.coordinator.label}.toml"


def policy_of(cluster: Cluster) -> admin_pb2.GetPolicyResponse:
    with grpc.insecure_channel(cluster.coordinator_socket) as channel:
        return AdminStub(channel).GetPolicy(admin_pb2.GetPolicyRequest(), timeout=5)


def pace_of(cluster: Cluster) -> int:
    with grpc.insecure_channel(cluster.coordinator_socket) as channel:
        status = AdminStub(channel).Status(admin_pb2.StatusRequest(), timeout=5)
    return next(link.pace_bytes_per_s for link in status.links if link.link.src_site == "a")


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def capped(text: str, cap: str) -> str:
    """The link a->b with a cap."""
    return text.replace('from = "a"\n', f'from = "a"\ncap = "{cap}"\n', 1)


def test_sighup_applies_a_good_file_and_keeps_the_old_one_when_it_is_bad(cluster: Cluster, file: Path) -> None:
    assert [(job.name, job.weight, job.floor_bytes_per_s) for job in policy_of(cluster).jobs] == [
        ("llama", 3, 1_250_000)
    ]
    before, text = pace_of(cluster), file.read_text()
    file.write_text(capped(text, "100Mbit").replace("weight = 3", "weight = 5"))
    cluster.coordinator.process.send_signal(signal.SIGHUP)
    until(lambda: policy_of(cluster).reloads == 1)
    policy = policy_of(cluster)
    assert policy.jobs[0].weight == 5
    assert next(link.limit_bytes_per_s for link in policy.links if link.link.src_site == "a") == 12_500_000
    assert pace_of(cluster) <= 12_500_000 < before

    bad = capped(text, "100Mbit").replace('floor = "10Mbit"', 'floor = "101Mbit"')
    file.write_text(bad)
    cluster.coordinator.process.send_signal(signal.SIGHUP)
    until(lambda: policy_of(cluster).reloads_refused == 1)
    line = bad.splitlines().index('floor = "101Mbit"') + 1
    assert policy_of(cluster).jobs[0].weight == 5
    assert pace_of(cluster) <= 12_500_000
    log = cluster.coordinator.log_path.read_text()
    assert f"{file.name}:{line}: [[job]] floor: the floors of all jobs sum to 101 Mbit/s" in log
    assert "the old one stays in force" in log
    assert cluster.coordinator.process.poll() is None


def test_the_commands_show_and_reload(cluster: Cluster, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    address = ["--coordinator", cluster.coordinator_socket]
    assert main(["policy", "show", *address]) == 0
    shown = capsys.readouterr().out
    assert "job llama: weight 3, floor 10 Mbit/s, cap none" in shown
    assert "class sync: all agents at once, at equal shares" in shown
    text = file.read_text()
    file.write_text(text.replace('capacity = "400Mbit"', 'capacity = "500Mbit"').replace("weight = 3", "weight = 2"))
    assert main(["policy", "reload", *address]) == 0
    out = capsys.readouterr().out
    assert "the policy was applied" in out
    assert "needs a restart, and stays as it was: [[link]] a->b capacity" in out
    file.write_text(text.replace("weight = 3", "weight = 0"))
    assert main(["policy", "reload", *address]) == 2
    assert "[[job]] weight: 0 is not a weight" in capsys.readouterr().err
    assert main(["policy", "show", "--json", *address]) == 0
    assert json.loads(capsys.readouterr().out)["jobs"] == [
        {"name": "llama", "weight": 2.0, "floor_bytes_per_s": 1_250_000, "cap_bytes_per_s": 0}
    ]
