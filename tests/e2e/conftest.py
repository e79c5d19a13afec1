"""Real daemons for the end-to-end tests. See :mod:`tests.e2e.rig` for what is proven at the end of each."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from proxyd.cli.cluster import Cluster, LinkFigures
from tests.e2e.rig import Net, end_well

_JOBS = itertools.count(1)


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
        for one in nets:
            one.prove()
        for one in nets:
            one.close()
            end_well(one.cluster)
