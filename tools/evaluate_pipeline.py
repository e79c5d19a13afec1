"""The part of the evaluation that is about a training step across sites: its runs, tables and pictures.

All of it is simulated, by ``proxyd simulate pipeline``: the same figures for the same seeds and code, whoever runs it.
:data:`TABLES` says which table stands in which document; above each stands what it rests on, as the runs say it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import evaluate_runs as runs
from evaluate_runs import MISSING, Item, command

PART = "pipeline"
LINKS = ("L1", "L2", "L3")
"""Of the published speed-ups."""
PRESETS = (*LINKS, "10G60", "4G90")
CLASSES = ("calm", "moderate", "drift", "real", "wild")
SEED, SEEDS = 101, 5
POLICIES = ("offload", "orders", "planner", "policy", "tasks", "worker")
CODE = (
    *(f"proxyd/sim/pipeline/{name}.py" for name in ("bounds", "engine", "model", "report", "systems", "wan")),
    "proxyd/core/traces.py",
    *(f"client/proxyd_client/schedule/{name}.py" for name in POLICIES),
)
CORE_CODE = (*CODE, "proxyd/sim/**/*.py", "proxyd/core/*.py")
QUICK = "--micro-batches 16 --stages 4"
"""A step that takes a blink: to see that everything runs, not for its figures."""

ROWS: dict[str, tuple[str, str]] = {
    "1f1b": ("1F1B", "fair"),
    "interleaved": ("1F1B, two stages per worker", "fair"),
    "zb_h1": ("ZB-H1", "fair"),
    "zb_v": ("ZB-V, two stages per worker", "fair"),
    "zb_h2": ("ZB-H2, 15 activations", "fair"),
    "offline": ("the better plan for the mean rate", "fair"),
    "1f1b_paced": ("1F1B: *pacing alone*", "serial"),
    "online_fair": ("run time: *scheduling alone*", "fair"),
    "offline_paced": ("the better plan", "serial"),
    "online": ("run time", "serial"),
    "offload_fair": ("run time and offload", "fair"),
    "proxyd": ("all three", "serial"),
}
"""By system: schedule and wire."""
ASKED = {"1f1b": (1.8, 2.2, 1.5), "zb_h1": (1.5, 1.9, 1.4), "offline": (1.2, 1.2, None)}
"""Speed-ups on L1, L2, L3 with wild traces; over the best offline planner on two links."""
PUBLISHED = {"1f1b": (1.87, 2.22, 1.62)}
OVER_PLANNERS, AT_BEST = 1.48, 2.65
SHARES = {"10G60": 0.564, "4G90": 0.42}
"""Published: of a single site's throughput, with plain 1F1B."""
CALIBRATIONS = {
    "preset": ("", "64 MiB, 187.5 ms: as the presets have them"),
    "fit": ("--message 8MiB --period 55ms", "8 MiB, 55 ms: *fitted*"),
}
CORE_ASKED = 1.03


def ratio_asked(preset: str, trace: str) -> float | None:
    """Most that a step may take, over its bound; None: nothing was asked for."""
    if preset not in LINKS:
        return None
    return 1.08 if trace == "wild" else 1.005 if preset == "L3" else 1.03


# --------------------------------------------------------------------------------------------------------------- runs


@functools.cache
def items(quick: bool = False) -> tuple[Item, ...]:
    """Everything, the slow ones first."""
    found: list[Item] = []

    def add(name: str, preset: str, trace: str, words: str, *, seeds: int = 1, code: Sequence[str] = CODE) -> None:
        many = f" --seeds {seeds}" if seeds > 1 and not quick else ""
        small = f" {QUICK}" if quick else ""
        text = f"simulate pipeline --preset {preset} --trace {trace} --seed {SEED}{many} {words}{small} --out {{out}}"
        found.append(command(f"pipeline-{name}", PART, text, tuple(code)))

    for trace in ("moderate", "wild"):
        for preset in LINKS:
            add(f"core-{preset}-{trace}", preset, trace, "--systems proxyd_core,proxyd", code=CORE_CODE)
    for preset in PRESETS:
        for trace in CLASSES:
            add(f"{preset}-{trace}", preset, trace, f"--systems {','.join(ROWS)}", seeds=SEEDS)
    for preset in LINKS:
        for trace in ("moderate", "wild"):
            add(f"memory-{preset}-{trace}", preset, trace, "--activations 32 --systems offline,1f1b", seeds=SEEDS)
    for preset in SHARES:
        for name, (options, _) in CALIBRATIONS.items():
            for trace in ("constant", "moderate"):
                words = f"{options} --systems 1f1b".strip()
                add(f"share-{name}-{preset}-{trace}", preset, trace, words, seeds=1 if trace == "constant" else SEEDS)
    for preset in ("L1", "L2"):
        add(f"step-{preset}-wild", preset, "wild", "--systems 1f1b,proxyd --plot {png}")
    return tuple(found)


