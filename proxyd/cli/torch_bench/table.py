"""What the PyTorch benchmarks print."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

LATE_S = 0.0005


def table_of(*names: str) -> Table:
    """Empty; the first column is text."""
    table = Table(header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for number, name in enumerate(names):
        table.add_column(name, justify="right" if number else "left", no_wrap=True)
    return table


def style(way: str) -> str | None:
    """Ours stands out."""
    return "bold green" if way == "proxyd" else None


def say(console: Console, text: str) -> None:
    """A line that is not dressed up."""
    console.print(text, highlight=False, soft_wrap=True)


def print_pipeline(console: Console, description: str, results: Sequence[dict[str, Any]]) -> None:
    """A table per ratio."""
    say(console, description)
    for result in results:
        say(
            console,
            f"\n{result['schedule']}, {result['pipelines']} pipelines, {result['microbatches']} micro-batches of "
            f"{result['activation_bytes'] / 1e6:.2f} MB: communication {result['communication_seconds']:.2f} s / "
            f"computation {result['compute_seconds']:.2f} s = {result['ratio']:.2f}",
        )
        table = table_of("way", "iteration", "x", "act p50", "p99", "grad p50", "p99", "WAN MB", "drops")
        ways = result["ways"]
        ours = ways.get("proxyd", next(iter(ways.values())))["iteration_median_seconds"]
        for way, one in ways.items():
            activation, gradient = one["activation_fct_seconds"], one["gradient_fct_seconds"]
            table.add_row(
                way,
                f"{one['iteration_median_seconds']:.3f} s",
                f"{one['iteration_median_seconds'] / ours:.2f}",
                *(f"{values[share]:.3f} s" for values in (activation, gradient) for share in ("p50", "p99")),
                f"{one['wan_bytes_per_iteration'] / 1e6:.1f}",
                f"{one['dropped_packets_per_iteration']:.0f}",
                style=style(way),
            )
        console.print(table)
        late(console, result)
    say(
        console,
        "iteration: median, ways taking turns; x: beside proxyd; act, grad: from isend until received, of activations "
        "and of their gradients; WAN MB: with headers, both ways, of one iteration; drops: packets, of one iteration.",
    )


def late(console: Console, result: dict[str, Any]) -> None:
    """A word where the machine was too busy for its figures to be the link's."""
    if result["emulator_late_p99_seconds"] > LATE_S:
        say(
            console,
            f"The emulator was {result['emulator_late_p99_seconds'] * 1e3:.1f} ms late at times (p99): this machine is "
            "busy, and figures are worse than the link's.",
        )


def print_allreduce(console: Console, description: str, result: dict[str, Any]) -> None:
    """A table per size."""
    say(console, f"{description}; 2 sites x {result['ranks_per_site']} ranks")
    table = table_of("all-reduce", "way", "time", "x", "WAN MB", "x 2 tensors", "drops")
    for size in result["sizes"]:
        ours = size["ways"].get("proxyd", next(iter(size["ways"].values())))["median_seconds"]
        for way, one in size["ways"].items():
            table.add_row(
                f"{size['bytes'] / (1 << 20):g} MiB",
                way,
                f"{one['median_seconds']:.3f} s",
                f"{one['median_seconds'] / ours:.2f}",
                f"{one['wan_bytes'] / 1e6:.1f}",
                f"{one['wan_bytes'] / size['bytes'] / 2:.3f}",
                f"{one['dropped_packets']:.0f}",
                style=style(way),
            )
    console.print(table)
    late(console, result)
    say(
        console,
        "time: median, ways taking turns; x: beside proxyd; WAN MB: with headers, both directions; x 2 tensors: that "
        "over twice the tensor's size, which is the least.",
    )


def print_local(console: Console, result: dict[str, Any]) -> None:
    """One line per way."""
    table = table_of("way", "64 MiB", "CPU s/GB", "4 KiB p50", "p99")
    for way, one in result["ways"].items():
        table.add_row(
            way,
            f"{one['gb_per_s']:.2f} GB/s",
            f"{one['cpu_s_per_gb']:.2f}",
            f"{one['ping_p50_us']:.0f} us",
            f"{one['ping_p99_us']:.0f} us",
            style=style(way),
        )
    console.print(table)
    say(console, "CPU: of both ranks and the daemons; 4 KiB: there and back. Medians of rounds in turns.")


def print_example(console: Console, description: str, result: dict[str, Any]) -> None:
    """One line per way."""
    say(console, f"{description}; 2 sites x {result['ranks_per_site']} ranks")
    table = table_of("way", "tokens/s", "step", "WAN MB", "drops", "first loss", "last loss")
    for way, one in result["ways"].items():
        table.add_row(
            way,
            f"{one['tokens_per_s']:,.0f}",
            f"{one['step_seconds']:.3f} s",
            f"{one['wan_bytes'] / 1e6:.1f}",
            str(one["dropped_packets"]),
            f"{one['losses'][0]:.6f}",
            f"{one['losses'][-1]:.6f}",
            style=style(way),
        )
    console.print(table)
    late(console, result)
    say(console, "step: median, without the first; WAN MB: with headers, both directions, of the whole run.")


