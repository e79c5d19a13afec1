"""What goes wrong, and what the caller hears: timeouts, lost peers and agents, no room, fork, close, cancel."""

from __future__ import annotations

import gc
import os
import pickle
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import proxyd_client
from proxyd.wire import client as wire
from proxyd.wire.envelope import Envelope, ErrorCode
from proxyd_client import (
    AgentUnavailable,
    ArgumentError,
    ClosedError,
    ConfigError,
    Endpoint,
    PeerLost,
    ProxydError,
    TransferCancelled,
    TransferFailed,
    TransferTimeout,
)
from proxyd_client.errors import class_of_code, next_step_of_code
from tests.fakes.fake_agent import FakeAgent

from .conftest import Connect

MIB = 1 << 20


@pytest.fixture
def pair(agent: FakeAgent, connect: Connect) -> tuple[Endpoint, Endpoint]:
    return connect(agent, 0), connect(agent, 1)


# -- timeouts ---


def test_a_send_timeout_names_both_ranks_tag_phase_and_bytes_and_cancels_nothing(
    pair: tuple[Endpoint, Endpoint], agent: FakeAgent
) -> None:
    sender, receiver = pair
    agent.change(hold=True)
    handle = sender.isend(np.zeros(MIB, np.uint8), 1, tag=7, group="tp")
    started = time.monotonic()
    with pytest.raises(TransferTimeout) as caught:
        handle.wait(0.2)
    assert 0.2 <= time.monotonic() - started < 2
    text = str(caught.value)
    for part in ("job/1", "here rank 0", "tag 7", "'tp'", "queued at the coordinator", "0 of 1048576 bytes"):
        assert part in text
    error = caught.value
    assert (error.peer, error.tag, error.group, error.bytes_done) == (1, 7, "tp", 0)
    assert error.phase == "queued at the coordinator"
    assert isinstance(error, TimeoutError)
    assert handle.eta_s() is not None
    agent.change(hold=False)
    handle.wait(20)
    assert receiver.recv(0, 7, group="tp", timeout_s=20).nbytes == MIB


@pytest.mark.parametrize(
    ("setup", "part"),
    [
        (lambda s: None, "no process is registered as job/5"),
        (lambda s: s.isend(b"x", 1, tag=8), "1 wait on others, the first one job/0 -> job/1, tag 8"),
    ],
)
def test_a_receive_timeout_says_what_is_missing(
    pair: tuple[Endpoint, Endpoint], setup: Callable[[Endpoint], object], part: str
) -> None:
    sender, receiver = pair
    handle = setup(sender)
    if handle is not None:
        sender.link_state(1)
    with pytest.raises(TransferTimeout) as caught:
        receiver.recv(0 if handle is not None else 5, 7, timeout_s=0.1)
    assert part in str(caught.value)
    assert "here rank 1" in str(caught.value)


def test_zero_timeout_takes_what_is_there(pair: tuple[Endpoint, Endpoint], agent: FakeAgent) -> None:
    sender, receiver = pair
    sender.send(b"there", 1, timeout_s=20)
    receiver.link_state(0)
    assert bytes(receiver.recv(0, timeout_s=0).data) == b"there"
    with pytest.raises(TransferTimeout):
        receiver.recv(0, timeout_s=0)


def test_a_handle_that_timed_out_stays_posted(pair: tuple[Endpoint, Endpoint]) -> None:
    sender, receiver = pair
    handle = receiver.irecv(0, 1)
    with pytest.raises(TransferTimeout):
        handle.wait(0.05)
    sender.isend(b"late", 1, tag=1)
    assert bytes(handle.wait(20).data) == b"late"
    assert handle.wait(0) is handle.wait(0)


# -- peers ---


def test_a_peer_that_ends_fails_its_receives_but_not_what_it_delivered(
    agent: FakeAgent, connect: Connect, pair: tuple[Endpoint, Endpoint]
) -> None:
    peer, here = pair
    peer.send(b"delivered", 1, tag=1, timeout_s=20)
    anyone = here.irecv(None, 9)
    pending = here.irecv(0, 2)
    agent.drop(0)
    with pytest.raises(PeerLost, match="the process of job/0 has ended") as caught:
        pending.wait(20)
    assert caught.value.peer == 0
    assert bytes(here.recv(0, 1, timeout_s=20).data) == b"delivered"
    with pytest.raises(PeerLost):
        here.recv(0, 1, timeout_s=20)
    assert not anyone.done()
    second_life = connect(agent, 0)
    here.link_state(0)  # its answer comes behind the news of the second life
    second_life.isend(b"again", 1, tag=2)
    assert bytes(here.recv(0, 2, timeout_s=20).data) == b"again"
    second_life.isend(b"any", 1, tag=9)
    assert bytes(anyone.wait(20).data) == b"any"


