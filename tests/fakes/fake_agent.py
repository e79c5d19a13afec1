"""A small agent for one process: speaks the agent's side of the client protocol for real, and delivers locally.

Real Unix (and TCP) sockets, real sealed memfds, real frames from a thread of its own. What it leaves out is everything
behind an agent: peers, grants, the coordinator. Messages go from endpoint to endpoint of this one agent, copied from
the sender's arena to the receiver's in chunks, or (``hand_over``) with the sender's arena passed on.

Knobs let a test hold things at a point of its choice: ``hold`` (nothing is delivered), ``stall_at_bytes`` (no message
lands further), :meth:`FakeAgent.kill` (all connections break), :meth:`FakeAgent.tell` (any frame to any rank).
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import mmap
import os
import queue
import secrets
import selectors
import socket
import threading
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from proxyd.wire import arena as layout
from proxyd.wire import client as wire
from proxyd.wire.auth import NONCE_BYTES
from proxyd.wire.codec import WireError
from proxyd.wire.envelope import Envelope, ErrorCode, TransferId
from proxyd.wire.fence import Fate, Fence

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class Memory:
    """One arena at the agent's side, with the simplest allocator that is right: first gap from the start."""

    def __init__(self, number: int, kind: wire.ArenaKind, size_bytes: int) -> None:
        self.number = number
        self.kind = kind
        self.size_bytes = size_bytes
        self.fd = os.memfd_create(f"fake-{kind.name.lower()}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, size_bytes)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SEALS)
        self.view = memoryview(mmap.mmap(self.fd, size_bytes))
        layout.write_header(self.view, layout.ArenaHeader(kind, number, size_bytes, 0, 1))
        self.blocks: dict[int, int] = {}

    def allocate(self, nbytes: int) -> int | None:
        at = layout.PAGE_BYTES
        for start in sorted(self.blocks):
            if start - at >= nbytes:
                break
            at = start + self.blocks[start]
        if at + nbytes > self.size_bytes:
            return None
        self.blocks[at] = nbytes
        return at


@dataclasses.dataclass(eq=False)
class Transfer:
    """One message, from the sender's post to the receiver's release."""

    sender: Session
    sequence: int
    envelope: Envelope
    source: memoryview
    arena: Memory | None
    offset: int
    filled_bytes: int
    receiver: Session | None = None
    block: tuple[Memory, int, int] | None = None
    """Arena, payload offset, start of the block."""
    accepted: bool = False
    landed_bytes: int = 0
    done: bool = False

    @property
    def id(self) -> TransferId:
        return TransferId(self.sender.hello.incarnation, self.sequence)


class Session:
    """One connected client."""

    def __init__(self, agent: FakeAgent, sock: socket.socket, *, shared_memory: bool) -> None:
        self.agent = agent
        self.sock = sock
        self.shared_memory = shared_memory
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self.decoder = wire.Decoder(allow_payload=not shared_memory)
        self.out: deque[tuple[bytes, int | None]] = deque()
        self.arenas: dict[int, Memory] = {}
        self.handed_over: dict[tuple[int, int], int] = {}
        self.next_arena = 1
        self.hello: wire.Hello = wire.Hello(0, "", 0, 0, 0, b"", b"", shared_memory=shared_memory)
        self.welcomed = False
        self.payload: tuple[Transfer | None, int] | None = None
        self.past: list[wire.Resume] | None = None
        """What it is saying of earlier lives of the agent."""
        self.fences: dict[int, Fence] = {}
        """From that, by senders' incarnations."""

    def tell(self, frame: wire.Frame, fd: int | None = None, payload: bytes = b"") -> None:
        self.out.append((wire.encode(frame, len(payload)) + payload, fd))
        self.agent.write(self)

    def new_arena(self, kind: wire.ArenaKind, size_bytes: int) -> Memory:
        memory = Memory(self.next_arena, kind, size_bytes)
        self.next_arena += 1
        self.arenas[memory.number] = memory
        self.tell(wire.ArenaGranted(memory.number, kind, size_bytes), memory.fd)
        return memory

    @property
    def key(self) -> tuple[str, int]:
        return self.hello.job, self.hello.rank


class FakeAgent:
    """Use as a context manager; attributes may be changed from the test's thread between messages."""

    def __init__(
        self,
        directory: Path,
        *,
        send_arena_bytes: int = 16 << 20,
        receive_arena_bytes: int = 16 << 20,
        memory_limit_bytes: int = 256 << 20,
        eager_bytes: int = 1 << 20,
        chunk_bytes: int = 256 << 10,
        hand_over: bool = False,
        token: bytes = b"",
        linger_ns: int = 5_000_000_000,
        incarnation: int = 1,
        reconnect_ns: int = 0,
        refuses: wire.Refused | None = None,
        hold: bool = False,
        stall_at_bytes: int | None = None,
    ) -> None:
        self.path = str(directory / "agent.sock")
        self.send_arena_bytes = send_arena_bytes
        self.receive_arena_bytes = receive_arena_bytes
        self.memory_limit_bytes = memory_limit_bytes
        self.eager_bytes = eager_bytes
        self.chunk_bytes = chunk_bytes
        self.hand_over = hand_over
        self.token = token
        self.linger_ns = linger_ns
        self.incarnation = incarnation
        self.reconnect_ns = reconnect_ns
        self.hold = hold
        self.stall_at_bytes = stall_at_bytes
        self.refuses = refuses
        """What each hello is answered with."""
        self.hellos: list[wire.Hello] = []
        self.frames: list[tuple[int, wire.Frame]] = []
        """Everything that clients sent after their hello: (rank, frame)."""
        self.sessions: dict[tuple[str, int], Session] = {}
        self.transfers: dict[TransferId, Transfer] = {}
        self.posts: list[wire.PostSend] = []
        self.waited_ns: Counter[int] = Counter()
        """By rank: how long it stood still, as it says."""
        self.problems: list[BaseException] = []
        self._queues: dict[tuple[str, int], deque[Transfer]] = {}
        self._selector = selectors.DefaultSelector()
        self._calls: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
        self._near, self._far = socket.socketpair()
        self._far.setblocking(False)
        self._stopping = False
        self._listeners: list[socket.socket] = []
        unix = socket.socket(socket.AF_UNIX)
        unix.bind(self.path)
        tcp = socket.create_server(("127.0.0.1", 0))
        self.tcp_address = f"tcp://127.0.0.1:{tcp.getsockname()[1]}"
        for listener in (unix, tcp):
            listener.listen()
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ, self._accept)
            self._listeners.append(listener)
        self._selector.register(self._far, selectors.EVENT_READ, self._run_calls)
        self._thread = threading.Thread(target=self._run, name="fake-agent", daemon=True)

    def __enter__(self) -> FakeAgent:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        if kind is None and self.problems:
            raise self.problems[0]

    # -- from the test's thread --------------------------------------------------------------------------------------

    def call(self, action: Callable[[], Any]) -> Any:
        """Run ``action`` in the agent's thread and return its result."""
        box: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._calls.put(lambda: box.put(action()))
        self._near.send(b"!")
        return box.get(timeout=10)

    def tell(self, rank: int, frame: wire.Frame, job: str = "job") -> None:
        """Send ``frame`` to an endpoint."""
        self.call(lambda: self.sessions[job, rank].tell(frame))

    def change(self, **knobs: Any) -> None:
        """Change knobs, then deliver what they let through."""

        def apply() -> None:
            for name, value in knobs.items():
                setattr(self, name, value)
            self._deliver_all()

        self.call(apply)

    def drop(self, rank: int, job: str = "job") -> None:
        """Treat an endpoint as dead, as the pidfd of a killed process would tell."""
        self.call(lambda: self._gone(self.sessions[job, rank]))

    def kill(self) -> None:
        """Break every connection without a word, and stop."""
        self._stopping = True
        with contextlib.suppress(OSError):  # it may have stopped by itself: see `problems`
            self._near.send(b"!")
        self._thread.join(10)

    def count(self, kind: type[Any]) -> int:
        """Frames of one type that came so far."""
        return sum(isinstance(frame, kind) for _, frame in list(self.frames))

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                for key, events in self._selector.select():
                    if isinstance(key.data, Session):
                        if events & selectors.EVENT_WRITE:
                            self.write(key.data)
                        if events & selectors.EVENT_READ:
                            self._read(key.data)
                    else:
                        key.data(key.fileobj)
        except Exception as error:  # noqa: BLE001 - raised again in the test's thread
            self.problems.append(error)
        finally:
            for key in list(self._selector.get_map().values()):
                fileobj = key.fileobj
                if isinstance(fileobj, socket.socket):
                    fileobj.close()
            self._selector.close()
            self._near.close()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)

    def _run_calls(self, sock: socket.socket) -> None:
        sock.recv(4096)
        while True:
            try:
                action = self._calls.get_nowait()
            except queue.Empty:
                return
            action()

    def _accept(self, listener: socket.socket) -> None:
        sock, _ = listener.accept()
        sock.setblocking(False)
        session = Session(self, sock, shared_memory=sock.family == socket.AF_UNIX)
        self._selector.register(sock, selectors.EVENT_READ, session)
        session.tell(wire.Challenge(wire.PROTOCOL_VERSION, session.nonce))

    def write(self, session: Session) -> None:
        if session.sock.fileno() < 0:
            return
        while session.out:
            data, fd = session.out[0]
            try:
                if fd is None:
                    sent = session.sock.send(data, socket.MSG_NOSIGNAL)
                else:
                    sent = socket.send_fds(session.sock, [data], [fd])
            except BlockingIOError:
                break
            except OSError:
                session.out.clear()
                return
            session.out.popleft()
            if sent < len(data):
                session.out.appendleft((data[sent:], None))
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if session.out else 0)
        self._selector.modify(session.sock, events, session)

    def _read(self, session: Session) -> None:
        try:
            data = session.sock.recv(1 << 20)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:
            self._gone(session)
            return
        session.decoder.feed(data)
        try:
            while session.sock.fileno() >= 0:
                if session.payload is not None and not self._take_payload(session):
                    return
                taken = session.decoder.next_frame()
                if taken is None:
                    return
                self._on_frame(session, *taken)
        except (WireError, AssertionError) as error:
            self.problems.append(error)
            self._gone(session)

    def _take_payload(self, session: Session) -> bool:
        transfer, at = session.payload or (None, 0)
        piece = session.decoder.take_payload(wire.MAX_PAYLOAD_BYTES)
        if transfer is not None:
            transfer.source[at : at + len(piece)] = piece
        if session.decoder.payload_left_bytes:
            session.payload = transfer, at + len(piece)
            return False
        session.payload = None
        if transfer is not None:
            transfer.filled_bytes = at + len(piece)
            self._deliver(transfer)
        return True

    def _gone(self, session: Session, code: ErrorCode = ErrorCode.PEER_LOST) -> None:
        if session.sock.fileno() < 0:
            return
        self._selector.unregister(session.sock)
        session.sock.close()
        if self.sessions.get(session.key) is not session:
            return
        del self.sessions[session.key]
        text = f"the process of {session.hello.job}/{session.hello.rank} has ended"
        for transfer in list(self.transfers.values()):
            if transfer.sender is session and not transfer.done:
                del self.transfers[transfer.id]
                transfer.done = True
                if transfer.receiver is not None:
                    transfer.receiver.tell(wire.RecvFailed(*transfer.id, code, text, transfer.landed_bytes))
            elif transfer.receiver is session:
                del self.transfers[transfer.id]
                if not transfer.done:
                    transfer.sender.tell(wire.SendFailed(transfer.sequence, code, text, transfer.landed_bytes))
                transfer.done = True
        for other in self.sessions.values():
            if other.hello.job == session.hello.job:
                other.tell(wire.PeerGone(session.hello.rank, session.hello.incarnation, text))

    # -- frames ------------------------------------------------------------------------------------------------------

    def _on_frame(self, session: Session, frame: wire.Frame, payload_bytes: int) -> None:
        if not session.welcomed:
            assert isinstance(frame, wire.Hello)
            self._on_hello(session, frame)
            return
        self.frames.append((session.hello.rank, frame))
        if session.past is not None:
            match frame:
                case wire.Resume():
                    session.past.append(frame)
                    fence = session.fences.setdefault(frame.incarnation, Fence())
                    fence.learn(frame.highest, frame.delivered, frame.awaited)
                case wire.Resumed():
                    session.past = None
                    self._attached(session)
                case wire.Bye():
                    self._gone(session, ErrorCode.CLOSED)
                case _:
                    raise WireError(f"{type(frame).__name__} before Resumed")
            return
        match frame:
            case wire.PostSend():
                self._on_post(session, frame)
            case wire.SendFilled():
                transfer = self.transfers.get(TransferId(session.hello.incarnation, frame.sequence))
                if transfer is not None and not transfer.done:
                    assert transfer.filled_bytes < frame.filled_bytes <= transfer.envelope.nbytes
                    transfer.filled_bytes = frame.filled_bytes
                    self._deliver(transfer)
            case wire.SendData():
                transfer = self.transfers.get(TransferId(session.hello.incarnation, frame.sequence))
                assert transfer is None or frame.offset == transfer.filled_bytes
                session.payload = transfer, frame.offset
            case wire.ArenaWanted():
                used = sum(m.size_bytes for m in session.arenas.values() if m.kind is wire.ArenaKind.SEND)
                size = max(self.send_arena_bytes, layout.page_round_up(frame.nbytes) + layout.PAGE_BYTES)
                if used + size > self.memory_limit_bytes:
                    text = f"{used} of {self.memory_limit_bytes} bytes are in use"
                    session.tell(wire.ArenaRefused(frame.nbytes, text))
                else:
                    session.new_arena(wire.ArenaKind.SEND, size)
            case wire.CancelSend():
                self._on_cancel(session, frame)
            case wire.Accept():
                transfer = self.transfers.get(TransferId(frame.incarnation, frame.sequence))
                if transfer is not None:
                    assert transfer.receiver is session
                    assert not transfer.accepted
                    transfer.accepted = True
                    if session.shared_memory:
                        self._give_block(transfer)
                        assert transfer.block is not None
                        memory, offset, _ = transfer.block
                        session.tell(wire.Block(*transfer.id, memory.number, offset))
                    self._deliver(transfer)
            case wire.Release():
                transfer = self.transfers.pop(TransferId(frame.incarnation, frame.sequence))
                assert transfer.receiver is session
                if transfer.block is not None:
                    memory, _, start = transfer.block
                    del memory.blocks[start]
                elif not transfer.done:
                    self._finish(transfer)
            case wire.LinkStateWanted():
                if (session.hello.job, frame.dst_rank) in self.sessions:
                    session.tell(wire.LinkState(frame.request, "here", "same host", 10**9, 0, 0, 0, 0, 750_000))
                else:
                    text = f"rank {frame.dst_rank} is not registered"
                    session.tell(wire.LinkState(frame.request, "", "", 0, 0, 0, 0, 0, 0, text))
            case wire.Bye():
                self._gone(session, ErrorCode.CLOSED)
            case wire.Waited():
                self.waited_ns[session.hello.rank] += frame.waited_ns
            case wire.AnnounceSend():
                pass
            case _:
                raise WireError(f"{type(frame).__name__} is not for a client to send")

    def _on_hello(self, session: Session, hello: wire.Hello) -> None:
        session.hello = hello
        self.hellos.append(hello)
        if self.refuses is not None:
            session.tell(self.refuses)
            self._gone(session)
            return
        expected = wire.hello_mac(self.token, session.nonce, hello.nonce, hello.job, hello.rank, hello.incarnation)
        if self.token and hello.mac != expected:
            session.tell(wire.Refused(ErrorCode.REFUSED, "the token is missing or another"))
            self._gone(session)
            return
        old = self.sessions.get(session.key)
        if old is not None:
            old.tell(wire.Bye(ErrorCode.CLOSED, "a newer process registered as this rank"))
            self._gone(old)
        self.sessions[session.key] = session
        session.welcomed = True
        mac = wire.welcome_mac(self.token, session.nonce, hello.nonce, "here", "fake")
        session.tell(
            wire.Welcome(
                "here", "fake", self.incarnation, self.memory_limit_bytes, self.linger_ns, mac, self.reconnect_ns
            )
        )
        if session.shared_memory:
            session.new_arena(wire.ArenaKind.SEND, self.send_arena_bytes)
            session.new_arena(wire.ArenaKind.RECEIVE, self.receive_arena_bytes)
        if hello.resumes:
            session.past = []
        else:
            self._attached(session)

    def _attached(self, session: Session) -> None:
        hello = session.hello
        for other in list(self.sessions.values()):
            if other.hello.job == hello.job and other.past is None:
                if other is not session:
                    other.tell(wire.PeerHere(hello.rank, hello.incarnation, "here"))
                session.tell(wire.PeerHere(other.hello.rank, other.hello.incarnation, "here"))
        self._deliver_all()

    def _on_post(self, session: Session, frame: wire.PostSend) -> None:
        self.posts.append(frame)
        envelope = frame.envelope
        memory = session.arenas[frame.arena] if frame.arena else None
        if memory is not None:
            assert frame.offset % layout.PAGE_BYTES == 0
            assert layout.PAGE_BYTES <= frame.offset <= frame.offset + envelope.nbytes <= memory.size_bytes
            source = memory.view[frame.offset : frame.offset + envelope.nbytes]
        else:
            assert not session.shared_memory or envelope.nbytes == 0
            source = memoryview(bytearray(envelope.nbytes))
        previous = [t.sequence for t in self.transfers.values() if t.sender is session]
        assert not previous or frame.sequence > max(previous), "POST_SEND out of sequence"
        transfer = Transfer(session, frame.sequence, envelope, source, memory, frame.offset, frame.filled_bytes)
        self.transfers[transfer.id] = transfer
        self._queues.setdefault((envelope.job, envelope.dst_rank), deque()).append(transfer)
        self._deliver_all()

    def _on_cancel(self, session: Session, frame: wire.CancelSend) -> None:
        transfer = self.transfers.get(TransferId(session.hello.incarnation, frame.sequence))
        if transfer is None or transfer.done:
            return
        transfer.done = True
        del self.transfers[transfer.id]
        if transfer.block is not None:
            del transfer.block[0].blocks[transfer.block[2]]
        if transfer.receiver is not None:
            text = "cancelled by its sender"
            transfer.receiver.tell(wire.RecvFailed(*transfer.id, ErrorCode.CANCELLED, text, transfer.landed_bytes))
        session.tell(wire.SendFailed(frame.sequence, ErrorCode.CANCELLED, "cancelled", transfer.landed_bytes))

    # -- delivery ----------------------------------------------------------------------------------------------------

    def _deliver_all(self) -> None:
        for key, waiting in self._queues.items():
            receiver = self.sessions.get(key)
            while receiver is not None and receiver.past is None and waiting and not self.hold:
                transfer = waiting.popleft()
                if not transfer.done:
                    transfer.receiver = receiver
                    self._offer(transfer, receiver)
            if self.hold:
                for transfer in waiting:
                    state = wire.SendState(transfer.sequence, wire.SendPhase.QUEUED, 0, 2_000_000_000)
                    transfer.sender.tell(state)
        for transfer in list(self.transfers.values()):
            self._deliver(transfer)

    def _offer(self, transfer: Transfer, receiver: Session) -> None:
        envelope = transfer.envelope
        fence = receiver.fences.get(transfer.id.incarnation)
        if fence is not None:
            fate = fence.fate(transfer.sequence)
            fence.offered(transfer.sequence)
            if fate is Fate.DELIVERED:
                self._finish(transfer)
                return
            if fate not in (Fate.NEW, Fate.AWAITED):
                transfer.done = True
                text = "it has ended before"
                transfer.sender.tell(wire.SendFailed(transfer.sequence, ErrorCode.PEER_LOST, text, 0))
                return
        arena = offset = 0
        shared = receiver.shared_memory and transfer.sender.shared_memory
        if self.hand_over and shared and transfer.arena is not None:
            key = transfer.sender.hello.incarnation, transfer.arena.number
            if key not in receiver.handed_over:
                receiver.handed_over[key] = receiver.next_arena
                receiver.next_arena += 1
                fd = os.open(f"/proc/self/fd/{transfer.arena.fd}", os.O_RDONLY | os.O_CLOEXEC)
                granted = wire.ArenaGranted(receiver.handed_over[key], wire.ArenaKind.PEER, transfer.arena.size_bytes)
                receiver.tell(granted, fd)
            arena, offset = receiver.handed_over[key], transfer.offset
            transfer.accepted = True
        elif receiver.shared_memory and 0 < envelope.nbytes <= self.eager_bytes:
            self._give_block(transfer)
            assert transfer.block is not None
            arena, offset = transfer.block[0].number, transfer.block[1]
            transfer.accepted = True
        receiver.tell(wire.Offered(*transfer.id, envelope, arena, offset))
        if envelope.nbytes == 0:
            self._finish(transfer)

    def _give_block(self, transfer: Transfer) -> None:
        receiver, nbytes = transfer.receiver, transfer.envelope.nbytes
        assert receiver is not None
        prefix_bytes = layout.block_prefix_bytes(nbytes, self.chunk_bytes)
        size = prefix_bytes + layout.page_round_up(nbytes)
        for memory in receiver.arenas.values():
            start = memory.allocate(size) if memory.kind is wire.ArenaKind.RECEIVE else None
            if start is not None:
                break
        else:
            arena_bytes = max(self.receive_arena_bytes, size + layout.PAGE_BYTES)
            memory = receiver.new_arena(wire.ArenaKind.RECEIVE, arena_bytes)
            start = memory.allocate(size)
            assert start is not None
        prefix = layout.BlockPrefix(transfer.id, nbytes, self.chunk_bytes)
        layout.write_block_prefix(memory.view[start : start + prefix_bytes], prefix)
        transfer.block = memory, start + prefix_bytes, start

    def _deliver(self, transfer: Transfer) -> None:
        receiver = transfer.receiver
        if receiver is None or transfer.done or not transfer.accepted:
            return
        limit = transfer.filled_bytes
        if self.stall_at_bytes is not None:
            limit = min(limit, self.stall_at_bytes)
        while transfer.landed_bytes < limit:
            start, end = transfer.landed_bytes, min(limit, transfer.landed_bytes + self.chunk_bytes)
            transfer.landed_bytes = end
            if not receiver.shared_memory:
                receiver.tell(wire.RecvData(*transfer.id, start), payload=bytes(transfer.source[start:end]))
                continue
            if transfer.block is not None:
                memory, offset, _ = transfer.block
                memory.view[offset + start : offset + end] = transfer.source[start:end]
            receiver.tell(wire.Landed(*transfer.id, end))
        state = wire.SendState(transfer.sequence, wire.SendPhase.SENDING, transfer.landed_bytes, 1_000_000_000)
        if transfer.landed_bytes < transfer.envelope.nbytes:
            transfer.sender.tell(state)
        elif transfer.block is not None or not receiver.shared_memory:
            self._finish(transfer)
        else:
            # Handed-over memory is the receiver's until RELEASE.
            transfer.sender.tell(wire.SendDelivered(transfer.sequence))

    def _finish(self, transfer: Transfer) -> None:
        transfer.done = True
        transfer.sender.tell(wire.SendDone(transfer.sequence))
