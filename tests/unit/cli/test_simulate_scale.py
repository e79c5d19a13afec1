"""``proxyd simulate scale``: both runs, made small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from proxyd.cli.main import main
from proxyd.core.errors import EXIT_OK


def test_both_runs_say_what_they_carried(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "scale.json"
    options = ["--transfers", "300", "--seconds", "20", "--out", str(out)]
    assert main(["simulate", "scale", *options]) == EXIT_OK
    figures = json.loads(out.read_text())
    assert (figures["wide"]["agents"], figures["wide"]["links"], figures["wide"]["transfers"]) == (1000, 100, 300)
    assert (figures["long"]["agents"], figures["long"]["simulated_s"]) == (64, 20)
    assert "1,000 agents, 100 links, 300 transfers" in capsys.readouterr().out


def test_one_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "scale", "--only", "long", "--seconds", "5"]) == EXIT_OK
    said = capsys.readouterr().out
    assert "long: 64 agents" in said
    assert "wide" not in said
