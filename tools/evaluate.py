#!/usr/bin/env python3
"""Runs everything that docs/evaluation.md shows, keeps the results, and writes them into its tables.

    tools/evaluate.py --list                 what there is, by name and command, and what is measured already
    tools/evaluate.py --part sim             run what is missing of one part: sim, wan, other or pipeline
    tools/evaluate.py --only 'wan-link-*'    ... or of these names; --again: also what is there
    tools/evaluate.py --write                nothing is run; tables and pictures from the results that are there
    tools/evaluate.py --quick                the part pipeline with tiny steps, into build/evaluation/quick

Each run is a command that a person can type. Its figures stay in ``build/evaluation/NAME.json``, so that a broken run
is taken up where it stopped; those of the part pipeline are made again when its code has changed. Run the parts ``wan``
and ``other`` on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import evaluate_pipeline
import evaluate_runs as runs
from evaluate_runs import MISSING, ROOT, Item, command, fill, read, run, tests_of

DOCS = ROOT / "docs"
DOCUMENT = "evaluation.md"
RATE, RTT = "400Mbit", "60ms"

Bound = tuple[float, float | None, float]
"""Least utilisation, most queue p99 in BDP (None: not asked), most loss."""

LINKS: dict[tuple[str, str], Bound] = {
    ("calm", "1bdp"): (0.95, 0.10, 0.001),
    ("calm", "0.1bdp"): (0.95, None, 0.001),
    ("moderate", "1bdp"): (0.95, 0.25, 0.001),
    ("moderate", "0.1bdp"): (0.95, None, 0.004),
    ("drift", "1bdp"): (0.90, None, 0.002),
    ("drift", "0.1bdp"): (0.90, None, 0.002),
    ("wild", "1bdp"): (0.90, 0.50, 0.015),
    ("wild", "0.1bdp"): (0.90, None, 0.015),
}
STEPS: dict[tuple[str, str], float] = {
    ("halve", "1bdp"): 0.01,
    ("halve", "0.5bdp"): 0.01,
    ("halve", "0.1bdp"): 0.18,
    ("double", "1bdp"): 0.01,
}
"""Most loss after the step."""
POLICED_MBIT = 100
RATES = {"10Mbit": "256KiB", "100Mbit": "2MiB", "1Gbit": "8MiB", "10Gbit": "64MiB", "100Gbit": "256MiB"}
"""And the size of a message at each."""
PLAIN = ("cubic", "bbr")
PICTURED = ("wan-link-moderate-1bdp", "wan-step-halve-1bdp", "wan-step-double-1bdp", "wan-policed", "wan-demo")
"""Their pictures are kept in docs/pictures."""


def items() -> list[Item]:
    """Everything, in the order in which it runs."""
    found = []
    for trace, buffer in LINKS:
        words = f"--trace {trace} --buffer {buffer} --rate {RATE} --rtt {RTT} --seed 1 --mtu 9000"
        found.append(command(f"sim-link-{trace}-{buffer}", "sim", f"simulate link {words} --seconds 60 --out {{out}}"))
    for step, buffer in STEPS:
        rate = RATE if step == "halve" else "200Mbit"
        words = f"--trace {step}s --buffer {buffer} --rate {rate} --rtt {RTT} --seconds 20 --mtu 9000"
        found.append(command(f"sim-step-{step}-{buffer}", "sim", f"simulate link {words} --out {{out}}"))
    for rate, message in RATES.items():
        words = (
            f"--trace moderate --buffer 1bdp --rate {rate} --rtt {RTT} --seconds 20 --message {message} --out {{out}}"
        )
        found.append(command(f"sim-rate-{rate}", "sim", f"simulate link {words}"))
    for name, control in (("beside", "1ms"), ("far", "90ms")):
        words = f"--trace calm --buffer 1bdp --rate {RATE} --rtt {RTT} --senders 2 --seconds 30 --mtu 9000"
        found.append(command(f"sim-{name}", "sim", f"simulate link {words} --control-rtt {control} --out {{out}}"))
    found.append(command("sim-targets", "sim", "simulate targets --out {out}"))
    found.append(command("sim-hour", "sim", "simulate scale --out {out}"))
    found.append(tests_of("test-light-use", "sim", "tests/sim/test_light_use.py"))
    found.append(tests_of("test-policy", "sim", "tests/sim/test_policy.py"))
    for trace, buffer in LINKS:
        words = f"--trace {trace} --buffer {buffer} --rate {RATE} --rtt {RTT} --seconds 30 --out {{out}} --plot {{png}}"
        found.append(command(f"wan-link-{trace}-{buffer}", "wan", f"bench link {words}"))
    for step, buffer in STEPS:
        words = f"--step {step} --buffer {buffer} --rate {RATE} --rtt {RTT} --seconds 16 --out {{out}} --plot {{png}}"
        found.append(command(f"wan-step-{step}-{buffer}", "wan", f"bench link {words}"))
    policed = (
        f"bench link --policer {POLICED_MBIT}Mbit:2MB --rate 400Mbit --seconds 30 --series --out {{out}} --plot {{png}}"
    )
    found.append(command("wan-policed", "wan", policed))
    cross = "bench link --cross 100Mbit --rate 400Mbit --seconds 24 --series --out {out} --plot {png}"
    found.append(command("wan-cross", "wan", cross))
    found.append(command("wan-demo", "wan", "demo --out {out} --plot {png}"))
    for part in ("far", "two-way", "urgent", "weights", "three-sites"):
        found.append(command(f"wan-{part}", "wan", f"bench ways --parts {part} --out {{out}}"))
    found.append(tests_of("test-agreement", "wan", "tests/wan/test_agreement.py"))
    found.append(tests_of("test-cases", "wan", "tests/e2e/test_cases_estimation.py"))
    found.append(command("bench-grants", "other", "bench grants --out {out}"))
    return [*found, *evaluate_pipeline.items()]


# ------------------------------------------------------------------------------------------------------------- tables


def modes(name: str) -> dict[str, Any]:
    """The runs of a ``bench link`` by mode."""
    report = read(name)
    return {} if report is None else {one["mode"]: one for one in report["runs"]}


def link_cell(figures: Any, bound: Bound | None) -> str:
    """``used, queue p99, loss``; with a bound: which of them miss it."""
    if not figures:
        return MISSING
    used, queue, loss = figures["utilisation"], figures["queue_p99_bdp"], figures["loss"]
    texts = [f"{used:.1%}", f"{queue:.2f}", f"{loss:.2%}"]
    if bound is not None:
        missed = (used < bound[0], bound[1] is not None and queue > bound[1], loss > bound[2])
        texts = [f"**{text}** (missed)" if miss else text for text, miss in zip(texts, missed, strict=True)]
    return ", ".join(texts)


def link_table() -> list[str]:
    """Used, queue and loss of a backlogged link."""
    rows = [
        "| trace | buffer | bound | simulated | proxyd | cubic | bbr |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for (trace, buffer), bound in LINKS.items():
        queue = "" if bound[1] is None else f", {bound[1]:.2f}"
        found = modes(f"wan-link-{trace}-{buffer}")
        cells = [
            trace,
            buffer,
            f"{bound[0]:.0%}{queue}, {bound[2]:.1%}",
            link_cell(read(f"sim-link-{trace}-{buffer}"), bound),
            link_cell(found.get("proxyd"), bound),
            *(link_cell(found.get(mode), None) for mode in PLAIN),
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def fct_table() -> list[str]:
    """FCT on the same links, and how far the estimate was off."""
    rows = [
        "| trace | buffer | proxyd mean, p99 | cubic | bbr | resent: proxyd, cubic, bbr | estimate off by p50, p95 |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for trace, buffer in LINKS:
        found = modes(f"wan-link-{trace}-{buffer}")
        if not found:
            rows.append(f"| {trace} | {buffer} | {' | '.join([MISSING] * 5)} |")
            continue
        times = []
        for mode in ("proxyd", *PLAIN):
            fct = found.get(mode, {}).get("fct_seconds")
            times.append(f"{fct['mean']:.2f}, {fct['p99']:.2f}" if fct else MISSING)
        resent = ", ".join(f"{found[mode]['retransmit_ratio']:.2%}" for mode in ("proxyd", *PLAIN) if mode in found)
        ours = found.get("proxyd", {})
        off = (
            f"{ours['estimate_error_p50']:.1%}, {ours['estimate_error_p95']:.1%}"
            if "estimate_error_p50" in ours
            else ""
        )
        rows.append(f"| {trace} | {buffer} | {' | '.join([*times, resent, off])} |")
    return rows


def step_cell(figures: Any, step: str, most_loss: float | None) -> str:
    """After a halving: queue back, loss. After a doubling: 0.9 used."""
    after = (figures or {}).get("step")
    if not after:
        return MISSING
    loss = f"{after['loss_of_5_rtts']:.2%} lost"
    if most_loss is not None and after["loss_of_5_rtts"] > most_loss:
        loss = f"**{loss}** (missed)"
    key, words, most = (
        ("queue_under_tenth_bdp_after_rtts", "queue back", 5.0)
        if step == "halve"
        else ("used_90_percent_after_rtts", "90 % used", 20.0)
    )
    value = after[key]
    text = f"{words} after {value:.1f} RTT" if value is not None else f"{words}: never"
    if most_loss is not None and (value is None or value > most):
        text = f"**{text}** (missed)"
    return f"{text}, {loss}"


def step_table() -> list[str]:
    """What a halving and a doubling cost."""
    rows = [
        "| step | buffer | bound | simulated | proxyd | cubic | bbr |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for (step, buffer), loss in STEPS.items():
        bound = f"queue back within 5 RTT, {loss:.0%}" if step == "halve" else "90 % used within 20 RTT"
        found = modes(f"wan-step-{step}-{buffer}")
        cells = [
            step,
            buffer,
            bound,
            step_cell(read(f"sim-step-{step}-{buffer}"), step, loss),
            step_cell(found.get("proxyd"), step, loss),
            *(step_cell(found.get(mode), step, None) for mode in PLAIN),
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def held(ok: bool, text: str) -> str:
    """A figure, and whether its bound holds."""
    return text if ok else f"**{text}** (missed)"


def passed(name: str) -> str:
    """Of a test file."""
    result = read(name)
    if result is None:
        return MISSING
    return held(result["passed"], re.sub(r"[= ]*([^=]*\S)[= ]*", r"\1", result["summary"]))


def over(name: str, call: Callable[[Any], str]) -> str:
    """A text from the figures of a run."""
    result = read(name)
    return MISSING if result is None else call(result)


def policed_found_s(report: Any) -> float | None:
    """When the estimate came to the policer's rate: the beginning of the first 6 s of which either half has a mean
    within -25 % and +10 % of it; None: never. Single looks move more than that: each probe is above the contract."""
    points = next(one for one in report["runs"] if one["mode"] == "proxyd")["series"]["estimate"]

    def holds(start_s: float) -> bool:
        values = [value for at, value in points if start_s <= at < start_s + 3.0]
        return bool(values) and 0.75 <= sum(values) / len(values) / POLICED_MBIT <= 1.1

    last_s = points[-1][0] if points else 0.0
    found = (float(at) for at, _ in points if at + 6.0 <= last_s and holds(at) and holds(at + 3.0))
    return next(found, None)


def demo_text(report: Any) -> str:
    """p99 over the ideal, and drops per packet."""
    ours = next(one for one in report["runs"] if one["mode"] == "proxyd")
    wan = report["wan"]
    over_ideal = ours["fct_seconds"]["p99"] / report["ideal_cct_seconds"]
    packets = ours["bursts"] * wan["senders"] * -(-wan["tensor_bytes"] // (wan["mtu"] - 52))
    drops = ours["drops"] / packets
    return f"{held(over_ideal <= 1.15, f'{over_ideal:.2f}')}, {held(drops < 0.001, f'{drops:.3%}')}"


def two_way_text(report: Any) -> str:
    """The worst direction, by where the coordinators stand."""
    texts = []
    for place, links in report["two-way"].items():
        worst = min(one["both_over_alone"] for one in links.values())
        texts.append(f"{place.replace('_', ' ')}: {held(worst >= 0.95, f'{worst:.3f}')}")
    return ", ".join(texts)


def urgent_text(report: Any) -> str:
    """p99 and bound by size."""
    texts = []
    for size, one in report["urgent"].items():
        p99, bound = one["p99_seconds"], one["bound_seconds"]
        texts.append(f"{int(size) >> 10} KiB: {held(p99 <= bound, f'{p99:.3f} s')} of {bound:.3f}")
    return ", ".join(texts)


def three_sites_text(report: Any) -> str:
    """How full the shared line is, its queue and its loss, and the most that was granted on it at any time."""
    one = report["three-sites"]
    used = held(one["egress_used"] >= 0.93, f"{one['egress_used']:.1%}")
    queue, loss, most = one["egress_queue_p99_bdp"], one["egress_loss"], one["granted_max_over_line"]
    return f"{used}; queue p99 {queue:.2f} BDP, loss {loss:.2%}; at most {most:.2f} of the line granted in all"


def far_simulated() -> str:
    """Used far over used beside."""
    near, far = read("sim-beside"), read("sim-far")
    if near is None or far is None:
        return MISSING
    ratio = far["utilisation"] / near["utilisation"]
    return held(ratio >= 0.95, f"{ratio:.3f}")


def grants_text(report: Any) -> str:
    """Pure, and through gRPC."""
    pure, wire, p99 = report["decisions_per_s"], report["grpc_grants_per_s"], report["grpc_p99_ms"]
    return (
        f"{held(pure >= 50_000, f'{pure:,.0f}/s')} pure; {held(wire >= 3000, f'{wire:,.0f}/s')}, "
        f"p99 {held(p99 < 5, f'{p99:.2f} ms')} through gRPC"
    )


def targets_text(table: Any) -> str:
    """How many bounds hold."""
    met = sum(bool(one["met"]) for one in table)
    return held(met == len(table), f"{met} of {len(table)} bounds hold")


def policed_text(report: Any) -> str:
    """Seconds, and the loss of the whole run beside plain TCP's."""
    found_s = policed_found_s(report)
    loss = {one["mode"]: one["loss"] for one in report["runs"]}
    texts = ", ".join(f"{mode} loses {value:.2%}" for mode, value in loss.items())
    return (
        f"{held(found_s is not None and found_s <= 15, 'never' if found_s is None else f'{found_s:.1f} s')} ({texts})"
    )


