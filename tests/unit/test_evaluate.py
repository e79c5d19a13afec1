"""tools/evaluate.py: its commands exist, and its tables say what is missing and what misses its bound."""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from proxyd.cli.main import COMMANDS

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def evaluate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    module = importlib.import_module("evaluate")
    monkeypatch.setattr(module.runs, "RESULTS", tmp_path)
    return module


def put(evaluate: ModuleType, name: str, figures: Any) -> None:
    (evaluate.runs.RESULTS / f"{name}.json").write_text(json.dumps(figures))


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
    for name, (document, _) in evaluate.tables_of(None).items():
        text = (ROOT / "docs" / document).read_text()
        assert text.count(f"<!-- table: {name} -->") == text.count(f"<!-- end of {name} -->") == 1


def test_what_was_not_measured_is_said(evaluate: ModuleType) -> None:
    for name, (_, table) in evaluate.tables_of(None).items():
        text = "\n".join(table())
        assert (evaluate.MISSING in text) == (name != "commands")
        columns = {row.count("|") for row in table() if row.startswith("|") and "`proxyd" not in row}
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
    assert "no-such-command" in (evaluate.runs.RESULTS / "broken.failed.txt").read_text()


def simulated(evaluate: ModuleType, name: str, ratio: float, least: float, most: float) -> None:
    """Figures of five seeds, as ``proxyd simulate pipeline`` writes them."""
    took = dict.fromkeys(evaluate.evaluate_pipeline.ROWS, 25.0) | {"1f1b": 40.0, "zb_h1": 30.0, "proxyd": 20.0}
    systems = [
        {
            "system": one,
            "iteration_seconds": s,
            "ratio_to_bound": ratio,
            "worst_ratio_to_bound": ratio + 0.1,
            "ratio_to_own_bound": ratio,
        }
        for one, s in took.items()
    ]
    over = {one: s / 20.0 for one, s in took.items() if one != "proxyd"}
    spread = {
        f"{word}_speedup_of_proxyd_over": dict.fromkeys(over, x) for word, x in (("least", least), ("most", most))
    }
    wires = {"a->b": {"one_way_ns": 60_000_000}}
    inputs = {
        "preset": "L1",
        "seed": 101,
        "seeds": 5,
        "loss_penalty": 0.15,
        "wires": wires,
        "pipelines": 2,
        "stages": 8,
    }
    inputs |= {"micro_batches": 128, "message_bytes": 64 << 20, "period_ns": 187_500_000, "activations": 8}
    put(
        evaluate,
        name,
        {"systems": systems, "bound_seconds": 19.0, "speedup_of_proxyd_over": over, **spread, "inputs": inputs},
    )
    item = next(item for item in evaluate.items() if item.name == name)
    item.result.with_suffix(".key").write_text(item.key)


def test_a_table_of_steps_says_what_it_rests_on_and_what_is_missed(evaluate: ModuleType) -> None:
    pipeline = evaluate.evaluate_pipeline
    simulated(evaluate, "pipeline-L1-wild", 1.2, 1.9, 2.1)
    lines = pipeline.speedup_table()
    assert lines[0].startswith("Simulated; seeds 101 to 105, means; loss penalty 0.15; one-way delays in ms: L1 60;")
    [row] = [row for row in lines if row.startswith("| `1f1b`")]
    assert row.startswith("| `1f1b` | 2.00 (1.90-2.10) | not measured yet")
    assert row.endswith("| 1.8 / 2.2 / 1.5 | 1.87 / 2.22 / 1.62 |")
    [row] = [row for row in lines if row.startswith("| `zb_h1`")]
    assert row.startswith("| `zb_h1` | 1.50 (1.90")
    [row] = [row for row in pipeline.bounds_table() if row.startswith("| wild")]
    assert row.startswith("| wild | **1.200** (missed) (1.300) | not measured yet")
    document = (ROOT / "docs" / "evaluation.md").read_text()
    docs = evaluate.runs.RESULTS / "docs"
    docs.mkdir()
    for name in ("evaluation.md", "scheduling.md"):
        (docs / name).write_text((ROOT / "docs" / name).read_text())
    evaluate.write("pipeline", docs)
    assert (docs / "evaluation.md").read_text() == document, "half a table isn't written"


def test_steps_are_simulated_once_for_each_state_of_the_code(
    evaluate: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = evaluate.runs.RESULTS
    words = ["--quick", "--only", "pipeline-share-fit-4G90-constant"]

    def again() -> str:
        monkeypatch.setattr(evaluate.runs, "RESULTS", results)
        assert evaluate.main(words) == 0
        return capsys.readouterr().out

    figures = results / "quick" / "pipeline-share-fit-4G90-constant.json"
    assert "ok " in again()
    first = figures.read_bytes()
    assert "ok " not in again(), "it is there"
    monkeypatch.setattr(evaluate.runs, "digest", lambda patterns: "other code")
    assert "ok " in again()
    assert figures.read_bytes() == first
    text = (results / "quick" / "docs" / "scheduling.md").read_text()
    assert "| 8 MiB, 55 ms: *fitted* | not measured yet" in text
