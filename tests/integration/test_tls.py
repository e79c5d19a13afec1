"""Certificates between real daemons over loopback: who gets in, who doesn't, and what happens when they are renewed."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import proxyd_client
from proxyd.cli.certificates import Authority, settings
from proxyd.cli.cluster import Cluster, Member
from proxyd.cli.main import main
from proxyd.cli.scrape import scrape
from proxyd.runtime.tls import TlsPaths
from tests.integration.relay_rig import content, endpoints, exchange, until


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class Rig:
    """A CA, certificates of a coordinator and of two sites' agents, and a cluster that uses them for everything."""

    def __init__(self, directory: Path, **certificates: TlsPaths) -> None:
        self.directory = directory
        self.authority = Authority(directory / "ca.pem")
        self.port = free_port()
        self.files = {
            "coordinator": self.authority.coordinator(directory / "coordinator"),
            "a": self.authority.agent(directory / "a", "a"),
            "b": self.authority.agent(directory / "b", "b", "b-0"),
        } | certificates

    def cluster(self, **more: object) -> Cluster:
        address = f"127.0.0.1:{self.port}"
        return Cluster(
            {"a": 1, "b": 1},
            coordinator={
                "listen": [address, f"unix:{self.directory}/admin.sock"],
                **settings(self.files["coordinator"]),
            },
            agent={"coordinators": [address]},
            each_agent={(site, 0): settings(self.files[site]) for site in ("a", "b")},
            directory=self.directory / "cluster",
        )


def refused(url: str, port: str, proof: str) -> float:
    return scrape(url).total("proxyd_failed_proofs_total", port=port, proof=proof)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    return Rig(tmp_path_factory.mktemp("rig"))


@pytest.fixture(scope="module")
def cluster(rig: Rig) -> Iterator[Cluster]:
    with rig.cluster() as one:
        yield one


def works(cluster: Cluster, nbytes: int = 3_000_001) -> None:
    with endpoints((cluster.agent("a"), 0), (cluster.agent("b"), 1)) as (sender, receiver):
        exchange(sender, receiver, content(nbytes, 1), src=0, dst=1, tag=7)
        exchange(receiver, sender, content(nbytes, 2), src=1, dst=0, tag=8)


def test_messages_cross_two_sites_encrypted_and_granted(cluster: Cluster) -> None:
    works(cluster, 40_000_000)
    metrics = scrape(cluster.agent("a").metrics)
    assert metrics.total("proxyd_granted_bytes_total") >= 40_000_000
    assert metrics.total("proxyd_fallback_bytes_total") == 0
    assert metrics.total("proxyd_corrupt_chunks_total") == 0
    assert 29 * 86_400 < metrics.total("proxyd_tls_certificate_expires_in_seconds") <= 30 * 86_400


