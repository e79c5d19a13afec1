"""Metrics for Prometheus: families as plain values, read at each scrape, and the small HTTP server that shows them.

Nothing is counted here. A daemon hands over a function that turns its status into :class:`MetricFamily` values; so the
figures that a scrape shows are those that the machine decides by. Units are Prometheus' base units (seconds, bytes).
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import dataclasses
import itertools
import logging
import socket
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric

from proxyd import __version__
from proxyd.core.errors import ListenError
from proxyd.runtime.addresses import Address
from proxyd.runtime.limits import Descriptors, Dismiss, Door, cancel
from proxyd.runtime.pages import Pages

log = logging.getLogger("proxyd.metrics")

Labels = Mapping[str, str]

JOB = "training_job"
"""The label of a job: `job` is Prometheus' own, and it would rename ours."""
MAX_REQUEST_BYTES = 8 << 10
REQUEST_TIMEOUT_S = 5.0
MAX_CONNECTIONS = 32
BACKLOG = 4096
"""The kernel takes so many connections for us before we accept them (or net.core.somaxconn, if that is less). Beyond it
SYNs are dropped and come again after a second: with 32, a few hundred strangers kept agents out for that long."""
MAX_LABEL_SETS = 1024
"""More series than this in one family means that somebody invents names; the rest is left out, and counted."""


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """One series. ``suffix``: only histograms need one (``_bucket``, ``_sum``, ``_count``)."""

    labels: Labels
    value: float
    suffix: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class MetricFamily:
    """All series of one name. A counter's name ends in ``_total``."""

    name: str
    help: str
    type: Literal["counter", "gauge", "histogram"]
    samples: Sequence[Sample]


Collect = Callable[[], Iterable[MetricFamily]]


def counter(name: str, help_text: str, values: Iterable[tuple[Labels, float]]) -> MetricFamily:
    """A family of totals."""
    return MetricFamily(name, help_text, "counter", [Sample(labels, value) for labels, value in values])


def gauge(name: str, help_text: str, values: Iterable[tuple[Labels, float]]) -> MetricFamily:
    """A family of values of now."""
    return MetricFamily(name, help_text, "gauge", [Sample(labels, value) for labels, value in values])


def build_info(role: str) -> MetricFamily:
    """Which version runs, and as what."""
    return gauge("proxyd_build_info", "Version and role; always 1.", [({"version": __version__, "role": role}, 1)])


class Histogram:
    """Counts observations by upper bound; for what a status cannot hold (a distribution of waits)."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self._sum += value

    def samples(self, labels: Labels) -> Iterator[Sample]:
        """As Prometheus wants it: cumulative buckets, then count and sum."""
        names = [*(f"{bound:g}" for bound in self._bounds), "+Inf"]
        for name, total in zip(names, itertools.accumulate(self._counts), strict=True):
            yield Sample({**labels, "le": name}, total, "_bucket")
        yield Sample(labels, sum(self._counts), "_count")
        yield Sample(labels, self._sum, "_sum")


class _Collector:
    """Bridges ``collect`` to prometheus_client."""

    def __init__(self, collect: Collect, limit: int) -> None:
        self._collect = collect
        self._limit = limit

    def collect(self) -> Iterator[Metric]:
        for family in self._collect():
            base = family.name.removesuffix("_total") if family.type == "counter" else family.name
            metric = Metric(base, family.help, family.type)
            for sample in family.samples[: self._limit]:
                metric.add_sample(family.name + sample.suffix, dict(sample.labels), sample.value)
            if len(family.samples) > self._limit:
                log.warning("metric %s has %d series; shown are %d", family.name, len(family.samples), self._limit)
            yield metric


def make_registry(collect: Collect, limit: int | None = None, *, process: bool = True) -> CollectorRegistry:
    """A registry of its own: ``collect``'s families and the process's (memory, CPU, descriptors).

    :param limit: series of one family; by default MAX_LABEL_SETS.
    :param process: False: ``collect`` brings those of the process, too.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(collect, MAX_LABEL_SETS if limit is None else limit))
    if process:
        ProcessCollector(registry=registry)
    return registry


def process_families() -> list[MetricFamily]:
    """This process's memory, CPU and descriptors."""
    registry = CollectorRegistry(auto_describe=False)
    ProcessCollector(registry=registry)
    found: list[MetricFamily] = []
    for metric in registry.collect():
        values = [(sample.labels, sample.value) for sample in metric.samples]
        if metric.type == "counter":
            found.append(counter(f"{metric.name}_total", metric.documentation, values))
        else:
            found.append(gauge(metric.name, metric.documentation, values))
    return found


