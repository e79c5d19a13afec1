"""``proxyd healthcheck``: is the daemon of this configuration alive? For container images and probes.

An agent is alive when its socket accepts; a coordinator when its first listener does. Nothing is sent, so no token is
needed, and only the standard library and the configuration are loaded.
"""

from __future__ import annotations

import argparse
import socket
import sys
from typing import TYPE_CHECKING

from proxyd.core.errors import EXIT_FAILED, EXIT_OK

if TYPE_CHECKING:
    from proxyd.runtime.addresses import Address


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="FILE", help="configuration file (TOML); else $PROXYD_CONFIG")
    parser.add_argument("--timeout-s", type=float, default=2.0, help="for each connection (default: %(default)s)")


def accepts(address: Address, timeout_s: float) -> str | None:
    """None when something accepts a connection at *address*, else why not."""
    try:
        if address.is_unix:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                probe.settimeout(timeout_s)
                probe.connect(address.path)
        else:
            host = address.host
            if address.is_unspecified:
                host = "::1" if ":" in host else "127.0.0.1"
            socket.create_connection((host, address.port), timeout_s).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


def run(args: argparse.Namespace) -> int:
    from proxyd.cli.check import config_path
    from proxyd.runtime.addresses import Address
    from proxyd.runtime.config import load_config

    config = load_config(config_path(args.config))
    probes = []
    if config.agent is not None:
        probes.append(("agent", Address(path=config.agent.socket)))
    if config.coordinator is not None:
        probes.append(("coordinator", config.coordinator.listen_addresses[0]))
    failed = False
    for name, address in probes:
        reason = accepts(address, args.timeout_s)
        failed = failed or reason is not None
        print(f"{name} {address}: {reason or 'ok'}", file=sys.stderr if reason else sys.stdout)
    return EXIT_FAILED if failed else EXIT_OK
