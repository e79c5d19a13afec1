"""Waiting for the first of several receives.

A thread that waits drives the socket itself (:mod:`proxyd_client.progress`), and copies what lands for what it waits
for. One that has several receives under way, and goes on with whichever is here first, does the same for all of them:
to hear of the end by a callback would take two hand-offs between threads, and as much as STAND_BACK_S more after any
look at the socket.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from proxyd_client.receive import Receive
    from proxyd_client.receiving import Receiver


def wait_any(
    receiver: Receiver, receives: Sequence[Receive], timeout_s: float | None, interrupted: Callable[[], bool]
) -> None:
    """Until one of them has ended, or ``interrupted()``, or the time is up, or the session has ended.

    :param receives: of this receiver; few, for each is looked at whenever something happens.
    :param interrupted: asked with the session's lock held, after each :func:`wake`; must not wait or call the library.
    """
    core = receiver.core
    core.check_process()
    deadline_ns = core.deadline_ns(timeout_s)

    def over() -> bool:
        return interrupted() or any(receive.ended and not receive.copying for receive in receives)

    def due() -> Receive | None:
        return next((receive for receive in receives if receive.copy_is_due_here), None)

    with core.lock:
        for receive in receives:
            receive.waiters += 1
        try:
            while not over():
                receive_due = due()
                if receive_due is not None:
                    receiver.copy_step(receive_due)
                elif not core.waiting.wait_for(lambda: over() or due() is not None, deadline_ns):
                    return
        finally:
            for receive in receives:
                receive.waiters -= 1
            if any(receive.copy_is_due for receive in receives):
                core.progress.call_background()


def wake(receiver: Receiver) -> None:
    """Have those look again who are in :func:`wait_any`."""
    with receiver.core.lock:
        receiver.core.progress.notify()
