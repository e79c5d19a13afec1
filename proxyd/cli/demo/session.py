"""One run of the demo: which modes over which links, in which order, and what becomes of the results."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from proxyd.cli.demo.measure import measure
from proxyd.cli.demo.net import LoopbackNet, Net, NetnsNet, may_use
from proxyd.cli.demo.results import RunResult, ratios
from proxyd.cli.demo.scenario import (
    WARMUP_BURSTS,
    Mode,
    Scenario,
    extra_scenarios,
    idle_restart_modes,
    main_modes,
)
from proxyd.cli.demo.traffic import PlainTraffic, ProxydTraffic, Traffic
from proxyd.core.errors import ProxydError
from proxyd.wan import available

FORWARD, BACK = ("a", "b"), ("b", "a")
BUDGET_S = 228.0
"""Of the default run: the demo promises less than four minutes."""
BURSTS, QUICK_BURSTS, EXTRA_BURSTS, IDLE_RESTART_BURSTS = 24, 4, 6, 3


class Watcher:
    """Progress on stderr: a bar on a terminal, else a line per mode."""

    def __init__(self, console: Console, total: int) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f} bursts"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("starting", total=total)

    def __enter__(self) -> Watcher:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def begin(self, text: str) -> None:
        """The next mode."""
        self._progress.update(self._task, description=text)
        if not self._console.is_terminal:
            self._console.print(f"proxyd demo: {text} ...", highlight=False, soft_wrap=True)

    def burst(self) -> None:
        """One burst is over."""
        self._progress.advance(self._task)


class Session:
    """All modes of all scenarios, one after another: they would disturb each other."""

    def __init__(self, console: Console, *, quick: bool, full: bool, configured: bool = True) -> None:
        self.console = console
        self.scenario = Scenario(configured=configured)
        self.started_s = time.monotonic()
        self.in_budget = not full
        self.modes = main_modes(QUICK_BURSTS if quick else BURSTS)
        self.extras: list[Scenario] = []
        reason = available()
        self.kind = "netns" if reason is None else "loopback"
        if reason is not None:
            self.fall_back(reason)
        elif not quick:
            self.modes += idle_restart_modes(BURSTS if full else IDLE_RESTART_BURSTS)
            self.extras = extra_scenarios(self.scenario) if full else []
        self.results: list[RunResult] = []
        self.extra_results: list[tuple[Scenario, list[RunResult]]] = []
        self.failures: dict[str, str] = {}
        """Variations that could not be run to their end, and why."""

    def fall_back(self, reason: str) -> None:
        """Say why there is no emulated WAN, and go on without what makes no sense without one.

        TCP sees no round trip there, so there is nothing to find one from: the coordinator is told.
        """
        self.scenario = replace(self.scenario, configured=True)
        self.console.print(
            f"proxyd demo: no emulated WAN here ({reason}); running on loopback behind a userspace bottleneck.",
            highlight=False,
            soft_wrap=True,
        )
        self.modes = [
            mode for mode in self.modes if mode.congestion_control is None or may_use(mode.congestion_control)
        ]

    def run(self) -> None:
        """Measure everything. Raises DemoError, WanError, ClusterError if the main scenario fails."""
        planned = [*self.modes, *(mode for scenario in self.extras for mode in extra_modes(scenario))]
        with Watcher(self.console, sum(mode.bursts + WARMUP_BURSTS for mode in planned)) as watcher:
            fit = self._fit_into_budget if self.in_budget else lambda mode, results: mode
            self.results = run_scenario(self.scenario, self.modes, watcher, self.kind, fit)
            for scenario in self.extras:
                try:
                    results = run_scenario(scenario, extra_modes(scenario), watcher)
                except ProxydError as error:
                    # One variation that failed must not cost the minutes that the others took.
                    self.failures[scenario.name] = str(error)
                    self.console.print(f"proxyd demo: {scenario.name}: {error}", highlight=False, soft_wrap=True)
                else:
                    self.extra_results.append((scenario, results))

    def _fit_into_budget(self, mode: Mode, results: Sequence[RunResult]) -> Mode | None:
        """The baselines with slow start after idle on come last: a busy machine has less time left for them."""
        if not mode.slow_start_after_idle:
            return mode
        left_s = BUDGET_S - (time.monotonic() - self.started_s)
        return shortened(mode, left_s, results, self.scenario)

    def to_json(self) -> dict[str, Any]:
        """The report."""
        report = scenario_json(self.scenario, self.results, self.kind)
        if self.extra_results:
            report["extras"] = [scenario_json(scenario, results) for scenario, results in self.extra_results]
        if self.failures:
            report["failures"] = self.failures
        return report


def shortened(mode: Mode, left_s: float, results: Sequence[RunResult], scenario: Scenario) -> Mode | None:
    """The mode with as many bursts as fit into ``left_s``, judged by the same TCP's earlier run; None: not one does."""
    seen = [max(r.cct_seconds) for r in results if r.mode.congestion_control == mode.congestion_control]
    one_s = 1.3 * max(seen, default=0.0) + scenario.gap_ns / 1e9
    fits = int(left_s / one_s) - WARMUP_BURSTS
    return replace(mode, bursts=min(mode.bursts, fits)) if fits >= 1 else None


