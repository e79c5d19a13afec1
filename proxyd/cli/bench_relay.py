"""``proxyd bench relay``: client -> agent -> agent -> client on loopback, beside plain TCP and gloo.

Two agents of two sites and a coordinator whose link is wider than the machine, so that everything is granted and
nothing is held back. The ways take turns in every round, and medians are compared: this host's speed changes by the
minute.

The relay runs twice: from and into memory of the clients' own, copied at both ends, and without these copies, from
``Endpoint.send_buffer`` and as views of what landed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proxyd.core.errors import EXIT_OK, ProxydError

if TYPE_CHECKING:
    from proxyd.cli.cluster import Cluster

MESSAGE_BYTES = 64 << 20
SMALL_BYTES = 1 << 10
RELAYED = ("relay", "lent")
LINK = {"capacity": "100Gbit", "rtt": "200us", "buffer": "1bdp", "mtu": 9000, "estimate": "fixed"}
"""Believed: on loopback there is no link to be found, and what is measured here is what relaying costs."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tls",
        action="store_true",
        help="TLS between the agents, and beside it one plain TLS socket (needs cryptography)",
    )
    parser.add_argument("--out", metavar="FILE", help="write the figures as JSON")
    parser.add_argument("--rounds", type=int, default=5, help="rounds; each way runs once per round (default: 5)")
    parser.add_argument("--messages", type=int, default=16, help="messages of 64 MiB per way and round (default: 16)")
    parser.add_argument("--pings", type=int, default=500, help="messages of 1 KiB for the latency (default: 500)")


