"""The locks themselves: etcd's with a real etcd, the Kubernetes Lease with an API server that knows its rules."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

aetcd = pytest.importorskip("aetcd", reason="needs the ha extra")

from proxyd.cli.certificates import Authority  # noqa: E402
from proxyd.coordinator.election import Election, LockError, LockLostError  # noqa: E402
from proxyd.coordinator.etcd_lock import EtcdLock  # noqa: E402
from proxyd.coordinator.etcd_tls import EtcdTls  # noqa: E402
from proxyd.coordinator.kubernetes_lock import KubernetesLock  # noqa: E402
from tests.fakes.etcd import Etcd, running_etcd  # noqa: E402
from tests.fakes.kubernetes import FakeApiServer  # noqa: E402

pytestmark = pytest.mark.timeout(60)

SECOND = 1_000_000_000
KEY = ("prod", "proxyd-hami")
T_NS = 3 * SECOND


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    with running_etcd(tmp_path_factory.mktemp("etcd")) as server:
        yield server


def etcd_lock(etcd: Etcd, key: str, me: str, ttl_ns: int = 2 * SECOND) -> EtcdLock:
    return EtcdLock([("127.0.0.1", etcd.port)], key, me, ttl_ns)


def run(main: Callable[[], Awaitable[None]], timeout_s: float = 30) -> None:
    async def guarded() -> None:
        async with asyncio.timeout(timeout_s):
            await main()

    asyncio.run(guarded())


# ------------------------------------------------------------------------------------------------- etcd


def test_etcd_one_has_it_and_the_next_one_a_higher_fence(etcd: Etcd) -> None:
    async def main() -> None:
        one, two = etcd_lock(etcd, "/t/1", "one:7600"), etcd_lock(etcd, "/t/1", "two:7600")
        fence = await one.claim()
        assert fence is not None
        assert fence > 0
        assert await two.claim() is None
        assert two.holder == "one:7600"
        await one.renew()
        assert await one.claim() is None, "not even its holder takes it twice"
        await one.release()
        later = await two.claim()
        assert later is not None
        assert later > fence
        with pytest.raises((LockLostError, LockError)):
            await one.renew()
        await two.release()
        await one.close()
        await two.close()

    run(main)


def test_etcd_ends_a_lease_that_nobody_renews_and_the_standby_has_it_in_time(etcd: Etcd) -> None:
    """Stopped, or killed: the same to etcd."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        first = Election(etcd_lock(etcd, "/t/2", "one:7600"), 2 * SECOND)
        second = Election(etcd_lock(etcd, "/t/2", "two:7600"), 2 * SECOND)
        fence = await first.acquire()
        begun_s = loop.time()
        waiting = asyncio.ensure_future(second.acquire())
        while not waiting.done():
            assert not (first.holds() and second.holds())
            await asyncio.sleep(0.02)
        assert not first.holds(), "it knows without asking"
        assert waiting.result() > fence
        assert loop.time() - begun_s <= 4.5, "the ttl, etcd's own half second, and a poll (on a busy machine)"
        await second.resign()

    run(main)


def test_etcd_that_stops_answering_costs_the_lock_in_time(etcd: Etcd) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        election = Election(etcd_lock(etcd, "/t/3", "one:7600"), 2 * SECOND)
        await election.acquire()
        etcd.stop()
        begun_s = loop.time()
        try:
            why = await election.hold()
        finally:
            etcd.go_on()
        assert "not renewed" in why
        assert loop.time() - begun_s <= 3.5
        assert not election.holds()

    run(main)


def test_etcd_a_key_that_was_deleted_by_hand_is_no_lock(etcd: Etcd) -> None:
    async def main() -> None:
        lock = etcd_lock(etcd, "/t/4", "one:7600")
        await lock.claim()
        async with aetcd.Client("127.0.0.1", etcd.port) as other:
            await other.delete(b"/t/4")
            with pytest.raises(LockLostError):
                await lock.renew()
            await other.put(b"/t/4", b"somebody")
            with pytest.raises(LockLostError):
                await lock.renew()
        await lock.close()

    run(main)


def test_etcd_a_member_that_is_away_is_passed_over(etcd: Etcd) -> None:
    async def main() -> None:
        lock = EtcdLock([("127.0.0.1", 1), ("127.0.0.1", etcd.port)], "/t/5", "me", 2 * SECOND)
        with pytest.raises(LockError) as caught:
            await lock.claim()
        assert "127.0.0.1:1" in str(caught.value)
        assert await lock.claim() is not None
        await lock.release()
        await lock.close()

    run(main)


