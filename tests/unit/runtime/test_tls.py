"""Files, names, rotation and warnings of TLS, without a network."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from proxyd.cli.certificates import Authority
from proxyd.core.errors import ConfigError
from proxyd.runtime.refusals import Refusals
from proxyd.runtime.tls import (
    DAY_S,
    TlsKeeper,
    TlsPaths,
    agent_tls,
    coordinator_tls,
    names_agent,
    security_families,
)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca") / "ca.pem")


def keeper_of(paths: TlsPaths, wall_s: list[float]) -> TlsKeeper:
    return TlsKeeper(paths, lambda _: None, dials=True, wall=lambda: wall_s[0])


def test_names() -> None:
    assert names_agent(["proxyd://a/x"], "a", "x")
    assert names_agent(["http://other", "proxyd://a/*"], "a", "x")
    assert names_agent(["proxyd://a/x"], "a", "x#1"), "an agent's workers have its certificate"
    for uris in ([], ["proxyd://a/y"], ["proxyd://b/*"], ["proxyd://*/x"], ["proxyd://*/*"], ["proxyd://a/x/"]):
        assert not names_agent(uris, "a", "x"), uris


def test_an_agents_certificate_must_name_it_and_is_no_coordinators(authority: Authority, tmp_path: Path) -> None:
    paths = authority.agent(tmp_path, "a", "x")
    assert agent_tls(paths, "a", "x") is not None
    for site, name in (("a", "y"), ("b", "x")):
        with pytest.raises(ConfigError, match=f"not of agent {site}/{name}.*proxyd://a/x"):
            agent_tls(paths, site, name)
    with pytest.raises(ConfigError, match="not of a coordinator"):
        coordinator_tls(paths)
    with pytest.raises(ConfigError, match="no proxyd:// URI"):
        agent_tls(authority.coordinator(tmp_path / "c"), "a", "x")
    assert coordinator_tls(authority.coordinator(tmp_path / "c")) is not None
    assert agent_tls(None, "a", "x") is None
    assert coordinator_tls(None) is None


def test_files_that_do_not_fit_are_refused_with_their_names(authority: Authority, tmp_path: Path) -> None:
    good = authority.agent(tmp_path / "good", "a")
    other = authority.agent(tmp_path / "other", "a")
    foreign = Authority(tmp_path / "foreign" / "ca.pem")
    empty = tmp_path / "empty"
    empty.touch()
    cases = {
        "the key belongs to another certificate": good._replace(key=other.key),
        "No such file": good._replace(key=str(tmp_path / "nowhere")),
        "not good under tls_ca": good._replace(ca=str(foreign.path)),
        "tls_certificate": good._replace(certificate=str(empty)),
        "tls_ca": good._replace(ca=str(empty)),
    }
    for words, paths in cases.items():
        with pytest.raises(ConfigError, match=words) as caught:
            agent_tls(paths, "a", "x")
        assert "PRIVATE" not in str(caught.value)


def test_other_files_are_taken_if_they_are_good_and_followed_from_then_on(authority: Authority, tmp_path: Path) -> None:
    first, second = authority.agent(tmp_path / "1", "a", "x"), authority.agent(tmp_path / "2", "a", "x")
    keeper = agent_tls(first, "a", "x")
    assert keeper is not None
    before = keeper.current()
    assert not keeper.move(first)
    for bad in (authority.agent(tmp_path / "3", "b"), second._replace(key=first.key), second._replace(ca="/none")):
        with pytest.raises(ConfigError):
            keeper.move(bad)
        assert (keeper.paths, keeper.current()) == (first, before)
    assert keeper.move(second)
    after = keeper.current()
    assert after.chain_pem == Path(second.certificate).read_bytes() != before.chain_pem
    authority.agent(tmp_path / "1", "a", "x")
    assert keeper.current() is after, "the old ones are nobody's business now"
    authority.agent(tmp_path / "2", "a", "x")
    assert keeper.current().chain_pem == Path(second.certificate).read_bytes() != after.chain_pem
    assert (keeper.reloads, keeper.refused_reloads) == (2, 3)


def test_a_key_with_a_password_is_refused_and_nobody_is_asked_for_it(authority: Authority, tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization

    paths = authority.agent(tmp_path, "a")
    key = serialization.load_pem_private_key(Path(paths.key).read_bytes(), None)
    Path(paths.key).write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    with pytest.raises(ConfigError, match="without a password"):
        agent_tls(paths, "a", "x")


def test_a_file_that_everybody_can_write_is_refused_and_a_readable_key_is_warned_of(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    paths = authority.agent(tmp_path, "a")
    Path(paths.key).chmod(0o644)
    assert agent_tls(paths, "a", "x") is not None
    assert "chmod 600" in caplog.text
    Path(paths.key).chmod(0o602)
    with pytest.raises(ConfigError, match="written by everybody"):
        agent_tls(paths, "a", "x")


def test_an_expired_certificate_is_used_and_said(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keeper = agent_tls(authority.agent(tmp_path, "a", life_s=-100), "a", "x")
    assert keeper is not None
    keeper.check()
    assert "has expired" in caplog.text
    assert keeper.state.startswith("expired on ")
    assert -200 < keeper.seconds_left < -90


def test_warnings_come_once_for_each_step_and_daily_after_the_end(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wall_s = [0.0]
    keeper = keeper_of(authority.agent(tmp_path, "a"), wall_s)
    end_s = wall_s[0] + keeper.seconds_left

    def lines_until(first_days: float, last_days: float) -> list[str]:
        """Of a look every six hours."""
        caplog.clear()
        days = first_days
        while days >= last_days:
            wall_s[0] = end_s - days * DAY_S
            keeper.check()
            days -= 0.25
        return [record.levelname for record in caplog.records]

    assert lines_until(30, 14.1) == []
    assert lines_until(14, 3.1) == ["WARNING"]
    assert lines_until(3, 1.1) == ["WARNING"]
    assert lines_until(1, 0.1) == ["ERROR"]
    assert lines_until(-0.1, -2.9) == ["ERROR"] * 3
    # A new one: nothing more to say, and the next end is told of again.
    wall_s[0] = keeper_of(keeper.paths, [0.0]).seconds_left - 30 * DAY_S
    authority.agent(tmp_path, "a")
    caplog.set_level(logging.INFO)
    assert lines_until(30, 20) == ["INFO"]
    assert lines_until(14, 13) == ["WARNING"]


def test_new_files_are_used_from_the_next_connection_on(authority: Authority, tmp_path: Path) -> None:
    keeper = agent_tls(authority.agent(tmp_path, "a"), "a", "x")
    assert keeper is not None
    first = keeper.current()
    assert keeper.current() is first
    paths = authority.agent(tmp_path, "a", life_s=50 * DAY_S)
    second = keeper.current()
    assert second is not first
    assert second.not_after_s > first.not_after_s
    assert second.key_pem == Path(paths.key).read_bytes()
    assert (keeper.reloads, keeper.refused_reloads) == (1, 0)


@pytest.mark.parametrize("kind", ["half", "gone", "another name", "foreign"])
def test_bad_new_files_change_nothing(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    paths = authority.agent(tmp_path, "a")
    keeper = agent_tls(paths, "a", "x")
    assert keeper is not None
    first = keeper.current()
    if kind == "half":
        Path(paths.key).write_bytes(Path(authority.agent(tmp_path / "b", "a").key).read_bytes())
    elif kind == "gone":
        Path(paths.certificate).unlink()
    elif kind == "another name":
        authority.agent(tmp_path, "b")
    else:
        Authority(tmp_path / "foreign.pem").agent(tmp_path, "a")
    for _ in range(3):
        assert keeper.current() is first
    assert keeper.refused_reloads == 1, "it is looked at again only when it changes again"
    assert caplog.text.count("stay in force") == 1
    authority.agent(tmp_path, "a")
    assert keeper.current() is not first


def test_no_secret_is_in_a_repr(authority: Authority, tmp_path: Path) -> None:
    paths = authority.agent(tmp_path, "a")
    keeper = agent_tls(paths, "a", "x")
    assert keeper is not None
    assert Path(paths.key).read_text().splitlines()[1] not in repr(keeper.current())


def test_refusals_have_bounded_labels() -> None:
    refusals = Refusals()
    refusals.add("data", "token")
    refusals.add("data", "token")
    assert refusals.count("data", "token") == 2
    for port, reason in (("7601", "token"), ("data", "because")):
        with pytest.raises(ValueError, match="no such refusal"):
            refusals.add(port, reason)
    (family,) = security_families(refusals, None)
    assert [(sample.labels, sample.value) for sample in family.samples] == [({"port": "data", "proof": "token"}, 2)]
