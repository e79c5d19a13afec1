from __future__ import annotations

import json
from pathlib import Path

import pytest

from proxyd.cli.check import config_path
from proxyd.cli.main import main
from proxyd.core.errors import ConfigError


def write(tmp_path: Path, text: str) -> str:
    file = tmp_path / "f.toml"
    file.write_text(text)
    return str(file)


def test_a_right_file_is_ok(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    link = "[[link]]\nfrom = 'a'\nto = 'b'\ncapacity = '1Gbit'\nrtt = '60ms'\n"
    file = write(tmp_path, f"[agent]\nsite = 'a'\n[coordinator]\n{link}")
    assert main(["check", file]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{file}: ok (agent and coordinator, 1 link)\n"
    assert captured.err == ""


def test_jobs_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path, "[coordinator]\n[[job]]\nname = 'x'\n[[job]]\nname = 'y'\nweight = 2\n")
    assert main(["check", file]) == 0
    assert capsys.readouterr().out == f"{file}: ok (coordinator, 2 jobs)\n"


def test_a_wrong_file_exits_2_and_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path, "[agent]\nsite = 'a'\nsokcet = '/x'\n")
    for command in (["check", file], ["agent", "--config", file]):
        assert main(command) == 2
        captured = capsys.readouterr()
        assert captured.err == f"proxyd: {file}:3: unknown key 'sokcet' in [agent]; did you mean 'socket'? [config]\n"
        assert captured.out == ""


def test_a_missing_section(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path, "[coordinator]\n")
    assert main(["check", file, "--section", "agent"]) == 2
    assert "no [agent] section" in capsys.readouterr().err


def test_json_shows_what_is_in_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path, "[agent]\nsite = 'a'\n")
    assert main(["check", file, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["agent"]["site"] == "a"
    assert shown["agent"]["memory"] == "8GiB"
    assert shown["link"] == []


def test_a_missing_token_is_a_note_elsewhere_and_an_error_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    token = tmp_path / "token"
    file = write(tmp_path, f"[coordinator]\nlisten = '0.0.0.0:7600'\ntoken_file = '{token}'\n")
    assert main(["check", file]) == 0
    assert f"token_file {token} is not on this host" in capsys.readouterr().err
    assert main(["check", file, "--here"]) == 2
    assert "openssl rand" in capsys.readouterr().err
    token.write_text("short")
    assert main(["check", file]) == 2
    assert "holds 5 bytes" in capsys.readouterr().err
    token.write_text("0123456789abcdef0123456789abcdef")
    assert main(["check", file, "--here"]) == 0


def test_the_file_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="PROXYD_CONFIG"):
        config_path(None)
    monkeypatch.setenv("PROXYD_CONFIG", "/etc/proxyd/agent.toml")
    assert config_path(None) == "/etc/proxyd/agent.toml"
    assert config_path("x.toml") == "x.toml"
