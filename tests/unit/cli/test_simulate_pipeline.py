"""``proxyd simulate pipeline``, made small."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from proxyd.cli.main import main
from proxyd.core.errors import EXIT_OK, EXIT_USAGE

SMALL = ("--micro-batches", "16", "--stages", "4")


def test_figures_table_and_the_same_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = []
    for name in ("one.json", "two.json"):
        out = tmp_path / name
        assert main(["simulate", "pipeline", "--preset", "L2", *SMALL, "--out", str(out)]) == EXIT_OK
        written.append(out.read_text())
    assert written[0] == written[1]
    figures = json.loads(written[0])
    by_name = {one["system"]: one for one in figures["systems"]}
    assert {"1f1b", "zb_h1", "zb_h2", "offline", "proxyd"} <= set(by_name)
    for name, one in by_name.items():
        assert one["ratio_to_bound"] == pytest.approx(one["iteration_seconds"] / figures["bound_seconds"], abs=1e-4)
        assert one["ratio_to_bound"] >= 1
        if name != "proxyd":
            faster = one["iteration_seconds"] / by_name["proxyd"]["iteration_seconds"]
            assert figures["speedup_of_proxyd_over"][name] == pytest.approx(faster, abs=1e-3)
    assert figures["inputs"]["wires"]["a->b"]["one_way_ns"] == 180_000_000
    said = capsys.readouterr().out
    assert "180 ms one way" in said
    assert "fair sharing, loss penalty 0.15" in said


def test_a_picture(tmp_path: Path) -> None:
    plot = tmp_path / "step.png"
    options = [*SMALL, "--systems", "1f1b,proxyd", "--plot", str(plot)]
    assert main(["simulate", "pipeline", *options]) == EXIT_OK
    assert plot.read_bytes().startswith(b"\x89PNG")


def figures_of(out: Path, *options: str) -> dict[str, Any]:
    words = ["simulate", "pipeline", *SMALL, "--systems", "1f1b,proxyd", "--out", str(out), *options]
    assert main(words) == EXIT_OK
    figures: dict[str, Any] = json.loads(out.read_text())
    return figures


def test_a_trace_from_a_file_has_the_presets_mean_and_tells_its_gaps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "link.csv"
    lines = [(at / 10, 2e9 if at % 50 else 0) for at in range(100)] + [(60 + at / 10, 9e9) for at in range(100)]
    file.write_text("".join(f"{at},{rate}\n" for at, rate in lines))
    one = figures_of(tmp_path / "one.json", "--trace", str(file))
    assert "link.csv: a gap of 50.1 s: the rate before it is taken to hold" in capsys.readouterr().err
    wire = one["inputs"]["wires"]["a->b"]
    assert wire["mean_rate_bytes_per_s"] == pytest.approx(12.38e9 / 8, rel=1e-6)
    assert figures_of(tmp_path / "two.json", "--trace", str(file)) == one
    other = figures_of(tmp_path / "two.json", "--trace", str(file), "--seed", "2")
    assert other["systems"] != one["systems"], "a seed begins elsewhere in the file"


def test_messages_and_compute_of_ones_own(tmp_path: Path) -> None:
    small = figures_of(tmp_path / "a.json", "--message", "8MiB", "--period", "60ms", "--trace", "constant")
    assert small["inputs"]["message_bytes"] == 8 << 20
    assert small["inputs"]["compute_seconds"] == pytest.approx(16 * 0.06, rel=1e-6)
    assert small["bounds"]["compute_seconds"] < 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--activations", "0"), "memory for 0 activations"),
        (("--offload", "-1"), "-1 more outside is impossible"),
        (("--micro-batches", "0"), "must be above zero"),
        (("--micro-batches", "100000000"), "tasks: more than 3,000,000"),
        (("--pipelines", "0"), "must be above zero"),
        (("--stages", "0"), "can't be halved"),
        (("--stages", "7"), "can't be halved"),
        (("--systems", "gpipe"), "no system 'gpipe'"),
        (("--systems", "interleaved", "--micro-batches", "9"), "9 is no multiple"),
        (("--speeds", "1,x"), "not numbers"),
        (("--speeds", "1"), "one between 0.001 and 1000 for each"),
        (("--speeds", "nan,1"), "one between 0.001 and 1000 for each"),
        (("--speeds", "1e-30,1"), "one between 0.001 and 1000 for each"),
        (("--loss-penalty", "nan"), "out of range"),
        (("--loss-penalty", "-0.1"), "out of range"),
        (("--message", "0"), "size"),
        (("--message", "nanMiB"), "size"),
        (("--period", "0ms"), "duration"),
        (("--period=-5ms",), "duration"),
        (("--period", "1ns"), "take time"),
        (("--seeds", "0"), "one run at least"),
        (("--trace", "stormy"), "no such class, and as a file it can't be read: No such file"),
        (("--trace", "."), "no such class, and as a file it can't be read"),
        (("--out", "/nowhere/F.json"), "/nowhere/F.json: its directory isn't there"),
        (("--plot", "/nowhere/F.png"), "/nowhere/F.png: its directory isn't there"),
    ],
)
def test_bad_options(options: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "pipeline", *SMALL, *options]) == EXIT_USAGE
    err = capsys.readouterr().err
    assert said in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "no opportunity"),
        (b"0, 1e9\n1, nan\n", "2: nan bit/s is no rate"),
        (b"-1, 1e9\n1, 1e9\n", "1: -1 s is no time"),
        (b"0, 0\n1, 0\n", "every rate is 0"),
        (b"\xff\xfe\x00", "it is not a text file"),
    ],
)
def test_bad_traces(content: bytes, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "link.trace"
    file.write_bytes(content)
    assert main(["simulate", "pipeline", *SMALL, "--trace", str(file)]) == EXIT_USAGE
    assert said in capsys.readouterr().err


def test_an_unknown_preset_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "pipeline", "--preset", "L9"]) == EXIT_USAGE
    assert "invalid choice: 'L9'" in capsys.readouterr().err
