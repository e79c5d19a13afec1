"""Going on with the next life of the agent.

Theory of operation
-------------------
An agent that is killed, or stopped and started again, loses all that it knew; its trainers lose nothing. The arenas are
theirs too, and stay mapped: what they send still lies there, and what has landed. So when the connection ends, the
session stays, looks for the next life of the agent (as long as ``WELCOME.reconnect_ns`` says) and goes on with it, in
the same life of its own. Rules, for "exactly once, in order, or an error":

1. *First all is read that the old life had said.* The kernel keeps what it took, also of a process that died. An agent
   tells nobody that a message was delivered before the kernel has what it told the receiver about it
   (:meth:`proxyd.agent.clients.ClientHub.once_told`). So a message that its sender counts as delivered is known here:
   it was offered, and it was said to be complete or the block's own map says so, chunk by chunk.
2. *What is complete is delivered*, whether the old life could say so or not; the next one is told (``RESUME``), and
   acknowledges it, should it be offered again. *What isn't is awaited*: it keeps its place in its channel and the
   receive that it was matched to, and loses memory and bytes. It is offered again, or fails; the agent sees to that.
3. *What was not acknowledged is posted again*, in the order of its sequence and before anything new, for the life of
   the receiver that it was meant for. The receiving side knows what it has of it. A message that was delivered within
   the host is done, and one that was being cancelled is cancelled.
4. *A connection that ended in this life of the agent is no restart*: it has ended the session, and refuses its return.
   So it does when a newer process has the rank.
5. Over TCP there is no such way back: what the agent had received for this trainer, and acknowledged, was in its own
   memory and died with it. Such a session ends with its agent.

What each side says of the end of a message that doesn't go on: the sender's agent, which offers it (or not); see
:mod:`proxyd.core.remembering`. Nothing waits without a bound.
"""

from __future__ import annotations

import os
import time
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from proxyd.wire.client import MAX_RESUMED, Frame, Resume
from proxyd.wire.envelope import TransferId
from proxyd_client import dial
from proxyd_client.errors import AgentUnavailable, ProxydError

if TYPE_CHECKING:
    from proxyd_client.session import Session

FIRST_PAUSE_S = 0.1
MAX_PAUSE_S = 1.0
ATTEMPT_S = 5.0
"""What one attempt may take: an agent that accepts and says nothing is tried anew."""
REMEMBERED = 4096
"""Delivered messages remembered of one sender. The agent's next life needs those that nobody had acknowledged when it
died: what arrives within a round trip, or, where this process had stood still, all that the kernel held for it. That is
256 KiB (:data:`proxyd.agent.local.UNREAD_BYTES`), and each message takes at least 80 bytes of it."""
MOST_SENDERS = 4096
MOST_SEQUENCES = 1 << 17
"""... and of all senders together, in what is told to the agent."""


class _Sender:
    """What is known of one sender's messages."""

    __slots__ = ("_delivered", "_next", "highest")

    def __init__(self) -> None:
        self.highest = 0
        self._delivered = array("Q")
        self._next = 0

    def delivered(self, sequence: int) -> None:
        if len(self._delivered) < REMEMBERED:
            self._delivered.append(sequence)
        else:
            self._delivered[self._next] = sequence
            self._next = (self._next + 1) % REMEMBERED

    def latest(self, limit: int) -> list[int]:
        """At most so many of those that were delivered last."""
        in_order = [*self._delivered[self._next :], *self._delivered[: self._next]]
        return in_order[max(0, len(in_order) - limit) :]