def test_a_restarted_rank_is_not_taken_for_a_lost_one(
    agent: FakeAgent, connect: Connect, pair: tuple[Endpoint, Endpoint]
) -> None:
    _, here = pair
    pending = here.irecv(0, 1)
    for _ in range(3):
        second = connect(agent, 0)
    second.isend(b"first", 1, tag=1)
    assert bytes(pending.wait(20).data) == b"first"
    second.isend(b"second", 1, tag=1)
    assert bytes(here.recv(0, 1, timeout_s=20).data) == b"second"


def test_a_peer_lost_in_the_middle_of_a_message(pair: tuple[Endpoint, Endpoint], agent: FakeAgent) -> None:
    peer, here = pair
    agent.change(stall_at_bytes=MIB)
    peer.isend(np.ones(4 * MIB, np.uint8), 1, tag=1)
    back = here.isend(np.ones(4 * MIB, np.uint8), 0, tag=1)
    out = bytearray(4 * MIB)
    handle = here.irecv_into(out, 0, 1)
    with pytest.raises(TransferTimeout, match="landing"):
        handle.wait(0.1)
    agent.drop(0)
    with pytest.raises(PeerLost, match="here rank 1") as caught:
        handle.wait(20)
    assert caught.value.bytes_done == MIB
    with pytest.raises(PeerLost, match="send to job/0"):
        back.wait(20)
    agent.change(stall_at_bytes=None)
    here.send(b"self", 1, tag=3, timeout_s=20)
    assert bytes(here.recv(1, 3, timeout_s=20).data) == b"self"


def test_a_failure_that_was_offered_is_raised_by_the_receive_whose_turn_it_is(
    pair: tuple[Endpoint, Endpoint], agent: FakeAgent
) -> None:
    _, here = pair
    envelope = Envelope("job", 0, 1, "", 1, 0, 10 * MIB, "uint8", (10 * MIB,))
    agent.tell(1, wire.Offered(5, 1, envelope, 0, 0))
    agent.tell(1, wire.RecvFailed(5, 1, ErrorCode.CORRUPT, "chunk 3 fails its checksum", 2 * MIB))
    with pytest.raises(TransferFailed, match="chunk 3 fails its checksum") as caught:
        here.recv(0, 1, timeout_s=20)
    assert caught.value.bytes_done == 2 * MIB
    pair[0].isend(b"next", 1, tag=1)
    assert bytes(here.recv(0, 1, timeout_s=20).data) == b"next"


# -- cancel ---


def test_a_cancelled_send_never_existed_for_the_receiver(pair: tuple[Endpoint, Endpoint], agent: FakeAgent) -> None:
    sender, receiver = pair
    agent.change(stall_at_bytes=MIB)
    first = sender.isend(np.full(4 * MIB, 1, np.uint8), 1, tag=1)
    out = np.zeros(4 * MIB, np.uint8)
    handle = receiver.irecv_into(out, 0, 1)
    with pytest.raises(TransferTimeout):
        handle.wait(0.1)
    assert first.cancel()
    with pytest.raises(TransferCancelled):
        first.wait(20)
    assert not first.cancel()
    agent.change(stall_at_bytes=None)
    sender.isend(np.full(4 * MIB, 2, np.uint8), 1, tag=1)
    assert handle.wait(20) == 4 * MIB
    assert (out == 2).all()


def test_a_cancelled_receive_passes_its_message_on(pair: tuple[Endpoint, Endpoint], agent: FakeAgent) -> None:
    sender, receiver = pair
    agent.change(stall_at_bytes=MIB)
    first = receiver.irecv_into(bytearray(4 * MIB), 0, 1)
    second = receiver.irecv(0, 1)
    sender.isend(np.full(4 * MIB, 3, np.uint8), 1, tag=1)
    with pytest.raises(TransferTimeout, match="landing"):
        first.wait(0.1)
    assert first.cancel()
    with pytest.raises(TransferCancelled):
        first.wait(20)
    agent.change(stall_at_bytes=None)
    assert (second.wait(20).array == 3).all()
    assert not second.cancel()


# -- room ---


