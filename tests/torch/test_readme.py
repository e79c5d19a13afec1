"""README's PyTorch quickstart, run as it is written: one torchrun at each of two sites."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from proxyd.cli.cluster import Cluster
from proxyd.cli.scrape import scrape

pytestmark = [pytest.mark.needs_torch, pytest.mark.timeout(180)]

README = Path(__file__).parents[2] / "README.md"
NBYTES = 4 * 1024 * 1024
"""Of the tensor in the quickstart."""


def test_the_quickstart(cluster: Cluster, tmp_path: Path) -> None:
    text = README.read_text()
    found = re.search(
        r"In PyTorch, `step\.py`:\n\n```python\n(.*?)```\n\n`(PROXYD_SOCKET=\S+ torchrun [^`]*)`", text, re.S
    )
    assert found, "README has no quickstart for PyTorch, or in another form"
    program, line = found.groups()
    assert len([one for one in program.splitlines() if one.strip()]) <= 10
    (tmp_path / "step.py").write_text(program)
    variable, torchrun, *options = shlex.split(line)
    assert (variable.partition("=")[0], torchrun) == ("PROXYD_SOCKET", "torchrun")
    options[options.index("--master-addr") + 1] = "127.0.0.1"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        options[:0] = ["--master-port", str(free.getsockname()[1])]
    before = _crossed(cluster)
    nodes = []
    for number, site in enumerate("ab"):
        options[options.index("--node-rank") + 1] = str(number)
        nodes.append(
            subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", *options],
                cwd=tmp_path,
                env={**os.environ, "PROXYD_SOCKET": cluster.agent(site).socket, "GLOO_SOCKET_IFNAME": "lo"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    output = [node.communicate(timeout=150)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(output)
    there, back = (now - then for now, then in zip(_crossed(cluster), before, strict=True))
    assert there >= 2 * NBYTES, "the activations and a part of the sum crossed from a to b through the agents"
    assert back >= NBYTES


def _crossed(cluster: Cluster) -> tuple[float, float]:
    """Payload that was acknowledged so far, from a to b and from b to a, as the agents count it."""
    agents = [scrape(agent.metrics) for agent in cluster.agents]
    there, back = (sum(a.total("proxyd_transfer_bytes_total", link=link) for a in agents) for link in ("a->b", "b->a"))
    return there, back
