"""The run of two sites that the README names, and its benchmark: small, and every step's gradients compared."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from proxyd.cli.main import COMMANDS, main

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "client/proxyd_client/examples/train_two_sites.py"

pytestmark = [pytest.mark.needs_torch, pytest.mark.netns, pytest.mark.slow, pytest.mark.timeout(180)]


# Alone: with trainers of another file beside these an agent may not hear its coordinator for half a second, and goes on
# at its fallback rate, as it should; nothing is to leave without a grant here.
@pytest.mark.alone
def test_every_way_trains_what_one_process_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "two_sites.json"
    place = ["--rate", "100Mbit", "--rtt", "40ms", "--steps", "1", "--ways", "gloo-bbr,1f1b,run-time,offload"]
    # 80 KiB at a time: what is small needs no grant.
    model = ["--microbatches", "6", "--layers", "2", "--width", "64", "--sequences", "5"]
    assert main(["example", "two-sites", *place, "--out", str(out), "--", *model]) == 0
    figures = json.loads(out.read_text())
    ways = figures["ways"]
    for name, way in ways.items():
        assert way["gradients_equal"], name
        assert way["losses_equal"], name
        assert way["losses"] == ways["gloo-bbr"]["losses"], name
        assert len(way["losses"]) == 3, "a step after two of warm-up"
        assert way["losses"][-1] < way["losses"][0], name
        assert way["wan_bytes"] > 2 * 6 * figures["message_bytes"], "there and back, six micro-batches"
    chosen = ways["run-time"]
    assert chosen["predictions"] > 0, "its decisions knew when the next gradient would come"
    assert not chosen["fallback"]
    assert chosen["peak_activation_bytes"] > ways["1f1b"]["peak_activation_bytes"], "it has more under way"
    # Three ways, three steps, there and back; nothing of it without a grant.
    carried = figures["proxyd"]
    assert carried["transferred_bytes"] >= 3 * 3 * 2 * 6 * figures["message_bytes"]
    assert carried["granted_bytes"] + carried["unscheduled_bytes"] >= carried["transferred_bytes"]
    assert carried["unscheduled_bytes"] < 10_000, "words between the ranks when they meet, no tensor"
    assert carried["fallback_bytes"] == 0
    assert carried["window_violations"] == 0
    printed = capsys.readouterr().out
    assert "bitwise equal in all ways, and to the whole model in one process" in printed
    # How much faster is a matter of who else uses this machine: it is printed, and measured on a quiet one.
    print(printed)


def test_the_benchmark_splits_backwards_and_moves_activations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "schedule.json"
    size = ["--iterations", "1", "--microbatches", "6", "--task", "4ms", "--ways", "1f1b,run-time,offload"]
    size += ["--activations", "4", "--offload-to", str(tmp_path)]
    assert main(["bench", "torch-schedule", *size, "--rate", "100Mbit", "--rtt", "40ms", "--out", str(out)]) == 0
    (run,) = json.loads(out.read_text())["runs"]
    assert run["communication_seconds"] == pytest.approx(6 * 0.012, rel=0.05)
    assert run["compute_seconds"] >= 6 * 0.012
    for way in run["ways"].values():
        assert way["iteration_median_seconds"] >= 6 * 0.012
        assert way["wan_bytes_per_iteration"] > 2 * 6 * run["message_bytes"]
    first, last = run["ways"]["run-time"]["stages"]
    assert first["predictions"] > 0
    assert first["decisions_made"] >= 3 * 6, "F, B and W of each"
    assert last["split_backwards"] + last["whole_backwards"] == 6
    chosen, moved = (run["ways"][way]["stages"][0] for way in ("run-time", "offload"))
    assert moved["offload"]["moved_out"] > 0, "two places are on the device"
    assert moved["memory_bytes"] < chosen["memory_bytes"]
    printed = capsys.readouterr().out
    assert "gradients: bitwise equal" in printed
    assert "offload beside run-time: iteration x " in printed
    assert min(run["ways"]["offload"]["peak_resident_bytes"]) > 0


def test_the_readme_names_both_ways_to_start_it() -> None:
    readme = (ROOT / "README.md").read_text()
    assert "proxyd example two-sites" in readme
    assert "example two-sites" in COMMANDS
    assert f"python {SCRIPT.relative_to(ROOT)}" in readme
    assert SCRIPT.is_file()


def test_the_script_alone_is_the_command() -> None:
    done = subprocess.run([sys.executable, SCRIPT, "--help"], capture_output=True, text=True, timeout=30, check=True)
    assert "usage: proxyd example two-sites" in done.stdout


def test_a_machine_without_namespaces_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("proxyd.wan.available", lambda: "no namespaces for you")
    assert main(["example", "two-sites"]) == 1
    said = capsys.readouterr().err
    assert "no namespaces for you" in said
    assert "torchrun" in said, "it runs on two real hosts as well"


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (["example", "two-sites", "--rate", "1Mbit", "--steps-of-rate", "1,zero"], "is no list of shares"),
        (["example", "two-sites", "--ratio", "0"], "--ratio 0"),
        (["example", "two-sites", "--ways", "1f1b,pigeon"], "there is no way 'pigeon'"),
        (["bench", "torch-schedule", "--ways", "pigeon"], "there is no way 'pigeon'"),
        (["bench", "torch-schedule", "--stages", "3"], "--stages 3"),
        (["bench", "torch-schedule", "--offload-to", "/nowhere"], "there is no such directory"),
        (["bench", "torch-schedule", "--microbatches", "1"], "--microbatches 1"),
    ],
)
def test_what_makes_no_sense_is_said_before_anything_starts(
    wrong: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(wrong) == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [["--layers", "3"], ["--microbatches", "1"], ["--steps", "0"], ["--ways", "pigeon"]])
def test_the_script_refuses_what_it_cannot_train(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    from proxyd_client.examples.train_two_sites import arguments

    with pytest.raises(SystemExit):
        arguments(wrong)
    assert "error:" in capsys.readouterr().err


def test_looking_for_connections_leaves_no_descriptor_open() -> None:
    from proxyd_client.examples.train_two_sites import connections

    with tempfile.TemporaryFile():  # no socket: looking at it failed once, with a copy of its descriptor open
        connections()
        before = len(os.listdir("/proc/self/fd"))
        connections()
        assert len(os.listdir("/proc/self/fd")) == before