def read(name: str) -> Any:
    """The figures of a run; None where there are none, or they come from another command or other code."""
    fresh = any(item.name == name and item.is_there for quick in (False, True) for item in items(quick))
    return runs.read(name) if fresh else None


def of(name: str, system: str) -> Any:
    """One system's figures in a run."""
    report = read(name)
    return None if report is None else next((one for one in report["systems"] if one["system"] == system), None)


# ------------------------------------------------------------------------------------------------------------- tables


def basis(names: Iterable[str]) -> str:
    """What these runs assume, as they say it themselves."""
    found = [report["inputs"] for report in map(read, names) if report is not None]
    if not found:
        return f"{MISSING.capitalize()}."
    one = found[0]
    last = one["seed"] + one["seeds"] - 1
    seeds = f"seeds {one['seed']} to {last}, means" if one["seeds"] > 1 else f"seed {one['seed']}"
    ways = {each["preset"]: each["wires"]["a->b"]["one_way_ns"] / 1e6 for each in found}
    told = ", ".join(f"{preset} {way:g}" for preset, way in ways.items())
    return (
        f"Simulated; {seeds}; loss penalty {one['loss_penalty']:g}; one-way delays in ms: {told}; {one['pipelines']} "
        f"pipelines of {one['stages']} stages; {one['micro_batches']} micro-batches of "
        f"{one['message_bytes'] / (1 << 20):g} MiB each way and {one['period_ns'] / 1e6:g} ms; {one['activations']} "
        f"activations on a device."
    )


