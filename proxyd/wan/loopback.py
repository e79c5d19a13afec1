"""A bottleneck on loopback, for machines without network namespaces.

A proxy in front of each destination: it accepts connections, and what it reads from all of them passes one shared
virtual clock (:mod:`proxyd.wan.trace`) and a delay line before it is written on. It is *not* a WAN: there are no
packets and so no drops, no losses and no congestion control at work over the delay. When the buffer is full the proxy
stops reading and TCP's flow control holds the senders back. Use it to see things run, not to compare TCPs.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from proxyd.wan.errors import WanError
from proxyd.wan.spec import LinkSpec
from proxyd.wan.trace import FixedRate, Line, TraceLine, read_trace

CHUNK_BYTES = 16_384
START_TIMEOUT_S = 10.0

Result = TypeVar("Result")


@dataclass
class LoopbackCounters:
    """What has crossed one direction, and how long its queue is now, in payload bytes."""

    passed_bytes: int = 0
    queue_bytes: int = 0
    queue_peak_bytes: int = 0


class _Direction:
    """One direction, shared by all of its connections. Lives on the loop of the proxy's thread."""

    def __init__(self, spec: LinkSpec) -> None:
        now_ns = time.monotonic_ns()
        if spec.rate_bytes_per_s is not None:
            self.line: Line = FixedRate(spec.rate_bytes_per_s, now_ns)
        else:
            assert spec.trace is not None, "LinkSpec holds exactly one of rate and trace"
            self.line = TraceLine(read_trace(spec.trace), now_ns)
        self.spec = spec
        self.position_bytes = 0
        self.counters = LoopbackCounters()
        # First come, first served: without it whoever wakes first after a pause would overtake.
        self.turn = asyncio.Lock()

    async def admit(self, length: int) -> int:
        """Wait for room in the buffer; then the instant, in ns, at which the last of ``length`` bytes arrives."""
        async with self.turn:
            while True:
                now_ns = time.monotonic_ns()
                carried = self.line.bytes_by(now_ns)
                queue = max(0, self.position_bytes - carried)
                # A chunk larger than the whole buffer passes when the buffer is empty.
                over = queue + length - max(self.spec.buffer_bytes, length)
                if over <= 0:
                    break
                await asyncio.sleep(max(1_000, self.line.time_for(carried + over) - now_ns) / 1e9)
            self.position_bytes = max(self.position_bytes, carried) + length
            self.counters.queue_bytes = queue + length
            self.counters.queue_peak_bytes = max(self.counters.queue_peak_bytes, queue + length)
            self.counters.passed_bytes += length
            return self.line.time_for(self.position_bytes) + self.spec.one_way_delay_ns


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: _Direction) -> None:
    """Carry one direction of one connection to its end, and pass the end on."""
    line: deque[tuple[int, bytes]] = deque()
    filled = asyncio.Event()
    # Cleared while the destination takes nothing: the line must not grow without bound.
    flowing = asyncio.Event()
    flowing.set()

    async def deliver() -> None:
        while True:
            while not line:
                filled.clear()
                await filled.wait()
            due_ns, data = line.popleft()
            wait_ns = due_ns - time.monotonic_ns()
            if wait_ns > 0:
                await asyncio.sleep(wait_ns / 1e9)
            if not data:
                if writer.can_write_eof():
                    writer.write_eof()
                return
            writer.write(data)
            flowing.clear()
            await writer.drain()
            flowing.set()

    async with asyncio.TaskGroup() as group:
        group.create_task(deliver())
        while True:
            await flowing.wait()
            data = await reader.read(CHUNK_BYTES)
            due_ns = await direction.admit(len(data)) if data else time.monotonic_ns() + direction.spec.one_way_delay_ns
            if not data and line:
                due_ns = max(due_ns, line[-1][0])
            line.append((due_ns, data))
            filled.set()
            if not data:
                return


class LoopbackWan:
    """Fronts on 127.0.0.1 that lead to destinations through a shared bottleneck. A context manager.

    ``links`` maps a ``(from, to)`` pair of sites to its description, as for :class:`~proxyd.wan.topology.Wan`; ``loss``
    is refused, because a byte stream can't lose any. Runs in a thread of its own.
    """

    def __init__(self, links: dict[tuple[str, str], LinkSpec]) -> None:
        for (src, dst), spec in links.items():
            if spec.loss > 0:
                raise WanError(f"link {src}->{dst}: a bottleneck on loopback can't lose packets; set loss = 0")
        self._links = dict(links)
        self._directions: dict[tuple[str, str], _Direction] = {}
        self._servers: list[asyncio.Server] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxyd-wan-loopback", daemon=True)
        self._thread.start()
        self._call(self._make_directions())

    def __enter__(self) -> LoopbackWan:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(START_TIMEOUT_S)

    async def _make_directions(self) -> None:
        self._directions = {pair: _Direction(spec) for pair, spec in self._links.items()}

    def front(self, src: str, dst: str, target: tuple[str, int]) -> tuple[str, int]:
        """An address that leads from site ``src`` to ``target``, a listener of site ``dst``; answers take ``dst->src``.

        Raises :class:`WanError` if there is no such link.
        """
        try:
            forward = self._directions[(src, dst)]
        except KeyError:
            known = ", ".join(f"{a}->{b}" for a, b in self._links)
            raise WanError(f"no link {src}->{dst}; the links are {known}") from None
        return self._call(self._serve(forward, self._directions.get((dst, src)), target))

    async def _serve(self, forward: _Direction, back: _Direction | None, target: tuple[str, int]) -> tuple[str, int]:
        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await self._carry(reader, writer, forward, back, target)
            except* OSError:
                pass  # one side has reset the connection: closing both says so to the other
            finally:
                writer.close()

        # A small read limit: what asyncio reads ahead is buffer that the link does not have.
        server = await asyncio.start_server(accept, "127.0.0.1", 0, limit=CHUNK_BYTES)
        self._servers.append(server)
        host, port = server.sockets[0].getsockname()
        return host, port

    async def _carry(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        forward: _Direction,
        back: _Direction | None,
        target: tuple[str, int],
    ) -> None:
        far_reader, far_writer = await asyncio.open_connection(*target, limit=CHUNK_BYTES)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(_pump(reader, far_writer, forward))
                if back is not None:
                    group.create_task(_pump(far_reader, writer, back))
        finally:
            far_writer.close()

    def counters(self) -> dict[str, LoopbackCounters]:
        """Counters of every link by its name, ``"a->b"``."""
        return {f"{src}->{dst}": direction.counters for (src, dst), direction in self._directions.items()}

    def close(self) -> None:
        """Close all fronts and connections, end the thread. Idempotent."""
        if self._loop.is_closed():
            return
        self._call(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _stop(self) -> None:
        for server in self._servers:
            server.close()
        own = asyncio.current_task()
        # A connection that is just being accepted starts a task of its own; hence more than one round.
        while tasks := [task for task in asyncio.all_tasks() if task is not own]:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        # close() only schedules the closing of a socket: two turns of the loop let it happen before the loop stops.
        for _ in range(2):
            await asyncio.sleep(0)
