"""A wrong configuration (case 42): exit code 2, on stderr, with key, line and the nearest name; and ``proxyd check``
says the very same without starting anything."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(60)

AGENT = '[agent]\nsite = "a"\nsocket = "{place}/a.sock"\ndata_listen = "127.0.0.1:0"\nmetrics = "off"\n'
COORDINATOR = '[coordinator]\nlisten = ["unix:{place}/c.sock"]\nmetrics = "off"\n[[link]]\nfrom = "a"\nto = "b"\n'

WRONG: dict[str, tuple[str, str, str, tuple[str, ...]]] = {
    "a misspelt key": ("coordinator", COORDINATOR, 'bandwith_cap = "50Mbit"', (":7:", "bandwith_cap", "[[link]]")),
    "a near miss": ("agent", AGENT, 'memroy = "1GiB"', (":6:", "memroy", "did you mean 'memory'")),
    "a text for a truth value": ("agent", AGENT, 'warm = "false"', (":6:", "[agent] warm", "must be true or false")),
    "a negative rate": ("coordinator", COORDINATOR, 'cap = "-50Mbit"', (":7:", "cap", "-50Mbit")),
    "a rate without a unit": ("coordinator", COORDINATOR, 'capacity = "50"', (":7:", "capacity", "50")),
    "the wrong section": ("coordinator", COORDINATOR, 'lease = "2s"', (":7:", "lease", "[coordinator]")),
}


def proxyd(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PROXYD_")}
    environment |= options.pop("env", {})  # type: ignore[arg-type]
    command = [sys.executable, "-m", "proxyd.cli.main", *arguments]
    return subprocess.run(  # type: ignore[call-overload,no-any-return]
        command, capture_output=True, text=True, timeout=20, check=False, env=environment, **options
    )


@pytest.mark.parametrize("what", WRONG)
def test_the_daemon_and_the_check_say_the_same(what: str, tmp_path: Path) -> None:
    role, text, line, words = WRONG[what]
    path = tmp_path / "proxyd.toml"
    path.write_text(text.format(place=tmp_path) + line + "\n")
    started, checked = proxyd(role, "--config", str(path)), proxyd("check", str(path))
    for done in (started, checked):
        assert (done.returncode, done.stdout) == (2, "")
        for word in (path.name, *words):
            assert word in done.stderr, f"{word!r} is missing in {done.stderr!r}"
        assert "Traceback" not in done.stderr
    assert started.stderr == checked.stderr
    assert not (tmp_path / "a.sock").exists()


def test_an_unknown_variable_is_refused_by_both(tmp_path: Path) -> None:
    path = tmp_path / "agent.toml"
    path.write_text(AGENT.format(place=tmp_path))
    for arguments in (("agent", "--config", str(path)), ("check", str(path))):
        done = proxyd(*arguments, env={"PROXYD_LOG_LEVLE": "debug"})
        assert done.returncode == 2
        assert "PROXYD_LOG_LEVLE" in done.stderr
        assert "did you mean PROXYD_LOG_LEVEL?" in done.stderr


@pytest.mark.parametrize("kind", ["directory", "no permission", "missing", "not text"])
def test_a_file_that_can_not_be_read(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "agent.toml"
    options: dict[str, object] = {}
    if kind == "directory":
        path.mkdir()
    elif kind == "not text":
        path.write_bytes(b"\xff\xfe[agent]\n")
    elif kind == "no permission":
        path.write_text(AGENT)
        path.chmod(0)
        if os.geteuid() == 0:
            # Root reads everything: so somebody else, who must reach the interpreter and nothing more.
            tmp_path.chmod(0o755)
            try:
                probe = subprocess.run([sys.executable, "-c", "import proxyd"], user=65534, check=False).returncode
            except PermissionError:
                probe = 1
            if probe:
                pytest.skip("nobody may not run this interpreter here")
            options = {"user": 65534}
    for arguments in (("agent", "--config", str(path)), ("check", str(path))):
        done = proxyd(*arguments, **options)
        assert done.returncode == 2, done.stderr
        assert str(path) in done.stderr
        assert "Traceback" not in done.stderr
