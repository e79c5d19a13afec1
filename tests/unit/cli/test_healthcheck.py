from __future__ import annotations

import socket
from pathlib import Path

import pytest

from proxyd.cli.main import main


def test_alive_and_gone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "agent.sock"
    with socket.socket(socket.AF_UNIX) as agent, socket.create_server(("127.0.0.1", 0)) as coordinator:
        agent.bind(str(path))
        agent.listen()
        port = coordinator.getsockname()[1]
        file = tmp_path / "f.toml"
        file.write_text(f"[agent]\nsite = 'a'\nsocket = '{path}'\n[coordinator]\nlisten = '127.0.0.1:{port}'\n")
        assert main(["healthcheck", "--config", str(file)]) == 0
        assert f"agent unix:{path}: ok" in capsys.readouterr().out
        agent.close()
        assert main(["healthcheck", "--config", str(file)]) == 1
        captured = capsys.readouterr()
    assert "Connection refused" in captured.err
    assert "coordinator 127.0.0.1" in captured.out


def test_a_listener_for_all_is_asked_on_loopback(tmp_path: Path) -> None:
    with socket.create_server(("0.0.0.0", 0)) as coordinator:
        file = tmp_path / "f.toml"
        port = coordinator.getsockname()[1]
        file.write_text(f"[coordinator]\nlisten = '0.0.0.0:{port}'\ntoken_file = '/nowhere'\n")
        assert main(["healthcheck", "--config", str(file)]) == 0
