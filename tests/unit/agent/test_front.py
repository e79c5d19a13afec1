"""Several workers behind one address: who gets which connection, what they say to each other, what is said of them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import uvloop

from proxyd.agent.front import doors
from proxyd.agent.front.doors import PeerDoor, TrainerDoor
from proxyd.agent.front.line import Line, LineError, encode, receive
from proxyd.agent.front.merging import FRONT, families_of, labelled, merged_drain, merged_families, merged_status
from proxyd.agent.front.placing import Placing
from proxyd.agent.front.worker import _Worker, draw_incarnation, home_of, worker_section
from proxyd.agent.local import credentials_of
from proxyd.agent.passing import MAX_WAITING, Passage, PassedSockets
from proxyd.runtime.config import AgentConfig
from proxyd.runtime.metrics import Sample, counter, gauge
from proxyd.v1 import admin_pb2, coordination_pb2
from proxyd.wire import routing

T = TypeVar("T")


def run(main: Callable[[], Awaitable[T]]) -> T:
    async def bounded() -> T:
        async with asyncio.timeout(20):
            return await main()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(bounded())


async def until(look: Callable[[], T]) -> T:
    """What ``look`` answers, once that is something."""
    while True:
        if found := look():
            return found
        await asyncio.sleep(0.001)


# -- who goes where ----------------------------------------------------------------------------------------------------


def test_trainers_go_where_there_are_fewest_and_whoever_is_on_the_way_counts() -> None:
    placing = Placing(3)
    everywhere = (0, 1, 2)
    assert [placing.place(0, everywhere) for _ in range(6)] == [0, 1, 2, 0, 1, 2]
    placing.reported(1, settled=2, attached=0)  # they were strangers, and left
    assert placing.trainers() == [2, 0, 2]
    assert placing.place(0, everywhere) == 1
    placing.reported(1, settled=3, attached=1)
    placing.reported(0, settled=2, attached=2)
    assert placing.trainers() == [2, 1, 2]
    placing.begins_anew(2)
    assert placing.place(0, everywhere) == 2
    assert placing.place(0, (0,)) == 0, "those that take none are left out"
    assert placing.place(0, ()) == 1, "unless that is so of all"


def test_a_life_may_find_what_its_predecessor_left() -> None:
    placing = Placing(2)
    placing.begins_anew(0)
    placing.reported(0, settled=3, attached=3)
    placing.place(0, (0,))
    assert placing.trainers() == [4, 0]


def test_a_process_keeps_its_worker_until_it_ends() -> None:
    placing = Placing(2)
    placing.keep(77, 1)
    for _ in range(3):
        assert placing.place(77, (0, 1)) == 1
    assert placing.place(77, (0,)) == 1, "its next life will have it"
    placing.ended(77)
    placing.ended(77)
    assert placing.place(77, (0, 1)) == 0, "the number may be another process's"


def test_an_incarnation_says_whose_it_is() -> None:
    for worker in (0, 1, routing.MAX_WORKERS - 1):
        life = draw_incarnation(worker)
        assert 0 < life < 1 << 63
        assert home_of(life) == worker


def test_a_trainer_that_comes_back_to_another_worker_is_sent_home_once() -> None:
    agent: Any = SimpleNamespace(admin=lambda: None, registry=lambda: None)
    worker = _Worker(agent, [], {"worker": 1, "workers": 3})
    home = draw_incarnation(2)
    assert worker._lives_elsewhere(77, home)
    assert not worker._lives_elsewhere(77, home), "the front can't place it there, so it stays"
    assert worker._lives_elsewhere(78, home)
    assert not worker._lives_elsewhere(79, draw_incarnation(1)), "it is here"
    assert not worker._lives_elsewhere(79, draw_incarnation(3)), "there was such a worker once"
    assert not worker._lives_elsewhere(0, home), "of another pid namespace: it can't be told where it goes next"


# -- passing sockets on ------------------------------------------------------------------------------------------------


def taken(door: PassedSockets) -> list[socket.socket]:
    found = []
    with contextlib.suppress(BlockingIOError):
        while True:
            found.append(door.accept()[0])
    return found


def test_a_socket_that_was_passed_on_still_says_who_is_at_its_other_end(tmp_path: Any) -> None:
    async def main() -> None:
        passage = Passage()
        door = PassedSockets(passage.far, socket.AF_UNIX, "/path")
        path = str(tmp_path / "s")
        code = f"import socket; s = socket.socket(socket.AF_UNIX); s.connect({path!r}); s.sendall(b'hi'); input()"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen()
            with subprocess.Popen([sys.executable, "-I", "-S", "-c", code], stdin=subprocess.PIPE) as trainer:  # noqa: ASYNC220
                assert passage.pass_on(listener.accept()[0])
                [sock] = taken(door)
                who = credentials_of(sock)
                assert (who.pid, who.uid) == (trainer.pid, os.getuid())
                assert sock.recv(2) == b"hi"
                trainer.communicate(b"\n")
                asyncio.get_running_loop().add_reader(who.pidfd, ended.set)
                await ended.wait()  # its end, by the passed socket's pidfd
                asyncio.get_running_loop().remove_reader(who.pidfd)
                os.close(who.pidfd)
                sock.close()
        passage.close()

    ended = asyncio.Event()
    run(main)


def test_what_a_worker_does_not_take_waits_for_its_next_life_and_not_without_bound() -> None:
    async def main() -> None:
        passage = Passage()
        others = []
        refused = 0
        for _ in range(MAX_WAITING + 1000):
            one, other = socket.socketpair()
            others.append(other)
            if not passage.pass_on(one):
                refused += 1
                break
        assert refused == 1
        assert passage.passed > MAX_WAITING
        door = PassedSockets(passage.far, socket.AF_UNIX, "")
        found = 0
        while found < passage.passed:
            for sock in taken(door):
                sock.close()
                found += 1
            await asyncio.sleep(0)
        assert door.taken == passage.passed
        for sock in others:
            sock.close()
        passage.close()
        with pytest.raises((OSError, ValueError)):
            door.accept()

    run(main)


# -- the front's doors -------------------------------------------------------------------------------------------------


class FakeWorker:
    """What a door needs of a worker."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.up = True
        self.local, self.data = Passage(), Passage()
        self.trainers = PassedSockets(self.local.far, socket.AF_UNIX, "")
        self.peers = PassedSockets(self.data.far, socket.AF_INET, ("127.0.0.1", 1))


