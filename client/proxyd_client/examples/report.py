"""What a training script says while it runs, and what it leaves behind."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path


def add_training_arguments(parser: argparse.ArgumentParser) -> None:
    """How long, over what, and where the figures go."""
    parser.add_argument("--backend", default="proxyd", help="proxyd or gloo (default: proxyd)")
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps (default: 10)")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="of AdamW (default: 3e-3)")
    parser.add_argument("--report", metavar="FILE.json", type=Path, help="write the figures there at the end")


class Report:
    """Kept by every rank, spoken by the one that knows the loss. ``tokens``: of a step, of all ranks together."""

    def __init__(self, options: argparse.Namespace, tokens: int, *, speaks: bool) -> None:
        self._options, self._tokens, self._speaks = options, tokens, speaks
        self._seconds: list[float] = []
        self._losses: list[float] = []
        self._began_s = time.monotonic()

    def step(self, loss: float) -> None:
        """A step has ended."""
        now_s = time.monotonic()
        self._seconds.append(now_s - self._began_s)
        self._losses.append(loss)
        self._began_s = now_s
        if self._speaks:
            speed = self._tokens / self._seconds[-1]
            print(f"step {len(self._losses)}: loss {loss:.4f}, {speed:,.0f} tokens/s", file=sys.stderr, flush=True)

    def close(self) -> None:
        """The first step agrees on shapes and finds the network: it is in no figure."""
        if not self._speaks or self._options.report is None:
            return
        seconds = statistics.median(self._seconds[1:] or self._seconds)
        figures = {
            "backend": self._options.backend,
            "steps": len(self._losses),
            "step_seconds": seconds,
            "tokens_per_s": self._tokens / seconds,
            "losses": self._losses,
        }
        self._options.report.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
