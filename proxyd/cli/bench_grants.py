"""``proxyd bench grants``: how fast the coordinator decides, alone and through gRPC."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time

from proxyd.core.errors import EXIT_OK

LINKS = 16
SENDERS_PER_LINK = 4
WAITING = 1000
TRANSFER_BYTES = 8 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", metavar="FILE", help="write the figures as JSON")
    parser.add_argument("--seconds", type=float, default=3.0, help="how long each part runs (default: 3)")
    parser.add_argument("--no-grpc", action="store_true", help="only the pure part")


def run(args: argparse.Namespace) -> int:
    figures: dict[str, float] = {"decisions_per_s": round(decisions_per_s(args.seconds), 1)}
    print(f"pure: {figures['decisions_per_s']:,.0f} grants decided per second ({WAITING} waiting, {LINKS} links)")
    if not args.no_grpc:
        from proxyd.runtime.environment import choose_grpc_engine

        choose_grpc_engine(os.environ)
        from proxyd.cli.grant_bench import SENDERS, grpc_grants

        measured = grpc_grants(args.seconds)
        figures["grpc_grants_per_s"] = round(measured.grants_per_s, 1)
        figures["grpc_p50_ms"] = round(measured.p50_ms, 3)
        figures["grpc_p99_ms"] = round(measured.p99_ms, 3)
        figures["grpc_coordinator_us_per_grant"] = round(measured.coordinator_us, 1)
        figures["grpc_agents_us_per_grant"] = round(measured.agents_us, 1)
        figures["grpc_saturated_grants_per_s"] = round(measured.saturated_grants_per_s, 1)
        print(
            f"gRPC on loopback, {SENDERS} agents: {measured.grants_per_s:,.0f} grants per second, request to grant p50 "
            f"{measured.p50_ms:.2f} ms, p99 {measured.p99_ms:.2f} ms; processor time per grant: coordinator "
            f"{measured.coordinator_us:.0f} us, agents {measured.agents_us:.0f} us; saturated "
            f"{measured.saturated_grants_per_s:,.0f} per second"
        )
    if args.out:
        with open(args.out, "w", encoding="utf-8") as file:
            json.dump(figures, file, indent=2)
            file.write("\n")
        print(f"written to {args.out}", file=sys.stderr)
    return EXIT_OK


def decisions_per_s(seconds: float) -> float:
    """Grants issued per second spent in the coordinator machine, with ``WAITING`` transfers waiting at all times.

    Fluid senders on 16 links close the loop in simulated time. What counts is processor time inside the machine: every
    request, report, beat and grant, but not the senders' own model, nor what else runs on the host, nor the reading of
    the clock. The garbage collector is as calm as a daemon's.
    """
    from proxyd.core.bandwidth import LinkSettings
    from proxyd.core.coordinator import CoordinatorConfig, CoordinatorMachine
    from proxyd.core.effects import CoordinatorEffect
    from proxyd.core.events import CoordinatorEvent
    from proxyd.core.ids import AgentName, LinkName
    from proxyd.runtime.lifecycle import calm_collector
    from proxyd.sim.fluid import FluidSender, FluidWorld

    links = [LinkName(f"site{index}", "far") for index in range(LINKS)]
    rtt_ns = 60_000_000
    settings = tuple(LinkSettings(link, 125_000_000, rtt_ns, 750_000, mtu_bytes=9000) for link in links)
    machine = CoordinatorMachine(CoordinatorConfig(owns=("*->far",), links=settings), epoch=1)
    spent_ns = 0
    clock_ns = _clock_ns()
    calm_collector()

    def timed(event: CoordinatorEvent, now_ns: int) -> list[CoordinatorEffect]:
        nonlocal spent_ns
        begin_ns = time.thread_time_ns()
        effects = machine.handle(event, now_ns)
        machine.next_deadline_ns()
        spent_ns += time.thread_time_ns() - begin_ns - clock_ns
        return effects

    senders = [
        FluidSender(AgentName(link.src_site, f"host{index}"), link, rtt_ns)
        for link in links
        for index in range(SENDERS_PER_LINK)
    ]
    world = FluidWorld(machine, senders, handle=timed)
    numbers = sorted(world.senders)
    sent = 0

    def keep_waiting() -> None:
        nonlocal sent
        for _ in range(WAITING - machine.waiting):
            world.send(numbers[sent % len(numbers)], TRANSFER_BYTES)
            sent += 1
        world.run(world.now_ns + 20_000_000)

    world.run(100_000_000)
    while len(world.grants) < 1000:  # warm up: all windows full
        keep_waiting()
    spent_ns, before = 0, len(world.grants)
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        keep_waiting()
    return (len(world.grants) - before) * 1e9 / spent_ns


def _clock_ns() -> int:
    """What two readings of the thread's clock are apart when nothing lies between them: the least, to be fair."""
    return min(-time.thread_time_ns() + time.thread_time_ns() for _ in range(1000))
