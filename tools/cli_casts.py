#!/usr/bin/env python3
"""Writes what ``proxyd doctor``, ``ping`` and ``top`` print on the emulated WAN into docs/cli.md.

    sudo tools/cli_casts.py           a real run: proxyd dev, two sites with two agents each, trainers that send

Needs root (network namespaces) and half a minute. What is printed is taken as it comes; only names of directories,
which differ from run to run, are shortened.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOC = ROOT / "docs/cli.md"
WAN = "rate=400Mbit,rtt=60ms,buffer=0.1bdp"
COLUMNS = 116
TRAINERS = 3
"""At each sending agent; each keeps two tensors under way."""
TENSOR_BYTES = 8 << 20
SETTLE_S = 8.0
START_S = 40.0

SENDER = """
import sys, numpy, proxyd_client
socket, rank, peers, nbytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
data = numpy.zeros(nbytes, dtype=numpy.uint8)
with proxyd_client.connect("llama", rank, socket=socket) as endpoint:
    handles = []
    while True:
        handles.append(endpoint.isend(data, dst=rank + peers, tag=0))
        if len(handles) > 1:
            handles.pop(0).wait(timeout_s=60)
"""
RECEIVER = """
import sys, proxyd_client
socket, rank, peers = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
with proxyd_client.connect("llama", rank, socket=socket) as endpoint:
    while True:
        endpoint.recv(src=rank - peers, tag=0, timeout_s=60)
"""


def main() -> int:
    if os.geteuid() != 0:
        sys.exit("network namespaces are root's: sudo tools/cli_casts.py")
    with tempfile.TemporaryDirectory(prefix="cast-") as scratch:
        shown = _record(Path(scratch))
    text = DOC.read_text()
    for name, cast in shown.items():
        begin, end = (
            f"<!-- begin: cast of {name} (tools/cli_casts.py writes this) -->\n",
            f"<!-- end: cast of {name} -->\n",
        )
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not found or not closed:
            sys.exit(f"{DOC} has no place for the cast of {name}")
        text = f"{before}{begin}\n```\n{cast}\n```\n\n{end}{after}"
    DOC.write_text(text)
    return 0


def _record(scratch: Path) -> dict[str, str]:
    directory, ready = scratch / "dev", scratch / "ready.json"
    command = [sys.executable, "-m", "proxyd.cli.main"]
    dev = subprocess.Popen(
        [*command, "dev", "--agents-per-site", "2", "--wan", WAN, "--directory", directory, "--ready-file", ready],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
    )
    trainers: list[subprocess.Popen[bytes]] = []
    try:
        deadline_s = time.monotonic() + START_S
        while not ready.exists():
            if dev.poll() is not None or time.monotonic() > deadline_s:
                raise SystemExit("proxyd dev did not start")
            time.sleep(0.1)
        facts = json.loads(ready.read_text())
        agents = {agent["name"]: agent for agent in facts["agents"]}
        ranks = 2 * TRAINERS
        for rank in range(ranks):
            for site, code, number in (("b", RECEIVER, rank + ranks), ("a", SENDER, rank)):
                argv = [agents[f"{site}-{rank % 2}"]["socket"], str(number), str(ranks), str(TENSOR_BYTES)]
                trainers.append(subprocess.Popen([sys.executable, "-c", code, *argv], stderr=subprocess.DEVNULL))
        time.sleep(SETTLE_S)

        def run(*argv: str, inside: int = 0) -> str:
            """What a command prints; in the network namespace of a process, where one is given."""
            enter = ["nsenter", "--net", f"--target={inside}"] if inside else []
            env = {**os.environ, "COLUMNS": str(COLUMNS), "PROXYD_SOCKET": agents["a-0"]["socket"], "NO_COLOR": "1"}
            env.pop("PROXYD_CONFIG", None)
            done = subprocess.run(
                [*enter, *command, *argv], cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=60
            )
            return _shortened((done.stdout + done.stderr).rstrip(), directory)

        where = f"unix:{directory}/coordinator.sock"
        configs = ("--config", str(directory / "a-0.toml"), "--config", str(directory / "coordinator.toml"))
        prompt = "$ proxyd"
        return {
            "top": f"{prompt} top --once\n" + run("top", "--once", "--rows", "8", "--coordinator", where),
            "ping": f"{prompt} ping b/b-0\n" + run("ping", "b/b-0", "--agent", agents["a-0"]["socket"]),
            "doctor": f"{prompt} doctor --config a-0.toml --config coordinator.toml\n"
            + run("doctor", *configs, inside=agents["a-0"]["pid"]),
        }
    finally:
        for trainer in trainers:
            trainer.kill()
            trainer.wait()
        dev.send_signal(signal.SIGINT)
        dev.wait(timeout=30)


def _shortened(text: str, directory: Path) -> str:
    text = text.replace(f"{directory}/", "/run/proxyd/")
    text = re.sub(r"/\S*/bin/python\S*", "/opt/proxyd/bin/python", text)
    return "\n".join(line.rstrip() for line in text.splitlines())


if __name__ == "__main__":
    sys.exit(main())