def tabled(names: Iterable[str], head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """What it rests on, and the table."""
    lines = [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]
    return [basis(names), "", *lines]


def held(ok: bool, text: str) -> str:
    """A figure, and whether its bound holds."""
    return text if ok else f"**{text}** (missed)"


def seconds_table(trace: str) -> list[str]:
    """Seconds per step by system, and how much faster proxyd is."""
    rows = []
    for system, (schedule, wire) in ROWS.items():
        cells = []
        for preset in LINKS:
            one, report = of(f"pipeline-{preset}-{trace}", system), read(f"pipeline-{preset}-{trace}")
            text = MISSING if one is None else f"{one['iteration_seconds']:.1f}"
            if one is not None and system != "proxyd":
                text += f" ({report['speedup_of_proxyd_over'][system]:.2f}x)"
            cells.append(text)
        rows.append([f"`{system}`", schedule, wire, *cells])
    bounds = [read(f"pipeline-{preset}-{trace}") for preset in LINKS]
    rows.append(["bound", "", "", *(MISSING if one is None else f"{one['bound_seconds']:.1f}" for one in bounds)])
    return tabled(names_of(LINKS, [trace]), ["system", "schedule", "wire", *LINKS], rows)


def names_of(presets: Iterable[str], traces: Iterable[str], kind: str = "") -> list[str]:
    """Of runs."""
    traces = list(traces)
    return [f"pipeline-{kind}{preset}-{trace}" for preset in presets for trace in traces]


def bounds_table() -> list[str]:
    """Over the bound, mean and worst."""
    rows = []
    for trace in CLASSES:
        cells = []
        for preset in PRESETS:
            one, most = of(f"pipeline-{preset}-{trace}", "proxyd"), ratio_asked(preset, trace)
            if one is None:
                cells.append(MISSING)
                continue
            mean, worst = one["ratio_to_bound"], one.get("worst_ratio_to_bound", one["ratio_to_bound"])
            cells.append(f"{held(most is None or mean <= most, f'{mean:.3f}')} ({worst:.3f})")
        asked = "1.08" if trace == "wild" else "1.03, L3 1.005"
        rows.append([trace, *cells, asked])
    return tabled(names_of(PRESETS, CLASSES), ["trace", *PRESETS, "asked for"], rows)


def room_table() -> list[str]:
    """With memory for eight and no offload, over the bound with that memory."""
    rows = []
    for trace in CLASSES:
        found = [of(f"pipeline-{preset}-{trace}", "online") for preset in PRESETS]
        cells = [MISSING if one is None else f"{one['ratio_to_own_bound']:.3f}" for one in found]
        if trace == "moderate":
            cells = [text if text == MISSING else held(float(text) <= 1.06, text) for text in cells]
        rows.append([trace, *cells, "1.06" if trace == "moderate" else ""])
    return tabled(names_of(PRESETS, CLASSES), ["trace", *PRESETS, "asked for"], rows)


def speedup_table() -> list[str]:
    """Beside what was asked for and what was published."""
    rows = []
    for system, asked in ASKED.items():
        cells = []
        for trace in ("wild", "moderate"):
            for place, preset in enumerate(LINKS):
                report = read(f"pipeline-{preset}-{trace}")
                if report is None:
                    cells.append(MISSING)
                    continue
                mean = report["speedup_of_proxyd_over"][system]
                least = report.get("least_speedup_of_proxyd_over", report["speedup_of_proxyd_over"])[system]
                most = report.get("most_speedup_of_proxyd_over", report["speedup_of_proxyd_over"])[system]
                bound = asked[place] if trace == "wild" else None
                cells.append(f"{held(bound is None or mean >= bound, f'{mean:.2f}')} ({least:.2f}-{most:.2f})")
        said = f"{asked[0]} on two links" if asked[2] is None else " / ".join(f"{one}" for one in asked)
        printed = " / ".join(map(str, PUBLISHED.get(system, ()))) or (f"{OVER_PLANNERS}" if system == "offline" else "")
        rows.append([f"`{system}`", *cells, said, printed])
    head = ["over", *(f"{preset} {trace}" for trace in ("wild", "moderate") for preset in LINKS), "asked", "published"]
    return tabled(names_of(LINKS, ("wild", "moderate")), head, rows)


PARTS: dict[str, tuple[str, str]] = {
    "pacing alone": ("", "1f1b_paced"),
    "scheduling alone": ("", "online_fair"),
    "memory alone: a plan with room for 32": ("memory-", "offline"),
    "scheduling and pacing": ("", "online"),
    "scheduling and offload": ("", "offload_fair"),
    "all three": ("", "proxyd"),
}
"""By name: the kind of run, and the system whose step is compared with that of plain 1F1B."""


def part_speedup(part: str, preset: str, trace: str) -> float | None:
    """Over 1F1B on the wire that is shared fairly, means over means."""
    kind, system = PARTS[part]
    plain, one = of(f"pipeline-{preset}-{trace}", "1f1b"), of(f"pipeline-{kind}{preset}-{trace}", system)
    if plain is None or one is None:
        return None
    return float(plain["iteration_seconds"] / one["iteration_seconds"])


def parts_table() -> list[str]:
    """What pacing, scheduling and offload bring, alone and together."""
    rows = []
    for part in PARTS:
        found = [part_speedup(part, preset, trace) for trace in ("wild", "moderate") for preset in LINKS]
        rows.append([part, *(MISSING if one is None else f"{one:.2f}" for one in found)])
    head = ["over plain 1F1B", *(f"{preset} {trace}" for trace in ("wild", "moderate") for preset in LINKS)]
    return tabled(names_of(LINKS, ("wild", "moderate")), head, rows)


def all_table() -> list[str]:
    """Every preset and class."""
    shown = ("1f1b", "zb_h1", "zb_h2", "offline", "online", "proxyd")
    rows = []
    for preset in PRESETS:
        for trace in CLASSES:
            report = read(f"pipeline-{preset}-{trace}")
            if report is None:
                rows.append([preset, trace, *[MISSING] * (len(shown) + 2)])
                continue
            took = {one["system"]: one["iteration_seconds"] for one in report["systems"]}
            cells = [f"{took[system]:.1f}" for system in shown]
            rows.append(
                [preset, trace, *cells, f"{report['bound_seconds']:.1f}", f"{took['1f1b'] / took['proxyd']:.2f}"]
            )
    head = ["preset", "trace", *(f"`{system}`" for system in shown), "bound", "over 1F1B"]
    return tabled(names_of(PRESETS, CLASSES), head, rows)


def share_of_one_site(name: str) -> float | None:
    """1F1B's throughput over that of one site, whose step is a period for each micro-batch and each stage but one."""
    report = read(name)
    if report is None:
        return None
    inputs = report["inputs"]
    alone_s = (inputs["micro_batches"] + inputs["stages"] - 1) * inputs["period_ns"] / 1e9
    return float(alone_s / next(one for one in report["systems"] if one["system"] == "1f1b")["iteration_seconds"])


def share_table() -> list[str]:
    """Calibration: 1F1B over a single site."""
    rows = []
    for name, (_, words) in CALIBRATIONS.items():
        cells = []
        for preset, published in SHARES.items():
            for trace in ("constant", "moderate"):
                share = share_of_one_site(f"pipeline-share-{name}-{preset}-{trace}")
                text = MISSING if share is None else f"{share:.1%}"
                if share is not None and trace == "constant":
                    text = held(abs(share - published) <= 0.02, text)
                cells.append(text)
        rows.append([words, *cells])
    rows.append(["published", *(f"{share:.1%}" if trace else "" for share in SHARES.values() for trace in (1, 0))])
    kinds = ("constant", f"moderate, {SEEDS} seeds")
    head = ["message and period", *(f"{preset}, {kind}" for preset in SHARES for kind in kinds)]
    return tabled([f"pipeline-share-preset-{preset}-constant" for preset in SHARES], head, rows)


def core_table() -> list[str]:
    """Granted by the coordinator's core, over one message at a time."""
    rows = []
    for trace in ("moderate", "wild"):
        cells = []
        for preset in LINKS:
            name = f"pipeline-core-{preset}-{trace}"
            core, ideal = of(name, "proxyd_core"), of(name, "proxyd")
            if core is None:
                cells.append(MISSING)
                continue
            ratio = core["iteration_seconds"] / ideal["iteration_seconds"]
            took = f"{ideal['iteration_seconds']:.2f} -> {core['iteration_seconds']:.2f}"
            cells.append(f"{took}: {held(ratio <= CORE_ASKED, f'{ratio:.3f}')}")
        rows.append([trace, *cells, f"{CORE_ASKED}"])
    return tabled(names_of(LINKS, ("moderate", "wild"), "core-"), ["trace", *LINKS, "asked for"], rows)


TABLES: dict[str, tuple[str, Callable[[], list[str]]]] = {
    "pipeline-wild": ("scheduling.md", lambda: seconds_table("wild")),
    "pipeline-moderate": ("scheduling.md", lambda: seconds_table("moderate")),
    "pipeline-bounds": ("scheduling.md", bounds_table),
    "pipeline-room": ("scheduling.md", room_table),
    "pipeline-share": ("scheduling.md", share_table),
    "pipeline-speedups": ("evaluation.md", speedup_table),
    "pipeline-parts": ("evaluation.md", parts_table),
    "pipeline-core": ("evaluation.md", core_table),
    "pipeline-all": ("evaluation.md", all_table),
}
"""By name: in which document, and its lines."""
PICTURED = ("pipeline-step-L1-wild", "pipeline-step-L2-wild")
BARS = "pipeline-parts"


def draw_parts(path: Path) -> bool:
    """One picture of :func:`parts_table`, beside what was published; False: not all of it is there."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colors = ("tab:gray", "tab:cyan", "tab:olive", "tab:blue", "tab:orange", "tab:green")
    figure, axes = pyplot.subplots(1, 2, sharey=True, figsize=(12, 4.6), layout="constrained")
    for axis, trace in zip(axes, ("wild", "moderate"), strict=True):
        for number, (part, color) in enumerate(zip(PARTS, colors, strict=True)):
            found = [part_speedup(part, preset, trace) for preset in LINKS]
            if None in found:
                pyplot.close(figure)
                return False
            heights = [one for one in found if one is not None]
            places = [place + (number - 2.5) * 0.14 for place in range(len(LINKS))]
            bars = axis.bar(places, heights, 0.13, color=color, label=part)
            axis.bar_label(bars, fmt="%.2f", fontsize=6.5, padding=1)
        for place, published in enumerate(PUBLISHED["1f1b"]):
            label = "published, over 1F1B" if place == 0 else None
            axis.hlines(published, place - 0.44, place + 0.44, color="black", ls="--", lw=1.2, label=label)
        axis.axhline(AT_BEST, color="tab:red", ls=":", lw=1.2, label=f"published, at best: {AT_BEST}")
        axis.axhline(1.0, color="black", lw=0.6)
        axis.set_xticks(range(len(LINKS)), LINKS)
        axis.set_title(f"{trace} traces", fontsize=10)
    axes[0].set_ylabel("times as fast as plain 1F1B")
    axes[1].legend(fontsize=7, loc="upper right", ncols=2)
    axes[0].set_ylim(0, 3.6)
    figure.suptitle(basis(names_of(LINKS, ("wild", "moderate"))), fontsize=8, wrap=True)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
    return True
