"""tools/evaluate.py: its commands exist, and its tables say what is missing and what misses its bound."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from proxyd.cli.main import COMMANDS

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def evaluate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("evaluate", ROOT / "tools" / "evaluate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "evaluate", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    return module


def put(evaluate: ModuleType, name: str, figures: Any) -> None:
    (evaluate.RESULTS / f"{name}.json").write_text(json.dumps(figures))


def test_every_command_can_be_typed(evaluate: ModuleType) -> None:
    names = set()
    for item in evaluate.items():
        assert item.name not in names
        names.add(item.name)
        if item.is_test:
            assert (ROOT / item.command[-1]).exists(), item.text
            continue
        words = item.text.split()[1:]
        full = " ".join(words[:2])
        command, options = (full, words[2:]) if full in COMMANDS else (words[0], words[1:])
        parser = argparse.ArgumentParser(exit_on_error=False)
        importlib.import_module(COMMANDS[command][0]).add_arguments(parser)
        parser.parse_args(options)
    assert set(evaluate.PICTURED) <= names


def test_the_document_has_a_place_for_every_table(evaluate: ModuleType) -> None:
    text = (ROOT / "docs" / "evaluation.md").read_text()
    for name in evaluate.TABLES:
        assert text.count(f"<!-- table: {name} -->") == text.count(f"<!-- end of {name} -->") == 1


def test_what_was_not_measured_is_said(evaluate: ModuleType) -> None:
    for name, table in evaluate.TABLES.items():
        text = "\n".join(table())
        assert (evaluate.MISSING in text) == (name != "commands")
        columns = {row.count("|") for row in table() if "`" not in row}
        assert len(columns) == 1, f"{name} is no table"


def test_a_missed_bound_is_said(evaluate: ModuleType) -> None:
    run = {"utilisation": 0.97, "queue_p99_bdp": 0.2, "loss": 0.0, "retransmit_ratio": 0.0, "fct_seconds": None}
    put(evaluate, "wan-link-calm-1bdp", {"runs": [{"mode": "proxyd", **run}, {"mode": "cubic", **run, "loss": 0.03}]})
    [row] = [row for row in evaluate.link_table() if row.startswith("| calm | 1bdp")]
    assert "97.0%, **0.20** (missed), 0.00%" in row
    assert "97.0%, 0.20, 3.00%" in row, "plain TCP has no bounds"
    step = {"queue_under_tenth_bdp_after_rtts": None, "loss_of_5_rtts": 0.12}
    assert evaluate.step_cell({"step": step}, "halve", 0.18) == "**queue back: never** (missed), 12.00% lost"
    put(evaluate, "bench-grants", {"decisions_per_s": 60_000.0, "grpc_grants_per_s": 2_000.0, "grpc_p99_ms": 1.0})
    [row] = [row for row in evaluate.rest_table() if row.startswith("| decisions")]
    assert "60,000/s pure; **2,000/s** (missed), p99 1.00 ms through gRPC" in row


def test_when_a_policed_path_was_found(evaluate: ModuleType) -> None:
    def report(estimates: list[float]) -> dict[str, Any]:
        series = {"estimate": [[number / 2, value] for number, value in enumerate(estimates)]}
        return {"runs": [{"mode": "cubic"}, {"mode": "proxyd", "series": series}]}

    # Two looks a second: the first two are of line rate, then it moves around the contract.
    assert evaluate.policed_found_s(report([300.0] * 2 + [70.0, 120.0] * 7)) == 1.0
    assert evaluate.policed_found_s(report([180.0] * 20)) is None
    assert evaluate.policed_found_s(report([95.0] * 6 + [180.0] * 14)) is None, "it has to stay"
    assert evaluate.policed_found_s(report([])) is None


def test_a_command_that_fails_leaves_its_words(evaluate: ModuleType) -> None:
    item = evaluate.Item("broken", "sim", ("proxyd", "no-such-command"))
    assert not evaluate.run(item)
    assert "no-such-command" in (evaluate.RESULTS / "broken.failed.txt").read_text()