class Pair:
    """A sender and a receiver process of one kind."""

    def __init__(self, kind: str, sender: Mapping[str, Any], receiver: Mapping[str, Any]) -> None:
        self.kind = kind
        self._receiver = self._spawn("recv", receiver)
        sender = dict(sender)
        if kind in ("tcp", "tls"):
            sender["port"] = self._answer(self._receiver)["port"]
        self._sender = self._spawn("send", sender)
        for process in (self._receiver, self._sender):
            self._answer(process)

    def _spawn(self, role: str, args: Mapping[str, Any]) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "proxyd.cli.relay_worker", self.kind, role]
        command.append(json.dumps({"nbytes": MESSAGE_BYTES, **args}))
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)

    def _answer(self, process: subprocess.Popen[bytes]) -> dict[str, Any]:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise ProxydError(f"a {self.kind} process of the benchmark ended", why=f"exit code {process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, **command: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Both ends do the same; answers of the sender and the receiver."""
        for process in (self._receiver, self._sender):
            assert process.stdin is not None
            process.stdin.write(json.dumps(command).encode() + b"\n")
            process.stdin.flush()
        return self._answer(self._sender), self._answer(self._receiver)

    def close(self) -> None:
        """End both."""
        for process in (self._sender, self._receiver):
            if process.stdin is not None:
                process.stdin.close()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def cpu_of(pids: list[int]) -> float:
    """Processor seconds that processes have used."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def run(args: argparse.Namespace) -> int:
    from proxyd.cli.cluster import Cluster, LinkFigures

    figures = LinkFigures(**LINK)  # type: ignore[arg-type] # the values are what its fields take
    links = {("a", "b"): figures, ("b", "a"): figures}
    with tempfile.TemporaryDirectory() as scratch:
        files = _certificates(Path(scratch)) if args.tls else {}
        each = {(site, 0): settings for site, settings in files.items()}
        with Cluster({"a": 1, "b": 1}, links=links, each_agent=each) as cluster:
            result = _compare(args, cluster, Path(scratch), files)
    _print(result)
    if args.out:
        Path(args.out).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        print(f"written to {args.out}", file=sys.stderr)
    return EXIT_OK


def _certificates(scratch: Path) -> dict[str, dict[str, str]]:
    from proxyd.cli.certificates import Authority, settings

    authority = Authority(scratch / "ca.pem")
    return {site: settings(authority.agent(scratch / site, site)) for site in ("a", "b")}


def _compare(
    args: argparse.Namespace, cluster: Cluster, scratch: Path, files: Mapping[str, Mapping[str, str]]
) -> dict[str, Any]:
    pairs: list[Pair] = []
    try:
        sockets = [{"socket": cluster.agent(site).socket} for site in ("a", "b")]
        pairs += [Pair("relay", *sockets), Pair("lent", *sockets)]
        pairs.append(Pair("tcp", {}, {}))
        if files:
            ends = [{key.removeprefix("tls_"): path for key, path in files[site].items()} for site in ("a", "b")]
            pairs.append(Pair("tls", *ends))
        if importlib.util.find_spec("torch") is not None:
            store = {"store": str(scratch / "store")}
            pairs.append(Pair("gloo", store, store))
        else:
            print("gloo is left out: torch is not installed (pip install 'proxyd[torch]')", file=sys.stderr)
        return _measure(args, cluster, pairs)
    finally:
        for pair in pairs:
            pair.close()


def _measure(args: argparse.Namespace, cluster: Cluster, pairs: list[Pair]) -> dict[str, Any]:
    daemons = [member.pid for member in cluster.members]
    speeds: dict[str, list[float]] = {pair.kind: [] for pair in pairs}
    costs: dict[str, list[float]] = {pair.kind: [] for pair in pairs}
    for number in range(args.rounds + 1):
        count = args.messages if number else 6  # the first round only touches all memory once
        for pair in pairs:
            before_s = cpu_of(daemons)
            sent, received = pair.ask(op="bulk", count=count)
            daemons_s = cpu_of(daemons) - before_s if pair.kind in RELAYED else 0.0
            if not number:
                continue
            giga = count * MESSAGE_BYTES / 1e9
            speeds[pair.kind].append(giga / ((received["end_ns"] - sent["start_ns"]) / 1e9))
            costs[pair.kind].append((sent["cpu_s"] + received["cpu_s"] + daemons_s) / giga)
            if sys.stderr.isatty():
                print(f"round {number}: {pair.kind} {speeds[pair.kind][-1]:.2f} GB/s", file=sys.stderr)
    _prove(cluster, pairs[:2], len(RELAYED) * args.rounds * args.messages * MESSAGE_BYTES)
    _, pings = pairs[0].ask(op="latency", count=args.pings, nbytes=SMALL_BYTES)
    latencies_ns = sorted(pings["latencies_ns"])

    def middle(values: list[float] | None) -> float | None:
        return round(statistics.median(values), 3) if values else None

    relay, lent, direct = (statistics.median(speeds[kind]) for kind in (*RELAYED, "tcp"))
    return {
        "relay_gb_per_s": middle(speeds["relay"]),
        "lent_gb_per_s": middle(speeds["lent"]),
        "direct_tcp_gb_per_s": middle(speeds["tcp"]),
        "direct_tls_gb_per_s": middle(speeds.get("tls")),
        "gloo_gb_per_s": middle(speeds.get("gloo")),
        "ratio_to_direct": round(relay / direct, 3),
        "lent_ratio_to_direct": round(lent / direct, 3),
        "relay_cpu_s_per_gb": middle(costs["relay"]),
        "lent_cpu_s_per_gb": middle(costs["lent"]),
        "direct_tcp_cpu_s_per_gb": middle(costs["tcp"]),
        "direct_tls_cpu_s_per_gb": middle(costs.get("tls")),
        "gloo_cpu_s_per_gb": middle(costs.get("gloo")),
        "latency_1kib_us": {
            "p50": round(latencies_ns[len(latencies_ns) // 2] / 1e3, 1),
            "p99": round(latencies_ns[len(latencies_ns) * 99 // 100] / 1e3, 1),
        },
        "message_bytes": MESSAGE_BYTES,
        "rounds": args.rounds,
        "messages_per_round": args.messages,
        "rounds_gb_per_s": {kind: [round(value, 3) for value in values] for kind, values in speeds.items()},
    }


def _prove(cluster: Cluster, relays: list[Pair], nbytes: int) -> None:
    """The bytes were right, and they crossed two agents under grants. Raises ProxydError."""
    from proxyd.cli.scrape import scrape

    if not all(relay.ask(op="check")[1]["right"] for relay in relays):
        raise ProxydError("the relay delivered wrong bytes", next_step="Report this with the agents' logs")
    sender, receiver = scrape(cluster.agent("a").metrics), scrape(cluster.agent("b").metrics)
    granted, fallback = sender.total("proxyd_granted_bytes_total"), sender.total("proxyd_fallback_bytes_total")
    arrived = receiver.total("proxyd_received_bytes_total")
    if granted < nbytes or arrived < nbytes or fallback:
        raise ProxydError(
            f"{nbytes} bytes were sent, but {granted:.0f} granted, {fallback:.0f} by fallback, {arrived:.0f} received",
            next_step="This run says nothing about the relay; look at the agents' logs",
        )


def _print(result: Mapping[str, Any]) -> None:
    names = {
        "relay": "client - agent - agent - client" + (", TLS" if result["direct_tls_gb_per_s"] else ""),
        "lent": "the same, no copies at the ends",
        "direct_tcp": "plain TCP, Python",
        "direct_tls": "plain TLS, Python",
        "gloo": "gloo",
    }
    for kind, name in names.items():
        speed, cost = result[f"{kind}_gb_per_s"], result[f"{kind}_cpu_s_per_gb"]
        if speed is not None:
            print(f"{name:34} {speed:6.2f} GB/s  {cost:5.2f} CPU s/GB")
    latency = result["latency_1kib_us"]
    print(f"relay / plain TCP: {result['ratio_to_direct']:.2f}, without copies {result['lent_ratio_to_direct']:.2f}")
    print(f"1 KiB message: p50 {latency['p50']} us, p99 {latency['p99']} us")