class Rig:
    """Two workers that take nothing by themselves, and the front's data door."""

    def __init__(self) -> None:
        self.workers: Any = [FakeWorker(0), FakeWorker(1)]
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setblocking(False)
        self.address = listener.getsockname()
        self.door = PeerDoor(listener, self.workers, 8)

    def dial(self, words: bytes = b"") -> socket.socket:
        sock = socket.create_connection(self.address)
        sock.sendall(words)
        return sock

    async def at(self, worker: int) -> socket.socket:
        """The next connection that it gets."""
        return (await until(lambda: taken(self.workers[worker].peers)))[0]

    async def refused(self, reason: str, times: int = 1) -> None:
        await until(lambda: dict(self.door.door.refusals())[reason] >= times)

    def close(self) -> None:
        self.door.close()
        for worker in self.workers:
            worker.local.close()
            worker.data.close()


@contextlib.contextmanager
def rig() -> Iterator[Rig]:
    one = Rig()
    try:
        yield one
    finally:
        one.close()


@pytest.mark.parametrize("pieces", [[16], [1, 15], [5, 5, 6]])
def test_a_preamble_is_taken_off_and_nothing_else(pieces: list[int]) -> None:
    async def main() -> None:
        with rig() as one:
            said = routing.preamble(1)
            with one.dial() as sock:
                for size in pieces[:-1]:
                    sock.sendall(said[:size])
                    said = said[size:]
                    await asyncio.sleep(0.005)
                sock.sendall(said + b"what follows")
                passed = await one.at(1)
                passed.setblocking(True)
                assert passed.recv(100) == b"what follows"
                assert passed.getpeername() == sock.getsockname()
                passed.close()

    run(main)


def test_whoever_says_something_else_is_the_first_workers() -> None:
    async def main() -> None:
        with rig() as one, one.dial(b"\x16\x03\x01 hello") as sock:
            passed = await one.at(0)
            passed.setblocking(True)
            assert passed.recv(100) == b"\x16\x03\x01 hello"
            passed.close()
            sock.close()

    run(main)


def test_whoever_says_nothing_is_the_first_workers_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        with rig() as one, one.dial():
            (await one.at(0)).close()
            assert len(one.door.door.room) == 0

    monkeypatch.setattr(doors, "SILENT_S", 0.01)
    run(main)


