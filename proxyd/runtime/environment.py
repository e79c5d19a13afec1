"""Every environment variable that proxyd knows: the one list.

A misspelt variable that is silently ignored runs with defaults, which is worse than not running. So anything that
starts with ``PROXYD_`` and is not listed here is refused, naming the nearest one.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from proxyd.core.errors import ConfigError

PREFIX = "PROXYD_"

KNOWN: dict[str, str] = {
    "PROXYD_CONFIG": "configuration file when a command gets no --config",
    "PROXYD_LOG_FORMAT": "[log] format: text or json",
    "PROXYD_LOG_LEVEL": "[log] level: debug, info, warning or error",
    "PROXYD_NAME": "[agent] name, for images that share one file",
    "PROXYD_SITE": "[agent] site",
    "PROXYD_SOCKET": "the agent's Unix socket: [agent] socket, and what a trainer connects to",
    "PROXYD_TOKEN_FILE": "token_file of [agent] and [coordinator], and of a trainer that uses an agent over TCP",
}


def check_environment(environ: Mapping[str, str]) -> None:
    """Refuse unknown ``PROXYD_*`` variables.

    :raises ConfigError: names every unknown one and the nearest known one.
    """
    problems = []
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in KNOWN:
            near = difflib.get_close_matches(name, KNOWN, 1, 0.6)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(KNOWN)}"
            problems.append(f"environment variable {name} is unknown ({hint})")
    if problems:
        raise ConfigError("; ".join(problems), next_step="Correct it or unset it")