def listen_tcp(address: Address, what: str) -> socket.socket:
    """A listening TCP socket at ``address``, or the inherited one of ``fd:N``. Raises ListenError.

    An inherited socket stays in the network namespace that it was made in: that is how a daemon inside a namespace can
    be scraped from outside.
    """
    try:
        if address.is_fd:
            inherited = socket.socket(fileno=address.fd)
            inherited.setblocking(False)
            return inherited
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        listener = socket.create_server((address.host, address.port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise ListenError(
            f"cannot listen on {address} for {what}",
            why=(error.strerror or str(error)).lower(),
            next_step="Stop what uses it, or choose another address",
        ) from error
    listener.setblocking(False)
    return listener


class MetricsServer:
    """``GET /metrics`` and ``GET /healthz`` on the daemon's own loop: a loop that hangs answers neither.

    :param address: ``host:port`` (port 0: any) or ``fd:N``.
    :param pages: the status page; None: ``/`` is the metrics too.
    :param registry: what a scrape shows; by default ``collect``'s families and the process's.
    :param fetch: awaited before a path is answered, to fetch what answering it takes.
    """

    def __init__(
        self,
        address: Address,
        collect: Collect,
        pages: Pages | None = None,
        *,
        registry: CollectorRegistry | None = None,
        fetch: Callable[[str], Awaitable[None]] | None = None,
    ) -> None:
        self._pages = pages
        self._fetch = fetch
        self._listener = listen_tcp(address, "metrics")
        self._registry = make_registry(collect) if registry is None else registry
        self._door: Door | None = None
        self._scrapes: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """Where to scrape."""
        host, port = self._listener.getsockname()[:2]
        return f"http://[{host}]:{port}/metrics" if ":" in host else f"http://{host}:{port}/metrics"

    async def start(self) -> None:
        """Accept from now on."""
        # Not asyncio's server: out of descriptors, uvloop closes it for good. A scrape may have the last one.
        descriptors = dataclasses.replace(Descriptors.here(), reserved=0)
        self._door = Door(
            self._listener, "metrics", self._arrived, log, places=MAX_CONNECTIONS, descriptors=descriptors
        )

    async def close(self) -> None:
        """Stop listening; answers under way are cut."""
        if self._door is not None:
            self._door.close()
        else:
            self._listener.close()
        for task in list(self._scrapes):
            task.cancel()
        await asyncio.gather(*self._scrapes, return_exceptions=True)

    def _arrived(self, sock: socket.socket, _: object, leave: Callable[[], None]) -> Dismiss:
        task = asyncio.get_running_loop().create_task(self._serve(sock))
        self._scrapes.add(task)

        def served(task: asyncio.Task[None]) -> None:
            self._scrapes.discard(task)
            leave()
            if task.cancelled():
                sock.close()

        task.add_done_callback(served)
        return lambda reason: cancel(task)

    async def _serve(self, sock: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=sock, limit=MAX_REQUEST_BYTES)
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                request = await reader.readuntil(b"\r\n\r\n")
                name = writer.get_extra_info("peername")
                peer = name[0] if isinstance(name, tuple) and name else ""
                text = request.decode("latin-1")
                if self._fetch is not None:
                    await self._fetch(_path(text))
                writer.write(self._answer(text, peer))
                await writer.drain()
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError, ConnectionError):
            log.debug("metrics: a scrape broke off")
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError, TimeoutError):
                await writer.wait_closed()

    def _answer(self, request: str, peer: str) -> bytes:
        line, *headers = request.split("\r\n")
        method = line.partition(" ")[0]
        path = _path(request)
        if method not in ("GET", "HEAD"):
            return _response("405 Method Not Allowed", b"only GET\n", "text/plain")
        if path == "/healthz":
            return _response("200 OK", b"ok\n", "text/plain")
        answer = None if self._pages is None else self._pages.answer(path, _header(headers, "host"), peer)
        if answer is not None:
            return _response(*answer)
        if path not in ("/", "/metrics"):
            return _response("404 Not Found", b"try /metrics\n", "text/plain")
        accept = _header(headers, "accept")
        encode, content_type = choose_encoder(accept)
        try:
            body = encode(self._registry)
        except Exception:
            # A figure that cannot be told must not end a daemon that works; the scraper sees that it failed.
            log.exception("metrics: collecting failed")
            return _response("500 Internal Server Error", b"collecting failed; see the log\n", "text/plain")
        return _response("200 OK", body, content_type)


def _path(request: str) -> str:
    """Without what follows a question mark."""
    return request.partition("\r\n")[0].partition(" ")[2].partition(" ")[0].partition("?")[0]


def _header(headers: Iterable[str], name: str) -> str:
    """The first of that name; empty: there is none."""
    return next((h.partition(":")[2].strip() for h in headers if h.lower().startswith(f"{name}:")), "")


def _response(status: str, body: bytes, content_type: str, headers: Mapping[str, str] | None = None) -> bytes:
    lines = {"Content-Type": content_type, "Content-Length": str(len(body)), "Connection": "close", **(headers or {})}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"HTTP/1.1 {status}\r\n{head}\r\n".encode() + body
