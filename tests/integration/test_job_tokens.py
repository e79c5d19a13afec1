"""Trainers of a job with a token prove it, on the socket and over TCP; everybody else is told what to do."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import proxyd_client
from proxyd.cli.cluster import AgentMember, Cluster
from proxyd.cli.main import main
from proxyd.cli.scrape import scrape
from tests.integration.relay_rig import until

BOUND_S = 3.0
"""For an answer that waiting can't improve; ``timeout_s`` is longer."""


class Rig:
    def __init__(self, directory: Path) -> None:
        self.secret = os.urandom(32).hex()
        self.file = directory / "llama.token"
        self.write(self.secret)
        self.cluster = Cluster(
            {"a": 1},
            agent={"gateway_listen": "127.0.0.1:0"},
            agent_extra=f'[[job]]\nname = "llama"\ntoken_file = "{self.file}"\n[[job]]\nname = "free"\n',
            directory=directory,
        )

    def write(self, secret: str) -> None:
        self.file.write_text(secret + "\n")
        self.file.chmod(0o640)

    @property
    def agent(self) -> AgentMember:
        return self.cluster.agent("a")

    def way(self, name: str) -> str:
        return self.agent.socket if name == "socket" else f"tcp://{self.agent.facts['gateway_address']}"

    def failed_proofs(self, proof: str) -> float:
        return scrape(self.agent.metrics).total("proxyd_failed_proofs_total", port="client", proof=proof)

    def reload(self) -> None:
        before = self.agent.last_words().count("configuration read again")
        self.agent.process.send_signal(signal.SIGHUP)
        until(lambda: self.agent.last_words().count("configuration read again") > before)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    one = Rig(tmp_path_factory.mktemp("rig"))
    with one.cluster:
        yield one
        assert not one.cluster.deaths()


def exchange(one: proxyd_client.Endpoint, two: proxyd_client.Endpoint) -> None:
    handle = one.isend(np.arange(100_000, dtype=np.uint8), dst=two.rank)
    assert np.array_equal(two.recv(src=one.rank, timeout_s=10).array, np.arange(100_000, dtype=np.uint8))
    handle.wait(timeout_s=10)


def works(rig: Rig, way: str, job: str, token: str | bytes | None) -> None:
    with (
        proxyd_client.connect(job, 0, socket=rig.way(way), token=token) as one,
        proxyd_client.connect(job, 1, socket=rig.way(way), token=token) as two,
    ):
        exchange(one, two)


def refusal(rig: Rig, way: str, job: str, token: str | None) -> str:
    begun_s = time.monotonic()
    with pytest.raises(proxyd_client.ConfigError) as caught:
        proxyd_client.connect(job, 0, socket=rig.way(way), token=token, timeout_s=20)
    assert time.monotonic() - begun_s < BOUND_S
    return str(caught.value)


@pytest.mark.parametrize("way", ["socket", "tcp"])
def test_the_jobs_token_and_no_other_opens(rig: Rig, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    site = rig.cluster.token_file.read_text().strip()
    before = rig.failed_proofs("job_token")
    texts = [refusal(rig, way, "llama", token) for token in (None, site, os.urandom(32).hex())]
    assert "job llama needs its own token at this agent, and yours is missing" in texts[0]
    for text in texts:
        assert "PROXYD_TOKEN_FILE" in text
        assert rig.secret not in text
        assert site not in text
    assert rig.failed_proofs("job_token") == before + 3
    works(rig, way, "llama", rig.secret)
    works(rig, way, "llama", f"{rig.secret}\n".encode())
    monkeypatch.setenv("PROXYD_TOKEN_FILE", str(rig.file))
    works(rig, way, "llama", None)


def test_other_jobs_are_as_before(rig: Rig) -> None:
    works(rig, "socket", "free", None)
    works(rig, "socket", "free", rig.secret)
    works(rig, "tcp", "free", rig.cluster.token_file.read_text())
    before = rig.failed_proofs("token")
    assert "token is missing or another one" in refusal(rig, "tcp", "free", rig.secret)
    assert "token is missing or another one" in refusal(rig, "tcp", "free", None)
    assert rig.failed_proofs("token") == before + 2


def test_a_reload_takes_new_tokens_and_leaves_alone_who_is_attached(rig: Rig) -> None:
    path = rig.cluster.directory / "a-0.toml"
    text = path.read_text()
    with (
        proxyd_client.connect("llama", 8, socket=rig.agent.socket, token=rig.secret) as one,
        proxyd_client.connect("free", 9, socket=rig.agent.socket),
        proxyd_client.connect("llama", 9, socket=rig.agent.socket, token=rig.secret) as two,
    ):
        old, new = rig.secret, os.urandom(32).hex()
        rig.write(new)
        works(rig, "socket", "llama", old)
        rig.reload()
        assert "another one" in refusal(rig, "socket", "llama", old)
        works(rig, "tcp", "llama", new)
        exchange(one, two)
        path.write_text(text.replace("[agent]", '[agent]\njobs = "proven"'))
        rig.reload()
        assert "job free has no token at this agent" in refusal(rig, "socket", "free", None)
        assert "needs a restart" not in rig.agent.last_words()
        rig.file.unlink()
        rig.agent.process.send_signal(signal.SIGHUP)
        until(lambda: "token_file" in rig.agent.last_words().rpartition("the old configuration stays in force")[2])
        works(rig, "socket", "llama", new)
        rig.write(old)
        path.write_text(text)
        rig.reload()
        works(rig, "socket", "llama", old)
        exchange(one, two)


def test_no_token_is_in_log_metrics_or_status(rig: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    refusal(rig, "socket", "llama", os.urandom(16).hex())
    main(["status", "--coordinator", rig.cluster.coordinator_socket])
    main(["check", "--json", str(rig.cluster.directory / "a-0.toml")])
    said = capsys.readouterr().out + rig.agent.last_words() + rig.cluster.coordinator.last_words()
    said += repr(scrape(rig.agent.metrics).__dict__)
    assert "llama" in said
    assert rig.secret not in said
    assert rig.cluster.token_file.read_text().strip() not in said


def test_after_an_agents_restart_trainers_prove_what_they_were_given(rig: Rig) -> None:
    with (
        proxyd_client.connect("llama", 8, socket=rig.agent.socket, token=rig.secret) as one,
        proxyd_client.connect("llama", 9, socket=rig.agent.socket, token=rig.secret) as two,
    ):
        exchange(one, two)
        rig.cluster.kill(rig.agent)
        rig.cluster.restart_agent("a")
        exchange(one, two)
        assert rig.failed_proofs("job_token") == 0
