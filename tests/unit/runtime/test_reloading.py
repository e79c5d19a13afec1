"""An agent reads its file again."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from proxyd.runtime import reloading
from proxyd.runtime.config import load_config
from proxyd.runtime.reloading import AgentReloader

FILE = '[agent]\nsite = "a"\n'


@pytest.fixture
def logs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """How the log was set up."""
    calls: list[tuple[str, str]] = []
    monkeypatch.setattr(reloading, "setup_logging", lambda *how: calls.append(how))
    return calls


def test_the_log_follows_and_what_needs_a_restart_is_named_until_it_is_changed_back(
    tmp_path: Path, logs: list[tuple[str, str]], caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "agent.toml"
    path.write_text(FILE)
    reloader = AgentReloader(load_config(path, "agent"), str(path))
    with caplog.at_level(logging.INFO):
        path.write_text(FILE + 'memory = "1GiB"\nlinger = "1s"\n[log]\nlevel = "warning"\n')
        for _ in range(2):
            assert reloader.reload()
            assert caplog.records[-1].levelno == logging.WARNING
            assert caplog.records[-1].proxyd_fields["keys"] == "[agent] memory, [agent] linger"  # type: ignore[attr-defined]
        assert logs == [("warning", "text")], "once"
        caplog.clear()
        path.write_text(FILE + '[log]\nlevel = "warning"\n')
        assert reloader.reload()
        assert [record.levelname for record in caplog.records] == ["INFO"]


def test_a_bad_file_changes_nothing(
    tmp_path: Path, logs: list[tuple[str, str]], caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "agent.toml"
    path.write_text(FILE)
    reloader = AgentReloader(load_config(path, "agent"), str(path))
    path.write_text(FILE + '[log]\nlevel = "loud"\n')
    assert not reloader.reload()
    assert "agent.toml:4: [log] level: must be" in caplog.text
    assert "the old configuration stays in force" in caplog.text
    path.unlink()
    assert not reloader.reload()
    assert "agent.toml" in caplog.records[-1].getMessage()
    assert logs == []
