"""``make test`` without torch, which README promises: what needs it is skipped, and nothing of it fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
import pytest
sys.exit(pytest.main(["-q", "-rN", "-p", "no:cacheprovider", "tests/torch"]))
"""


def test_all_that_needs_it_is_skipped() -> None:
    """Conditions of marks and imports at the top of test files, too, must do without."""
    environment = {name: value for name, value in os.environ.items() if name != "CI"}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    words = done.stdout.splitlines()[-1].split()
    assert done.returncode == 0, done.stdout + done.stderr
    assert words[1] == "skipped", done.stdout
    assert int(words[0]) > 100
