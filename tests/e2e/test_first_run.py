"""The site's quickstart, as it is written there: two sites, and a first paced transfer."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "index.md").read_text()


def test_it_runs_as_written_in_at_most_five_commands(tmp_path: Path) -> None:
    commands = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)[0].splitlines()
    assert len(commands) <= 5
    assert commands[-1] == "python first.py"
    dev = commands[-2].removesuffix(" &").split()
    assert dev[:2] == ["proxyd", "dev"]
    script = re.findall(r"```python\n(# first.py\n.*?)```", PAGE, re.DOTALL)[0]
    (tmp_path / "first.py").write_text(script)
    with subprocess.Popen([Path(sys.executable).with_name("proxyd"), *dev[1:]], cwd=tmp_path) as sites:
        try:
            done = subprocess.run(
                [sys.executable, "first.py"], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60
            )
            assert done.returncode == 0, done.stderr
            assert done.stdout.startswith("4194304 bytes, equal; LinkState("), done.stdout
        finally:
            sites.send_signal(signal.SIGINT)
            sites.wait(30)
