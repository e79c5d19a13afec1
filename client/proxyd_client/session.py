"""One endpoint's session with its agent: the state that sending and receiving share, and where frames are handed out.

Lock order: the session's lock (:attr:`Progress.lock`), then the link's. Frames are dispatched with the session's lock
held; nothing under it waits, except by :meth:`Progress.wait_for`, which lets go of it.

An endpoint ends once, by one error that every later call repeats: closed by its owner, replaced by a newer life of the
same rank (BYE), the agent gone for too long, or a protocol violation. Whatever was pending fails with it. The end of
the connection alone (of the stream, or BYE with AGENT_STOPS) ends nothing: see :mod:`proxyd_client.resuming`.
"""

from __future__ import annotations

import atexit
import errno
import os
import threading
import time
import weakref

from proxyd.wire.client import (
    ArenaGranted,
    ArenaKind,
    ArenaRefused,
    Block,
    Bye,
    Expect,
    Foretold,
    Frame,
    Landed,
    LinkState,
    LinkStateWanted,
    Offered,
    PeerGone,
    PeerHere,
    RecvData,
    RecvFailed,
    Resumed,
    SendDelivered,
    SendDone,
    SendFailed,
    SendState,
)
from proxyd.wire.codec import WireError
from proxyd.wire.envelope import ErrorCode
from proxyd_client.arena import Mapping
from proxyd_client.core import SessionCore
from proxyd_client.dial import Address, Identity, establish
from proxyd_client.dial import Session as Established
from proxyd_client.errors import AgentUnavailable, ClosedError, PeerLost, ProxydError, TransferTimeout, class_of_code
from proxyd_client.link import Link
from proxyd_client.progress import Progress
from proxyd_client.receiving import Receiver
from proxyd_client.resuming import look_for_the_next_life
from proxyd_client.sending import Sender

_FLUSH_ON_CLOSE_NS = 200_000_000


