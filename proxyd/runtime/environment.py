"""Every environment variable that proxyd knows: the one list.

A misspelt variable that is silently ignored runs with defaults, which is worse than not running. So anything that
starts with ``PROXYD_`` and is not listed here is refused, naming the nearest one.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, MutableMapping

from proxyd.core.errors import ConfigError

PREFIX = "PROXYD_"

KNOWN: dict[str, str] = {
    "PROXYD_CONFIG": "configuration file when a command gets no --config",
    "PROXYD_LOG_FORMAT": "[log] format: text or json",
    "PROXYD_LOG_LEVEL": "[log] level: debug, info, warning or error",
    "PROXYD_NAME": "[agent] name, for images that share one file",
    "PROXYD_SITE": "[agent] site",
    "PROXYD_SOCKET": "the agent's Unix socket: [agent] socket, and what a trainer connects to",
    "PROXYD_TOKEN_FILE": "token_file of [agent] and [coordinator]; the token that a trainer proves",
}

GRPC_EXPERIMENTS = "-event_engine_client,-event_engine_listener"
"""Without gRPC's event engine, which newer versions of grpcio use unless told otherwise. Its threads pass each message
on to one another; where cores are few, that costs more than the message does (docs/evaluation.md, "Decisions")."""


def choose_grpc_engine(environ: MutableMapping[str, str]) -> None:
    """Let gRPC read sockets in the thread that waits for them. To be called before anything imports grpc, which looks
    at its variable only then; whoever has set that variable has chosen."""
    environ.setdefault("GRPC_EXPERIMENTS", GRPC_EXPERIMENTS)


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
