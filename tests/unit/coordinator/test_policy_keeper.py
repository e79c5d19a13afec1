"""Reading the file again, and telling the time."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from pathlib import Path

import pytest

from proxyd.coordinator.policy_keeper import PolicyKeeper
from proxyd.core.errors import ConfigError
from proxyd.core.events import CoordinatorEvent, LocalTime, PolicyChanged
from proxyd.core.ids import LinkName
from proxyd.runtime import reloading
from proxyd.runtime.config import Config, load_config

FILE = """\
[coordinator]
[[link]]
from = "a"
to = "b"
capacity = "1Gbit"
cap = "500Mbit"
[[job]]
name = "llama"
weight = 3
"""
UTC = datetime.UTC


class Desk:
    """A keeper with a clock that stands where it is put."""

    def __init__(self, tmp_path: Path, text: str = FILE, at: str = "2026-11-30 08:59:30") -> None:
        self.file = tmp_path / "c.toml"
        self.file.write_text(text)
        self.told: list[CoordinatorEvent] = []
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.taken: str | ConfigError = ""
        self.now = datetime.datetime.fromisoformat(at).replace(tzinfo=UTC)
        self.keeper = PolicyKeeper(
            load_config(self.file, "coordinator"),
            str(self.file),
            self.told.append,
            lambda delay_s, do: self.timers.append((delay_s, do)),
            lambda zone: self.now.astimezone(zone or UTC),
            apply=self.take,
        )
        self.keeper.start()

    def take(self, _: Config) -> str:
        if isinstance(self.taken, ConfigError):
            raise self.taken
        return self.taken

    def minutes(self) -> list[int]:
        return [event.minute_of_week for event in self.told if isinstance(event, LocalTime)]

    def policies(self) -> list[PolicyChanged]:
        return [event for event in self.told if isinstance(event, PolicyChanged)]


def test_policy_and_time_are_told_at_start_and_the_time_at_each_minute(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    assert isinstance(desk.told[0], PolicyChanged)
    assert desk.minutes() == [8 * 60 + 59]
    [(delay_s, tick)] = desk.timers
    assert 30 < delay_s < 30.1
    desk.now += datetime.timedelta(seconds=delay_s)
    tick()
    assert desk.minutes()[-1] == 9 * 60
    desk.now -= datetime.timedelta(hours=2)  # somebody set the clock
    desk.timers[-1][1]()
    assert desk.minutes()[-1] == 7 * 60
    desk.keeper.close()
    desk.timers[-1][1]()
    assert len(desk.minutes()) == 3


def test_the_time_zone_counts_and_summer_time_is_followed(tmp_path: Path) -> None:
    text = FILE.replace("[coordinator]\n", '[coordinator]\ntime_zone = "Europe/Berlin"\n')
    desk = Desk(tmp_path, text, "2026-10-25 00:30:00")  # a Sunday: 02:30 in Berlin, for the first time
    assert desk.minutes() == [6 * 1440 + 150]
    desk.now += datetime.timedelta(hours=1)
    desk.timers[-1][1]()
    assert desk.minutes()[-1] == 6 * 1440 + 150, "02:30 again"
    desk.file.write_text(text.replace("Europe/Berlin", "Asia/Shanghai"))
    assert desk.keeper.reload().needs_restart == ()
    assert desk.minutes()[-1] == 6 * 1440 + 570


def test_a_good_file_is_applied_and_what_needs_a_restart_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs: list[tuple[str, str]] = []
    monkeypatch.setattr(reloading, "setup_logging", lambda *how: logs.append(how))
    desk = Desk(tmp_path)
    text = FILE.replace("weight = 3", "weight = 5").replace("500Mbit", "100Mbit").replace("1Gbit", "2Gbit")
    text = text.replace("[coordinator]\n", '[coordinator]\nname = "other"\n')
    desk.file.write_text(text + '[[link]]\nfrom = "b"\nto = "a"\n[log]\nlevel = "debug"\n')
    result = desk.keeper.reload()
    assert result.applied
    policy = desk.policies()[-1].policy
    assert policy.job("llama").weight == 5
    assert policy.link(LinkName("a", "b")).cap_bytes_per_s == 12_500_000
    assert set(result.needs_restart) == {
        "[coordinator] name",
        "[[link]] a->b capacity",
        "[[link]] b->a (new)",
    }
    assert logs == [("debug", "text")]
    desk.file.write_text(FILE.partition("[[link]]")[0])
    assert desk.keeper.reload().needs_restart == ("[[link]] a->b (gone)",), "compared with what runs, not the last file"


def test_the_daemons_part_is_told_and_can_refuse_all(tmp_path: Path) -> None:
    tls = '[coordinator]\ntls_certificate = "/c"\ntls_key = "/k"\ntls_ca = "/ca"\n'
    desk = Desk(tmp_path, FILE.replace("[coordinator]\n", tls))
    desk.taken = "TLS files"
    desk.file.write_text(FILE.replace("[coordinator]\n", tls.replace("/k", "/k2")))
    result = desk.keeper.reload()
    assert result.needs_restart == ()
    assert "applied too: TLS files" in result.message
    desk.file.write_text(FILE.replace("weight = 3", "weight = 5"))
    assert "[coordinator] tls_key" in desk.keeper.reload().needs_restart
    desk.taken = ConfigError("the key belongs to another certificate")
    desk.file.write_text(FILE.replace("weight = 3", "weight = 7"))
    result = desk.keeper.reload()
    assert not result.applied
    assert "another certificate" in result.message
    assert desk.policies()[-1].policy.job("llama").weight == 5


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (FILE.replace("weight = 3", "weight = 0"), "c.toml:9: [[job]] weight: 0 is not a weight"),
        ("[coordinator\n", "c.toml:1: not valid TOML"),
        ("[agent]\nsite = 'a'\n", "no [coordinator] section"),
        (None, "cannot read the configuration"),
    ],
)
def test_a_bad_file_changes_nothing_and_is_told_with_its_line(
    tmp_path: Path, text: str | None, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    desk = Desk(tmp_path)
    told = list(desk.told)
    if text is None:
        desk.file.unlink()
    else:
        desk.file.write_text(text)
    result = desk.keeper.reload()
    assert not result.applied
    assert says in result.message
    assert says in caplog.text
    assert desk.told == told
    assert desk.keeper.policy.job("llama").weight == 3
    desk.file.write_text(FILE.replace("weight = 3", "weight = 4"))
    assert desk.keeper.reload().applied
    assert desk.policies()[-1].policy.job("llama").weight == 4


def test_the_same_file_again_is_no_news(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    assert "is the same" in desk.keeper.reload().message
    assert len(desk.policies()) == 1