class Session:
    """Connects on construction; see :func:`proxyd_client.connect` for the errors."""

    def __init__(self, address: Address, identity: Identity, timeout_s: float) -> None:
        sock, welcome, decoder, fds = establish(address, identity, timeout_s)
        self.address = address
        self.welcome = welcome
        link = Link(sock, decoder, fds, shared_memory=address.shared_memory)
        progress = Progress(link, self._pump, self._work, self._idle)
        self.core = SessionCore(address, identity, welcome, link, progress)
        self.receiver = Receiver(self.core)
        self.sender = Sender(self.core, self.receiver.life_of)
        self.seeker: threading.Thread | None = None
        """Looks for the agent's next life."""
        self.lost_ns = 0
        """When the connection ended, and ..."""
        self.why_away = ""
        """... how."""
        self._link_requests = 0
        self._link_answers: dict[int, LinkState | None] = {}
        self._link_questions: dict[int, int] = {}
        """Destinations asked for, by request, for as long as there is no answer."""
        self._prefaulted = False
        # Frames that came right behind the welcome wait in the decoder, where poll() doesn't see them.
        with progress.lock:
            self._pump()
        progress.start()
        _live[id(self)] = self

    def close(self, linger_s: float | None) -> None:
        """Wait up to ``linger_s`` (None: what the agent says) for sends to be acknowledged, say BYE, fail the rest."""
        core = self.core
        if os.getpid() != core.pid:
            return
        linger_ns = self.welcome.linger_ns if linger_s is None else int(linger_s * 1e9)
        with core.lock:
            if core.closing:
                return  # another thread is at it
            core.closing = True
            if core.failure is not None:
                self.end(core.failure)
                return
            deadline_ns = time.monotonic_ns() + max(0, linger_ns)
            core.progress.wait_for(lambda: self.sender.all_settled or core.failure is not None, deadline_ns)
            if core.failure is None:
                core.waiting.tell(now=True)
                core.link.send(Bye(code=ErrorCode.CLOSED, message="closed by its owner"))
                flushed_by_ns = time.monotonic_ns() + _FLUSH_ON_CLOSE_NS
                core.progress.wait_for(lambda: not core.link.backlog_bytes, flushed_by_ns)
            self.end(_closed(core), driven_elsewhere=True)

    def link_state(self, dst: int, timeout_s: float | None) -> LinkState:
        """Ask the agent for the path to ``dst``."""
        core = self.core
        core.check_process()
        deadline_ns = core.deadline_ns(timeout_s)
        with core.lock:
            core.check_open()
            self._link_requests += 1
            request = self._link_requests
            self._link_answers[request] = None
            self._link_questions[request] = dst
            core.link.send(LinkStateWanted(request=request, dst_rank=dst))

            def answered() -> bool:
                return self._link_answers[request] is not None or core.failure is not None

            core.progress.wait_for(answered, deadline_ns)
            answer = self._link_answers.pop(request)
            self._link_questions.pop(request, None)
            if answer is None:
                if core.failure is not None:
                    raise core.failure.again()
                raise TransferTimeout(
                    f"the agent did not answer within {timeout_s} s for the link to {core.name_of(dst)}",
                    peer=dst,
                    phase="asking for the state of the link",
                )
            if answer.error:
                raise PeerLost(
                    f"there is no link to {core.name_of(dst)}",
                    why=answer.error,
                    peer=dst,
                    phase="asking for the state of the link",
                )
            return answer

    # -- called by the driver, with the lock held --------------------------------------------------------------------

    def _pump(self) -> None:
        core = self.core
        try:
            core.link.pump(self._dispatch, self.receiver.data_target)
        except ConnectionError as error:
            self._lose_agent(error.strerror or str(error))
        except WireError as error:
            self.end(
                AgentUnavailable(
                    f"the agent at {core.address} broke the protocol",
                    why=str(error),
                    next_step="Run the same version of proxyd for agent and trainer",
                    phase="connection to the agent lost",
                )
            )
        except ProxydError as error:
            self.end(error)

    def _lose_agent(self, why: str) -> None:
        """The connection has ended, and all is read that came over it."""
        core = self.core
        self.lost_ns, self.why_away = time.monotonic_ns(), why
        reconnects = core.address.shared_memory and core.welcome.reconnect_ns > 0
        if reconnects:
            core.away = True
            core.link.close()
            core.progress.pause()
            self.sender.agent_lost()
            self.receiver.agent_lost()
            if self.seeker is not None:
                return  # it has just gone on, and sees that this was not for long
            self.seeker = threading.Thread(
                target=look_for_the_next_life, args=(self, why), name="proxyd-reconnect", daemon=True
            )
            try:
                self.seeker.start()
            except RuntimeError as error:  # at interpreter exit, or out of threads
                why, reconnects = f"{why}; its next life can't be looked for: {error}", False
        if not reconnects:
            self.end(
                AgentUnavailable(
                    f"the agent at {core.address} is gone",
                    why=why,
                    next_step="Start it again and connect anew; what was not acknowledged must be sent again",
                    phase="connection to the agent lost",
                )
            )

    def go_on(self, found: Established) -> None:
        """The agent's next life has answered; with the lock held."""
        core = self.core
        core.link = Link(found.sock, found.decoder, found.fds, shared_memory=True)
        core.welcome = self.welcome = found.welcome
        core.away = False
        for frame in self.receiver.what_it_knows():
            core.link.send(frame)
        core.link.send(Resumed())
        for request, dst in self._link_questions.items():
            core.link.send(LinkStateWanted(request=request, dst_rank=dst))
        self.receiver.agent_back(found.welcome.reconnect_ns / 1e9)
        core.progress.go_on(core.link)
        self._pump()  # frames that came right behind the welcome

    def _work(self) -> bool:
        return self.receiver.work()

    def _idle(self) -> None:
        self.receiver.trim()

    def _dispatch(self, frame: Frame, fd: int | None) -> None:
        match frame:
            case SendState():
                self.sender.on_state(frame)
            case SendDone():
                self.sender.on_done(frame)
            case SendDelivered():
                self.sender.on_delivered(frame)
            case SendFailed():
                self.sender.on_failed(frame)
            case Offered():
                self.receiver.on_offered(frame)
            case Block():
                self.receiver.on_block(frame)
            case Landed():
                self.receiver.on_landed(frame)
            case RecvData():
                self.receiver.on_data(frame)
            case RecvFailed():
                self.receiver.on_failed(frame)
            case Expect():
                self.receiver.on_expect(frame)
            case Foretold():
                self.receiver.forecast.on_foretold(frame, time.monotonic_ns())
            case PeerHere():
                self.receiver.on_peer_here(frame)
            case PeerGone():
                self.receiver.on_peer_gone(frame)
            case ArenaGranted():
                self._on_arena(frame, fd)
            case ArenaRefused():
                self.sender.on_arena_refused(frame)
            case LinkState():
                if frame.request in self._link_answers:
                    self._link_answers[frame.request] = frame
                    self._link_questions.pop(frame.request, None)
            case Bye() if frame.code == ErrorCode.AGENT_STOPS:
                raise ConnectionResetError(errno.ECONNRESET, frame.message or "the agent stops")
            case Bye():
                raise _ended_by_agent(self.core, frame)
            case _:
                raise WireError(f"an agent doesn't send {type(frame).__name__}")

    def _on_arena(self, frame: ArenaGranted, fd: int | None) -> None:
        if fd is None:
            raise WireError("shared memory was granted over a connection that can't pass it")
        try:
            kind = ArenaKind(frame.kind)
        except ValueError as error:
            raise WireError(f"arena {frame.arena} has unknown kind {frame.kind}") from error
        try:
            mapping = Mapping(fd, frame.arena, kind, frame.size_bytes)
        except OSError as error:
            raise AgentUnavailable(
                f"arena {frame.arena} of {frame.size_bytes} bytes can't be mapped",
                why=error.strerror or str(error),
                next_step="Raise this process's memory limits (ulimit -v, cgroup)",
                phase="mapping shared memory",
            ) from error
        if kind is not ArenaKind.SEND:
            self.receiver.add_arena(mapping)
            return
        self.sender.add_arena(mapping)
        if not self._prefaulted:
            self._prefaulted = True
            stop = self.core.has_ended
            threading.Thread(target=mapping.prefault, args=(stop,), name="proxyd-prefault", daemon=True).start()

    def end(self, error: ProxydError, *, driven_elsewhere: bool = False) -> None:
        """The session is over; with the lock held. Only the first error counts.

        :param driven_elsewhere: another thread may be polling the socket, which then is closed only after it. What it
            waits for has failed before it looks: it would take the end for a timeout.
        """
        core = self.core
        if core.failure is None:
            core.failure = error.again()  # without a traceback, whose frames hold this session and its arenas
            self.sender.fail_all(error)
            self.receiver.fail_all(error)
            core.progress.stop()
        if driven_elsewhere:
            core.progress.stop_and_wait()
        core.link.close()
        _live.pop(id(self), None)