def test_a_message_that_can_never_fit_is_refused_with_numbers(
    start_agent: Callable[..., FakeAgent], connect: Connect
) -> None:
    agent = start_agent(send_arena_bytes=MIB, memory_limit_bytes=4 * MIB)
    sender = connect(agent, 0)
    with pytest.raises(ConfigError, match=r"5242880 bytes can never fit: the agent's memory limit is 4194304"):
        sender.isend(np.zeros(5 * MIB, np.uint8), 1)
    # Within the limit, but the first arena has taken its part of it.
    with pytest.raises(ConfigError, match=r"no memory for a message of 4194304 bytes.*are in use"):
        sender.isend(np.zeros(4 * MIB, np.uint8), 1)
    sender.send(b"fits", 0, timeout_s=20)


def test_a_full_arena_holds_the_sender_until_the_receiver_takes(
    start_agent: Callable[..., FakeAgent], connect: Connect
) -> None:
    agent = start_agent(send_arena_bytes=2 * MIB, memory_limit_bytes=2 * MIB, hold=True)
    sender, receiver = connect(agent, 0), connect(agent, 1)
    block = np.arange(MIB, dtype=np.uint8)
    handles = [sender.isend(block, 1)]
    with pytest.raises(TransferTimeout, match=r"ranks \[1\] have not acknowledged"):
        sender.isend(block, 1, timeout_s=0.1)
    sent = threading.Event()

    def send_more() -> None:
        handles.append(sender.isend(block, 1))
        sent.set()

    thread = threading.Thread(target=send_more)
    thread.start()
    assert not sent.wait(0.1)
    agent.change(hold=False)
    assert sent.wait(20)
    thread.join()
    for _ in range(2):
        assert np.array_equal(receiver.recv(0, timeout_s=20).array, block)
    for handle in handles:
        handle.wait(20)


# -- the agent ---


def test_a_dead_agent_fails_everything_in_bounded_time(pair: tuple[Endpoint, Endpoint], agent: FakeAgent) -> None:
    sender, receiver = pair
    agent.change(hold=True)
    send, receive = sender.isend(b"x", 1), receiver.irecv_into(bytearray(1), 0)
    caught: list[ProxydError] = []

    def wait_for_message() -> None:
        try:
            receiver.recv(None, 5, timeout_s=60)
        except ProxydError as error:
            caught.append(error)

    thread = threading.Thread(target=wait_for_message)
    thread.start()
    agent.kill()
    thread.join(10)
    assert not thread.is_alive()
    assert isinstance(caught[0], AgentUnavailable)
    for call in (
        lambda: send.wait(10),
        lambda: receive.wait(10),
        lambda: sender.isend(b"x", 1),
        lambda: receiver.recv(0),
        lambda: receiver.eta(0),
        lambda: sender.link_state(1),
        lambda: sender.announce(1, 1, nbytes=5),
    ):
        with pytest.raises(AgentUnavailable, match=r"agent at .*agent\.sock is gone"):
            call()


def test_a_newer_life_of_the_rank_closes_the_older(agent: FakeAgent, connect: Connect) -> None:
    old = connect(agent, 0)
    pending = old.irecv(None)
    new = connect(agent, 0)
    with pytest.raises(ClosedError, match="newer process"):
        pending.wait(20)
    with pytest.raises(ClosedError, match="newer process"):
        old.isend(b"x", 0)
    new.send(b"mine", 0, timeout_s=20)


@pytest.mark.parametrize(
    "frame",
    [
        wire.Landed(1, 1, 5),
        wire.Block(1, 1, 9, 4096),
        wire.Offered(2, 1, Envelope("job", 0, 1, "", 1, 0, 10, "uint8", (10,)), 9, 4096),
        wire.Offered(2, 1, Envelope("job", 0, 1, "", 1, 0, 1 << 30, "uint8", (1 << 30,)), 2, 4096),
        wire.ArenaWanted(5),
    ],
)
def test_an_agent_that_breaks_the_protocol_is_not_believed(
    pair: tuple[Endpoint, Endpoint], agent: FakeAgent, frame: wire.Frame
) -> None:
    _, here = pair
    agent.tell(1, wire.Offered(1, 1, Envelope("job", 0, 1, "", 1, 0, 4, "uint8", (4,)), 0, 0))
    agent.tell(1, frame)
    with pytest.raises(AgentUnavailable, match="broke the protocol"):
        here.recv(3, timeout_s=20)


# -- close, fork ---


def test_close_waits_for_acknowledgements_then_fails_the_rest(
    start_agent: Callable[..., FakeAgent], connect: Connect
) -> None:
    agent = start_agent(hold=True)
    sender, receiver = connect(agent, 0), connect(agent, 1)
    handle, posted = sender.isend(b"x", 1), sender.irecv(1)
    started = time.monotonic()
    sender.close(linger_s=0.2)
    assert 0.2 <= time.monotonic() - started < 5
    for pending in (handle, posted):
        with pytest.raises(ClosedError):
            pending.wait(10)
    with pytest.raises(ClosedError):
        sender.recv(1)
    sender.close()
    with pytest.raises(PeerLost):
        receiver.recv(0, timeout_s=20)
    assert agent.count(wire.Bye) == 1


