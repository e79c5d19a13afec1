"""A real Prometheus scrapes a real run of two sites: every expression of the dashboards and rules finds something.

The scrape configuration and the rules are those of deploy/, with other targets and shorter intervals.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import threading
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import proxyd_client
from proxyd.cli.certificates import Authority, settings
from proxyd.cli.cluster import Cluster, LinkFigures, Member
from proxyd_client.errors import ProxydError
from tests.e2e.rig import MIB, until
from tests.unit.test_metrics_doc import documented

yaml = pytest.importorskip("yaml", reason="comes with the ha extra")

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "deploy" / "prometheus" / "proxyd.rules.yml"
INTERVAL_S = 1
BOTTLENECK = '[[bottleneck]]\nsite = "a"\ndirection = "egress"\ncapacity = "400Mbit"\n'
VARIABLES = {"link": ".*", "agent": ".*", "class": ".*", "training_job": ".*", "__rate_interval": "10s"}


def program(name: str) -> str:
    """In CI it is there."""
    found = shutil.which(name, path=ROOT / "build" / "tools") or shutil.which(name)
    if found is None:
        assert os.environ.get("CI") != "true", "tools/prepare.sh tests did not bring it"
        pytest.skip(f"{name} is not installed (tools/prepare.sh tests fetches it)")
    return found


def dashboard_queries() -> list[str]:
    """All of them, with each variable at "all"."""
    found = []
    for path in sorted((ROOT / "deploy" / "grafana" / "dashboards").glob("*.json")):
        board = json.loads(path.read_text())
        for panel in board["panels"]:
            found += [target["expr"] for target in panel.get("targets", ())]
        asked = [one["query"] for one in board["templating"]["list"] if one["type"] == "query"]
        # label_values(family, label)
        found += [query.removeprefix("label_values(").partition(",")[0] for query in asked]
    for name, value in VARIABLES.items():
        found = [query.replace(f"${name}", value) for query in found]
    return found


def recorded_queries() -> list[str]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule["record"] for group in groups for rule in group["rules"] if "record" in rule]


class Prometheus:
    """One that scrapes a cluster."""

    def __init__(self, cluster: Cluster, directory: Path) -> None:
        config = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": f"{INTERVAL_S}s", "evaluation_interval": f"{INTERVAL_S}s"}
        config["rule_files"] = [str(RULES)]
        jobs = {job["job_name"]: job for job in config["scrape_configs"]}
        assert set(jobs) == {"proxyd-coordinator", "proxyd-agent"}
        jobs["proxyd-coordinator"]["static_configs"] = [{"targets": [self.target(cluster.coordinator)]}]
        jobs["proxyd-agent"]["static_configs"] = [{"targets": [self.target(one) for one in cluster.agents]}]
        path = directory / "prometheus.yml"
        path.write_text(yaml.safe_dump(config))
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._log = (directory / "prometheus.log").open("wb")
        self._process = subprocess.Popen(
            [
                program("prometheus"),
                f"--config.file={path}",
                f"--storage.tsdb.path={directory / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        self.log_path = directory / "prometheus.log"

    @staticmethod
    def target(member: Member) -> str:
        """As Prometheus names it: its instance."""
        return urllib.parse.urlsplit(member.metrics).netloc

    def get(self, path: str, **query: str) -> Any:
        with self._opener.open(f"{self._url}{path}?{urllib.parse.urlencode(query)}", timeout=10) as response:
            return json.load(response)["data"]

    def query(self, expr: str) -> list[Any]:
        """What it finds now. Raises HTTPError for an expression that it doesn't understand."""
        return list(self.get("/api/v1/query", query=expr)["result"])

    def ready(self) -> bool:
        assert self._process.poll() is None, self.log_path.read_text()[-2000:]
        with contextlib.suppress(OSError):
            return self._opener.open(f"{self._url}/-/ready", timeout=5).status == 200
        return False

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(20)
        self._log.close()


@contextlib.contextmanager
def traffic(cluster: Cluster, job: str) -> Iterator[None]:
    """Two ranks that send each other messages of all classes and sizes, announced, until the end."""
    sockets = [cluster.agent(site).socket for site in ("a", "b")]
    ranks = [proxyd_client.connect(job, number, socket=path) for number, path in enumerate(sockets)]
    stop = threading.Event()
    problems: list[BaseException] = []

    def run(rank: int) -> None:
        me, other = ranks[rank], 1 - rank
        sizes = {"pipeline": MIB, "sync": MIB, "bulk": 16_000}
        try:
            while not stop.is_set():
                handles = []
                for tag, (traffic, size) in enumerate(sizes.items()):
                    me.announce(other, tag, nbytes=size, traffic=traffic)
                    handles.append(me.isend(np.zeros(size, np.uint8), other, tag, traffic=traffic))
                for tag in range(len(sizes)):
                    me.recv(other, tag, timeout_s=20)
                for handle in handles:
                    handle.wait(20)
                stop.wait(0.1)  # it computes
        except ProxydError as error:
            if not stop.is_set():
                problems.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for one in ranks:
            one.close(0)
        for thread in threads:
            thread.join()
    if problems:
        raise problems[0]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    authority = Authority(tmp_path / "ca.pem")
    each = {(site, 0): settings(authority.agent(tmp_path / site, site)) for site in ("a", "b")}
    each["a", 0] |= {"workers": 2}  # its series have one label more, and are found all the same
    figures = LinkFigures("400Mbit", "2ms", "1bdp")
    links = {("a", "b"): figures, ("b", "a"): figures}
    with Cluster({"a": 1, "b": 1}, links=links, each_agent=each, coordinator_extra=BOTTLENECK) as one:
        yield one