def test_etcd_over_tls_both_sides_must_be_right(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca.pem")
    server = authority.issue(tmp_path / "server", dns_names=["localhost"])
    mine, foreign = authority.issue(tmp_path / "mine"), Authority(tmp_path / "other.pem").issue(tmp_path / "foreign")
    good = EtcdTls(mine.ca, mine.certificate, mine.key)

    async def main(port: int) -> None:
        def lock(tls: EtcdTls | None, host: str = "localhost") -> EtcdLock:
            return EtcdLock([(host, port)], "/t/tls", "me", 2 * SECOND, tls)

        strangers = [
            lock(None),
            lock(good._replace(certificate=None, key=None)),
            lock(EtcdTls(mine.ca, foreign.certificate, foreign.key)),
            lock(good._replace(ca=foreign.ca)),
            lock(good, "127.0.0.1"),  # not the name in its certificate
        ]
        for stranger in strangers:
            with pytest.raises(LockError, match="etcd at"):
                await stranger.claim()
        one, two = lock(good), lock(good)
        assert await one.claim() is not None
        assert await two.claim() is None
        assert two.holder == "me"
        # Renewed files: good for the next connection, and bad ones cost no more than an attempt.
        await one.close()
        good_key = mine.key + ".good"
        os.rename(mine.key, good_key)
        shutil.copy(foreign.key, mine.key)
        with pytest.raises(LockError, match="can't be used together"):
            await one.renew()
        os.rename(good_key, mine.key)
        await one.renew()
        await one.release()
        assert await two.claim() is not None
        for each in (one, two, *strangers):
            await each.close()

    with running_etcd(tmp_path, server) as etcd:
        run(lambda: main(etcd.port))


# ------------------------------------------------------------------------------------------- kubernetes


class Clock:
    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


@asynccontextmanager
async def kubernetes(
    directory: Path, count: int = 2
) -> AsyncIterator[tuple[FakeApiServer, Clock, list[KubernetesLock]]]:
    server, clock = FakeApiServer(), Clock()
    path = await server.start(directory)
    locks = [
        KubernetesLock(*KEY, f"{number}:7600", T_NS, kubeconfig=path, clock=clock) for number in range(1, count + 1)
    ]
    try:
        yield server, clock, locks
    finally:
        for lock in locks:
            await lock.close()
        await server.close()


def test_a_lease_is_made_renewed_let_go_and_taken_over(tmp_path: Path) -> None:
    async def main() -> None:
        async with kubernetes(tmp_path) as (server, _, (one, two)):
            assert await one.claim() == 1
            assert server.leases[KEY]["spec"]["holderIdentity"].startswith("1:7600_")
            assert await two.claim() is None
            assert two.holder == "1:7600"
            await one.renew()
            await one.renew()
            await one.release()
            assert server.leases[KEY]["spec"]["holderIdentity"] == ""
            assert await two.claim() == 2
            with pytest.raises(LockLostError):
                await one.renew()
            assert server.leases[KEY]["spec"]["leaseTransitions"] == 1

    run(main)


def test_a_holder_that_stops_renewing_is_found_out_by_the_waiting_ones_own_clock(tmp_path: Path) -> None:
    async def main() -> None:
        async with kubernetes(tmp_path) as (server, clock, (one, two)):
            await one.claim()
            for _ in range(20):
                assert await two.claim() is None
                clock.now_ns += SECOND
                await one.renew()
            # The times in the object are of another host's wall clock, an hour off: they mean nothing.
            server.leases[KEY]["spec"]["renewTime"] = "2001-01-01T00:00:00.000000Z"
            assert await two.claim() is None
            clock.now_ns += T_NS - 1
            assert await two.claim() is None
            clock.now_ns += 1
            assert await two.claim() == 2

    run(main)


def test_of_two_that_take_a_dead_ones_lease_at_once_one_gets_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with kubernetes(tmp_path, 6) as (_, clock, (one, *others)):
            await one.claim()
            assert await asyncio.gather(*(lock.claim() for lock in others)) == [None] * 5
            clock.now_ns += T_NS
            got = await asyncio.gather(*(lock.claim() for lock in others))
            assert sorted(fence for fence in got if fence is not None) == [2]

    run(main)


def test_of_two_that_make_the_lease_at_once_one_gets_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with kubernetes(tmp_path, 6) as (_, _, locks):
            got = await asyncio.gather(*(lock.claim() for lock in locks))
            assert [fence for fence in got if fence is not None] == [1]

    run(main)


def test_a_write_whose_answer_was_lost_and_an_annotation_cost_no_lock(tmp_path: Path) -> None:
    async def main() -> None:
        async with kubernetes(tmp_path) as (server, _, (one, _)):
            await one.claim()
            server.fail = "lost"
            with pytest.raises(LockError):
                await one.renew()
            with pytest.raises(LockError):
                await one.renew()  # its own write, which it knows nothing of
            await one.renew()
            server.touch(KEY)
            with pytest.raises(LockError):
                await one.renew()
            await one.renew()

    run(main)


def test_a_lease_that_was_deleted_is_lost_and_a_server_that_is_away_is_tried_again(tmp_path: Path) -> None:
    async def main() -> None:
        async with kubernetes(tmp_path) as (server, _, (one, two)):
            await one.claim()
            server.fail = "503"
            with pytest.raises(LockError):
                await one.renew()
            with pytest.raises(LockError):
                await two.claim()
            server.fail = ""
            await one.renew()
            del server.leases[KEY]
            with pytest.raises(LockLostError):
                await one.renew()

    run(main)


def test_without_a_cluster_it_says_so(tmp_path: Path) -> None:
    async def main() -> None:
        lock = KubernetesLock(*KEY, "1:7600", T_NS, kubeconfig=str(tmp_path / "nothing"))
        with pytest.raises(LockError) as caught:
            await lock.claim()
        assert "prod/proxyd-hami" in str(caught.value)

    run(main)
