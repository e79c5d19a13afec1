"""Real daemons for the end-to-end tests. See :mod:`tests.e2e.rig` for what is proven at the end of each."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from proxyd.cli.cluster import Cluster, LinkFigures
from tests.e2e.rig import Net, end_well

_JOBS = itertools.count(1)
_FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    if report.when == "call":
        item.stash[_FAILED] = report.failed
    return report  # type: ignore[return-value] # a wrapper's result is pytest's


def _keep_logs(request: pytest.FixtureRequest, clusters: list[Cluster]) -> None:
    """A failed test's daemons are heard before their directory goes: whole in build/logs, their end in the report."""
    kept = Path("build/logs") / request.node.name.replace("/", "_")[:80]
    kept.mkdir(parents=True, exist_ok=True)
    for cluster in clusters:
        for member in cluster.members:
            shutil.copy(member.log_path, kept / member.log_path.name)
            print(f"--- {member.label}, exit code {member.process.poll()}, all of it in {kept}\n{member.last_words()}")


@pytest.fixture(scope="session")
def loopback(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A coordinator, two agents at site a (with gateways) and one at b, everything on 127.0.0.1; shared by all tests
    that leave it as it was."""
    with Cluster(
        {"a": 2, "b": 1},
        links={("a", "b"): LinkFigures(), ("b", "a"): LinkFigures()},
        agent={"gateway_listen": "127.0.0.1:0", "resolve_timeout": "4s"},
    ) as cluster:
        yield cluster
        end_well(cluster)


@pytest.fixture(scope="session", autouse=True)
def _faulthandler() -> None:
    """Should a daemon hang at its end, SIGABRT makes it say where."""
    os.environ["PYTHONFAULTHANDLER"] = "1"


def _job(request: pytest.FixtureRequest) -> str:
    return f"{request.node.name[:60]}-{next(_JOBS)}"


@pytest.fixture
def net(loopback: Cluster, request: pytest.FixtureRequest) -> Iterator[Net]:
    """This test's job on the shared cluster; closed, and proven, at its end."""
    one = Net(loopback, _job(request))
    try:
        yield one
        one.prove()
    finally:
        one.close()


@pytest.fixture
def start(request: pytest.FixtureRequest) -> Iterator[Callable[..., Net]]:
    """Starts a cluster of the test's own, for what would harm others; arguments are Cluster's."""
    nets: list[Net] = []
    with ExitStack() as stack:

        def start(sites: dict[str, int] | None = None, **options: Any) -> Net:
            cluster = stack.enter_context(Cluster(sites or {"a": 1, "b": 1}, **options))
            nets.append(Net(cluster, _job(request)))
            stack.callback(nets[-1].close)
            return nets[-1]

        yield start
        failed = request.node.stash.get(_FAILED, False)
        try:
            for one in nets:
                one.prove()
            for one in nets:
                one.close()
                end_well(one.cluster)
        except BaseException:
            failed = True
            raise
        finally:
            if failed:
                _keep_logs(request, [one.cluster for one in nets])
