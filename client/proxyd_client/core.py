"""What the parts of a session share: identity, lock, the error that ended it, and how errors name things."""

from __future__ import annotations

import os
import threading
import time

from proxyd.wire.client import Welcome
from proxyd_client.calls import Calls
from proxyd_client.dial import Address, Identity
from proxyd_client.errors import ArgumentError, ClosedError, ProxydError
from proxyd_client.link import Link
from proxyd_client.progress import Progress
from proxyd_client.waiting import Waiting

_LONGEST_WAIT_S = 10 * 365 * 86400.0


class SessionCore:
    """Shared by sender and receiver. :attr:`failure` is set once, under the lock."""

    def __init__(self, address: Address, identity: Identity, welcome: Welcome, link: Link, progress: Progress) -> None:
        self.address = address
        self.identity = identity
        self.welcome = welcome
        self.link = link
        self.progress = progress
        self.lock: threading.Lock = progress.lock
        self.calls = Calls()
        self.waiting = Waiting(self)
        self.failure: ProxydError | None = None
        self.closing = False
        self.away = False
        """The agent is gone, and its next life is looked for; ``link`` is closed."""
        self.begun_ns = time.monotonic_ns()
        self.pid = os.getpid()

    def has_ended(self) -> bool:
        """Whether the session is over."""
        return self.failure is not None

    def check_process(self) -> None:
        """Refuse use in a forked child, before any lock is touched: a lock may have been held at the fork."""
        if os.getpid() != self.pid:
            raise ClosedError(
                f"this endpoint belongs to process {self.pid}, and this is process {os.getpid()}, forked from it",
                next_step="Call proxyd_client.connect() again in the child, with a rank of its own",
                phase="after fork",
            )

    def check_open(self) -> None:
        """Raise what ended the session, with the lock held."""
        if self.failure is not None:
            raise self.failure.again()
        if self.closing:
            raise ClosedError(f"endpoint {self.name_of(self.identity.rank)} is being closed", phase="closing")

    def name_of(self, rank: int | None) -> str:
        """``job/rank``, for people."""
        return f"{self.identity.job}/{rank}" if rank is not None else f"any rank of {self.identity.job}"

    def channel(self, tag: int, group: str) -> str:
        """Tag, group and the local rank, for people."""
        where = f", group {group!r}" if group else ""
        return f"tag {tag}{where}, here rank {self.identity.rank}"

    @staticmethod
    def deadline_ns(timeout_s: float | None) -> int | None:
        """Deadline on the monotonic clock. Raises ArgumentError for a negative or NaN timeout."""
        if timeout_s is None:
            return None
        if not timeout_s >= 0:
            raise ArgumentError(f"timeout_s must not be negative, got {timeout_s}")
        return time.monotonic_ns() + int(min(timeout_s, _LONGEST_WAIT_S) * 1e9)

    @staticmethod
    def remaining_s(deadline_ns: int | None) -> float | None:
        """Seconds left until a deadline, not negative."""
        return None if deadline_ns is None else max(0.0, (deadline_ns - time.monotonic_ns()) / 1e9)
