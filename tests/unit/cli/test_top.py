"""What ``proxyd top`` shows of a status, and how rates come from two looks."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from proxyd.cli.main import main
from proxyd.cli.top.frames import Frame, picture
from proxyd.v1 import admin_pb2, coordination_pb2

MIB = 1 << 20


def status(delivered_bytes: int = 0) -> admin_pb2.StatusResponse:
    """A link at 400 Mbit/s: a/0 sends, a transfer of a/1 waits."""
    link = coordination_pb2.LinkName(src_site="a", dst_site="b")
    a0, a1 = (coordination_pb2.AgentName(site="a", name=name) for name in ("0", "1"))
    return admin_pb2.StatusResponse(
        coordinator="c",
        version="1",
        uptime_ns=60_000_000_000,
        agents=[admin_pb2.AgentStatus(agent=a0, transfers=2)],
        links=[
            admin_pb2.LinkStatus(
                link=link,
                source="estimated",
                pace_bytes_per_s=50_000_000,
                rtt_ns=60_000_000,
                window_bytes=4 * MIB,
                outstanding_bytes=2 * MIB,
                waiting_transfers=1,
                totals=admin_pb2.LinkTotals(delivered_bytes=delivered_bytes),
                lanes=[admin_pb2.LaneStatus(agent=a0, rate_bytes_per_s=50_000_000, outstanding_bytes=2 * MIB)],
                waiting=[
                    admin_pb2.WaitingStatus(
                        transfer=coordination_pb2.TransferId(incarnation=0xC0FFEE, sequence=17),
                        agent=a1,
                        job="llama",
                        traffic=coordination_pb2.TRAFFIC_CLASS_SYNC,
                        wanted_bytes=8 * MIB,
                        granted_bytes=2 * MIB,
                        waited_ns=70_000_000,
                        reason="sync: 1 transfer is before it",
                    )
                ],
            )
        ],
    )


def drawn(frame: Frame, rows: int = 10) -> str:
    console = Console(file=io.StringIO(), width=200, highlight=False)
    console.print(picture(frame, rows))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_who_sends_and_who_waits_for_what() -> None:
    text = drawn(Frame(2.0, coordinator=status(45_000_000)).since(Frame(1.0, coordinator=status(0))))
    assert "360 Mbit/s" in text
    assert "90 %" in text
    assert "a/0" in text
    assert "0000000000c0ffee-17" in text
    assert "25 %" in text
    assert "sync: 1 transfer is before it" in text
    assert "c0ffee" not in drawn(Frame(2.0, coordinator=status()), rows=0)


def test_a_daemon_that_was_started_anew_and_one_that_is_away() -> None:
    before = Frame(1.0, coordinator=status(10 * MIB))
    assert Frame(2.0, coordinator=status(0)).since(before).delivered == {"a->b": 0}
    assert "this is an old picture: no coordinator answers" in drawn(before.without_answer("no coordinator answers"))


def test_draining_shows() -> None:
    one = status()
    one.draining, one.held_transfers = True, 3
    assert "3 are held" in drawn(Frame(1.0, coordinator=one))


def test_plain_is_json() -> None:
    frame = Frame(2.0, coordinator=status(50_000_000)).since(Frame(1.0, coordinator=status(0)))
    shown = json.loads(json.dumps(frame.plain()))
    assert shown["delivered_bytes_per_s"] == {"a->b": 50_000_000}
    assert shown["status"]["links"][0]["waiting"][0]["job"] == "llama"


def test_no_daemon_is_an_error_that_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--once", "--coordinator", "127.0.0.1:9"]) == 1
    assert "--coordinator" in capsys.readouterr().err
    assert main(["top", "--once", "--agent", "/nowhere/x.sock"]) == 1
    assert "no agent runs here" in capsys.readouterr().err
    assert main(["top", "--interval-s", "0"]) == 2