def test_a_preamble_for_nobody_or_half_of_one_is_closed_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        with rig() as one:
            with one.dial(routing.preamble(2)) as sock:
                await one.refused("worker")
                assert await asyncio.get_running_loop().sock_recv(_calm(sock), 1) == b""
            with one.dial(routing.preamble(1)[:7]) as sock:
                sock.shutdown(socket.SHUT_WR)
                await one.refused("hello")
            with one.dial(routing.preamble(1)[:7]):
                await one.refused("silent")
            assert not taken(one.workers[0].peers)
            assert not taken(one.workers[1].peers)

    monkeypatch.setattr(doors, "PREAMBLE_S", 0.02)
    run(main)


def _calm(sock: socket.socket) -> socket.socket:
    sock.setblocking(False)
    return sock


def test_strangers_in_front_of_the_workers_have_so_many_places() -> None:
    async def main() -> None:
        with rig() as one, contextlib.ExitStack() as stack:
            for _ in range(12):
                stack.enter_context(one.dial())
            await one.refused("crowded", 4)
            assert len(one.door.door.room) == 8

    run(main)


def test_a_process_that_comes_again_is_passed_to_the_same_worker(tmp_path: Any) -> None:
    async def main() -> None:
        workers: Any = [FakeWorker(0), FakeWorker(1)]
        placing = Placing(2)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        listener.setblocking(False)
        door = TrainerDoor(listener, "socket", lambda worker: worker.local, workers, placing, 8)
        placing.place(0, (0,))  # somebody is at the first one
        for number in range(3):
            with socket.socket(socket.AF_UNIX) as sock:
                sock.connect(str(tmp_path / "s"))
                found = await until(lambda: taken(workers[1].trainers))
                assert len(found) == 1, number
                found[0].close()
        assert placing.knows(os.getpid())
        door.close()
        for worker in workers:
            worker.local.close()
            worker.data.close()

    run(main)


# -- what the front and a worker say to each other ---------------------------------------------------------------------


def test_questions_are_answered_refused_or_end_with_the_line() -> None:
    async def main() -> None:
        async def twice(body: bytes) -> bytes:
            return body * 2

        async def refuse(body: bytes) -> bytes:
            raise LineError("it is not known where that is", status="NOT_FOUND")

        async def never(body: bytes) -> bytes:
            await asyncio.Event().wait()
            return b""

        news: list[dict[str, Any]] = []
        near, far = socket.socketpair()
        front, worker = Line({}, news.append), Line({"twice": twice, "refuse": refuse, "never": never})
        with pytest.raises(LineError, match="not there"):
            await front.ask("twice", timeout_s=1)
        running = [asyncio.ensure_future(one.run(await one.open(sock))) for one, sock in ((front, near), (worker, far))]
        large = bytes(3 << 20)
        assert await asyncio.gather(*(front.ask("twice", body, timeout_s=10) for body in (b"ab", large))) == [
            b"abab",
            large * 2,
        ]
        with pytest.raises(LineError, match="not known") as caught:
            await front.ask("refuse", timeout_s=10)
        assert caught.value.status == "NOT_FOUND"
        with pytest.raises(LineError, match=r"within 0\.01 s"):
            await front.ask("never", timeout_s=0.01)
        worker.tell(attached=3)
        waiting = asyncio.ensure_future(front.ask("never", timeout_s=10))
        await asyncio.sleep(0)
        running[1].cancel()
        with pytest.raises(LineError, match="gone"):
            await waiting
        await running[0]
        assert news == [{"attached": 3}]

    run(main)


def test_the_first_frame_is_read_before_there_is_a_loop() -> None:
    near, far = socket.socketpair()
    near.sendall(encode({"worker": 3}, b"body"))
    assert receive(far) == ({"worker": 3}, b"body")
    near.close()
    with pytest.raises(LineError, match="gone"):
        receive(far)
    far.close()


# -- the configuration -------------------------------------------------------------------------------------------------


