"""``proxyd simulate pipeline``, made small."""

from __future__ import annotations

import json
from pathlib import Path

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


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--activations", "0"), "memory for 0 activations"),
        (("--systems", "gpipe"), "no system 'gpipe'"),
        (("--speeds", "1,x"), "not numbers"),
        (("--loss-penalty", "nan"), "out of range"),
    ],
)
def test_bad_options(options: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "pipeline", *SMALL, *options]) == EXIT_USAGE
    assert said in capsys.readouterr().err
