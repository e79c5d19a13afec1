"""When the work of a send is done, and what becomes of its errors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from proxyd_client.errors import PeerLost, ProxydError, TransferTimeout
from proxyd_client.handle import Handle

pytestmark = pytest.mark.needs_torch


class UnderWay:
    """A send that was posted; the test says how it ends."""

    source = None

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.error: ProxydError | None = None

    def wait(self, timeout_s: float | None) -> None:
        if not self.ended.wait(timeout_s):
            raise TransferTimeout("not yet")
        if self.error is not None:
            raise self.error.again()

    def poll(self) -> bool:
        return self.ended.is_set()

    def eta_s(self) -> float | None:
        return None

    def cancel(self) -> bool:
        return False

    def call_when_done(self, callback: Callable[[], None]) -> None:
        threading.Thread(target=lambda: (self.ended.wait(), callback())).start()

    def describe(self) -> str:
        return "a send"


class Outbox:
    """Posts at once."""

    endpoint = None

    def __init__(self) -> None:
        self.sends: list[UnderWay] = []

    def send(self, *_: Any, **__: Any) -> Handle[None]:
        self.sends.append(UnderWay())
        return Handle(self.sends[-1])


def one_of_two() -> tuple[Any, Outbox]:
    """Point-to-point of rank 0 in a group of two."""
    import datetime

    from proxyd_client.torch.membership import Member, Membership
    from proxyd_client.torch.p2p import PointToPoint

    outbox: Any = Outbox()
    members = [Member(0, "a", "a-0"), Member(1, "b", "b-0")]
    return PointToPoint(Membership("g", 0, members, outbox, datetime.timedelta(seconds=60))), outbox


def test_a_send_is_done_when_its_tensor_may_change() -> None:
    import torch

    p2p, outbox = one_of_two()
    work = p2p.send(torch.ones(3), 1)
    assert work.is_completed()
    assert work.wait(), "it is in shared memory, and nobody has received it"
    assert not outbox.sends[0].poll()
    outbox.sends[0].ended.set()
    assert work.get_future().wait()


def test_what_kept_it_from_arriving_is_raised_by_the_next_send_to_that_rank_once() -> None:
    import torch

    p2p, outbox = one_of_two()
    p2p.send(torch.ones(3), 1).wait()
    p2p.send(torch.ones(3), 1).wait()
    outbox.sends[0].error = PeerLost("rank 1 has ended")
    outbox.sends[0].ended.set()
    with pytest.raises(PeerLost, match=r"earlier send to .*group rank 1.*rank 1 has ended"):
        p2p.send(torch.ones(3), 1)
    assert p2p.send(torch.ones(3), 1).wait()


def test_what_its_own_wait_has_told_no_later_send_repeats() -> None:
    import torch

    p2p, outbox = one_of_two()
    work = p2p.send(torch.ones(3), 1)
    outbox.sends[0].error = PeerLost("rank 1 has ended")
    outbox.sends[0].ended.set()
    with pytest.raises(PeerLost):
        work.wait()
    assert isinstance(work.exception(), PeerLost)
    assert p2p.send(torch.ones(3), 1).wait()


def test_one_that_waits_for_room_is_not_done() -> None:
    import datetime

    import torch

    from proxyd_client.torch.outbox import Later
    from proxyd_client.torch.works import Fate, SendWork

    later = Later(None, 1, {})  # type: ignore[arg-type] # its payload is never looked at
    work = SendWork(Fate(Handle(later)), [torch.ones(3)], lambda: "send", 60.0, lambda _: 0)
    assert not work.is_completed()
    with pytest.raises(TransferTimeout):
        work.wait(datetime.timedelta(seconds=0.01))
    later.posted(Handle(UnderWay()))
    assert work.wait()
    assert work.is_completed()


def test_who_waits_for_a_collective_is_counted_and_the_thread_that_does_it_is_not() -> None:
    from proxyd_client.torch.in_order import InOrder

    class Waiting:
        blocked: list[str] = []

        def __enter__(self) -> None:
            self.blocked.append(threading.current_thread().name)
            go_on.set()

        def __exit__(self, *_: object) -> None:
            pass

    go_on, waiting = threading.Event(), Waiting()
    order = InOrder("collectives", waiting)
    work = order.submit(lambda: go_on.wait(20) and None, [], "a collective")
    assert work.wait()
    assert work.wait(), "it has ended: nobody stands still"
    order.close(PeerLost("over"))
    assert waiting.blocked == [threading.current_thread().name]