def extra_modes(scenario: Scenario) -> list[Mode]:
    """What runs in a variation. At open load plain TCP may carry less than is offered, so its times grow with the
    number of bursts, and most with slow start after idle on: all baselines, with as many bursts as by default.
    """
    if scenario.open_load is None:
        return main_modes(EXTRA_BURSTS)
    return [*main_modes(BURSTS), *idle_restart_modes(BURSTS)]


def scenario_json(scenario: Scenario, results: Sequence[RunResult], kind: str = "netns") -> dict[str, Any]:
    """One scenario and its runs as plain values."""
    return {
        "scenario": scenario.name,
        "runs": [result.to_json() for result in results],
        "ideal_cct_seconds": round(scenario.ideal_cct_seconds, 4),
        "ideal_mean_fct_seconds": round(scenario.ideal_mean_fct_seconds, 4),
        "ratios": ratios(scenario, results),
        "wan": {
            "kind": kind,
            "rate_bits_per_s": scenario.rate_bytes_per_s * 8,
            "rtt_seconds": scenario.rtt_ns / 1e9,
            "buffer_bytes": scenario.buffer_bytes,
            "mtu": scenario.mtu,
            "senders": scenario.senders,
            "tensor_bytes": scenario.tensor_bytes,
            "bursts": max((len(result.cct_seconds) for result in results), default=0),
            "warmup_bursts": WARMUP_BURSTS,
            "sending_hosts": scenario.senders,
            "receiving_hosts": scenario.receiving_hosts,
            "loss": scenario.loss,
            "gap_seconds": None if scenario.open_load is not None else scenario.gap_ns / 1e9,
            "open_load": scenario.open_load,
            "both_directions": scenario.both_directions,
            "configured": scenario.configured,
        },
    }


def run_scenario(
    scenario: Scenario,
    modes: Sequence[Mode],
    watcher: Watcher,
    kind: str = "netns",
    fit: Callable[[Mode, Sequence[RunResult]], Mode | None] = lambda mode, results: mode,
) -> list[RunResult]:
    """All modes over one network, one after another. The daemons only live while proxyd's own mode runs.

    ``fit`` may shorten a mode, or drop it (None), by what has been seen until then.
    """
    results: list[RunResult] = []
    with NetnsNet(scenario) if kind == "netns" else LoopbackNet(scenario) as net:
        for wanted in modes:
            mode = fit(wanted, results)
            if mode is None:
                continue
            prefix = "" if scenario.name == "default" else f"{scenario.name}: "
            watcher.begin(f"{prefix}{mode.label}")
            net.slow_start_after_idle(mode.slow_start_after_idle)
            results.append(run_mode(net, scenario, mode, watcher.burst))
    return results


def run_mode(net: Net, scenario: Scenario, mode: Mode, on_burst: Callable[[], None]) -> RunResult:
    """One mode, in both directions if the scenario says so."""
    with ExitStack() as ending:
        make = traffic_maker(net, scenario, mode, ending)
        forward = make(FORWARD)
        if not scenario.both_directions:
            return measure(net, scenario, mode, forward, on_burst=on_burst)
        back = make(BACK)
        return _both_ways(net, scenario, mode, forward, back, on_burst)


def traffic_maker(net: Net, scenario: Scenario, mode: Mode, ending: ExitStack) -> Callable[[tuple[str, str]], Traffic]:
    """How to make the mode's traffic of one direction; ``ending`` takes care of its end."""
    if mode.congestion_control is not None:
        return lambda sites: ending.enter_context(PlainTraffic(net, scenario, mode, sites))
    cluster = net.cluster(ending)
    return lambda sites: ending.enter_context(ProxydTraffic(net, scenario, cluster, sites))


def _both_ways(
    net: Net, scenario: Scenario, mode: Mode, forward: Traffic, back: Traffic, on_burst: Callable[[], None]
) -> RunResult:
    """Each direction runs its own closed loop; the figures are of both together, drops and queue of the first."""
    found: list[RunResult] = []
    failed: list[ProxydError] = []

    def other_way() -> None:
        try:
            found.append(measure(net, scenario, mode, back, link=BACK))
        except ProxydError as error:
            failed.append(error)

    thread = threading.Thread(target=other_way, name="demo-back")
    thread.start()
    try:
        result = measure(net, scenario, mode, forward, on_burst=on_burst)
    finally:
        thread.join()
    if failed:
        raise failed[0]
    other = found[0]
    return replace(
        result,
        fct_seconds=result.fct_seconds + other.fct_seconds,
        cct_seconds=result.cct_seconds + other.cct_seconds,
        drops=result.drops + other.drops,
        retransmits=result.retransmits + other.retransmits,
        warmup_drops=result.warmup_drops + other.warmup_drops,
        goodput_mbps=(result.goodput_mbps + other.goodput_mbps) / 2,
    )


def write_json(path: Path, report: dict[str, Any]) -> None:
    """Whole or not at all: a reader never sees half a report."""
    temporary = path.with_name(f".{path.name}.part")
    temporary.write_text(json.dumps(report, indent=2) + "\n")
    temporary.replace(path)
