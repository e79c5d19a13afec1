"""Results of a suite as lines of JSON, one a test, so that another process can read them while it runs."""

from __future__ import annotations

import json
import unittest
from collections import Counter
from typing import Any, TextIO


class Lines(unittest.TestResult):
    """Writes ``{"name", "outcome", "why"}``; outcomes are passed, failed and skipped."""

    def __init__(self, file: TextIO) -> None:
        super().__init__()
        self._file = file
        self._skipped: str | None = None

    def _say(self, test: Any, outcome: str, why: str) -> None:
        name = test.id().rsplit(".", 1)[-1]
        print(json.dumps({"name": name, "outcome": outcome, "why": why}), file=self._file, flush=True)

    def addSuccess(self, test: Any) -> None:
        self._say(test, "passed", "")

    def addFailure(self, test: Any, err: Any) -> None:
        super().addFailure(test, err)
        self._say(test, "failed", self.failures[-1][1])

    def addError(self, test: Any, err: Any) -> None:
        super().addError(test, err)
        self._say(test, "failed", self.errors[-1][1])

    def addSkip(self, test: Any, reason: str) -> None:
        self._skipped = reason  # where a rank said it, the reason is known after tearDown

    def stopTest(self, test: Any) -> None:
        if self._skipped is not None:
            said = getattr(test, "reasons", [])
            self._say(test, "skipped", "; ".join(said) if said and "subprocess log" in self._skipped else self._skipped)
            self._skipped = None
        super().stopTest(test)


def summary(results: list[dict[str, str]]) -> str:
    """In pytest's words."""
    counts = Counter(result["outcome"] for result in results)
    return ", ".join(f"{counts[outcome]} {outcome}" for outcome in ("passed", "skipped", "failed") if counts[outcome])
