"""Over TCP the token speaks for the trainer: one without the right token is refused at once, with words."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import proxyd_client
from proxyd.cli.cluster import Cluster

BOUND_S = 3.0
"""For an answer that waiting can't improve; ``timeout_s`` is longer."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster({"a": 1}, agent={"gateway_listen": "127.0.0.1:0"}) as one:
        yield one


def gateway(cluster: Cluster) -> str:
    return f"tcp://{cluster.agent('a').facts['gateway_address']}"


def use_token(monkeypatch: pytest.MonkeyPatch, path: Path, content: str) -> None:
    path.write_text(content)
    monkeypatch.setenv("PROXYD_TOKEN_FILE", str(path))


def connects(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the right token a message goes through, whatever happened before."""
    monkeypatch.setenv("PROXYD_TOKEN_FILE", str(cluster.token_file))
    with (
        proxyd_client.connect("job", 0, socket=gateway(cluster)) as one,
        proxyd_client.connect("job", 1, socket=gateway(cluster)) as two,
    ):
        handle = one.isend(np.arange(100_000, dtype=np.uint8), dst=1)
        assert np.array_equal(two.recv(src=0, timeout_s=10).array, np.arange(100_000, dtype=np.uint8))
        handle.wait(timeout_s=10)


@pytest.mark.parametrize("what", ["wrong", "none"])
def test_a_trainer_with_another_token_is_refused_at_once(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, what: str
) -> None:
    if what == "wrong":
        use_token(monkeypatch, tmp_path / "token", os.urandom(32).hex())
    begun_s = time.monotonic()
    with pytest.raises(proxyd_client.ConfigError) as caught:
        proxyd_client.connect("job", 0, socket=gateway(cluster), timeout_s=20)
    assert time.monotonic() - begun_s < BOUND_S
    text = str(caught.value)
    assert gateway(cluster) in text
    assert "token" in text
    assert "PROXYD_TOKEN_FILE" in text or "token_file" in text, "it says where to put the right one"
    assert cluster.token_file.read_text().strip() not in text
    connects(cluster, monkeypatch)
    log = cluster.agent("a").last_words()
    assert "token" in log, "the agent's log tells of it"
    assert cluster.token_file.read_text().strip() not in log
