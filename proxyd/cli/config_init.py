"""``proxyd config init``: a configuration to start from, which is valid as it is printed."""

from __future__ import annotations

import argparse
import json
import os
import sys

from proxyd.core.errors import EXIT_OK, ConfigError

TOKEN_FILE = "/etc/proxyd/token"
FILE_MODE = 0o640


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("role", choices=("agent", "coordinator"), help="the daemon that it is for")
    parser.add_argument("--site", default="a", metavar="NAME", help="this host's data center (default: %(default)s)")
    parser.add_argument("--name", metavar="NAME", help="of the daemon (default: the host's, or the site's)")
    parser.add_argument(
        "--peer-site",
        action="append",
        metavar="NAME",
        help="coordinator: a site at the other end of a link (default: b)",
    )
    parser.add_argument("--rate", metavar="RATE", help='coordinator: what the links carry, like "4Gbit", if known')
    parser.add_argument("--rtt", metavar="TIME", help='coordinator: their round trip, like "60ms", if known')
    parser.add_argument(
        "--coordinator",
        action="append",
        metavar="ADDRESS",
        help="agent: where a coordinator is, may be given more than once (default: 127.0.0.1:7600)",
    )
    parser.add_argument("--address", metavar="HOST", help="this host's address, as other hosts reach it")
    parser.add_argument("--token-file", default=TOKEN_FILE, metavar="FILE", help="default: %(default)s")
    parser.add_argument("--output", metavar="FILE", help="write it there (mode 0640); never over a file that exists")


def run(args: argparse.Namespace) -> int:
    from proxyd.runtime.config import parse_config

    text = agent_text(args) if args.role == "agent" else coordinator_text(args)
    parse_config(text, "what was asked for", args.role)
    if args.output is None:
        print(text, end="")
    else:
        _write(args.output, text)
    if not os.path.exists(args.token_file):
        print(
            f"next: openssl rand -hex 32 | sudo tee {args.token_file} >/dev/null && sudo chmod 640 {args.token_file}"
            "   (the same content on every host)",
            file=sys.stderr,
        )
    print(f"then: proxyd config check --here {args.output or 'FILE'} && proxyd doctor", file=sys.stderr)
    return EXIT_OK


def _write(path: str, text: str) -> None:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE)
    except FileExistsError as error:
        raise ConfigError(f"{path} exists", next_step="Move it away, or choose another name") from error
    except OSError as error:
        raise ConfigError(f"cannot write {path}", why=error.strerror or str(error)) from error
    with os.fdopen(fd, "w") as file:
        file.write(text)


def _quoted(value: str) -> str:
    return json.dumps(value)  # a TOML basic string is written alike


def agent_text(args: argparse.Namespace) -> str:
    """An agent's file."""
    name = f"name = {_quoted(args.name)}" if args.name else '# name = "gw-1"'
    coordinators = ", ".join(_quoted(one) for one in args.coordinator or ["127.0.0.1:7600"])
    if args.address:
        listen = f'data_listen = "0.0.0.0:7601"\ndata_address = {_quoted(f"{args.address}:7601")}'
    else:
        beyond = '# Beyond this host: data_listen = "0.0.0.0:7601" and data_address = "HOST:7601"'
        listen = f'data_listen = "127.0.0.1:7601"\n{beyond}'
    return f"""\
# A proxyd agent: docs/configuration.md explains every key.

[agent]
site = {_quoted(args.site)}
# Unique within the site; without it the host's own name.
{name}
# Trainers on this host connect here (PROXYD_SOCKET says otherwise).
socket = "/run/proxyd/agent.sock"
# Peers of other sites connect here, and are told this address.
{listen}
# All of them, in the same order everywhere.
coordinators = [{coordinators}]
# The same content on every host.
token_file = {_quoted(args.token_file)}
# The most that all trainers' arenas on this host may take together.
memory = "8GiB"
# Trainers on other hosts of this site may use this agent over TCP:
# gateway_listen = "HOST:7602"
# On a gateway with several cores, one process for each; elsewhere leave it at 1:
# workers = 4

[log]
format = "text"
"""


def coordinator_text(args: argparse.Namespace) -> str:
    """A coordinator's file, with both directions of each link."""
    listen = f"{args.address}:7600" if args.address else "127.0.0.1:7600"
    links = ""
    for peer in args.peer_site or ["b"]:
        for source, destination in ((args.site, peer), (peer, args.site)):
            links += f"\n[[link]]\nfrom = {_quoted(source)}\nto = {_quoted(destination)}\n"
            links += f"capacity = {_quoted(args.rate)}\n" if args.rate else '# capacity = "4Gbit"\n'
            links += f"rtt = {_quoted(args.rtt)}\n" if args.rtt else '# rtt = "60ms"\n'
            links += '# What stands in front of the narrow place, if you know: buffer = "0.1bdp"\n'
    return f"""\
# A proxyd coordinator: docs/configuration.md explains every key.

[coordinator]
name = {_quoted(args.name or args.site)}
# Agents connect to the first; people ask at the second, on this host.
listen = [{_quoted(listen)}, "unix:/run/proxyd/coordinator.sock"]
owns = ["*->*"]
# The same content on every host.
token_file = {_quoted(args.token_file)}

# A link is one direction. What isn't said here is found out from live transfers.
{links.lstrip()}
[log]
format = "text"
"""
