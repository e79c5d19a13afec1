"""The image, really built and run, where no registry and no Docker engine is (tools/image.sh). By command: it takes a
minute or two of a processor, and 1 GB of disk.

    IMAGE_LONG=1 python -m pytest tests/e2e/test_image.py
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tools" / "image.sh"
TAG = "proxyd:test"
CONFIG = """
[coordinator]
listen = "127.0.0.1:{control}"
metrics = "127.0.0.1:{pages[0]}"

[agent]
site = "a"
name = "x"
data_listen = "127.0.0.1:{data}"
coordinators = ["127.0.0.1:{control}"]
metrics = "127.0.0.1:{pages[1]}"
"""


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def page(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
        return str(answer.read(), "utf-8")


@pytest.mark.timeout(900)
@pytest.mark.skipif(os.environ.get("IMAGE_LONG") != "1", reason="takes minutes: IMAGE_LONG=1")
def test_the_image_is_built_and_both_daemons_run_in_it(tmp_path: Path) -> None:
    subprocess.run([SCRIPT, "build", TAG], check=True, timeout=600)
    control, data, *pages = free_ports(4)
    tmp_path.chmod(0o755)
    (tmp_path / "proxyd.toml").write_text(CONFIG.format(control=control, data=data, pages=pages))
    environment = os.environ | {"PROXYD_IMAGE_VOLUMES": f"--volume {tmp_path}:/etc/proxyd:ro"}
    with ExitStack() as stack:
        daemons = [
            stack.enter_context(subprocess.Popen([SCRIPT, "run", TAG, kind], env=environment, start_new_session=True))
            for kind in ("coordinator", "agent")
        ]
        for daemon in daemons:
            stack.callback(lambda one=daemon: one.poll() is None and os.killpg(one.pid, signal.SIGKILL))
        deadline_s = time.monotonic() + 240
        while True:
            try:
                assert page(pages[0], "/healthz")
                if re.search(r"^proxyd_coordinator_up\S* 1.0$", page(pages[1], "/metrics"), re.MULTILINE):
                    break
            except OSError:
                pass
            assert time.monotonic() < deadline_s
            assert all(one.poll() is None for one in daemons)
            time.sleep(0.5)
        ours = [
            path
            for path in Path("/proc").glob("[0-9]*/cmdline")
            if path.exists() and b"/opt/proxyd/bin/proxyd" in path.read_bytes() and path.stat().st_uid == 7600
        ]
        assert len(ours) == 2  # as the image's user, and nobody else
        for path in ours:
            os.kill(int(path.parent.name), signal.SIGTERM)
        assert [one.wait(60) for one in daemons] == [0, 0]
