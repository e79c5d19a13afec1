"""What the daemons raise, split by who must act.

======================  =======================================  =========
class                   who must act                             exit code
======================  =======================================  =========
:class:`OperatorError`  the person who wrote the configuration   2
:class:`CallerError`    the program that called us               1
:class:`RemoteError`    another process or the network; retry    1
:class:`InternalError`  us: a broken invariant, report it        1
======================  =======================================  =========

A message says what happened, why, and what to do next, with numbers. Each class has a ``code`` for scripts and
searches, which stays when texts change (docs/errors.md has them all). The trainer's library has a root of the same name
in ``proxyd_client.errors``; it cannot import this one, and the two never meet in one process.
"""

from __future__ import annotations

from typing import ClassVar

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_DEGRADED = 3


class ProxydError(Exception):
    """Root of everything proxyd raises on purpose.

    :param what: what happened, with the numbers; one sentence without a full stop.
    :param why: the cause or the rule that was broken; empty when *what* already says it.
    :param next_step: what the reader should do; empty when there is nothing to do.
    """

    exit_code: ClassVar[int] = EXIT_FAILED
    code: ClassVar[str] = "failed"

    def __init__(self, what: str, *, why: str = "", next_step: str = "") -> None:
        self.what = what
        self.why = why
        self.next_step = next_step
        super().__init__(what)

    def __str__(self) -> str:
        text = f"{self.what}: {self.why}" if self.why else self.what
        return f"{text}. {self.next_step}" if self.next_step else text

    def __reduce__(self) -> tuple[object, ...]:
        # The default would drop the keyword arguments when an error crosses a process boundary.
        return _rebuild, (type(self), self.what, self.why, self.next_step)


def _rebuild(kind: type[ProxydError], what: str, why: str, next_step: str) -> ProxydError:
    return kind(what, why=why, next_step=next_step)


class OperatorError(ProxydError):
    """The installation or its configuration is wrong; only a person can put it right."""

    exit_code: ClassVar[int] = EXIT_USAGE
    code = "operator"


class ConfigError(OperatorError):
    """A configuration file, option or environment variable is wrong. The message names file, line and key."""

    code = "config"


class UnitError(ConfigError, ValueError):
    """A rate, size or duration that cannot be read. Also a ValueError, so that validators collect it."""

    code = "unit"


class ListenError(OperatorError):
    """An address or socket path cannot be listened on: busy, not permitted, too long, or without authentication."""

    exit_code: ClassVar[int] = EXIT_FAILED
    code = "listen"


class MissingExtraError(OperatorError):
    """A command needs an optional dependency that is not installed."""

    code = "missing-extra"


class CallerError(ProxydError):
    """The program that uses us asked for something that cannot be: unknown destination, mismatched size, closed."""

    code = "caller"


class RemoteError(ProxydError):
    """A peer, the coordinator or the network failed. Nothing is wrong here, and trying again may help."""

    code = "remote"


class InternalError(ProxydError):
    """An invariant of our own is broken. Always a bug."""

    code = "internal"
