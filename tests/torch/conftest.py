"""Agents and worlds that the tests with torch share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from proxyd.cli.cluster import Cluster, LinkFigures

if TYPE_CHECKING:
    from .worlds import World


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A coordinator and agents at two sites, on loopback."""
    with Cluster({"a": 1, "b": 1}, links={("a", "b"): LinkFigures(), ("b", "a"): LinkFigures()}) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def world(cluster: Cluster) -> Iterator[World]:
    """Four ranks, 0 and 1 at site a, 2 and 3 at site b; the default group is proxyd's."""
    from .worlds import World

    a, b = cluster.agent("a").socket, cluster.agent("b").socket
    with World(4, [a, a, b, b]) as world:
        yield world
