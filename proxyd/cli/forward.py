"""``proxyd forward``: connections of programs that know nothing of proxyd, paced, from one site to another.

A process of its own beside the agent: what it does for a copy of a terabyte doesn't take the agent's time, and when it
dies tensors don't notice.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from proxyd.core.errors import ConfigError

if TYPE_CHECKING:
    from proxyd.runtime.config_forward import ForwardConfig

JOB = "forward"
DEFAULT_CLASS = "bulk"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="FILE", help="take the [[forward]] tables of this file (TOML)")
    parser.add_argument("--listen", metavar="ADDRESS", help='where clients connect, like "127.0.0.1:8022"')
    parser.add_argument("--to", metavar="SITE", help="the site whose exit connects further")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--target", metavar="HOST:PORT", help="a plain port: all connections go there")
    kind.add_argument("--socks5", action="store_true", help="clients say where by SOCKS5")
    kind.add_argument("--http", action="store_true", help="clients say where by HTTP CONNECT")
    parser.add_argument(
        "--clients",
        metavar="NETWORK",
        action="append",
        default=[],
        help='whose clients beyond this host may come in, like "10.1.0.0/16"; may be repeated',
    )
    parser.add_argument(
        "--allow",
        metavar="NETWORK:PORTS",
        action="append",
        default=[],
        help='be the exit of this site, for such targets: "10.2.0.0/16:22,873", "127.0.0.1/32:*"; may be repeated',
    )
    parser.add_argument(
        "--class",
        dest="traffic",
        choices=("pipeline", "sync", "bulk"),
        default=DEFAULT_CLASS,
        help=f"the traffic class of what goes out (default: {DEFAULT_CLASS})",
    )
    parser.add_argument("--job", default=JOB, help=f"the job's name, for policies and tokens (default: {JOB})")
    parser.add_argument("--socket", metavar="PATH", help="the agent's socket (default: $PROXYD_SOCKET, else the usual)")
    parser.add_argument("--ready-fd", type=int, metavar="N", help="write a JSON line there once all doors are open")


def run(args: argparse.Namespace) -> int:
    from proxyd.forward.process import serve
    from proxyd.runtime.config import LogConfig, load_config
    from proxyd.runtime.lifecycle import run_daemon
    from proxyd.runtime.logs import setup_logging

    log, tables, socket = LogConfig(), _of_options(args), args.socket
    if args.config is not None:
        config = load_config(args.config)
        log, tables = config.log, [*config.forwards, *tables]
        if socket is None and config.agent is not None:
            socket = config.agent.socket
    if not tables:
        raise ConfigError(
            "there is nothing to forward",
            why="neither a [[forward]] table nor options say what",
            next_step="Open a door (--listen ADDRESS --to SITE --target HOST:PORT), or be an exit (--allow NET:PORTS)",
        )
    setup_logging(log.level, log.format)
    return run_daemon(lambda stop: serve(tables, stop, job=args.job, socket=socket, ready_fd=args.ready_fd))


def _of_options(args: argparse.Namespace) -> list[ForwardConfig]:
    """What the command line asks for. Raises ConfigError."""
    from pydantic import ValidationError

    from proxyd.runtime.config_forward import ForwardConfig

    wanted: list[dict[str, object]] = []
    if args.allow:
        wanted.append({"kind": "exit", "allow": tuple(args.allow)})
    if args.listen is not None or args.to is not None or args.target is not None or args.socks5 or args.http:
        kind = "socks5" if args.socks5 else "http" if args.http else "tcp"
        wanted.append(
            {
                "kind": kind,
                "listen": args.listen,
                "to": args.to,
                "target": args.target,
                "traffic": args.traffic,
                "clients": tuple(args.clients),
            }
        )
    try:
        return [ForwardConfig.model_validate(one) for one in wanted]
    except ValidationError as error:
        why = "; ".join(one["msg"].removeprefix("Value error, ") for one in error.errors())
        raise ConfigError("these options don't fit each other", why=why) from error
