"""A local agent and endpoints on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import proxyd_client
from proxyd_client import Endpoint
from tests.fakes.fake_agent import FakeAgent

Connect = Callable[..., Endpoint]


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PROXYD_SOCKET", raising=False)
    monkeypatch.delenv("PROXYD_TOKEN_FILE", raising=False)


@pytest.fixture
def start_agent(tmp_path: Path) -> Iterator[Callable[..., FakeAgent]]:
    """Starts an agent with the given knobs; stopped at the end."""
    with ExitStack() as stack:
        yield lambda **knobs: stack.enter_context(FakeAgent(tmp_path, **knobs))


@pytest.fixture
def agent(start_agent: Callable[..., FakeAgent]) -> FakeAgent:
    return start_agent()


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Connects ranks of job ``job``; closed at the end without lingering."""
    endpoints: list[Endpoint] = []

    def connect(agent: FakeAgent, rank: int, *, tcp: bool = False, **options: Any) -> Endpoint:
        address = agent.tcp_address if tcp else agent.path
        endpoints.append(proxyd_client.connect("job", rank, socket=address, **options))
        return endpoints[-1]

    yield connect
    for endpoint in endpoints:
        endpoint.close(linger_s=0)
