"""One forwarding process: doors for clients of this site, an exit for those of others, and the word between stations.

A station is an endpoint of the job ``forward`` (or another one). An exit's rank follows from its site, so whoever
wants to go to a site knows whom to ask; a station without an exit takes a rank by chance. In the group :data:`WORDS` a
station asks another one to connect somewhere (``open``), and hears ``opened`` or ``refused`` with the reason; bytes
then flow in a group of their own (:mod:`proxyd.forward.stream`).

An exit connects only to what its rules allow. Names are resolved there, and what is connected to is the address that
was judged.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import re
import secrets
import socket
import zlib
from collections.abc import Sequence
from typing import Any

from proxyd.core.errors import ConfigError
from proxyd.forward.doors import DoorError, Kind, Reader, Target, Why, ask, said
from proxyd.forward.stream import DATA, RESET, Stream, reset_at_close, result
from proxyd.runtime.networks import Network, Rule, allowed, plain_address
from proxyd_client import Endpoint, Message, ProxydError

log = logging.getLogger("proxyd.forward")

WORDS = "words"
MAX_WORD_BYTES = 4 << 10
MAX_STREAMS = 1024
"""More at once are refused: each has a descriptor and a few tasks."""
MAX_ASKED = 128
"""Clients that have not said where they want to go, at once: each may take 10 s for it, and holds a descriptor."""
CONNECT_TIMEOUT_S = 10.0
OPEN_TIMEOUT_S = 20.0
"""The other side's name lookup and connection, and the way there."""
RANKS = 1 << 30
_GROUP = re.compile(r"([0-9a-f]{1,8})\.[0-9a-f]{8}\.[0-9]{1,20}")
"""Of a stream: the rank of the station that asks, its life, and a number."""
SOCKET_BUFFER_BYTES = 4 << 20


def exit_rank(site: str) -> int:
    """Of the exit of a site. Others take ranks from above (:func:`chance_rank`)."""
    return zlib.crc32(site.encode()) % RANKS


def chance_rank() -> int:
    """Of a station that nobody asks."""
    return RANKS + secrets.randbelow(RANKS)


class Refused(Exception):
    """The other station does not connect."""

    def __init__(self, why: Why, detail: str) -> None:
        super().__init__(f"{why.value}: {detail}" if detail else why.value)
        self.why = why