def test_what_holds_for_all_workers_together_is_divided() -> None:
    section = AgentConfig.model_validate(
        {"site": "a", "name": "gw", "workers": 3, "memory": "1000MiB", "arena": "16MiB", "clients": 8, "strangers": 2}
    )
    parts = [worker_section(section, number) for number in range(3)]
    assert [part.name for part in parts] == ["gw#0", "gw#1", "gw#2"]
    assert [part.max_clients for part in parts] == [3, 3, 2]
    assert sum(part.memory_bytes for part in parts) <= section.memory_bytes < sum(p.memory_bytes for p in parts) + 3
    assert {part.strangers for part in parts} == {1}
    assert all(part.admin_path is None and part.metrics_address is None for part in parts)
    assert {part.max_clients for part in (worker_section(AgentConfig(site="a", workers=2), 1),)} == {None}


# -- what is said of them ----------------------------------------------------------------------------------------------


def test_a_scrape_names_each_family_once_and_each_series_has_its_worker() -> None:
    answer = (
        b'[["proxyd_x", "Xs.", "counter", [["proxyd_x_total", {"link": "a->b"}, 3.0]]],'
        b' ["proxyd_y_seconds", "Ys.", "histogram", [["proxyd_y_seconds_bucket", {"le": "+Inf"}, 1.0],'
        b' ["proxyd_y_seconds_count", {}, 1.0]]]]'
    )
    own = [counter("proxyd_x_total", "Xs.", [({}, 5)]), gauge("proxyd_z", "Zs.", [({}, 1)])]
    found = merged_families([families_of(answer, "0"), families_of(answer, "1"), labelled(own, FRONT)])
    assert [family.name for family in found] == ["proxyd_x_total", "proxyd_y_seconds", "proxyd_z"]
    assert found[0].samples == [
        Sample({"link": "a->b", "worker": "0"}, 3.0),
        Sample({"link": "a->b", "worker": "1"}, 3.0),
        Sample({"worker": "front"}, 5),
    ]
    assert [sample.suffix for sample in found[1].samples] == ["_bucket", "_count"] * 2


def status(number: int, **figures: Any) -> admin_pb2.AgentStatusResponse:
    name = coordination_pb2.AgentName(site="a", name=f"gw#{number}")
    return admin_pb2.AgentStatusResponse(agent=name, pid=100 + number, **figures)


def test_the_status_of_all_is_put_together() -> None:
    peer = coordination_pb2.AgentName(site="b", name="x")
    link = coordination_pb2.LinkName(src_site="a", dst_site="b")
    workers = {
        number: status(
            number,
            draining=True,
            held_transfers=1,
            outgoing_transfers=2,
            trainers=[coordination_pb2.EndpointName(job="j", rank=9 - number)],
            coordinators=[admin_pb2.ControlSession(address="c:1", connected=True)],
            peers=[admin_pb2.PeerStatus(agent=peer, connected=number == 1, streams=number, rtt_ns=7 * number)],
            links=[admin_pb2.AgentLink(link=link, fallback=number == 0, backlog_bytes=10, rate_bytes_per_s=5 * number)],
        )
        for number in (0, 1)
    }
    front = admin_pb2.AgentStatusResponse(agent=coordination_pb2.AgentName(site="a", name="gw"), pid=99)
    whole = merged_status(front, workers, 2)
    assert (whole.agent.name, whole.pid, whole.draining) == ("gw", 99, True)
    assert (whole.held_transfers, whole.outgoing_transfers) == (2, 4)
    assert [one.rank for one in whole.trainers] == [8, 9]
    assert [(one.address, one.connected) for one in whole.coordinators] == [("c:1", True)]
    assert [(one.connected, one.streams, one.rtt_ns) for one in whole.peers] == [(True, 1, 7)]
    assert [(one.fallback, one.backlog_bytes, one.rate_bytes_per_s) for one in whole.links] == [(True, 20, 5)]
    assert [one.pid for one in whole.workers] == [100, 101]
    del workers[0]
    whole = merged_status(front, workers, 2)
    assert [(one.agent.name, one.pid) for one in whole.workers] == [("gw#0", 0), ("gw#1", 101)]
    assert not whole.coordinators[0].connected, "a worker that doesn't answer has no session"
    assert not merged_status(front, {}, 2).draining


def test_the_agent_drains_when_all_workers_do() -> None:
    one, other = (
        admin_pb2.DrainResponse(draining=draining, under_way_transfers=3, held_transfers=1)
        for draining in (True, False)
    )
    assert merged_drain([one, one]).draining
    both = merged_drain([one, other])
    assert (both.draining, both.under_way_transfers, both.held_transfers) == (False, 6, 2)
