"""The soak: three minutes in CI, twenty seconds elsewhere; an hour or a day by ``tools/soak.py --seconds``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 180 if os.environ.get("CI") == "true" else 20
PAUSE_S = 0.1
"""Between two messages of a trainer: most of a processor is left to the tests beside it."""


# Side by side with others: it looks at sums, memory and descriptors, and what it does takes three minutes anyway.
@pytest.mark.together
@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 180)
def test_mixed_load_with_kills_leaves_nothing_wrong_and_nothing_behind(tmp_path: Path) -> None:
    out = tmp_path / "soak.json"
    command = [sys.executable, str(ROOT / "tools" / "soak.py"), "--seconds", str(SECONDS), "--pause", str(PAUSE_S)]
    done = subprocess.run(
        [*command, "--kill", "trainers,coordinator", "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=SECONDS + 150,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(out.read_text())
    assert figures["problems"] == []
    assert figures["messages"] > 5 * SECONDS
    assert figures["kills"]["trainers"] >= SECONDS // 20
    assert figures["kills"]["coordinator"] >= 1
    assert sum(daemon["judged"] for daemon in figures["daemons"].values()) == 3
