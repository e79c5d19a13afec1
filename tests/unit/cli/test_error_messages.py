"""Whoever mistypes, or has no daemon, or not the rights, reads what is wrong, why, and what to do next."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from proxyd.cli.asking import agent_socket
from proxyd.cli.main import main

ASK_COORDINATOR = (
    ["status"],
    ["top", "--once"],
    ["health"],
    ["drain"],
    ["undrain"],
    ["policy", "show"],
    ["policy", "reload"],
    ["why", "00c0ffee00c0ffee-17"],
)
ASK_AGENT = (["status"], ["top", "--once"], ["health"], ["drain"], ["undrain"], ["ping", "b/b-0"])


def said(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    assert captured.out == "", "an error is no output"
    assert "Traceback" not in captured.err
    return captured.err


@pytest.mark.parametrize("command", ASK_COORDINATOR, ids=lambda command: " ".join(command))
def test_no_coordinator(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--coordinator", "127.0.0.1:9"]) == 1
    text = said(capsys)
    assert "no coordinator answers at 127.0.0.1:9" in text
    assert "Is it running" in text
    assert main([*command, "--coordinator", "127.0.0.1"]) in (1, 2)
    text = said(capsys)
    assert "the port is missing" in text
    assert 'Write it like "127.0.0.1:7600"' in text


@pytest.mark.parametrize("command", ASK_AGENT, ids=lambda command: " ".join(command))
def test_no_agent(command: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    assert main([*command, "--agent", str(path)]) == 1
    text = said(capsys)
    assert f"{path}.admin is not there" in text
    assert "systemctl start proxyd-agent" in text
    path.touch()  # a trainers' socket without an admin socket beside it
    assert main([*command, "--agent", str(path)]) in (1, 2)
    assert "has no admin socket" in said(capsys)
    Path(f"{path}.admin").touch()
    assert main([*command, "--agent", str(path)]) in (1, 2)
    assert "is no socket" in said(capsys)


def test_an_agent_that_was_killed_leaves_a_socket_that_nobody_serves(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "a.sock.admin"))
    assert main(["status", "--agent", str(tmp_path / "a.sock")]) == 1
    text = said(capsys)
    assert "no agent answers" in text
    assert "proxyd doctor" in text


@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user")
def test_an_admin_socket_of_another_user(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    with socket.socket(socket.AF_UNIX) as admin:
        admin.bind(f"{path}.admin")
        os.chmod(f"{path}.admin", 0o600)
        admin.listen()
        code = (
            "import os, sys\nimport grpc\nimport proxyd.cli.status, proxyd.runtime.grpc_options\n"
            "import proxyd.runtime.addresses, proxyd.v1.admin_pb2_grpc, proxyd.cli.agent_status\n"
            "from proxyd.cli.main import main\n"
            "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
            f"sys.exit(main(['status', '--agent', {str(path)!r}]))\n"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2, done.stderr
    assert "is not for uid 65534" in done.stderr
    assert "only the agent's user and root" in done.stderr
    assert "sudo -u proxyd" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", [["health"], ["healthcheck"], ["agent"], ["coordinator"], ["config", "check"]])
def test_a_wrong_configuration_has_its_line_and_the_right_key(
    command: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "f.toml"
    file.write_text("[agent]\nsite = 'a'\ndata_lisen = '127.0.0.1:1'\n")
    where = [str(file)] if command[-1] == "check" else ["--config", str(file)]
    assert main([*command, *where]) == 2
    text = said(capsys)
    assert f"{file}:3: unknown key 'data_lisen' in [agent]; did you mean 'data_listen'?" in text


def test_the_admin_socket_of_the_configuration_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "f.toml"
    file.write_text("[agent]\nsite = 'a'\nadmin = '/elsewhere/agent.admin'\n")
    monkeypatch.delenv("PROXYD_SOCKET", raising=False)
    monkeypatch.setenv("PROXYD_CONFIG", str(file))
    assert agent_socket("") == "/elsewhere/agent.admin"
    assert agent_socket("/given/a.sock") == "/given/a.sock.admin"
    monkeypatch.setenv("PROXYD_CONFIG", str(tmp_path / "none.toml"))
    assert agent_socket("") == "/run/proxyd/agent.sock.admin"
    monkeypatch.setenv("PROXYD_SOCKET", "/set/b.sock")
    assert agent_socket("") == "/set/b.sock.admin"


def test_which_daemon(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PROXYD_CONFIG", raising=False)
    assert main(["drain"]) == 2
    assert "--agent" in said(capsys)
    assert main(["health"]) == 2
    assert "PROXYD_CONFIG" in said(capsys)
    assert main(["ping", "nobody"]) == 2
    assert "SITE/NAME" in said(capsys)