def rest_table() -> list[str]:
    """Everything that is one line."""
    lines: list[tuple[str, str, str, str]] = [
        ("estimate through ten minutes of light use", "within 20 %", "test-light-use", passed("test-light-use")),
        ("a policed path is found", "within 15 s", "wan-policed", over("wan-policed", policed_text)),
        (
            "demo without a capacity: p99 FCT over ideal CCT, drops",
            "1.15, 0.1 %",
            "wan-demo",
            over("wan-demo", demo_text),
        ),
        ("coordinator 90 ms away over one beside, simulated", "0.95", "sim-far", far_simulated()),
        (
            "the same on real sockets",
            "0.95",
            "wan-far",
            over(
                "wan-far",
                lambda one: held(one["far"]["far_over_beside"] >= 0.95, f"{one['far']['far_over_beside']:.3f}"),
            ),
        ),
        ("both directions at once over one way", "0.95", "wan-two-way", over("wan-two-way", two_way_text)),
        ("weights over 10 s; an urgent message, simulated", "5 %", "test-policy", passed("test-policy")),
        ("three sites behind one line: used", "93 %", "wan-three-sites", over("wan-three-sites", three_sites_text)),
        (
            "the same weights on real sockets",
            "5 %",
            "wan-weights",
            over(
                "wan-weights", lambda one: held(one["weights"]["off_by"] <= 0.05, f"{one['weights']['off_by']:.1%} off")
            ),
        ),
        (
            "p99 of a small urgent message under a bulk job",
            "2 RTT + a slot",
            "wan-urgent",
            over("wan-urgent", urgent_text),
        ),
        ("all bounds of a link, simulated at 1 Gbit/s", "all", "sim-targets", over("sim-targets", targets_text)),
        ("the same burst, simulated and on real sockets", "10 %", "test-agreement", passed("test-agreement")),
        ("field cases 5, 12, 20, 28, 29, 44", "pass", "test-cases", passed("test-cases")),
        ("decisions", "50,000/s; 3,000/s, 5 ms", "bench-grants", over("bench-grants", grants_text)),
        (
            "a simulated hour of 64 agents",
            "60 s",
            "sim-hour",
            over("sim-hour", lambda one: held(one["long"]["clock_s"] < 60, f"{one['long']['clock_s']:.1f} s")),
        ),
    ]
    commands = {item.name: item.text for item in items()}
    rows = ["| what | bound | figure | command |", "| --- | --- | --- | --- |"]
    return rows + [f"| {what} | {bound} | {figure} | `{commands[name]}` |" for what, bound, name, figure in lines]