@pytest.mark.timeout(120)
def test_every_expression_finds_something_and_who_ends_is_gone_with_the_next_scrape(
    cluster: Cluster, tmp_path: Path
) -> None:
    wanted = [*dashboard_queries(), *recorded_queries()]
    assert len(wanted) > 80
    prometheus = Prometheus(cluster, tmp_path)
    try:
        with traffic(cluster, "gpt"):
            host, _, port = cluster.agent("b").data_address.rpartition(":")
            with socket.create_connection((host, int(port))) as stranger:  # a proof that fails has its series, too
                stranger.sendall(bytes(64))
                assert stranger.recv(1) in (b"", b"\x15"), "it speaks no TLS"
            until(prometheus.ready, "Prometheus is ready", 20)

            def missing() -> list[str]:
                return [expr for expr in wanted if not prometheus.query(expr)]

            left: list[str] = wanted

            def all_found() -> bool:
                nonlocal left
                left = [expr for expr in left if not prometheus.query(expr)]
                return not left

            with contextlib.suppress(AssertionError):
                until(all_found, "", 40)
            assert not left, f"{len(left)} expressions find nothing: {left}"
            assert missing() == [], "and go on finding it"
            rules_are_well(prometheus)
            what_is_exported_is_documented_and_well_formed(cluster)
            [[_, waited]] = [one["value"] for one in prometheus.query("sum(rate(proxyd_job_wait_seconds_total[10s]))")]
            assert 0 < float(waited) <= 2.2, "two ranks wait two seconds in a second at most"
        who_ends_is_gone(cluster, prometheus)
    finally:
        prometheus.close()


def rules_are_well(prometheus: Prometheus) -> None:
    """Each was evaluated without an error, and of the alerts only those fire that should in such a run."""
    rules = [rule for group in prometheus.get("/api/v1/rules")["groups"] for rule in group["rules"]]
    assert {rule["name"]: rule.get("lastError") for rule in rules if rule["health"] != "ok"} == {}
    raised = {rule["name"] for rule in rules if rule.get("alerts")}
    # The kernel's setting is the machine's. A second's worth of queue or loss on a busy machine isn't for minutes.
    assert not raised & {"ProxydNoActiveCoordinator", "ProxydTargetDown", "ProxydAgentAlone", "ProxydTransfersFail"}


def what_is_exported_is_documented_and_well_formed(cluster: Cluster) -> None:
    sections = documented()
    for member in cluster.members:
        side = "Coordinator" if member is cluster.coordinator else "Agent"
        rows = sections["Both"] | sections[side] | sections["Workers"]
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(member.metrics, timeout=10) as response:
            text = response.read().decode()
        done = subprocess.run(
            [program("promtool"), "check", "metrics"],
            input=text,
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        )
        assert (done.returncode, done.stdout + done.stderr) == (0, ""), member.label
        named = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE proxyd_")}
        assert named <= set(rows), member.label


def who_ends_is_gone(cluster: Cluster, prometheus: Prometheus) -> None:
    """Trainers with the next scrape; a daemon's series with the first one that fails."""

    def within(scrapes: int, condition: Callable[[], bool], what: str) -> None:
        # One scrape, and what the loaded machine adds.
        until(condition, what, scrapes * INTERVAL_S + 10)

    within(1, lambda: not prometheus.query('proxyd_job_clients{training_job="gpt"}'), "the job's series are gone")
    assert not prometheus.query('proxyd_job_wait_seconds_total{training_job="gpt"}')
    agent = cluster.agent("b")
    instance = prometheus.target(agent)
    cluster.kill(agent)
    within(1, lambda: prometheus.query(f'up{{instance="{instance}"}}')[0]["value"][1] == "0", "the agent is down")
    assert not prometheus.query(f'proxyd_clients{{instance="{instance}"}}')
    within(3, lambda: bool(prometheus.query('ALERTS{alertname="ProxydTargetDown"}')), "the alert is pending")
