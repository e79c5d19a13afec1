"""``proxyd simulate link``: options, files, and what wrong ones say."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from proxyd.cli.main import main
from proxyd.core.errors import EXIT_OK, EXIT_USAGE

QUICK = [
    *("simulate", "link", "--rate", "50Mbit", "--rtt", "20ms", "--seconds", "2", "--senders", "2"),
    *("--message", "1MiB", "--hint", "50Mbit", "--fixed", "--told"),
]


def test_it_writes_figures_inputs_and_a_series(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, series = tmp_path / "out.json", tmp_path / "series.csv"
    assert main([*QUICK, "--trace", "calm", "--out", str(out), "--series", str(series)]) == EXIT_OK
    figures = json.loads(out.read_text())
    assert figures == json.loads(capsys.readouterr().out)
    assert {
        "utilisation",
        "queue_p99_bdp",
        "loss",
        "fct_seconds",
        "estimate_error_p50",
        "estimate_error_p95",
    } <= set(figures)
    assert set(figures["fct_seconds"]) == {"mean", "p50", "p99"}
    assert figures["inputs"]["buffer_bytes"] == 12_500  # 0.1 BDP
    rows = list(csv.reader(series.open()))
    assert rows[0][:3] == ["time_s", "rate_bytes_per_s", "estimate_bytes_per_s"]
    assert len(rows) == 1 + 201  # every 10 ms, both ends


def test_the_same_seed_writes_the_same_file(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a.json", "b.json")]
    for file in files:
        assert main([*QUICK, "--trace", "wild", "--seed", "7", "--out", str(file)]) == EXIT_OK
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_file_is_a_trace_of_its_own_rate_or_of_the_one_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "link.trace"
    trace.write_text("".join(f"{ms}\n" * 2 for ms in range(1, 1001)))  # two packets of 1504 bytes a millisecond
    options = [*QUICK, "--trace", str(trace)]
    assert main(options) == EXIT_OK
    assert json.loads(capsys.readouterr().out)["inputs"]["rate_bytes_per_s"] == pytest.approx(6_250_000, rel=0.001)
    options = [
        "simulate",
        "link",
        "--trace",
        str(trace),
        "--rtt",
        "20ms",
        "--seconds",
        "1",
        "--hint",
        "20Mbit",
        "--fixed",
    ]
    assert main(options) == EXIT_OK
    assert json.loads(capsys.readouterr().out)["inputs"]["rate_bytes_per_s"] == pytest.approx(3_008_000, rel=0.001)


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "link.png"
    assert main([*QUICK, "--trace", "halves", "--picture", str(picture)]) == EXIT_OK
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--trace", "no/such/file"], "no such class, and as a file it can't be read"),
        (["--rate", "5"], "bits or bytes must be said"),
        (["--cross", "tcp:none"], "'none' is not a number of connections"),
        (["--cross", "5Mbit:1s"], "neither RATE, RATE:ON:OFF nor tcp:N"),
        (["--policer", "5Mbit"], "a bucket needs a size"),
        (["--seconds", "0"], "is no time"),
        (["--seconds", "0.1"], "too short"),
    ],
)
def test_wrong_options_say_what_is_wrong(options: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, *options]) == EXIT_USAGE
    assert told in capsys.readouterr().err


def test_a_belief_needs_something_to_believe(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "link", "--fixed"]) == EXIT_USAGE
    assert "--fixed needs a --hint" in capsys.readouterr().err