class Knowledge:
    """What this endpoint was offered, by the lives of its senders, the one that was heard last standing last."""

    def __init__(self) -> None:
        self._senders: OrderedDict[tuple[int, int], _Sender] = OrderedDict()

    def offered(self, rank: int, transfer: TransferId) -> bool:
        """A message was offered for the first time. False: it can't have been, later ones were."""
        key = rank, transfer.incarnation
        sender = self._senders.get(key)
        if sender is None:
            sender = self._senders[key] = _Sender()
            if len(self._senders) > MOST_SENDERS:
                self._senders.popitem(last=False)
        else:
            self._senders.move_to_end(key)
        if transfer.sequence <= sender.highest:
            return False
        sender.highest = transfer.sequence
        return True

    def delivered(self, rank: int, transfer: TransferId) -> None:
        """All of a message is here."""
        sender = self._senders.get((rank, transfer.incarnation))
        if sender is not None:
            sender.delivered(transfer.sequence)

    def frames(self, awaited: Iterable[tuple[int, TransferId]]) -> list[Frame]:
        """All of it, for the agent's next life; ``awaited``: (sender's rank, message), of those not complete."""
        of_sender: dict[tuple[int, int], list[int]] = {}
        for rank, transfer in awaited:
            of_sender.setdefault((rank, transfer.incarnation), []).append(transfer.sequence)
        each = min(REMEMBERED, MOST_SEQUENCES // max(1, len(self._senders)))
        frames: list[Frame] = []
        for (rank, incarnation), sender in self._senders.items():
            waits = sorted(of_sender.get((rank, incarnation), ()))
            ended = sender.latest(each)
            for start in range(0, max(1, len(ended), len(waits)), MAX_RESUMED):
                part = slice(start, start + MAX_RESUMED)
                frames.append(_frame(rank, incarnation, sender.highest, ended[part], waits[part]))
        return frames


def _frame(rank: int, incarnation: int, highest: int, delivered: Sequence[int], awaited: Sequence[int]) -> Resume:
    return Resume(rank, incarnation, highest, tuple(delivered), tuple(awaited))


def look_for_the_next_life(session: Session, why: str) -> None:
    """In a thread of its own, from the end of one connection until another one stands and all that waited is posted
    again, or the session is over. ``why``: how the last one ended."""
    core = session.core
    try:
        pause_s = FIRST_PAUSE_S
        while True:
            time.sleep(pause_s * (0.5 + os.urandom(1)[0] / 512))
            found = _find(session, pause_s, why)
            with core.lock:
                if core.has_ended() or found is None:
                    if isinstance(found, dial.Session):
                        _close(found)
                    return
                if isinstance(found, ProxydError):
                    session.end(found)
                    return
                session.go_on(found)
                session.sender.post_again()
                if core.has_ended() or not core.away:
                    session.seeker = None
                    return
                why = session.why_away
            pause_s = min(MAX_PAUSE_S, 2 * pause_s)
    except BaseException as error:
        # Whatever it is, nobody may wait for this thread any longer.
        with core.lock:
            session.end(
                AgentUnavailable(
                    f"the agent at {core.address} is gone",
                    why=f"{why}; looking for its next life failed: {type(error).__name__}: {error}",
                    phase="looking for the agent",
                )
            )
        raise


def _find(session: Session, pause_s: float, why: str) -> dial.Session | ProxydError | None:
    """The next life's session; the error that ends the search; None when the session is over."""
    core = session.core
    reconnect_s = core.welcome.reconnect_ns / 1e9
    lost = session.lost_ns / 1e9
    deadline = lost + reconnect_s
    while not core.has_ended():
        come_back = dial.Return(core.welcome.agent_incarnation, time.monotonic_ns() - core.begun_ns)
        try:
            until = min(deadline, time.monotonic() + ATTEMPT_S)
            return dial.attempt(core.address, core.identity, dial.read_token(), until, come_back)
        except ProxydError as error:  # first: some of them are OSErrors, too
            return error
        except OSError as error:
            # Also what waiting doesn't mend elsewhere: a socket that was just made isn't accessible yet.
            problem = dial.problem_of(core.address, error).what
        now = time.monotonic()
        if now >= deadline:
            return AgentUnavailable(
                f"the agent at {core.address} is gone",
                why=f"{why}; it has not come back within {now - lost:.1f} s ({problem})",
                next_step="Start it again and connect anew; what was not acknowledged must be sent again",
                phase="waiting for this host's agent to come back",
            )
        pause_s = min(MAX_PAUSE_S, 2 * pause_s)
        time.sleep(min(pause_s * (0.5 + os.urandom(1)[0] / 512), max(0.01, deadline - now)))
    return None


def _close(found: dial.Session) -> None:
    found.sock.close()
    for fd in found.fds:
        os.close(fd)
