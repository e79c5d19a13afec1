"""File modes of what is secret, and certificates: whom they name and how long they are good."""

from __future__ import annotations

import grp
import os
import pwd
import shlex
import stat
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from proxyd.cli.doctor.findings import Finding, fail, ok, skip, warn
from proxyd.cli.doctor.subject import Subject
from proxyd.core.errors import ConfigError

if TYPE_CHECKING:
    from proxyd.runtime.tls import TlsKeeper, TlsPaths

ROTATION = "docs/security.md, Rotation: replace certificate and key, no restart is needed"


def secrets(subject: Subject) -> list[Finding]:
    """Configuration files, tokens and keys: nobody may write them but their owner, and few may read them."""
    found = []
    for path in subject.paths:
        if os.path.exists(path):
            found.append(_mode(f"mode of {path}", path, secret=False))
    for path in sorted(set(_secret_files(subject))):
        found.append(_mode(f"mode of {path}", path, secret=True))
    return found or [skip("file modes", "no configuration, so no files are known")]


def _secret_files(subject: Subject) -> Iterator[str]:
    from proxyd.runtime.config import token_files

    for config in subject.configs:
        for path, _ in token_files(config):
            yield path
        for section in (config.agent, config.coordinator):
            if section is not None and section.tls_key is not None:
                yield section.tls_key
        if config.coordinator is not None and config.coordinator.lock_key is not None:
            yield config.coordinator.lock_key


def _mode(name: str, path: str, *, secret: bool) -> Finding:
    quoted = shlex.quote(path)
    try:
        status = os.stat(path)
    except OSError as error:
        if isinstance(error, PermissionError):
            return skip(name, f"not for this user to look at ({error.strerror}); sudo proxyd doctor sees it")
        fix = f"openssl rand -hex 32 | sudo tee {quoted} >/dev/null && sudo chmod 640 {quoted}"
        return fail(name, f"{error.strerror}: a daemon that needs it refuses to start", fix)
    mode = stat.S_IMODE(status.st_mode)
    text = f"{mode:04o}, {_owner(status)}"
    if mode & 0o002:
        return fail(name, f"{text}: every user of this host can write it", f"sudo chmod o-w {quoted}")
    if secret and mode & 0o004:
        return fail(name, f"{text}: every user of this host can read it", f"sudo chmod o-r {quoted}")
    parent = Path(path).resolve().parent
    above = stat.S_IMODE(os.stat(parent).st_mode)
    if above & 0o002 and not above & stat.S_ISVTX:
        text = f"{text}, but every user can replace it: {parent} is {above:04o}"
        return fail(name, text, f"sudo chmod o-w {shlex.quote(str(parent))}")
    if secret and not os.access(path, os.R_OK):
        return ok(name, f"{text} (not readable for this user, which need not be the daemon's)")
    return ok(name, text)


def _owner(status: os.stat_result) -> str:
    try:
        user = pwd.getpwuid(status.st_uid).pw_name
    except KeyError:
        user = str(status.st_uid)
    try:
        group = grp.getgrgid(status.st_gid).gr_name
    except KeyError:
        group = str(status.st_gid)
    return f"{user}:{group}"


def tokens(subject: Subject) -> list[Finding]:
    """Would a daemon take the tokens?"""
    from proxyd.runtime.config import read_token, token_files

    found = []
    for path, job in sorted({one for config in subject.configs for one in token_files(config)}):
        name = f"token {path}"
        if not os.access(path, os.R_OK):
            if os.path.exists(path):
                found.append(skip(name, "not readable for this user; sudo proxyd doctor reads it"))
            continue
        try:
            read_token(path, job)
        except ConfigError as error:
            found.append(fail(name, f"{error.what}: {error.why}" if error.why else error.what, error.next_step))
        else:
            found.append(ok(name, "a daemon takes it; it must be the same on every host"))
    return found


def certificates(subject: Subject) -> list[Finding]:
    """Of each daemon with TLS: do the files fit together, do they name it, how long are they good?"""
    from proxyd.runtime.tls import agent_tls, coordinator_tls

    found: list[Finding] = []
    if (agent := subject.agent) is not None:
        load = partial(agent_tls, agent.tls, agent.site, agent.name)
        found.append(_certificate("certificate of the agent", agent.tls, load))
    if (coordinator := subject.coordinator) is not None:
        found.append(
            _certificate("certificate of the coordinator", coordinator.tls, partial(coordinator_tls, coordinator.tls))
        )
    return found or [skip("certificates", "no configuration, so no files are known")]


def _certificate(name: str, paths: TlsPaths | None, load: Callable[[], TlsKeeper | None]) -> Finding:
    from proxyd.runtime.tls import DAY_S, WARN_BEFORE_S

    if paths is None:
        return skip(name, "no TLS is configured: connections are proven by the token and not encrypted")
    unreadable = [path for path in paths if os.path.exists(path) and not os.access(path, os.R_OK)]
    if unreadable:
        return skip(name, f"{unreadable[0]} is not readable for this user; sudo proxyd doctor reads it")
    try:
        keeper = load()
    except ConfigError as error:
        what = f"{error.what}: {error.why}" if error.why else error.what
        show = f"openssl x509 -noout -text -in {shlex.quote(paths.certificate)}"
        return fail(name, what, f"{error.next_step or 'Look at it'}: {show}")
    assert keeper is not None
    identity = keeper.current()
    names = ", ".join((*identity.uris, *identity.dns_names))
    days = keeper.seconds_left / DAY_S
    text = f"names {names}; {days:.1f} days left (until {time.strftime('%Y-%m-%d', time.gmtime(identity.not_after_s))})"
    if days <= 0:
        return fail(name, f"names {names}; it expired {-days:.1f} days ago, and others refuse it", ROTATION)
    soon, very_soon = WARN_BEFORE_S[0] / DAY_S, WARN_BEFORE_S[1] / DAY_S
    if days <= very_soon:
        return fail(name, text, ROTATION)
    return warn(name, text, ROTATION) if days <= soon else ok(name, text)
