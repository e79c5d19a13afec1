"""Processes on the hosts of a WAN that speak JSON lines: one object per line on stdin and stdout.

The one who directs them is a single thread: it sends commands and waits for the next event of anybody.
"""

from __future__ import annotations

import json
import selectors
import subprocess
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from proxyd.wan.errors import WanError


class Place(Protocol):
    """Where a process can be started: a host of a WAN, or this machine."""

    def popen(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
        **options: Any,
    ) -> subprocess.Popen[Any]:
        """Start a command there."""


@dataclass(eq=False)
class Member:
    """One process of a crew."""

    name: str
    process: subprocess.Popen[bytes]
    _buffer: bytes = field(default=b"", repr=False)

    def command(self, **fields: Any) -> None:
        """Send one object. Raises :class:`WanError` if the process is gone."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(fields).encode() + b"\n")
            self.process.stdin.flush()
        except OSError as error:
            raise WanError(
                f"{self.name} ended with status {self.process.poll()}; its last words are on stderr"
            ) from error


class Crew:
    """Starts processes, multiplexes their events, ends them all. A context manager."""

    def __init__(self) -> None:
        self.members: list[Member] = []
        self._selector = selectors.DefaultSelector()
        self._events: deque[tuple[Member, dict[str, Any]]] = deque()

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(
        self,
        host: Place,
        name: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> Member:
        """Run a command on a host and listen to it."""
        process = host.popen(argv, env=env, pass_fds=pass_fds, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        member = Member(name, process)
        self.members.append(member)
        assert process.stdout is not None
        self._selector.register(process.stdout, selectors.EVENT_READ, member)
        return member

    def next_event(self, timeout_s: float) -> tuple[Member, dict[str, Any]]:
        """The next event of anybody. Raises :class:`WanError` after ``timeout_s`` or when a member has ended."""
        deadline_s = time.monotonic() + timeout_s
        while not self._events:
            ready = self._selector.select(max(0.0, deadline_s - time.monotonic()))
            if not ready:
                raise WanError(f"none of {len(self.members)} processes said anything within {timeout_s:.1f} s")
            for key, _ in ready:
                self._read(key.data)
        return self._events.popleft()

    def _read(self, member: Member) -> None:
        assert member.process.stdout is not None
        # read1 would wait for the buffered layer; the raw file returns what is there.
        data = member.process.stdout.raw.read(65536)  # type: ignore[attr-defined]
        if not data:
            self._selector.unregister(member.process.stdout)
            raise WanError(f"{member.name} ended with status {member.process.wait()}; its last words are on stderr")
        *lines, member._buffer = (member._buffer + data).split(b"\n")
        self._events.extend((member, json.loads(line)) for line in lines)

    def gather(self, event: str, count: int, timeout_s: float) -> list[tuple[Member, dict[str, Any]]]:
        """The next ``count`` events of one kind; those of other kinds are dropped."""
        found: list[tuple[Member, dict[str, Any]]] = []
        deadline_s = time.monotonic() + timeout_s
        while len(found) < count:
            member, fields = self.next_event(deadline_s - time.monotonic())
            if fields["event"] == event:
                found.append((member, fields))
        return found

    def close(self) -> None:
        """Kill every member."""
        for member in self.members:
            member.process.kill()
        for member in self.members:
            member.process.wait()
            for stream in (member.process.stdin, member.process.stdout):
                if stream is not None:
                    try:
                        stream.close()
                    except BrokenPipeError:
                        continue  # a command that was still in our buffer; nobody is left to read it
        self._selector.close()
