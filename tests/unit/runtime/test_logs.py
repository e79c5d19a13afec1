from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator
from typing import Literal

import pytest

from proxyd.core.ids import AgentName, LinkName
from proxyd.runtime import logs
from proxyd.runtime.logs import Throttle, fields, setup_logging


@pytest.fixture(autouse=True)
def _restore_root() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def logged(style: Literal["text", "json"], level: str = "info") -> tuple[io.StringIO, logging.Logger]:
    stream = io.StringIO()
    setup_logging(level, style, stream)
    return stream, logging.getLogger("proxyd.test")


def test_text_has_fields_after_the_message() -> None:
    stream, log = logged("text")
    log.info("peer is up", extra=fields(peer="b", rtt_ns=60_000_000, why="two words"))
    log.debug("not shown")
    line = stream.getvalue()
    assert line.endswith('INFO proxyd.test: peer is up peer=b rtt_ns=60000000 why="two words"\n')
    assert line.count("\n") == 1


def test_json_is_one_object_a_line() -> None:
    stream, log = logged("json", "debug")
    log.debug('odd "text"\n', extra=fields(peer="b", message="not over ours"))
    try:
        raise ValueError("boom")
    except ValueError:
        log.exception("failed")
    first, second = (json.loads(line) for line in stream.getvalue().splitlines())
    assert first == {
        "time": first["time"],
        "level": "debug",
        "logger": "proxyd.test",
        "message": 'odd "text"\n',
        "peer": "b",
    }
    assert "ValueError: boom" in second["exception"]


def test_names_are_written_as_people_write_them() -> None:
    stream, log = logged("json")
    log.info("up", extra=fields(agent=AgentName("hami", "gw-1"), link=LinkName("hami", "shenzhen"), places=(1, 2)))
    line = json.loads(stream.getvalue())
    assert (line["agent"], line["link"], line["places"]) == ("hami/gw-1", "hami->shenzhen", [1, 2])


@pytest.mark.parametrize("style", ["text", "json"])
def test_secrets_stay_out(style: Literal["text", "json"]) -> None:
    stream, log = logged(style)
    log.info("hello", extra=fields(token="hunter2", job_secret="hunter2", hmac=b"hunter2", frame=b"hunter2"))
    log.info("hello", extra=fields(token_file="/etc/proxyd/token", tokens=4))
    text = stream.getvalue()
    assert "hunter2" not in text
    assert "<7 bytes>" in text
    assert "/etc/proxyd/token" in text


def test_text_from_a_peer_cannot_forge_a_line() -> None:
    stream, log = logged("text")
    log.warning("refused %s", "x\n2026 INFO proxyd: all is well", extra=fields(job="a\nb"))
    assert stream.getvalue().count("\n") == 1


def test_setting_up_twice_does_not_double_the_lines() -> None:
    logged("text")
    stream, log = logged("text")
    log.info("once")
    assert stream.getvalue().count("once") == 1


def test_a_storm_becomes_one_line_per_interval() -> None:
    stream, log = logged("text")
    now_ns = 0
    throttle = Throttle(log, 1_000_000_000, clock_ns=lambda: now_ns)
    passed = []
    for step in range(25):
        now_ns = step * 100_000_000
        passed.append(throttle.warning("accept", "no descriptors left", step=step))
    assert [step for step, ok in enumerate(passed) if ok] == [0, 10, 20]
    assert "step=10 kept_back=9" in stream.getvalue()
    assert throttle.error("other key", "passes at once")


def test_throttle_keys_are_bounded() -> None:
    _, log = logged("text")
    throttle = Throttle(log, 1_000_000_000, clock_ns=lambda: 0, max_keys=2)
    assert [throttle.warning(key, "x") for key in ("a", "b", "c", "c", "a")] == [True, True, True, False, True]


def test_a_call_that_was_cancelled_at_the_stop_is_no_error_of_ours() -> None:
    stream, log = logged("text")
    for name, error in (
        ("grpc._cython.cygrpc", asyncio.CancelledError()),
        ("grpc._cython.cygrpc", ValueError("a real one")),
        ("proxyd.x", asyncio.CancelledError()),
    ):
        logging.getLogger(name).error("not handled", exc_info=error)
    assert stream.getvalue().count("not handled") == 2
    assert "a real one" in stream.getvalue()
    assert log


def test_what_a_process_says_everywhere_is_in_each_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_everywhere", {})
    logs.say_everywhere(worker=3)
    stream, log = logged("text")
    log.info("peer is up", extra=fields(peer="b#1"))
    log.info("stopping")
    first, second = stream.getvalue().splitlines()
    assert first.endswith("peer is up worker=3 peer=b#1")
    assert second.endswith("stopping worker=3")
