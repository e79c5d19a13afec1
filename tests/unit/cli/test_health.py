from __future__ import annotations

import socket
from pathlib import Path

import pytest

from proxyd.cli.main import main


def test_an_agent_that_has_no_admin_socket_is_only_knocked_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "agent.sock"
    file = tmp_path / "f.toml"
    file.write_text(f"[agent]\nsite = 'a'\nsocket = '{path}'\nadmin = 'off'\n")
    with socket.socket(socket.AF_UNIX) as agent:
        agent.bind(str(path))
        agent.listen()
        assert main(["health", "--config", str(file)]) == 0
        assert f'agent {path}: serving, it accepts trainers; admin = "off" tells no more' in capsys.readouterr().out
    assert main(["health", "--config", str(file)]) == 1
    assert "down, nobody accepts there: Connection refused" in capsys.readouterr().err
