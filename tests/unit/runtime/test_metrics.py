"""Families to text, the HTTP server around them, listening."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterable

import pytest
from prometheus_client.parser import text_string_to_metric_families

from proxyd.core.errors import ListenError
from proxyd.runtime import metrics
from proxyd.runtime.addresses import Address
from proxyd.runtime.metrics import Histogram, MetricFamily, MetricsServer, build_info, counter, gauge, listen_tcp

LOOPBACK = Address(host="127.0.0.1", port=0)


def families() -> Iterable[MetricFamily]:
    yield counter("proxyd_granted_bytes_total", "Granted.", [({"link": "a->b"}, 7), ({"link": 'odd "\\\n'}, 1)])
    yield gauge("proxyd_link_queue_seconds", "Queue.", [({"link": "a->b"}, 0.25)])
    histogram = Histogram((0.1, 1.0))
    for value in (0.1, 0.5, 3.0):
        histogram.observe(value)
    yield MetricFamily("proxyd_grant_wait_seconds", "Wait.", "histogram", list(histogram.samples({"c": "x"})))
    yield build_info("test")


def run(main: Callable[[MetricsServer], Awaitable[None]], collect: Callable[[], Iterable[MetricFamily]]) -> None:
    async def around() -> None:
        server = MetricsServer(LOOPBACK, collect)
        await server.start()
        try:
            await asyncio.wait_for(main(server), 10)
        finally:
            await server.close()

    asyncio.run(around())


async def ask(server: MetricsServer, request: bytes) -> tuple[str, str]:
    """Status line and body."""
    port = int(server.url.split(":")[2].split("/")[0])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    head, _, body = (await reader.read()).decode().partition("\r\n\r\n")
    writer.close()
    return head.split("\r\n")[0], body


def test_a_scrape_holds_every_family_and_parses() -> None:
    async def main(server: MetricsServer) -> None:
        status, body = await ask(server, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        assert status == "HTTP/1.1 200 OK"
        samples = {
            (sample.name, tuple(sample.labels.values())): sample.value
            for family in text_string_to_metric_families(body)
            for sample in family.samples
        }
        assert samples["proxyd_granted_bytes_total", ("a->b",)] == 7
        assert samples["proxyd_granted_bytes_total", ('odd "\\\n',)] == 1
        assert samples["proxyd_link_queue_seconds", ("a->b",)] == 0.25
        assert samples["proxyd_grant_wait_seconds_bucket", ("x", "0.1")] == 1
        assert samples["proxyd_grant_wait_seconds_bucket", ("x", "1")] == 2
        assert samples["proxyd_grant_wait_seconds_bucket", ("x", "+Inf")] == 3
        assert samples["proxyd_grant_wait_seconds_count", ("x",)] == 3
        assert samples["proxyd_grant_wait_seconds_sum", ("x",)] == pytest.approx(3.6)
        assert samples["process_resident_memory_bytes", ()] > 1e6

    run(main, families)


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        (b"GET /healthz HTTP/1.1", "HTTP/1.1 200 OK"),
        (b"GET /metrics?name=x HTTP/1.0", "HTTP/1.1 200 OK"),
        (b"GET /etc/passwd HTTP/1.1", "HTTP/1.1 404 Not Found"),
        (b"POST /metrics HTTP/1.1", "HTTP/1.1 405 Method Not Allowed"),
        (b"\x00\xff nonsense", "HTTP/1.1 405 Method Not Allowed"),
    ],
)
def test_paths_and_methods(request_line: bytes, status: str) -> None:
    async def main(server: MetricsServer) -> None:
        assert (await ask(server, request_line + b"\r\n\r\n"))[0] == status

    run(main, families)


def test_openmetrics_on_request() -> None:
    async def main(server: MetricsServer) -> None:
        accept = b"Accept: application/openmetrics-text; version=1.0.0\r\n"
        _, body = await ask(server, b"GET /metrics HTTP/1.1\r\n" + accept + b"\r\n")
        assert body.endswith("# EOF\n")

    run(main, families)


def test_a_collector_that_breaks_answers_500_and_keeps_its_text_to_the_log(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> Iterable[MetricFamily]:
        raise RuntimeError("secret detail")

    async def main(server: MetricsServer) -> None:
        status, body = await ask(server, b"GET /metrics HTTP/1.1\r\n\r\n")
        assert status == "HTTP/1.1 500 Internal Server Error"
        assert "secret" not in body
        assert (await ask(server, b"GET /healthz HTTP/1.1\r\n\r\n"))[1] == "ok\n"

    run(main, broken)
    assert "secret detail" in caplog.text


def test_an_endless_request_is_cut() -> None:
    async def main(server: MetricsServer) -> None:
        status, _ = await ask(server, b"GET /" + b"x" * 20_000)
        assert status == ""

    run(main, families)


def test_invented_names_cannot_fill_a_scrape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "MAX_LABEL_SETS", 10)

    def many() -> Iterable[MetricFamily]:
        yield gauge("proxyd_x", "X.", [({"link": f"l{i}"}, i) for i in range(1000)])

    async def main(server: MetricsServer) -> None:
        _, body = await ask(server, b"GET /metrics HTTP/1.1\r\n\r\n")
        assert body.count("proxyd_x{") == 10

    run(main, many)


def test_an_inherited_descriptor_is_served() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]

    async def main() -> None:
        server = MetricsServer(Address(fd=listener.detach()), families)
        await server.start()
        assert server.url == f"http://127.0.0.1:{port}/metrics"
        assert (await ask(server, b"GET /healthz HTTP/1.1\r\n\r\n"))[1] == "ok\n"
        await server.close()

    asyncio.run(main())


def test_a_busy_port_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        with pytest.raises(ListenError, match=rf"127\.0\.0\.1:{port} for metrics.*in use.*another address"):
            listen_tcp(Address(host="127.0.0.1", port=port), "metrics")
