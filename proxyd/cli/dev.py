"""``proxyd dev``: coordinators and agents as child processes, on loopback or on an emulated WAN."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from proxyd.core.errors import EXIT_OK, ConfigError
from proxyd.core.units import format_rate, format_size, parse_buffer, parse_duration, parse_rate

if TYPE_CHECKING:
    from proxyd.cli.cluster import Cluster, LinkFigures
    from proxyd.wan import Wan

WAN_FORM = "rate=400Mbit,rtt=60ms,buffer=0.1bdp"
WAN_MTU = 9000
POLL_S = 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--site", action="append", metavar="NAME", help="a site; give at least two (default: a, b)")
    parser.add_argument("--agents-per-site", type=int, default=1, metavar="N", help="default 1")
    parser.add_argument(
        "--coordinator-per-site",
        action="store_true",
        help="a coordinator for each site, which owns the links out of it (default: one that owns all links)",
    )
    parser.add_argument(
        "--wan",
        metavar="SPEC",
        help=f'emulate the links between the sites: "{WAN_FORM}" (needs network namespaces); without it: loopback',
    )
    parser.add_argument(
        "--link-capacity",
        metavar="RATE",
        help="what the coordinator believes of each link (default: the WAN's, 20Gbit)",
    )
    parser.add_argument(
        "--observe", action="store_true", help="shadow mode: nothing is granted, only reckoned (docs/shadow.md)"
    )
    parser.add_argument("--grant-log", metavar="FILE", help="the coordinator writes its grant log there")
    parser.add_argument(
        "--ready-file", metavar="FILE", help="write addresses and pids there as JSON once all are ready"
    )
    parser.add_argument(
        "--directory",
        metavar="DIR",
        help="keep configurations, logs and sockets there (a-0.sock is site a's first agent); default: a temporary one",
    )
    parser.add_argument(
        "--log-level", default="info", choices=("debug", "info", "warning", "error"), help="of all daemons"
    )


def run(args: argparse.Namespace) -> int:
    sites = args.site or ["a", "b"]
    if len(set(sites)) != len(sites) or len(sites) < 2:
        raise ConfigError(f"--site {' --site '.join(sites)}", why="two or more different sites are needed")
    if not 1 <= args.agents_per_site <= 64:
        raise ConfigError(f"--agents-per-site {args.agents_per_site}", why="it must be from 1 to 64")
    from proxyd.cli.cluster import Cluster

    ready_file = Path(args.ready_file) if args.ready_file else None
    if ready_file is not None:
        ready_file.unlink(missing_ok=True)  # one of an earlier run would be believed
    stop = _Stop()
    counts = dict.fromkeys(sites, args.agents_per_site)
    with contextlib.ExitStack() as ending:
        figures, wan = _network(args, counts, ending)
        links = {(a, b): figures for a in sites for b in sites if a != b}
        owns = {f"coordinator-{site}": [f"{site}->*"] for site in sites} if args.coordinator_per_site else None
        settings = {"mode": "observe"} if args.observe else {}
        if args.grant_log:
            if args.coordinator_per_site:
                raise ConfigError("--grant-log", why="several coordinators can't write one log")
            settings["grant_log"] = str(Path(args.grant_log).absolute())
        cluster = Cluster(
            counts,
            links=links,
            coordinators=owns,
            wan=wan,
            coordinator=settings,
            directory=Path(args.directory).absolute() if args.directory else None,
            log_level=args.log_level,
        )
        ending.callback(cluster.close)
        cluster.start()
        stop.started = True
        _print_facts(cluster)
        if ready_file is not None:
            ending.callback(ready_file.unlink, missing_ok=True)
            _write_whole(ready_file, json.dumps(cluster.facts(), indent=2) + "\n")
        print("Ctrl-C ends all.", flush=True)
        while not stop.asked:
            time.sleep(POLL_S)
            for member, code in cluster.deaths():
                words = member.last_words().splitlines()[-3:]
                print(
                    f"proxyd dev: {member.label} {_ended(code)}; the others go on", *words, sep="\n  ", file=sys.stderr
                )
    return EXIT_OK


class _Stop:
    """SIGTERM and SIGINT end everything in order; until ``started`` they interrupt what waits for a child."""

    def __init__(self) -> None:
        self.asked = False
        self.started = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: object) -> None:
        self.asked = True
        if not self.started:
            raise KeyboardInterrupt


def _network(
    args: argparse.Namespace, counts: dict[str, int], ending: contextlib.ExitStack
) -> tuple[LinkFigures, Wan | None]:
    """What the coordinator is told of the links, and the emulated WAN if one is wanted."""
    from proxyd.cli.cluster import LinkFigures

    if args.link_capacity:
        parse_rate(args.link_capacity)
    if not args.wan:
        return LinkFigures(capacity=args.link_capacity or LinkFigures.capacity), None
    rate_text, rtt_text, buffer_text = parse_wan(args.wan)
    rate, rtt_ns = parse_rate(rate_text), parse_duration(rtt_text)
    from proxyd.wan import LinkSpec, Wan

    spec = LinkSpec(rate, None, rtt_ns // 2, parse_buffer(buffer_text, rate, rtt_ns))
    links = {(a, b): spec for a in counts for b in counts if a != b}
    wan = ending.enter_context(Wan(counts, links, mtu=WAN_MTU))
    return LinkFigures(args.link_capacity or rate_text, rtt_text, buffer_text, WAN_MTU), wan


def parse_wan(text: str) -> tuple[str, str, str]:
    """``"rate=400Mbit,rtt=60ms,buffer=0.1bdp"`` -> rate, rtt, buffer as texts; what is left out has these values.

    Raises ConfigError.
    """
    values = dict(pair.split("=", 1) for pair in WAN_FORM.split(","))
    for pair in text.split(","):
        key, separator, value = (part.strip() for part in pair.partition("="))
        if not separator or key not in values:
            raise ConfigError(f"--wan {text!r}: {pair!r} is not understood", next_step=f'Write it like "{WAN_FORM}"')
        values[key] = value
    rate = parse_rate(values["rate"])
    parse_buffer(values["buffer"], rate, parse_duration(values["rtt"]))
    return values["rate"], values["rtt"], values["buffer"]


def _write_whole(path: Path, text: str) -> None:
    """All or nothing: who waits for the file must not read half of it."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_text(text)
    scratch.replace(path)


def _print_facts(cluster: Cluster) -> None:
    for coordinator in cluster.coordinators.values():
        print(
            f"coordinator  {coordinator.address}  pid {coordinator.pid}  {coordinator.metrics}"
            f"  owns {', '.join(coordinator.owns)}"
        )
    for agent in cluster.agents:
        print(
            f"agent        {agent.site}/{agent.name}  socket {agent.socket}  data {agent.data_address}"
            f"  pid {agent.pid}  {agent.metrics}"
        )
    for (src, dst), link in cluster.links.items():
        print(f"link         {src}->{dst}  {_told(link)}")
    print(f"logs and configuration: {cluster.directory}")
    where, first = cluster.coordinator.address, cluster.agents[0]
    print(f"try: proxyd status --coordinator {where}    PROXYD_SOCKET={first.socket} python your_script.py")


def _told(link: LinkFigures | None) -> str:
    if link is None or link.capacity is None or link.rtt is None:
        return "capacity to be found out"
    rate = parse_rate(link.capacity)
    size = "unknown"
    if link.buffer is not None:
        size = format_size(parse_buffer(link.buffer, rate, parse_duration(link.rtt)))
    return f"{format_rate(rate)}  rtt {link.rtt}  buffer {size}"


def _ended(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
