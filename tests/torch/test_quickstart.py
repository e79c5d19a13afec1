"""The README's PyTorch quickstart, run as it is written there."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.needs_torch, pytest.mark.slow]

README = Path(__file__).parents[2] / "README.md"


def test_it_runs_as_written_and_has_at_most_ten_lines(tmp_path: Path) -> None:
    section = README.read_text().split("## PyTorch, in ten lines")[1].split("\n## ")[0]
    script, shell = (re.search(rf"```{kind}\n(.*?)```", section, re.DOTALL)[1] for kind in ("python", "sh"))  # type: ignore[index]
    code = [line for line in (script + shell).splitlines() if line.strip() and not line.startswith("#")]
    assert len(code) <= 10, code
    install, *rest = shell.splitlines()
    assert install == "pip install 'proxyd[daemon,torch]'"  # this environment has it
    (tmp_path / "train.py").write_text(script)
    # `jobs -p` ends the daemons, and whoever is left of a run that failed, as Ctrl-C in the terminal does.
    commands = "\n".join(["trap 'kill $(jobs -p)' EXIT", *rest, "wait $!"])
    with socket.socket() as free:  # other tests run beside this one
        free.bind(("127.0.0.1", 0))
        commands = commands.replace("29400", str(free.getsockname()[1]))
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        ["bash", "-c", commands],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=100)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(f"not done after 100 s: {process.communicate()[0]}")
    assert process.returncode == 0, output
    assert "rank 0: 3.0" in output
    assert "rank 1: 3.0" in output