class Station:
    """See the module's text.

    :param rules: what its exit may connect to; None: it is none.
    """

    def __init__(self, endpoint: Endpoint, rules: Sequence[Rule] | None = None) -> None:
        self._endpoint = endpoint
        self._rules = rules
        self._numbers = itertools.count(1)
        self._life = secrets.token_hex(4)
        self._asked: dict[str, tuple[int, asyncio.Future[None]]] = {}
        """By group: whom we asked, and where the answer is awaited."""
        self._streams: set[str] = set()
        self._silent = 0
        """Clients that have not said where they want to go."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._listeners: list[socket.socket] = []
        self._doors: list[asyncio.Task[Any]] = []
        self.finished = self.broken = self.refused = 0
        """Connections that were carried to their end; that broke; that never came to be."""
        self.bytes_out = self.bytes_in = 0
        """Read from sockets and sent; received and written to sockets; of connections that have ended."""

    @property
    def streams(self) -> int:
        """Connections under way."""
        return len(self._streams)

    async def run(self) -> None:
        """Hear other stations, until cancelled. Raises ProxydError when the agent is lost for good."""
        try:
            while True:
                message = await result(self._endpoint.irecv(src=None, group=WORDS))
                self._heard(message)
        finally:
            await self.close_doors()
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def listen(
        self, host: str, port: int, kind: Kind, to: str, target: Target | None, traffic: str, clients: Sequence[Network]
    ) -> tuple[str, int]:
        """Open a door; answers where. Raises ConfigError."""
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listener = socket.create_server((host, port), family=family, backlog=128)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {Target(host, port)} to forward",
                why=(error.strerror or str(error)).lower(),
                next_step="Stop what uses it, or choose another address",
            ) from error
        listener.setblocking(False)
        self._listeners.append(listener)
        self._doors.append(self._keep(self._accept(listener, kind, to, target, traffic, clients)))
        name = listener.getsockname()
        return name[0], name[1]

    async def close_doors(self) -> None:
        """Let nobody in any more; connections go on."""
        for door in self._doors:
            door.cancel()
        await asyncio.gather(*self._doors, return_exceptions=True)
        for listener in self._listeners:
            listener.close()

    # -- at the door -------------------------------------------------------------------------------------------------

    async def _accept(
        self,
        listener: socket.socket,
        kind: Kind,
        to: str,
        target: Target | None,
        traffic: str,
        clients: Sequence[Network],
    ) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, name = await loop.sock_accept(listener)
            except OSError as error:  # no descriptor left: the client waits in the backlog
                log.warning("a client can't be let in: %s", error)
                await asyncio.sleep(1.0)
                continue
            address = plain_address(name[0])
            if not address.is_loopback and not any(address in one for one in clients):
                log.warning("%s is no client of this door", address)
                self.refused += 1
                sock.close()
                continue
            if target is None and self._silent >= MAX_ASKED:
                log.warning("%s was turned away: %d clients have yet to say where they want to go", address, MAX_ASKED)
                self.refused += 1
                sock.close()
                continue
            # Counted here: a burst is accepted before the first of its tasks runs.
            self._silent += target is None
            self._keep(self._serve(sock, kind, exit_rank(to), target, traffic, to))

    async def _serve(
        self, sock: socket.socket, kind: Kind, peer: int, target: Target | None, traffic: str, to: str
    ) -> None:
        loop = asyncio.get_running_loop()
        sock.setblocking(False)
        with contextlib.closing(sock), contextlib.suppress(OSError):
            reader = Reader(sock)
            try:
                wanted = await ask(kind, reader, sock) if target is None else target
            except (DoorError, TimeoutError) as error:
                self.refused += 1
                log.info("a client was turned away: %s", str(error) or "it said nothing in time")
                if isinstance(error, DoorError) and error.reply:
                    await loop.sock_sendall(sock, error.reply)
                return
            finally:
                self._silent -= target is None
            try:
                group = await self._open(peer, wanted, traffic)
            except (Refused, ProxydError) as error:
                self.refused += 1
                log.warning("no connection to %s at %s: %s", wanted, to, error)
                if kind == "tcp":
                    reset_at_close(sock)  # the only word that it has: an end of nothing would look like an empty answer
                await loop.sock_sendall(sock, said(kind, error.why if isinstance(error, Refused) else Why.FAILED))
                return
            await self._carry(sock, peer, group, traffic, said(kind, None), reader.rest, f"{wanted} at {to}")

    async def _open(self, peer: int, target: Target, traffic: str) -> str:
        """Ask the station there to connect; the group of the stream. Raises Refused and ProxydError."""
        if len(self._streams) >= MAX_STREAMS:
            raise Refused(Why.FULL, f"{MAX_STREAMS} connections are under way")
        group = f"{self._endpoint.rank:x}.{self._life}.{next(self._numbers)}"
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._asked[group] = peer, answer
        self._streams.add(group)
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                await self._say(peer, op="open", group=group, host=target.host, port=target.port, traffic=traffic)
                await answer
        except BaseException as error:
            self._streams.discard(group)
            self._endpoint.close_group(group)
            if isinstance(error, TimeoutError):
                raise Refused(Why.TIMEOUT, f"the other site's exit said nothing for {OPEN_TIMEOUT_S:g} s") from None
            raise
        finally:
            del self._asked[group]
        return group

    async def _carry(
        self, sock: socket.socket, peer: int, group: str, traffic: str, hello: bytes, first: bytes, what: str
    ) -> None:
        """A connection that stands at both ends, to its end."""
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a host that is gone must not keep a place for ever
        stream = Stream(
            self._endpoint,
            sock,
            peer,
            group,
            traffic=traffic,
            share=lambda: len(self._streams),
            hello=hello,
            first=first,
        )
        try:
            why = await stream.run()
            self.finished += not why
            self.broken += bool(why)
            log.log(
                logging.WARNING if why else logging.INFO,
                "a connection to %s %s: %d bytes out, %d in%s",
                what,
                "broke" if why else "is over",
                stream.sent_bytes,
                stream.taken_bytes,
                f": {why}" if why else "",
            )
        finally:
            self.bytes_out += stream.sent_bytes
            self.bytes_in += stream.taken_bytes
            self._streams.discard(group)
            with contextlib.suppress(ProxydError):
                self._endpoint.close_group(group)

    # -- between stations --------------------------------------------------------------------------------------------

    async def _say(self, peer: int, **word: object) -> None:
        handle = self._endpoint.isend(json.dumps(word).encode(), dst=peer, group=WORDS, traffic="pipeline", timeout_s=0)
        # An error of delivery is one of the connection that it is about.
        loop, done = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

        def tell() -> None:
            if not done.done():
                done.set_result(None)

        def in_its_thread() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(tell)

        handle.call_when_done(in_its_thread)
        await done
        handle.wait(0)

    def _heard(self, message: Message) -> None:
        try:
            word = json.loads(bytes(message.data)) if message.nbytes <= MAX_WORD_BYTES else {}
            op, group = word["op"], word["group"]
            asked_by = _GROUP.fullmatch(group) if isinstance(group, str) else None
            if asked_by is None:
                raise ValueError("its group is none")
            if op == "open":
                if int(asked_by[1], 16) != message.src:
                    raise ValueError("its group is another station's")
                port, host, traffic = word["port"], str(word["host"])[:256], str(word["traffic"])
                if not isinstance(port, int) or not 0 <= port < 65536:
                    raise ValueError("its port is none")
                if traffic not in ("pipeline", "sync", "bulk"):
                    raise ValueError(f"{traffic!r} is no traffic class")
                self._keep(self._exit(message.src, group, Target(host, port), traffic))
                return
            asked, answer = self._asked.get(group, (message.src, None))
            if asked != message.src:
                raise ValueError("it answers what another one was asked")
            if answer is not None and not answer.done():
                if op == "opened":
                    answer.set_result(None)
                else:
                    answer.set_exception(Refused(Why(word["why"]), str(word.get("detail", ""))[:512]))
            elif op == "opened" and group not in self._streams:
                # Whoever asked has given up: its connection there would wait for the end of its target.
                with contextlib.suppress(ProxydError):
                    self._endpoint.isend(bytes([RESET]), dst=message.src, tag=DATA, group=group, timeout_s=0)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            log.warning("rank %d says what nobody understands: %s", message.src, error)

    # -- at the exit -------------------------------------------------------------------------------------------------

    async def _exit(self, peer: int, group: str, target: Target, traffic: str) -> None:
        try:
            if group in self._streams:
                raise Refused(Why.FAILED, "that connection exists")
            if len(self._streams) >= MAX_STREAMS:
                raise Refused(Why.FULL, f"{MAX_STREAMS} connections are under way")
            self._streams.add(group)  # a connection that isn't there yet takes its place, too
            try:
                sock = await self._connect(target)
            except BaseException:
                self._streams.discard(group)
                raise
        except Refused as error:
            self.refused += 1
            log.warning("rank %d is not connected to %s: %s", peer, target, error)
            with contextlib.suppress(ProxydError):
                await self._say(peer, op="refused", group=group, why=error.why.value, detail=str(error))
            return
        with contextlib.closing(sock):
            try:
                await self._say(peer, op="opened", group=group)
            except ProxydError as error:
                self._streams.discard(group)
                log.warning("rank %d is gone before it was connected to %s: %s", peer, target, error)
                return
            await self._carry(sock, peer, group, traffic, b"", b"", f"{target} for rank {peer}")

    async def _connect(self, target: Target) -> socket.socket:
        """A connection to a target that the rules allow. Raises Refused."""
        if not self._rules:
            raise Refused(Why.FORBIDDEN, "this station is no exit")
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
        except (OSError, ValueError) as error:  # the latter: no name that could be asked for
            raise Refused(Why.UNKNOWN_NAME, f"{target.host}: {error}") from None
        judged = [one for one in found if allowed(self._rules, plain_address(str(one[4][0])), target.port)]
        if not judged:
            raise Refused(Why.FORBIDDEN, f"no rule of the exit allows {target}")
        refused = Refused(Why.UNREACHABLE, str(target))
        for family, kind, protocol, _, address in judged:
            sock = socket.socket(family, kind, protocol)
            sock.setblocking(False)
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    await loop.sock_connect(sock, address)
                return sock
            except TimeoutError:
                refused = Refused(Why.TIMEOUT, f"{target} does not answer within {CONNECT_TIMEOUT_S:g} s")
            except ConnectionRefusedError:
                refused = Refused(Why.REFUSED, f"nothing listens at {target}")
            except OSError as error:
                refused = Refused(Why.UNREACHABLE, f"{target}: {error.strerror or error}")
            sock.close()
        raise refused

    def _keep(self, work: Any) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a connection's task failed", exc_info=error)