def rate_table() -> list[str]:
    """The same trace from 10 Mbit/s to 100 Gbit/s."""
    rows = ["| rate | used, queue p99, loss |", "| --- | --- |"]
    for rate in RATES:
        rows.append(f"| {rate} | {link_cell(read(f'sim-rate-{rate}'), LINKS['moderate', '1bdp'])} |")
    return rows


def command_table() -> list[str]:
    """Every run and its command."""
    rows = ["| result | command |", "| --- | --- |"]
    shown = [item for item in items() if item.part != evaluate_pipeline.PART]
    return rows + [f"| {item.name} | `{item.text}` |" for item in shown]


TABLES: dict[str, Callable[[], list[str]]] = {
    "link": link_table,
    "fct": fct_table,
    "step": step_table,
    "rates": rate_table,
    "rest": rest_table,
    "commands": command_table,
}


def tables_of(part: str | None) -> dict[str, tuple[str, Callable[[], list[str]]]]:
    """By name: in which document, and its lines. Of one part, or of all."""
    links = {name: (DOCUMENT, table) for name, table in TABLES.items()}
    if part == evaluate_pipeline.PART:
        return dict(evaluate_pipeline.TABLES)
    return links if part is not None else {**links, **evaluate_pipeline.TABLES}


def write(part: str | None, docs: Path, incomplete: bool = False) -> None:
    """Tables into the documents, pictures beside them.

    Where nothing of the links has been measured their tables stay as they are. So does a table of pipelines of which
    something is missing, unless it may be ``incomplete``: its figures are worth nothing beside ones from other code.
    """
    measured = any(item.result.exists() for item in items() if item.part != evaluate_pipeline.PART)
    texts: dict[str, str] = {}
    for name, (document, table) in tables_of(part).items():
        text = texts.get(document) or (docs / document).read_text()
        lines = table()
        simulated = name in evaluate_pipeline.TABLES
        if incomplete or (MISSING not in "\n".join(lines) if simulated else measured):
            text = fill(text, name, lines)
        else:
            print(f"something is missing for the table {name!r}: it stays as it is")
        texts[document] = text
    pictures = docs / "pictures"
    pictures.mkdir(exist_ok=True)
    for name in PICTURED + evaluate_pipeline.PICTURED:
        source = runs.RESULTS / f"{name}.png"
        if source.exists():
            shutil.copyfile(source, pictures / f"{name}.png")
    if part in (None, evaluate_pipeline.PART):
        evaluate_pipeline.draw_parts(pictures / f"{evaluate_pipeline.BARS}.png")
    for document, text in texts.items():
        (docs / document).write_text(text)
        print(f"written: {docs / document}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 1 when a run failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="say what there is and run nothing")
    parser.add_argument("--part", choices=("sim", "wan", "other", "pipeline"), help="only these")
    parser.add_argument("--only", metavar="PATTERN", default="*", help="only names like this")
    parser.add_argument("--again", action="store_true", help="also what was measured before")
    parser.add_argument("--write", action="store_true", help="only write the tables")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="of the part pipeline, at once")
    parser.add_argument(
        "--quick", action="store_true", help="the part pipeline with tiny steps, into build/evaluation/quick alone"
    )
    args = parser.parse_args(arguments)
    docs, everything, part = DOCS, items(), args.part
    if args.quick:
        runs.RESULTS = runs.RESULTS / "quick"
        docs, everything, part = (
            runs.RESULTS / "docs",
            list(evaluate_pipeline.items(quick=True)),
            evaluate_pipeline.PART,
        )
        docs.mkdir(parents=True, exist_ok=True)
        for document in {document for document, _ in evaluate_pipeline.TABLES.values()}:
            shutil.copyfile(DOCS / document, docs / document)
    runs.RESULTS.mkdir(parents=True, exist_ok=True)
    chosen = [item for item in everything if part in (None, item.part) and fnmatch.fnmatchcase(item.name, args.only)]
    if args.list:
        for item in chosen:
            print(f"{'there' if item.is_there else '-':6} {item.name:28} {item.text}")
        return 0
    ok = True
    if not args.write:
        due = [item for item in chosen if args.again or not item.is_there]
        # What is simulated measures no time, so it may run side by side; all else runs alone.
        simulated = [item for item in due if item.part == evaluate_pipeline.PART]
        with ThreadPoolExecutor(max_workers=max(1, args.jobs)) as pool:
            ok = all(list(pool.map(run, simulated)))
        for item in due:
            if item not in simulated:
                ok = run(item) and ok
    write(part, docs, incomplete=args.quick)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
