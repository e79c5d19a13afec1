"""The policy in force: read at start, read again when somebody asks, and told which minute of the week it is.

What a reload can change is the policy: jobs, classes, the links' caps, calendars and FIFO shares, and the time zone
that calendars count in; which TLS files are used; and how the log is written. Everything else of the file is fixed at
start; :class:`Reload` names what differs, so that nobody believes it to be in force. A wrong file changes nothing.
"""

from __future__ import annotations

import dataclasses
import datetime
import logging
import zoneinfo
from collections.abc import Callable, Iterator

from proxyd.core.errors import ConfigError
from proxyd.core.events import CoordinatorEvent, LocalTime, PolicyChanged
from proxyd.core.policy import DAY_MINUTES, Policy
from proxyd.runtime.config import Config, load_config
from proxyd.runtime.logs import fields
from proxyd.runtime.reloading import SECRET_KEYS, Reloads, changed_keys, changed_secrets, follow_log_settings

log = logging.getLogger("proxyd.coordinator")

APPLIED_AT_ONCE = {
    "coordinator": frozenset({"jobs", "time_zone"}),
    "link": frozenset({"cap", "calendar", "fifo_share"}),
}
"""Keys that a reload applies, by table; all of ``[[job]]``, ``[[class]]`` and ``[log]`` besides."""
LATE_S = 0.05
"""After the full minute: a timer that is a little early would tell the minute before."""


@dataclasses.dataclass(frozen=True)
class Reload:
    """What came of reading the file again."""

    applied: bool
    message: str
    """What was done, or why nothing was, with the line."""
    needs_restart: tuple[str, ...] = ()
    """Keys that differ from those in force and stay as they were."""


class PolicyKeeper:
    """See the module's text.

    :param config: as it was read at start.
    :param path: the file, to be read again; None: there is none.
    :param tell: takes the events for the machine.
    :param call_later: calls a function after so many seconds, as an event loop does.
    :param wall: the wall clock.
    :param apply: the daemon's part of a reload, see :attr:`proxyd.runtime.reloading.AgentReloader.apply`.
    :param token: what its token_file held at start.
    :param reloads: counts how they turn out.
    """

    def __init__(
        self,
        config: Config,
        path: str | None,
        tell: Callable[[CoordinatorEvent], None],
        call_later: Callable[[float, Callable[[], None]], object],
        wall: Callable[[datetime.tzinfo | None], datetime.datetime] = datetime.datetime.now,
        *,
        apply: Callable[[Config], str] = lambda _: "",
        token: bytes = b"",
        reloads: Reloads | None = None,
    ) -> None:
        self._apply = apply
        self._token = token
        self.config = config
        self.path = path
        self.policy: Policy = config.policy
        self.reloads = Reloads() if reloads is None else reloads
        self._running = config
        """What is in force of that which only a restart changes."""
        self._tell = tell
        self._call_later = call_later
        self._wall = wall
        self._closed = False

    def start(self) -> None:
        """Tell the machine policy and time; from then on the time each minute."""
        self._tell(PolicyChanged(self.policy))
        self._tick()

    def close(self) -> None:
        """Say nothing more."""
        self._closed = True

    def local_time(self) -> datetime.datetime:
        """Now, in the time zone that calendars count in."""
        name = self.config.require_coordinator().time_zone
        return self._wall(zoneinfo.ZoneInfo(name) if name else None)

    @property
    def minute_of_week(self) -> int:
        """0: Monday 00:00."""
        now = self.local_time()
        return now.weekday() * DAY_MINUTES + now.hour * 60 + now.minute

    def _tick(self) -> None:
        # Windows begin and end at full minutes, so a look at each of them is in time; and a clock that was set, or
        # summer time, is followed within a minute.
        if not self._closed:
            self._tell(LocalTime(self.minute_of_week))
            now = self.local_time()
            self._call_later(60 - now.second - now.microsecond / 1e6 + LATE_S, self._tick)

    def reload(self) -> Reload:
        """Read the file again and apply what can be applied. Never raises for what stands in the file."""
        if self.path is None:
            return self._refuse("this coordinator was started without a file")
        try:
            config = load_config(self.path, "coordinator")
            policy = config.policy
            applied = self._apply(config)
        except ConfigError as error:
            return self._refuse(str(error))
        follow_log_settings(self.config, config)
        differs = tuple(needs_restart(self._running, config, self._token))
        changed = policy != self.policy
        self.config, self.policy = config, policy
        self.reloads.good()
        if changed:
            self._tell(PolicyChanged(policy))
        self._tell(LocalTime(self.minute_of_week))
        message = f"{self.path}: the policy was {'applied' if changed else 'read again, and is the same'}"
        message += f"; applied too: {applied}" if applied else ""
        log.info("policy reloaded", extra=fields(file=self.path, changed=changed, jobs=len(policy.jobs)))
        if differs:
            log.warning(
                "what else has changed in the file needs a restart and stays as it was",
                extra=fields(file=self.path, keys=", ".join(differs)),
            )
        return Reload(True, message, differs)

    def _refuse(self, why: str) -> Reload:
        self.reloads.bad()
        log.error("the policy was not reloaded, the old one stays in force: %s", why)
        return Reload(False, why)


def needs_restart(old: Config, new: Config, token: bytes = b"") -> Iterator[str]:
    """Keys that differ and that only a restart can change, as in ``"[[link]] a->b capacity"``.

    :param token: the one in use.
    """
    before, after = old.require_coordinator(), new.require_coordinator()
    yield from changed_keys("coordinator", before, after, but=APPLIED_AT_ONCE["coordinator"] | SECRET_KEYS)
    yield from changed_secrets("coordinator", before, after, token)
    links = {link.name: link for link in old.links}
    for link in new.links:
        present = links.pop(link.name, None)
        if present is None:
            yield f"[[link]] {link.name} (new)"
            continue
        for name in type(link).model_fields:
            if name not in APPLIED_AT_ONCE["link"] and getattr(present, name) != getattr(link, name):
                yield f"[[link]] {link.name} {name}"
    yield from (f"[[link]] {name} (gone)" for name in links)
    if old.bottlenecks != new.bottlenecks:
        yield "[[bottleneck]]"
