"""SIGHUP: a daemon reads its own file again, applies what can be applied, and names what can't. A wrong file changes
nothing, and the log says so with the line. What a daemon applies beyond the log's settings it does itself."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterator

from pydantic import BaseModel

from proxyd.core.errors import ConfigError
from proxyd.runtime.config import AgentConfig, Config, CoordinatorConfig, load_config, read_token
from proxyd.runtime.logs import fields, setup_logging
from proxyd.runtime.metrics import MetricFamily, counter, gauge


def changed_keys(table: str, before: BaseModel, after: BaseModel, but: Collection[str] = ()) -> Iterator[str]:
    """Keys of a section that differ, as in ``"[agent] memory"``, but for some."""
    for name in type(after).model_fields:
        if name not in but and getattr(before, name) != getattr(after, name):
            yield f"[{table}] {name}"


def changed_secrets(
    table: str,
    before: AgentConfig | CoordinatorConfig,
    after: AgentConfig | CoordinatorConfig,
    token: bytes,
) -> Iterator[str]:
    """Of the keys that name secrets, those with a difference that only a restart can take on.

    Other TLS files are used from the next connection on; whether there is TLS at all was decided at start. The token is
    read once, so that another one in its file is a difference too.

    :param token: the one in use.
    """
    if (before.tls is None) != (after.tls is None):
        yield from (f"[{table}] {key}" for key in sorted(TLS_KEYS))
    if before.token_file != after.token_file:
        yield f"[{table}] token_file"
    else:
        now: bytes | None = None
        with contextlib.suppress(ConfigError):
            now = read_token(after.token_file) or b""
        if now != token:
            yield f"[{table}] token_file (its content)"


def follow_log_settings(before: Config, after: Config) -> bool:
    """Log from now on as ``after`` says; answers whether that is a change."""
    if before.log == after.log:
        return False
    setup_logging(after.log.level, after.log.format)
    return True


TLS_KEYS = frozenset({"tls_certificate", "tls_key", "tls_ca"})
SECRET_KEYS = TLS_KEYS | {"token_file"}
"""Keys that :func:`changed_secrets` judges."""
AGENT_APPLIES = frozenset({"jobs"})
"""Keys of ``[agent]`` that a reload applies; ``[log]``, TLS files and the jobs' tokens besides."""


class Reloads:
    """How reading the file again turned out; what a daemon was started with counts as read.

    :param wall: the wall clock, in seconds.
    """

    def __init__(self, wall: Callable[[], float] = time.time) -> None:
        self._wall = wall
        self.used = 0
        self.refused = 0
        self._last_was_good = True
        self._good_at_s = wall()

    def good(self) -> None:
        """The file is in force."""
        self.used += 1
        self._last_was_good, self._good_at_s = True, self._wall()

    def bad(self) -> None:
        """It was refused, and nothing changed."""
        self.refused += 1
        self._last_was_good = False

    def families(self) -> list[MetricFamily]:
        """Of either daemon, for a scrape."""
        return [
            counter(
                "proxyd_config_reloads_total",
                "Configuration files that were read again, by what became of them.",
                [({"outcome": "used"}, self.used), ({"outcome": "refused"}, self.refused)],
            ),
            gauge(
                "proxyd_config_last_reload_successful",
                "0 while the configuration file is not the one in force, because it was refused.",
                [({}, int(self._last_was_good))],
            ),
            gauge(
                "proxyd_config_last_reload_success_timestamp_seconds",
                "When the configuration in force was read.",
                [({}, self._good_at_s)],
            ),
        ]


class AgentReloader:
    """An agent's file. The log, the TLS files and what trainers must prove follow it; everything else is fixed
    while the agent runs, because trainers' memory, listeners and peers' connections were made by it.

    :param config: as it was read at start.
    :param path: the file.
    :param token: what its token_file held then.
    """

    def __init__(self, config: Config, path: str, token: bytes = b"") -> None:
        self._token = token
        self.reloads = Reloads()
        self.apply: Callable[[Config], str] = lambda _: ""
        """The agent's part: takes on what it can and answers what that was, in words ("": nothing changed). It may
        raise ConfigError, having changed nothing."""
        self._config = config
        self._path = path
        self._log = logging.getLogger("proxyd.agent")

    def reload(self) -> bool:
        """Read the file again; answers whether it was good. Never raises for what stands in it."""
        try:
            config = load_config(self._path, "agent")
            applied = self.apply(config)
        except ConfigError as error:
            self.reloads.bad()
            self._log.error("the file was not read again, the old configuration stays in force: %s", error)
            return False
        self.reloads.good()
        changed = follow_log_settings(self._config, config)
        before, after = self._config.require_agent(), config.require_agent()
        needs_restart = [
            *changed_keys("agent", before, after, but=AGENT_APPLIES | SECRET_KEYS),
            *changed_secrets("agent", before, after, self._token),
        ]
        # Compared with what runs: a key that was changed back needs no restart.
        self._config = self._config.model_copy(update={"log": config.log})
        self._log.info(
            "configuration read again",
            extra=fields(file=self._path, log_changed=changed, applied=applied or "nothing else"),
        )
        if needs_restart:
            self._log.warning(
                "what has changed in the file needs a restart and stays as it was",
                extra=fields(file=self._path, keys=", ".join(needs_restart)),
            )
        return True