def print_schedules(console: Console, description: str, results: Sequence[dict[str, Any]]) -> None:
    """One setting in full, or one line for each of many."""
    say(console, description)
    if len(results) > 1:
        print_settings(console, results)
    else:
        print_setting(console, results[0])


def print_setting(console: Console, result: dict[str, Any]) -> None:
    """A line per way."""
    say(
        console,
        f"{result['setting']}: {result['microbatches']} micro-batches of {result['message_bytes'] / 1e6:.2f} MB, "
        f"communication {result['communication_seconds']:.2f} s / computation {result['compute_seconds']:.2f} s = "
        f"{result['ratio']:.2f}",
    )
    table = table_of("way", "iteration", "x", "held MB", "waited", "decision", "drops")
    other_s = best_of_gloo(result)
    for way, one in result["ways"].items():
        first = one["stages"][0]
        chosen = "waits_s" in first
        table.add_row(
            way,
            f"{one['iteration_median_seconds']:.3f} s",
            f"{other_s / one['iteration_median_seconds']:.2f}",
            ", ".join(f"{held / 1e6:.1f}" for held in one["peak_activation_bytes"]),
            f"{sum(first['waits_s'].values()):.3f} s" if chosen else "",
            f"{first['decision_p50_us']:.0f}, {first['decision_p99_us']:.0f} us" if chosen else "",
            f"{one['dropped_packets_per_iteration']:.0f}",
            style="bold green" if way in ("run-time", "offload") else None,
        )
    console.print(table)
    late(console, result)
    say_offload(console, result["ways"])
    for way, one in result["ways"].items():
        for stage, said in enumerate(one["stages"]):
            if "waits_s" in said:
                say(console, f"{way}, stage {stage}: {words(said)}")
    say(
        console,
        "iteration: median, ways taking turns; x: faster than the better one of gloo; held: activations at most, by "
        "stage; waited: the first stage, in the middle one of its iterations; decision: p50 and p99; drops: packets. "
        f"Losses and gradients: {result['gradients']}.",
    )


def say_offload(console: Console, ways: dict[str, Any]) -> None:
    """What moving activations out saves and costs, beside as many as are wanted and beside as few on the device."""
    for other in ("run-time", "few"):
        if "offload" not in ways or other not in ways:
            continue
        shares = {
            name: [mine / max(1, theirs) for mine, theirs in zip(ways["offload"][name], ways[other][name], strict=True)]
            for name in ("peak_activation_bytes", "peak_resident_bytes")
        }
        took = ways["offload"]["iteration_median_seconds"] / ways[other]["iteration_median_seconds"]
        say(
            console,
            f"offload beside {other}: iteration x {took:.3f}; activations on the device, by stage, "
            f"{', '.join(f'{share:.0%}' for share in shares['peak_activation_bytes'])}; peak resident memory of the "
            f"process beyond its start, {', '.join(f'{share:.0%}' for share in shares['peak_resident_bytes'])}",
        )


def best_of_gloo(result: dict[str, Any]) -> float:
    """The iteration that others are compared with: gloo's shorter one, else that of the first way."""
    medians = {way: float(one["iteration_median_seconds"]) for way, one in result["ways"].items()}
    return min([one for way, one in medians.items() if way.startswith("gloo")] or list(medians.values())[:1])


def words(said: dict[str, Any]) -> str:
    """What a stage's schedule tells of one iteration."""
    waits = ", ".join(f"{why} {seconds * 1e3:.0f} ms" for why, seconds in said["waits_s"].items() if seconds > 0.0005)
    told = (
        f"waits: {waits or 'none'}; backwards split {said['split_backwards']}, whole {said['whole_backwards']}; "
        f"predictions before {said['predictions']} of {said['decisions_made']} decisions, "
        f"off by {said['prediction_error_s'] * 1e3:.1f} ms"
    )
    moves = said["offload"]
    if moves:
        told += (
            f"; moved out {moves['moved_out']} ({moves['moved_bytes'] / 1e6:.1f} MB, "
            f"{moves['host_peak_bytes'] / 1e6:.1f} at once), void {moves['void']}, waited for {moves['surprises']}"
        )
    return "; ".join(filter(None, [told, moves and moves["trouble"], said["fallback"]]))


def print_settings(console: Console, results: Sequence[dict[str, Any]]) -> None:
    """How the ways compare from setting to setting."""
    ways = list(results[0]["ways"])
    table = table_of("setting", *ways, "last / one before")
    for result in results:
        medians = [result["ways"][way]["iteration_median_seconds"] for way in ways]
        share = medians[-1] / medians[-2] if len(medians) > 1 else 1.0
        table.add_row(
            result["setting"],
            *(f"{median:.3f} s" for median in medians),
            f"{share:.3f}",
            style="bold red" if share > 1.02 else None,
        )
    console.print(table)
    say(console, f"Losses and gradients: {results[0]['gradients']}.")
