"""``proxyd agent``: the daemon of a trainer's host or of a gateway."""

from __future__ import annotations

import argparse
import os


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="FILE", help="configuration file (TOML); else $PROXYD_CONFIG")
    parser.add_argument(
        "--ready-fd", metavar="N", type=int, help="write one line, READY {json}, to this descriptor once it accepts"
    )


def run(args: argparse.Namespace) -> int:
    from proxyd.cli.check import config_path
    from proxyd.runtime.config import load_config
    from proxyd.runtime.environment import choose_grpc_engine
    from proxyd.runtime.grpc_options import only_tls_1_3
    from proxyd.runtime.logs import setup_logging

    path = config_path(args.config)
    config = load_config(path, "agent")
    setup_logging(config.log.level, config.log.format)
    # Before grpc is imported, with the daemon.
    only_tls_1_3()
    choose_grpc_engine(os.environ)
    if config.require_agent().workers > 1:
        from proxyd.agent.front import daemon as front

        return front.run(config, ready_fd=args.ready_fd, path=path)
    from proxyd.agent import daemon

    return daemon.run(config, ready_fd=args.ready_fd, path=path)
