"""Clients that ruin their own memory, strangers at every door: the agent lives on, and so do others' messages."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import pickle
import random
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from proxyd.cli.scrape import scrape
from proxyd.wire import client as wire
from proxyd.wire.arena import PAGE_BYTES
from proxyd_client import ConfigError, PeerLost, ProxydError, TransferFailed, connect
from tests.e2e.rig import MIB, Net, Trainer, pattern, rss_bytes, until

pytestmark = pytest.mark.timeout(60)


@contextlib.contextmanager
def traffic(net: Net) -> Iterator[Callable[[], int]]:
    """Another pair's messages go on all the while, every one checked; yields their count so far."""
    sender, receiver = net.connect(100, "a"), net.connect(101, "b")
    stop, count, errors = threading.Event(), [0], list[BaseException]()

    def run() -> None:
        try:
            while not stop.is_set():
                number = count[0]
                handle = sender.isend(pattern(300_000 + number, 100, number), dst=101, tag=1)
                got = receiver.recv(src=100, tag=1, timeout_s=10)
                assert np.array_equal(got.array, pattern(300_000 + number, 100, number))
                handle.wait(10)
                count[0] += 1
        except (AssertionError, ProxydError) as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield lambda: count[0]
    finally:
        before = count[0]
        with contextlib.suppress(AssertionError):
            until(lambda: errors or count[0] >= before + 3, "others go on")
        stop.set()
        thread.join(15)
    assert not errors, errors
    assert count[0] >= before + 3, "the others' messages stand still"


Arenas = dict[int, tuple[int, wire.ArenaGranted]]


def raw_client(net: Net, rank: int, site: str) -> tuple[socket.socket, wire.Decoder, Arenas]:
    """A session spoken by hand, over the Unix socket; answers its connection, the decoder (which may hold the beginning
    of a frame) and its arenas with their descriptors."""
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(10)
    sock.connect(net.agent(site).socket)
    decoder, fds, arenas = wire.Decoder(allow_payload=False), list[int](), {}
    life = secrets.randbits(63) + 1  # a name that was used before is refused while anything of it may linger
    while len(arenas) < 2:
        while (item := decoder.next_frame()) is None:
            data, more, _, _ = socket.recv_fds(sock, 65536, 16)
            assert data, "the agent hung up"
            fds += more
            decoder.feed(data)
        frame = item[0]
        if isinstance(frame, wire.Challenge):
            mac = wire.hello_mac(b"", frame.nonce, bytes(32), net.job, rank, life)
            hello = wire.Hello(wire.PROTOCOL_VERSION, net.job, rank, life, os.getpid(), bytes(32), mac, True)
            sock.sendall(wire.encode(hello))
        elif isinstance(frame, wire.ArenaGranted):
            arenas[frame.kind] = (fds.pop(0), frame)
    assert not fds
    return sock, decoder, arenas