@pytest.mark.parametrize("timeout_s", [None, 60.0])
@pytest.mark.parametrize("first", [0, 1])
def test_whoever_waits_while_another_thread_closes_hears_of_it(
    start_agent: Callable[..., FakeAgent],
    connect: Connect,
    monkeypatch: pytest.MonkeyPatch,
    timeout_s: float | None,
    first: int,
) -> None:
    """The first of them drives the session while it waits: the end of its driving is no timeout."""
    endpoint = connect(start_agent(hold=True), 0)
    handle = endpoint.isend(b"x", 1)
    progress, begun = endpoint._session.core.progress, threading.Semaphore(0)
    wait_for = progress.wait_for

    def wait_and_say_so(ready: Callable[[], bool], deadline_ns: int | None) -> bool:
        begun.release()  # under the session's lock, which close() gets only once this waits
        return wait_for(ready, deadline_ns)

    waits: list[Callable[[], object]] = [
        lambda: endpoint.recv(1, timeout_s=timeout_s),
        lambda: handle.wait(timeout_s),
        lambda: endpoint.recv(1, tag=5, timeout_s=timeout_s),
    ]
    monkeypatch.setattr(progress, "wait_for", wait_and_say_so)
    with ThreadPoolExecutor(len(waits)) as pool:
        told = []
        for wait in waits[first:] + waits[:first]:
            told.append(pool.submit(wait))
            assert begun.acquire(timeout=20)
        endpoint.close(linger_s=0)
        for one in told:
            with pytest.raises(ClosedError):
                one.result(20)


def test_close_lingers_for_what_is_being_delivered(pair: tuple[Endpoint, Endpoint], agent: FakeAgent) -> None:
    sender, receiver = pair
    with sender:
        handle = sender.isend(np.ones(8 * MIB, np.uint8), 1)
        receiver.irecv_into(np.empty(8 * MIB, np.uint8), 0)
    handle.wait(0)


def test_an_error_in_a_with_block_does_not_linger(agent: FakeAgent, connect: Connect) -> None:
    agent.change(hold=True)
    started = time.monotonic()

    def fail_inside() -> None:
        with connect(agent, 0) as sender:
            sender.isend(b"x", 1)
            raise KeyError

    with pytest.raises(KeyError):
        fail_inside()
    assert time.monotonic() - started < 4


def test_threads_and_descriptors_go_with_the_endpoint(agent: FakeAgent, connect: Connect) -> None:
    connect(agent, 0).close(linger_s=0)
    gc.collect()
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(5):
        endpoint = connect(agent, 0)
        endpoint.send(b"x", 0, timeout_s=20)
        endpoint.close(linger_s=0)
    # The agent runs in this process, and closes its side (and drops its arenas) when it has read the BYE.
    while agent.call(lambda: len(agent.sessions)):
        pass
    gc.collect()
    fds, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    own = 2 * 5 * 2  # the agent keeps memfd descriptors of its sessions until they are collected
    assert fds <= before[0] + own
    assert threads <= before[1] + 1


