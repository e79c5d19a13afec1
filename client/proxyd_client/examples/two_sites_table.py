"""What :mod:`.train_two_sites` prints: one line per way, and whether all of them trained the same. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

COLUMNS = ("way", "iteration", "faster", "held", "waited", "decision", "gradients", "loss", "at last")
GLOO = "gloo"


def reference(ways: dict[str, dict[str, Any]]) -> str:
    """The way that others are compared with: gloo's faster one, else the first."""
    gloo = [name for name in ways if name.startswith(GLOO)]
    return min(gloo or list(ways)[:1], key=lambda name: float(ways[name]["iteration_median_seconds"]))


def rows(figures: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """A line for each way, as text. Waits and decisions are the first stage's."""
    ways = figures["ways"]
    other_s = ways[reference(ways)]["iteration_median_seconds"]
    for name, one in ways.items():
        waits_s, decision_s = one.get("waits_seconds"), one.get("decision_p50_seconds")
        yield (
            name,
            f"{one['iteration_median_seconds']:.3f} s",
            f"{other_s / one['iteration_median_seconds']:.2f}x",
            f"{one['peak_activation_bytes'] / 1e6:.1f} MB",
            "" if waits_s is None else f"{sum(waits_s.values()):.3f} s",
            "" if decision_s is None else f"{decision_s * 1e6:.0f} us",
            "equal" if one["gradients_equal"] and one["losses_equal"] else "DIFFERENT",
            f"{one['losses'][0]:.4f}",
            f"{one['losses'][-1]:.4f}",
        )


def remarks(figures: dict[str, Any]) -> Iterator[str]:
    """What a reader of the table has to know."""
    ways = figures["ways"]
    yield (
        f"iteration: median of {figures['iterations']} steps, ways taking turns in the same ranks, without "
        f"{figures['warmups']} of warm-up; faster: than {reference(ways)}, the better one of gloo; held: "
        "activations of the first stage at most; waited, decision (median): of the first stage in its last step."
    )
    equal = all(one["gradients_equal"] and one["losses_equal"] for one in ways.values())
    yield (
        "Gradients and losses of every step: bitwise equal in all ways, and to the whole model in one process."
        if equal
        else "GRADIENTS OR LOSSES DIFFER from those of the whole model in one process: report this."
    )
    longest = max((one["losses"] for one in ways.values()), key=len)
    same = all(one["losses"] == longest[: len(one["losses"])] for one in ways.values())
    for name, one in ways.items():
        if not same or one["losses"] is longest:
            yield f"loss of {'all ways' if same else name}: {' '.join(f'{loss:.4f}' for loss in one['losses'])}"
        if len(one["losses"]) < len(longest):
            yield f"{name} stopped after {len(one['losses'])} steps: it would have taken most of the time."
    for name, one in ways.items():
        if "decisions" in one:
            waits = ", ".join(f"{why} {seconds:.3f} s" for why, seconds in one["waits_seconds"].items())
            yield (
                f"{name}, first stage, last step: predictions before {one['predictions']} of {one['decisions']} "
                f"decisions, off by {one['prediction_error_seconds'] * 1e3:.0f} ms; waits: {waits or 'none'}"
                + (f"; {one['moved_out']} activations moved out" if one.get("moved_out") else "")
                + (f"; {one['fallback']}" if one["fallback"] else "")
            )
    told = figures.get("proxyd")
    if told:
        yield (
            f"proxyd's ways sent {told['transferred_bytes'] / 1e6:.1f} MB, {told['granted_bytes'] / 1e6:.1f} MB under "
            f"grants (resent chunks and warm-up included), {told['unscheduled_bytes'] / 1e6:.1f} MB too small for one, "
            f"{told['fallback_bytes'] / 1e6:.1f} MB without."
        )


def text(figures: dict[str, Any]) -> str:
    """The table, for a terminal."""
    lines = [COLUMNS, *rows(figures)]
    widths = [max(len(line[place]) for line in lines) for place in range(len(COLUMNS))]
    table = [
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    return "\n".join([*table, "", *remarks(figures)])