def test_status_says_how_long_the_certificate_is_good(
    rig: Rig, cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    address = f"unix:{rig.directory}/admin.sock"
    assert main(["status", "--coordinator", address]) == 0
    assert "TLS certificate valid until 2" in capsys.readouterr().out
    assert main(["status", "--coordinator", cluster.coordinator.address]) == 1
    assert "unix: address" in capsys.readouterr().err


def test_no_byte_is_outstanding_once_all_is_acknowledged(cluster: Cluster) -> None:
    """TLS adds bytes to the wire; what the coordinator counts is payload, and it comes out even."""
    works(cluster, 10_000_000)

    def even() -> bool:
        metrics = scrape(cluster.coordinator.metrics)
        outstanding = metrics.total("proxyd_link_outstanding_bytes")
        granted, delivered, returned = (
            metrics.total(f"proxyd_{name}_bytes_total") for name in ("granted", "delivered", "returned")
        )
        return outstanding == 0 and granted == delivered + returned

    until(even)


def speak(cluster: Cluster, context: ssl.SSLContext | None, port: int) -> bytes:
    """What a client of that kind gets to hear; nothing when it is hung up on. Raises OSError."""
    with socket.create_connection(("127.0.0.1", port), timeout=15) as sock:
        if context is None:
            return sock.recv(100)
        with context.wrap_socket(sock) as secured:
            return secured.recv(100)


def context_of(paths: TlsPaths | None, ca: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(ca)
    context.set_alpn_protocols(["h2"])
    if paths is not None:
        context.load_cert_chain(paths.certificate, paths.key)
    return context


def data_port(cluster: Cluster, site: str) -> int:
    return int(cluster.agent(site).data_address.rpartition(":")[2])


@pytest.mark.parametrize("kind", ["missing", "foreign", "expired"])
def test_a_stranger_at_the_data_port_is_refused_and_named(
    rig: Rig, cluster: Cluster, tmp_path: Path, kind: str
) -> None:
    paths = {
        "missing": lambda: None,
        "foreign": lambda: Authority(tmp_path / "ca.pem").agent(tmp_path, "b"),
        "expired": lambda: rig.authority.agent(tmp_path, "b", life_s=-60),
    }[kind]()
    agent = cluster.agent("a")
    before = refused(agent.metrics, "data", f"certificate_{kind}")
    with pytest.raises(ssl.SSLError, match=r"(?i)alert"):
        speak(cluster, context_of(paths, rig.authority.path), data_port(cluster, "a"))
    assert refused(agent.metrics, "data", f"certificate_{kind}") == before + 1
    words = {"missing": "showed no certificate", "foreign": "issuer", "expired": "expired"}[kind]
    assert words in agent.last_words().lower()
    assert "refused a connection to the data port" in agent.last_words()
    works(cluster)


def test_a_stranger_without_tls_at_the_data_port_is_refused(cluster: Cluster) -> None:
    agent = cluster.agent("a")
    before = refused(agent.metrics, "data", "tls")
    with socket.create_connection(("127.0.0.1", data_port(cluster, "a")), timeout=5) as sock:
        sock.sendall(b"\x80\x04\x95" + os.urandom(400))
        with contextlib.suppress(ConnectionResetError):
            while sock.recv(100):
                pass
    until(lambda: refused(agent.metrics, "data", "tls") == before + 1)
    works(cluster)


def test_strangers_at_the_control_port_are_hung_up_on_and_counted(rig: Rig, cluster: Cluster, tmp_path: Path) -> None:
    strangers = [
        None,
        Authority(tmp_path / "ca.pem").agent(tmp_path / "foreign", "b"),
        rig.authority.agent(tmp_path / "expired", "b", life_s=-60),
    ]
    before = refused(cluster.coordinator.metrics, "control", "tls")
    for paths in strangers:
        try:
            heard = speak(cluster, context_of(paths, rig.authority.path), rig.port)
        except (ssl.SSLError, ConnectionResetError):
            heard = b""
        assert heard == b""
    # More on a busy host: a good connection whose first call comes late counts as well.
    until(lambda: refused(cluster.coordinator.metrics, "control", "tls") >= before + len(strangers), 20)
    assert "TLS handshakes at the control port came to nothing, from 127.0.0.1:" in cluster.coordinator.last_words()


@pytest.mark.parametrize("port", ["data", "control"])
def test_nothing_older_than_tls_1_3_is_spoken(rig: Rig, cluster: Cluster, port: str) -> None:
    context = context_of(rig.files["b"], rig.authority.path)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises((ssl.SSLError, ConnectionResetError)):
        speak(cluster, context, rig.port if port == "control" else data_port(cluster, "a"))


def test_the_right_certificate_is_served_at_the_control_port(rig: Rig, cluster: Cluster) -> None:
    """So that the refusals above are no accident of how they ask."""
    assert speak(cluster, context_of(rig.files["b"], rig.authority.path), rig.port) != b""
    assert speak(cluster, context_of(rig.files["b"], rig.authority.path), data_port(cluster, "a")) != b""


def test_certificates_are_renewed_under_load_without_a_failed_transfer(rig: Rig, cluster: Cluster) -> None:
    """Twice, with new keys. One pair of trainers goes on through it; in the other direction trainers come and go, so
    that their agents connect anew, and both generations of certificates meet."""
    stop = threading.Event()
    failures: list[Exception] = []
    done = {"stays": 0, "comes and goes": 0}

    def stay() -> None:
        with endpoints((cluster.agent("a"), 0), (cluster.agent("b"), 1)) as (one, two):
            while not stop.is_set():
                exchange(one, two, content(1_000_000, done["stays"]), src=0, dst=1, tag=done["stays"])
                done["stays"] += 1

    def come_and_go() -> None:
        rank = 10  # a new one each time: a name's earlier life is another matter
        while not stop.is_set():
            with endpoints((cluster.agent("b"), rank), (cluster.agent("a"), rank + 1)) as (one, two):
                exchange(one, two, content(300_000, rank), src=rank, dst=rank + 1, tag=rank)
            done["comes and goes"] += 1
            rank += 2

    def guarded(load: Callable[[], None]) -> None:
        try:
            load()
        except (proxyd_client.ProxydError, AssertionError) as error:
            failures.append(error)

    serials = {site: _serial(cluster, rig, site) for site in ("a", "b")}
    threads = [threading.Thread(target=guarded, args=(load,)) for load in (stay, come_and_go)]
    for thread in threads:
        thread.start()
    try:
        for round_number in range(2):
            rig.authority.coordinator(rig.directory / "coordinator")
            rig.authority.agent(rig.directory / "a", "a")
            rig.authority.agent(rig.directory / "b", "b", "b-0")
            before = dict(done)
            until(lambda then=before: all(done[kind] >= then[kind] + 3 for kind in done) or bool(failures), 30)
            for site in ("a", "b"):
                serial = _serial(cluster, rig, site)
                assert serial != serials[site], f"round {round_number}: agent {site} shows its old certificate"
                serials[site] = serial
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)
    assert not failures
    for member in (cluster.agent("a"), cluster.agent("b")):
        metrics = scrape(member.metrics)
        assert metrics.total("proxyd_tls_reloads_total", outcome="used") >= 2
        assert metrics.total("proxyd_transfers_total", outcome="failed") == 0
    # A restarted coordinator has them back, on the certificates of now.
    cluster.kill(cluster.coordinator)
    cluster.start_coordinator()
    cluster.await_sessions()
    works(cluster)


def _serial(cluster: Cluster, rig: Rig, site: str) -> str:
    """Of the certificate that an agent's data port shows now."""
    with (
        socket.create_connection(("127.0.0.1", data_port(cluster, site)), timeout=10) as sock,
        context_of(rig.files["b"], rig.authority.path).wrap_socket(sock) as secured,
    ):
        secured.recv(10)
        return str((secured.getpeercert() or {})["serialNumber"])


def test_half_replaced_files_change_nothing_and_the_rest_of_them_is_taken(rig: Rig, cluster: Cluster) -> None:
    agent = cluster.agent("a")
    serial = _serial(cluster, rig, "a")
    key = Path(rig.files["a"].key)
    good = key.read_bytes()
    key.write_bytes(b"-----BEGIN PRIVATE KEY-----\nnothing\n-----END PRIVATE KEY-----\n")
    assert _serial(cluster, rig, "a") == serial
    assert "stay in force" in agent.last_words()
    assert scrape(agent.metrics).total("proxyd_tls_reloads_total", outcome="refused") >= 1
    key.write_bytes(good)
    works(cluster)
    rig.authority.agent(rig.directory / "a", "a")
    assert _serial(cluster, rig, "a") != serial


def test_a_reload_takes_other_files_if_they_are_good(rig: Rig, cluster: Cluster) -> None:
    """Named anew in the configuration, not replaced."""
    directory, serial = rig.directory, _serial(cluster, rig, "a")

    def reload(member: Member, name: str, files: TlsPaths) -> str:
        """With another certificate and key in the member's file; answers what it said to that."""
        path, before = cluster.directory / f"{name}.toml", member.log_path.stat().st_size
        text = re.sub(r"(?m)^tls_certificate = .*$", f'tls_certificate = "{files.certificate}"', path.read_text())
        path.write_text(re.sub(r"(?m)^tls_key = .*$", f'tls_key = "{files.key}"', text))
        member.process.send_signal(signal.SIGHUP)
        said = lambda: member.log_path.read_bytes()[before:].decode()  # noqa: E731 # used here alone
        until(lambda: "stays in force" in said() or "other TLS files are in use" in said())
        assert "needs a restart" not in said()
        return said()

    wrong = rig.authority.agent(directory / "wrong", "b")
    assert "certificate is not of agent a/a-0" in reload(cluster.agent("a"), "a-0", wrong)
    assert "certificate is not of a coordinator" in reload(cluster.coordinator, "coordinator", wrong)
    assert _serial(cluster, rig, "a") == serial
    works(cluster)
    assert "in use" in reload(cluster.agent("a"), "a-0", rig.authority.agent(directory / "moved-a", "a"))
    moved = rig.authority.coordinator(directory / "moved-coordinator")
    assert "in use" in reload(cluster.coordinator, "coordinator", moved)
    assert _serial(cluster, rig, "a") != serial
    with (
        socket.create_connection(("127.0.0.1", rig.port), timeout=10) as sock,
        context_of(rig.files["b"], rig.authority.path).wrap_socket(sock) as secured,
    ):
        shown = secured.getpeercert(binary_form=True)
    assert shown == ssl.PEM_cert_to_DER_cert(Path(moved.certificate).read_text())
    works(cluster)


def test_no_secret_is_in_a_log_or_a_metric(rig: Rig, cluster: Cluster) -> None:
    secrets = [cluster.token_file.read_text().strip()]
    for paths in rig.files.values():
        secrets += [line for line in Path(paths.key).read_text().splitlines() if not line.startswith("-")]
    for member in cluster.members:
        log = member.log_path.read_text()
        for secret in secrets:
            assert secret not in log


@pytest.mark.parametrize("kind", ["expired", "other agent", "foreign"])
def test_an_agent_with_a_bad_certificate_gets_neither_sessions_nor_peers(tmp_path: Path, kind: str) -> None:
    rig = Rig(tmp_path)
    if kind == "expired":
        rig.files["b"] = rig.authority.agent(tmp_path / "b", "b", life_s=-3600)
    elif kind == "foreign":
        rig.files["b"] = Authority(tmp_path / "other" / "ca.pem").agent(tmp_path / "other", "b")
    else:
        # Its configuration is its own business; what others believe is what its certificate says.
        rig.files["b"] = rig.authority.issue(tmp_path / "b", uris=["proxyd://c/*", "proxyd://b/b-0"])
    cluster = rig.cluster()
    if kind == "other agent":
        with cluster:
            works(cluster)
            agent = cluster.agent("a")
            # A second agent of site c, under the name of a: nobody but a itself may be that.
            with socket.create_connection(("127.0.0.1", data_port(cluster, "a")), timeout=10) as sock:
                claim(sock, rig, cluster)
            until(lambda: refused(agent.metrics, "data", "certificate_name") == 1)
            assert "its certificate is of" in agent.last_words() or "your certificate is of" in agent.last_words()
        return
    with pytest.raises(Exception, match="1 of 2 agents"):
        _start(cluster)
    log = (rig.directory / "cluster" / "b-0.log").read_text()
    assert "coordinator 127.0.0.1" in log
    assert ("expired" if kind == "expired" else "issuer") in log


def _start(cluster: Cluster) -> None:
    cluster.await_sessions = lambda timeout_s=4.0: Cluster.await_sessions(cluster, 4.0)  # type: ignore[method-assign]
    with cluster:
        pass


def claim(sock: socket.socket, rig: Rig, cluster: Cluster) -> None:
    """Say over a certificate of site b's agent that one is an agent of another site."""
    from proxyd.wire import peer as wire
    from proxyd.wire.auth import token_mac

    with context_of(rig.files["b"], rig.authority.path).wrap_socket(sock) as secured:
        secured.settimeout(10)
        data = b""
        while len(data) < wire.HEADER_BYTES:
            data += secured.recv(1000)
        header = wire.decode_header(data[: wire.HEADER_BYTES])
        while len(data) < wire.HEADER_BYTES + header.length:
            data += secured.recv(1000)
        challenge = wire.decode_control(header, data[wire.HEADER_BYTES :])
        assert isinstance(challenge, wire.Challenge)
        nonce = bytes(32)
        token = cluster.token_file.read_text().strip().encode()
        text = f"peer {wire.StreamPurpose.CONTROL}.0 z/z-0 {1:016x} to a/a-0"
        mac = token_mac(token, "dial", challenge.nonce, nonce, text)
        secured.sendall(
            wire.encode(
                wire.Hello(wire.PROTOCOL_VERSION, wire.StreamPurpose.CONTROL, 0, "z", "z-0", 1, "a", "a-0", nonce, mac)
            )
        )
        assert b"proxyd://b/b-0" in secured.recv(2000)


def test_workers_have_the_certificate_of_their_agent(rig: Rig, tmp_path: Path) -> None:
    """The preamble goes ahead of the handshake, which the worker itself has: TLS can't be passed on half-way."""
    address = f"127.0.0.1:{free_port()}"
    workers = {"workers": 2, "arena": "16MiB", **settings(rig.files["b"])}
    with Cluster(
        {"a": 1, "b": 1},
        coordinator={"listen": [address, f"unix:{tmp_path}/admin.sock"], **settings(rig.files["coordinator"])},
        agent={"coordinators": [address]},
        each_agent={("a", 0): settings(rig.files["a"]), ("b", 0): workers},
        directory=tmp_path / "cluster",
    ) as cluster:
        works(cluster)
        for name in ("b-0#0", "b-0#1"):
            there = ["--agent", cluster.agent("a").socket, "--address", cluster.agent("b").data_address]
            assert main(["ping", f"b/{name}", *there, "--count", "1"]) == 0
        metrics = scrape(cluster.agent("b").metrics)
        assert metrics.total("proxyd_received_bytes_total") >= 3_000_001
        assert metrics.total("proxyd_failed_proofs_total") == 0