def _in_child(action: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            action()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_gets_an_error_and_leaves_the_parent_alone(
    pair: tuple[Endpoint, Endpoint], agent: FakeAgent
) -> None:
    sender, receiver = pair
    sender.send(b"held", 1, tag=1, timeout_s=20)
    message = receiver.recv(0, 1, timeout_s=20)
    handle = receiver.irecv(0, 2)
    parent = os.getpid()

    def child() -> None:
        nonlocal message
        for call in (
            lambda: receiver.recv(0, 1, timeout_s=1),
            lambda: receiver.isend(b"x", 0),
            lambda: handle.wait(1),
            lambda: handle.done(),
            lambda: receiver.announce(0, 1, nbytes=1),
            lambda: receiver.link_state(0),
            lambda: receiver.eta(0),
        ):
            with pytest.raises(ClosedError, match=rf"belongs to process {parent}.*connect\(\) again"):
                call()
        assert bytes(message.data) == b"held"
        del message  # its last view here: no RELEASE may reach the agent
        gc.collect()
        receiver.close()

    assert _in_child(child) == 0
    receiver.link_state(0)
    assert agent.count(wire.Release) == 0
    assert agent.count(wire.Bye) == 0
    sender.isend(b"after", 1, tag=2)
    assert bytes(handle.wait(20).data) == b"after"
    del message
    gc.collect()
    receiver.link_state(0)
    assert agent.count(wire.Release) == 1


# -- connecting ---


def test_a_missing_agent_is_waited_for_and_named(tmp_path: Path) -> None:
    path = tmp_path / "nobody.sock"
    started = time.monotonic()
    with pytest.raises(AgentUnavailable, match=r"no agent answered at .*nobody\.sock within 0\.3 s: there is no such"):
        proxyd_client.connect("job", 0, socket=path, timeout_s=0.3)
    assert 0.2 <= time.monotonic() - started < 2


def test_an_agent_that_comes_late_is_found(tmp_path: Path) -> None:
    found: list[Endpoint] = []
    agent_path = tmp_path / "agent.sock"

    def connect() -> None:
        found.append(proxyd_client.connect("job", 0, socket=agent_path, timeout_s=20))

    thread = threading.Thread(target=connect)
    thread.start()
    with FakeAgent(tmp_path):
        thread.join(20)
        assert found[0].site == "here"
        assert found[0].agent_name == "fake"
        found[0].close()


def test_the_environment_names_the_socket(agent: FakeAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROXYD_SOCKET", agent.path)
    with proxyd_client.connect("job", 3) as endpoint:
        assert repr(endpoint) == f"<Endpoint job/3 at {agent.path}>"


def test_paths_that_cannot_work_are_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    regular = tmp_path / "file"
    regular.write_text("")
    for socket, text in (
        ("/" + "x" * 119, "has 120 bytes, but a Unix socket path holds 107"),
        (regular, "is not a socket"),
        ("tcp://nohost", "is no TCP address"),
        ("", "is empty"),
    ):
        started = time.monotonic()
        with pytest.raises(ConfigError, match=text):
            proxyd_client.connect("job", 0, socket=socket, timeout_s=30)
        assert time.monotonic() - started < 5
    monkeypatch.setenv("PROXYD_TOKEN_FILE", str(tmp_path / "missing"))
    with pytest.raises(ConfigError, match="token file"):
        proxyd_client.connect("job", 0, socket=regular)
    for job in ("", "j" * 129):
        with pytest.raises(ValueError, match="job must be"):
            proxyd_client.connect(job, 0)


def test_tokens_on_both_sides_of_tcp(
    start_agent: Callable[..., FakeAgent], connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = start_agent(token=b"right")
    token_file = tmp_path / "token"
    monkeypatch.setenv("PROXYD_TOKEN_FILE", str(token_file))
    token_file.write_text("right\n")
    endpoint = connect(agent, 0, tcp=True)
    assert endpoint.link_state(0).link == "here"
    token_file.write_text("wrong\n")
    with pytest.raises(ConfigError, match="refused job/1"):
        connect(agent, 1, tcp=True)
    agent.change(token=b"")
    with pytest.raises(ConfigError, match="doesn't hold this trainer's token"):
        connect(agent, 1, tcp=True)


# -- errors as values ---


def test_errors_keep_their_details_through_pickle_and_again() -> None:
    error = TransferTimeout("slow", why="queue", next_step="wait", peer=1, tag=2, group="g", phase="p", bytes_done=3)
    for copy in (pickle.loads(pickle.dumps(error)), error.again()):  # noqa: S301 - our own bytes
        assert type(copy) is TransferTimeout
        assert str(copy) == "slow: queue. wait"
        assert (copy.peer, copy.tag, copy.group, copy.phase, copy.bytes_done) == (1, 2, "g", "p", 3)


def test_every_code_has_a_class() -> None:
    assert all(issubclass(class_of_code(code), ProxydError) for code in ErrorCode)
    assert class_of_code(ErrorCode.UNKNOWN_DESTINATION) is PeerLost
    assert class_of_code(999) is TransferFailed
    assert next_step_of_code(999) == ""


@pytest.mark.parametrize("token", ["", " \n", b"", 7])
def test_a_token_that_is_none_is_the_callers_mistake(token: Any) -> None:
    with pytest.raises(ArgumentError, match="token"):
        proxyd_client.connect("job", 0, socket="/nonexistent", token=token, timeout_s=0)


def test_a_token_that_is_handed_over_goes_before_the_environments(
    start_agent: Callable[..., FakeAgent], connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = start_agent(token=b"right")
    monkeypatch.setenv("PROXYD_TOKEN_FILE", "/nonexistent")
    endpoint = connect(agent, 0, tcp=True, token="right\n")
    assert endpoint.link_state(0).link == "here"
    assert "right" not in repr(endpoint._session.core.identity)