def _closed(core: SessionCore) -> ClosedError:
    return ClosedError(f"endpoint {core.identity.job}/{core.identity.rank} is closed", phase="closed")


def _ended_by_agent(core: SessionCore, frame: Bye) -> ProxydError:
    who = f"{core.identity.job}/{core.identity.rank}"
    if frame.code == ErrorCode.CLOSED:
        return ClosedError(
            f"endpoint {who} was closed by the agent",
            why=frame.message or "a newer process registered as the same rank",
            next_step="Connect again only if this process is meant to be that rank",
            phase="closed by the agent",
        )
    kind = class_of_code(frame.code) if frame.code else AgentUnavailable
    return kind(
        f"the agent at {core.address} ended the session of {who}",
        why=frame.message,
        next_step="Connect again once it is back",
        phase="closed by the agent",
    )


_live: weakref.WeakValueDictionary[int, Session] = weakref.WeakValueDictionary()


def _close_all_at_exit() -> None:
    # A script that ends right after isend() must not lose what it sent.
    for session in list(_live.values()):
        session.close(None)
        session.core.calls.finish()


def _abandon_in_child() -> None:
    for session in list(_live.values()):
        session.core.link.abandon_in_child()


atexit.register(_close_all_at_exit)
os.register_at_fork(after_in_child=_abandon_in_child)
