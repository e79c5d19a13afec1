"""``proxyd bench local``: two trainers of one host through its one agent, beside gloo.

Nothing crosses a network here: the sender's block is handed to the receiver. So what is measured is two copies, in and
out of shared memory, and what the frames about them cost. Both ways use the same calls, one message after the other (a
blocking send, a blocking receive into a buffer); ``proxyd x 3`` has three sends and two receives under way, as a
trainer has that works ahead. The ways take turns in every round, and medians are compared.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proxyd.cli.bench_relay import MESSAGE_BYTES, Pair, cpu_of
from proxyd.core.errors import EXIT_OK, ProxydError

if TYPE_CHECKING:
    from proxyd.cli.cluster import Cluster

SMALL_BYTES = 4 << 10
WARM_MESSAGES = 6
NAMES = {"proxyd": "proxyd", "proxyd_ahead": "proxyd x 3", "gloo": "gloo"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", metavar="FILE", help="write the figures as JSON")
    parser.add_argument("--rounds", type=int, default=5, help="rounds; each way runs once per round (default: 5)")
    parser.add_argument("--messages", type=int, default=16, help="messages of 64 MiB per way and round (default: 16)")
    parser.add_argument("--trips", type=int, default=1000, help="4 KiB round trips per way and round (default: 1000)")


def run(args: argparse.Namespace) -> int:
    from proxyd.cli.cluster import Cluster

    with tempfile.TemporaryDirectory() as scratch, Cluster({"a": 1}) as cluster:
        result = _compare(args, cluster, Path(scratch))
    _print(result)
    if args.out:
        Path(args.out).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        print(f"written to {args.out}", file=sys.stderr)
    return EXIT_OK


def _compare(args: argparse.Namespace, cluster: Cluster, scratch: Path) -> dict[str, Any]:
    agent = cluster.agent("a")
    plain = {"socket": agent.socket, "job": "plain", "in_flight": 1, "posted": 1}
    ahead = {"socket": agent.socket, "job": "ahead"}
    pairs: dict[str, Pair] = {}
    try:
        pairs["proxyd"] = Pair("relay", plain, plain)
        pairs["proxyd_ahead"] = Pair("relay", ahead, ahead)
        if importlib.util.find_spec("torch") is not None:
            store = {"store": str(scratch / "store")}
            pairs["gloo"] = Pair("gloo", store, store)
        else:
            print("gloo is left out: torch is not installed (pip install 'proxyd[torch]')", file=sys.stderr)
        return _measure(args, agent.pid, pairs)
    finally:
        for pair in pairs.values():
            pair.close()


def _measure(args: argparse.Namespace, agent_pid: int, pairs: Mapping[str, Pair]) -> dict[str, Any]:
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in pairs}
    for number in range(args.rounds + 1):
        for name, pair in pairs.items():
            # The first round only touches all memory once.
            figures = _bulk(pair, agent_pid, args.messages if number else WARM_MESSAGES)
            if name != "proxyd_ahead":
                figures |= _round_trips(pair, agent_pid, args.trips if number else max(1, args.trips // 10))
            if number:
                rounds[name].append(figures)
                if sys.stderr.isatty():
                    print(f"round {number}: {NAMES[name]} {figures['gb_per_s']:.2f} GB/s", file=sys.stderr)
    for pair in pairs.values():
        _, received = pair.ask(op="check")
        if not received["right"]:
            raise ProxydError("wrong bytes were delivered", next_step="Report this with the agent's log")
    return {
        "ways": {name: _medians(figures) for name, figures in rounds.items()},
        "message_bytes": MESSAGE_BYTES,
        "small_bytes": SMALL_BYTES,
        "rounds": args.rounds,
        "messages_per_round": args.messages,
        "trips_per_round": args.trips,
        "each_round": rounds,
    }


def _bulk(pair: Pair, agent_pid: int, count: int) -> dict[str, float]:
    before_s = cpu_of([agent_pid])
    sent, received = pair.ask(op="bulk", count=count)
    agent_s = cpu_of([agent_pid]) - before_s if pair.kind == "relay" else 0.0
    giga = count * MESSAGE_BYTES / 1e9
    return {
        "gb_per_s": giga / ((received["end_ns"] - sent["start_ns"]) / 1e9),
        "cpu_s_per_gb": (sent["cpu_s"] + received["cpu_s"] + agent_s) / giga,
        "sender_cpu_s_per_gb": sent["cpu_s"] / giga,
        "receiver_cpu_s_per_gb": received["cpu_s"] / giga,
        "agent_cpu_s_per_gb": agent_s / giga,
    }


def _round_trips(pair: Pair, agent_pid: int, count: int) -> dict[str, float]:
    before_s = cpu_of([agent_pid])
    sent, received = pair.ask(op="round_trips", count=count, nbytes=SMALL_BYTES)
    agent_s = cpu_of([agent_pid]) - before_s if pair.kind == "relay" else 0.0
    times_us = sorted(ns / 1e3 for ns in sent["round_trips_ns"])
    return {
        "round_trip_p50_us": times_us[len(times_us) // 2],
        "round_trip_p99_us": times_us[len(times_us) * 99 // 100],
        "round_trip_cpu_us": (sent["cpu_s"] + received["cpu_s"] + agent_s) / count * 1e6,
    }


def _medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {key: round(statistics.median(one[key] for one in rounds), 3) for key in rounds[0]} if rounds else {}


def _print(result: Mapping[str, Any]) -> None:
    mebi, kibi = result["message_bytes"] >> 20, result["small_bytes"] >> 10
    print(f"{mebi} MiB send / recv, {kibi} KiB there and back, medians of {result['rounds']} interleaved rounds")
    print(f"{'':12} {'GB/s':>6} {'CPU s/GB':>9} {'p50 us':>8} {'p99 us':>8} {'CPU us per round trip':>22}")
    for name, way in result["ways"].items():
        row = f"{NAMES[name]:12} {way['gb_per_s']:6.2f} {way['cpu_s_per_gb']:9.3f}"
        if "round_trip_p50_us" in way:
            row += f" {way['round_trip_p50_us']:8.0f} {way['round_trip_p99_us']:8.0f} {way['round_trip_cpu_us']:22.0f}"
        print(row)
    ours, gloo = result["ways"]["proxyd"], result["ways"].get("gloo")
    if gloo:
        print(
            f"proxyd / gloo: {ours['gb_per_s'] / gloo['gb_per_s']:.2f} of its GB/s (bar: 1 and more), "
            f"{ours['cpu_s_per_gb'] / gloo['cpu_s_per_gb']:.2f} of its CPU time (1 and less), "
            f"{ours['round_trip_p50_us'] / gloo['round_trip_p50_us']:.2f} of its round trip (3 and less)"
        )
