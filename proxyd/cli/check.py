"""``proxyd check FILE``: the verdict of a daemon's start, without starting it."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import TYPE_CHECKING

from proxyd.core.errors import EXIT_OK, ConfigError

if TYPE_CHECKING:
    from proxyd.runtime.config import Config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="FILE", help="configuration file (TOML)")
    parser.add_argument("--section", choices=("agent", "coordinator"), help="the daemon that will run with it")
    parser.add_argument("--here", action="store_true", help="it is for this host: a missing token file is an error too")
    parser.add_argument("--json", action="store_true", help="print the configuration in force as JSON")


def run(args: argparse.Namespace) -> int:
    from proxyd.runtime.config import load_config, read_token, token_files

    config = load_config(args.config, args.section)
    if args.here:
        _check_tls(config)
    for token_file, job in token_files(config):
        if os.path.exists(token_file) or args.here:
            read_token(token_file, job)
        else:
            print(
                f"proxyd: note: token_file {token_file} is not on this host; a daemon here would refuse to start",
                file=sys.stderr,
            )
    if args.json:
        print(json.dumps(config.model_dump(mode="json", by_alias=True)))
        return EXIT_OK
    parts = [name for name in ("agent", "coordinator") if getattr(config, name) is not None]
    found = [(len(config.links), "link"), (len(config.jobs), "job")]
    counts = "".join(f", {number} {name}{'' if number == 1 else 's'}" for number, name in found if number)
    print(f"{args.config}: ok ({' and '.join(parts)}{counts})")
    return EXIT_OK


def _check_tls(config: Config) -> None:
    """The TLS files, as a daemon on this host would at its start."""
    from proxyd.runtime.tls import agent_tls, coordinator_tls

    if config.agent is not None:
        agent_tls(config.agent.tls, config.agent.site, config.agent.name)
    if config.coordinator is not None:
        coordinator_tls(config.coordinator.tls)
        if config.coordinator.lock is not None:
            from proxyd.coordinator.daemon import make_election

            make_election(config)  # nothing is asked of the lock; its files, and its library, are looked at


def config_path(given: str | None) -> str:
    """The file of ``--config`` or of ``PROXYD_CONFIG``.

    :raises ConfigError: neither is set.
    """
    path = given or os.environ.get("PROXYD_CONFIG", "")
    if not path:
        raise ConfigError("no configuration file", next_step="Say --config FILE.toml or set PROXYD_CONFIG")
    return path