def test_an_arena_can_neither_be_truncated_nor_unsealed(net: Net) -> None:
    sock, _, arenas = raw_client(net, 3, "a")
    for fd, granted in arenas.values():
        assert os.fstat(fd).st_size == granted.size_bytes
        for size in (0, granted.size_bytes // 2, 2 * granted.size_bytes):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)
        with pytest.raises(PermissionError):
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        os.close(fd)
    sock.close()


def test_another_trainers_arena_comes_read_only(net: Net) -> None:
    """Same-host messages hand the sender's memory over: to be read, not to be written."""
    sender = net.connect(0, "a")
    sock, decoder, arenas = raw_client(net, 3, "a")
    for fd, _ in arenas.values():
        os.close(fd)
    handle = sender.isend(pattern(2 * MIB), dst=3, tag=1)
    fds, peer = list[int](), None
    while peer is None:
        data, more, _, _ = socket.recv_fds(sock, 65536, 16)
        fds += more
        decoder.feed(data)
        while (item := decoder.next_frame()) is not None:
            if isinstance(item[0], wire.ArenaGranted) and item[0].kind == wire.ArenaKind.PEER:
                peer = item[0]
    with pytest.raises(PermissionError):
        mmap.mmap(fds[-1], peer.size_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(OSError, match=r"Bad file|not permitted|Permission"):
        os.pwrite(fds[-1], b"x", PAGE_BYTES)
    readable = mmap.mmap(fds[-1], peer.size_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
    assert len(readable) == peer.size_bytes
    sock.close()
    handle.wait(5)  # all of it was in its hands when it went


def test_a_sender_that_scribbles_over_its_posted_block_harms_itself_alone(net: Net) -> None:
    """Each chunk is hashed as it is read and verified over there: what doesn't agree is sent again, or the transfer
    fails; what arrives is one consistent reading of the block, chunk by chunk."""
    net.injects_fault("a client writes into a block that it has posted")
    body = (
        "import threading\n"
        "sender = ep._session.sender\n"
        "stop = threading.Event()\n"
        "def scribble():\n"
        "    noise = np.random.default_rng(1)\n"
        "    while not stop.is_set():\n"
        "        for send in list(sender.pending.values()):\n"
        "            if send.block is not None:\n"
        "                block = send.block.data\n"
        "                block[:] = noise.integers(0, 256)\n"
        "threading.Thread(target=scribble, daemon=True).start()\n"
        "while hear().strip() == 'more':\n"
        "    h = ep.isend(pattern(32 * MIB, 3, 0), dst=4, tag=1)\n"
        "    try:\n"
        "        h.wait(20)\n"
        "        say('ok')\n"
        "    except proxyd_client.ProxydError as error:\n"
        "        say(type(error).__name__)\n"
        "stop.set()\n"
        "ep.send(pattern(5 * MIB, 3, 99), dst=4, tag=99)\n"
        "say('sent')\n"
        "hear()\n"
    )
    with traffic(net):
        receiver = net.connect(4, "b")
        other = Trainer(net, 3, "a", body)
        # Whether a byte changes between the hash and the kernel's copy is a matter of luck, and of who else computes.
        until_s = time.monotonic() + 60
        outcomes: list[str] = []
        while len(outcomes) < 6 or not net.moved().corrupt:
            assert time.monotonic() < until_s, f"nothing was corrupted in {len(outcomes)} messages"
            other.say("more")
            with contextlib.suppress(TransferFailed):
                assert receiver.recv(src=3, tag=1, timeout_s=30).nbytes == 32 * MIB
            outcomes.append(other.hear())
        assert set(outcomes) <= {"ok", "TransferFailed"}, outcomes
        other.say("stop")
        # After it, the next message is right.
        assert np.array_equal(receiver.recv(src=3, tag=99, timeout_s=20).array, pattern(5 * MIB, 3, 99))
        assert other.hear() == "sent"
    assert scrape(net.agent("a").metrics).total("proxyd_resent_chunks_total") > 0


def test_a_receiver_that_ruins_its_arena_harms_itself_alone(net: Net) -> None:
    """Header page, chunk maps, payload: all of it is the client's to ruin, and the agent believes none of it."""
    net.injects_fault("a client writes garbage into its receive arena")
    sock, _, arenas = raw_client(net, 3, "b")
    fd, granted = arenas[wire.ArenaKind.RECEIVE]
    memory = np.frombuffer(mmap.mmap(fd, granted.size_bytes), np.uint8)
    sender = net.connect(0, "a")
    with traffic(net) as count:
        for _ in range(3):
            handle = sender.isend(pattern(16 * MIB), dst=3, tag=1)
            before = count()
            while count() < before + 2:
                memory[: 40 * MIB] = np.random.default_rng(before).integers(0, 256, 40 * MIB, np.uint8)
            handle.wait(10)
    sock.close()
    # The same rank again, sane: the next message is right.
    receiver = net.connect(3, "b")
    for _ in range(100):
        handle = sender.isend(pattern(3 * MIB, 1), dst=3, tag=2)
        try:
            handle.wait(10)
        except PeerLost as error:
            # Offered before the sender's agent had heard of the new life, it was the old one's.
            assert "receiver gone" in str(error)
        else:
            break
    assert np.array_equal(receiver.recv(src=0, tag=2, timeout_s=10).array, pattern(3 * MIB, 1))


def garbage() -> dict[str, bytes]:
    """What strangers say."""
    noise = random.Random(7)
    return {
        "nothing": b"",
        "noise": noise.randbytes(100_000),
        "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        "tls": bytes.fromhex("16030100c8010000c40303") + noise.randbytes(200),
        "pickle": pickle.dumps({"a": [1, 2, 3]}),
        "huge length": struct.pack("<IHHQ", 0xFFFFFFFF, 2, 0, 1 << 60),
        "huge payload": struct.pack("<IHHQ", 0, 12, 0, 1 << 60),
        "zeros": bytes(1 << 20),
        "post before hello": wire.encode(wire.SendFilled(1, 1 << 60)),
    }


@pytest.mark.parametrize("door", ["socket", "data", "gateway", "metrics"])
def test_strangers_are_shown_the_door(net: Net, door: str) -> None:
    agent = net.agent("b")
    gateway, data = str(agent.facts["gateway_address"]), agent.data_address
    address = {"data": data, "gateway": gateway, "metrics": agent.metrics.split("/")[2]}.get(door, "")
    before = rss_bytes(agent.pid, "RssAnon")

    def call() -> socket.socket:
        if door == "socket":
            sock = socket.socket(socket.AF_UNIX)
            sock.settimeout(5)
            sock.connect(agent.socket)
        else:
            host, _, port = address.rpartition(":")
            sock = socket.create_connection((host, int(port)), timeout=5)
        return sock

    with traffic(net):
        silent = [call() for _ in range(100)]
        for text in garbage().values():
            with call() as sock, contextlib.suppress(BrokenPipeError, ConnectionResetError):
                sock.sendall(text)
                try:
                    sock.shutdown(socket.SHUT_WR)
                except OSError as error:
                    if error.errno != errno.ENOTCONN:  # it was faster: the connection is gone already
                        raise
                while sock.recv(65536):
                    pass
        for sock in silent:
            sock.close()
    grown = rss_bytes(agent.pid, "RssAnon") - before
    assert grown < 8 * MIB, f"the agent has grown by {grown} bytes"


def test_the_gateway_asks_for_the_token(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = f"tcp://{net.agent('b').facts['gateway_address']}"
    with pytest.raises(ConfigError, match="token"):
        connect(net.job, 5, socket=gateway, timeout_s=5)
    wrong = net.cluster.directory / f"wrong-{os.getpid()}"
    wrong.write_text("0123456789abcdef" * 4)
    monkeypatch.setenv("PROXYD_TOKEN_FILE", str(wrong))
    with pytest.raises(ConfigError, match="token"):
        connect(net.job, 5, socket=gateway, timeout_s=5)
    monkeypatch.setenv("PROXYD_TOKEN_FILE", str(net.cluster.token_file))
    with connect(net.job, 5, socket=gateway, timeout_s=5) as endpoint:
        assert endpoint.site == "b"
    secret = net.cluster.token_file.read_text()
    for member in net.cluster.members:
        assert secret not in member.log_path.read_text()


def test_a_client_that_names_memory_it_does_not_have_is_ended(net: Net) -> None:
    from proxyd.wire.envelope import Envelope, TrafficClass

    def post(arena: int, offset: int, nbytes: int, job: str = net.job) -> wire.PostSend:
        envelope = Envelope(job, 3, 1, "", 0, TrafficClass.PIPELINE, nbytes, "uint8", (nbytes,))
        return wire.PostSend(1, envelope, arena, offset, nbytes)

    with traffic(net):
        for number in range(4):
            sock, decoder, arenas = raw_client(net, 3, "a")
            own = arenas[wire.ArenaKind.SEND][1]
            wicked = (
                post(own.arena, 0, 4096),
                post(own.arena, own.size_bytes - 10, 4096),
                post(own.arena + 1, PAGE_BYTES, 4096),
                post(own.arena, PAGE_BYTES, 4096, job="another"),
            )
            sock.sendall(wire.encode(wicked[number]))
            said = ""
            while data := sock.recv(65536):
                decoder.feed(data)
                while (item := decoder.next_frame()) is not None:
                    said = item[0].message if isinstance(item[0], wire.Bye) else said
            assert "can't follow this client" in said
            sock.close()
            for fd, _ in arenas.values():
                os.close(fd)
