"""``proxyd forward``'s options and tables, before anything is connected."""

from __future__ import annotations

from pathlib import Path

import pytest

from proxyd.cli.main import main
from proxyd.runtime.config import load_config


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ([], "nothing to forward"),
        (["--socks5"], "needs listen and to"),
        (["--listen", "127.0.0.1:0", "--to", "b"], "kind tcp needs a target"),
        (["--listen", "0.0.0.0:0", "--to", "b", "--http"], "can be reached from other hosts"),
        (["--allow", "10.2.0.0/40:22"], "is no network"),
        (["--allow", "10.2.0.0/16:70000"], "a port that is none"),
    ],
)
def test_what_does_not_fit_is_a_clear_error(options: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["forward", *options]) == 2
    assert why in capsys.readouterr().err


TABLES = """
[agent]
site = "a"

[[forward]]
kind = "exit"
allow = ["10.2.0.0/16:22,873"]

[[forward]]
listen = "127.0.0.1:8022"
to = "b"
target = "10.2.0.9:22"
"""


def test_tables_stand_in_the_agents_file(tmp_path: Path) -> None:
    path = tmp_path / "agent.toml"
    path.write_text(TABLES)
    exit_, door = load_config(path).forwards
    assert (exit_.kind, exit_.allow) == ("exit", ("10.2.0.0/16:22,873",))
    assert (door.kind, door.to, door.traffic) == ("tcp", "b", "bulk")


def test_a_wrong_table_names_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "agent.toml"
    path.write_text(TABLES + '[[forward]]\nkind = "exit"\nlisten = "127.0.0.1:1"\nallow = ["10.0.0.0/8:1"]\n')
    assert main(["check", str(path)]) == 2
    assert "an exit has no listen" in capsys.readouterr().err
