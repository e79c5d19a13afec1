"""An agent reads its file again."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from proxyd.core.errors import ConfigError
from proxyd.runtime import reloading
from proxyd.runtime.config import Config, load_config
from proxyd.runtime.reloading import AgentReloader, Reloads

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


def test_what_the_agent_takes_on_needs_no_restart_and_what_it_refuses_changes_nothing(
    tmp_path: Path, logs: list[tuple[str, str]], caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "agent.toml"
    tls = 'tls_certificate = "/c"\ntls_key = "/k"\ntls_ca = "/ca"\n'
    path.write_text(FILE + tls)
    reloader = AgentReloader(load_config(path, "agent"), str(path))
    taken: list[str | None] = []

    def take(config: Config) -> str:
        paths = config.require_agent().tls
        taken.append(paths and paths.key)
        return "TLS files"

    reloader.apply = take
    path.write_text(FILE + tls.replace("/k", "/k2"))
    with caplog.at_level(logging.INFO):
        assert reloader.reload()
        assert taken == ["/k2"]
        [record] = caplog.records
        assert record.proxyd_fields["applied"] == "TLS files"  # type: ignore[attr-defined]
        path.write_text(FILE)
        assert reloader.reload()
        keys = caplog.records[-1].proxyd_fields["keys"]  # type: ignore[attr-defined]
        assert keys == "[agent] tls_ca, [agent] tls_certificate, [agent] tls_key", "on or off was decided at start"

        def refuse(config: Config) -> str:
            raise ConfigError("these won't do")

        reloader.apply = refuse
        path.write_text(FILE + '[log]\nlevel = "debug"\n')
        assert not reloader.reload()
        assert "these won't do" in caplog.text
        assert logs == []


@pytest.mark.parametrize("harm", ["another", "shorter", "away"])
def test_another_token_in_the_file_is_said_to_need_a_restart(
    harm: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, token = tmp_path / "agent.toml", tmp_path / "token"
    token.write_text("0123456789abcdef\n")
    path.write_text(f'{FILE}token_file = "{token}"\n')
    reloader = AgentReloader(load_config(path, "agent"), str(path), b"0123456789abcdef")
    assert reloader.reload()
    assert not caplog.records
    if harm == "away":
        token.unlink()
    else:
        token.write_text("fedcba9876543210" if harm == "another" else "short")
    assert reloader.reload()
    assert caplog.records[-1].proxyd_fields["keys"] == "[agent] token_file (its content)"  # type: ignore[attr-defined]


def test_what_became_of_a_reload_is_a_metric(tmp_path: Path) -> None:
    path, wall = tmp_path / "agent.toml", [1000.0]
    path.write_text(FILE)
    reloader = AgentReloader(load_config(path, "agent"), str(path))
    reloader.reloads = Reloads(lambda: wall[0])

    def figures() -> dict[str, list[float]]:
        return {one.name: [sample.value for sample in one.samples] for one in reloader.reloads.families()}

    def of(used: int, refused: int, good: int, at_s: float) -> dict[str, list[float]]:
        return {
            "proxyd_config_reloads_total": [used, refused],
            "proxyd_config_last_reload_successful": [good],
            "proxyd_config_last_reload_success_timestamp_seconds": [at_s],
        }

    assert figures() == of(0, 0, 1, 1000)
    wall[0], _ = 2000.0, path.write_text(FILE + "nonsense")
    assert not reloader.reload()
    assert figures() == of(0, 1, 0, 1000)
    path.write_text(FILE)
    assert reloader.reload()
    assert figures() == of(1, 1, 1, 2000)
