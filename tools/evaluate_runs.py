"""What every part of the evaluation shares: a run is a command that a person can type, and its figures stay in a file.

Of a simulation the figures depend on the command and the code alone. So such a run says which files its code is in
(``code``), and what is there of it counts only while command and files are those that it came from.
"""

from __future__ import annotations

import functools
import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "build" / "evaluation"
MISSING = "not measured yet"
TIMEOUT_S = 900.0


@dataclass(frozen=True)
class Item:
    """One run. ``{out}`` and ``{png}`` in its command stand for its files."""

    name: str
    part: str
    command: tuple[str, ...]
    code: tuple[str, ...] = ()
    """Patterns of the files that its figures depend on; none: what was measured stays until it is measured again."""

    @property
    def result(self) -> Path:
        return RESULTS / f"{self.name}.json"

    @property
    def picture(self) -> Path:
        return RESULTS / f"{self.name}.png"

    @property
    def text(self) -> str:
        """As a person would type it."""
        return " ".join(word.format(out=f"{self.name}.json", png=f"{self.name}.png") for word in self.command)

    @property
    def is_test(self) -> bool:
        return self.command[0] == "pytest"

    @property
    def key(self) -> str:
        """Of command and code; empty where no code is named."""
        if not self.code:
            return ""
        return hashlib.sha256(f"{self.text}\n{digest(self.code)}".encode()).hexdigest()

    @property
    def is_there(self) -> bool:
        """Its figures are there, and come from this command and this code."""
        if not self.result.exists():
            return False
        path = self.result.with_suffix(".key")
        return not self.code or (path.exists() and path.read_text() == self.key)


@functools.cache
def digest(patterns: tuple[str, ...]) -> str:
    """Of the content of all files that match."""
    found = hashlib.sha256()
    for path in sorted({path for pattern in patterns for path in ROOT.glob(pattern)}):
        found.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return found.hexdigest()


def command(name: str, part: str, text: str, code: tuple[str, ...] = ()) -> Item:
    """A ``proxyd`` command."""
    return Item(name, part, ("proxyd", *text.split()), code)


def tests_of(name: str, part: str, path: str) -> Item:
    """A file of tests: passed or not, and its last line."""
    return Item(name, part, ("pytest", "-q", path))


def run(item: Item) -> bool:
    """Run one; its figures are there afterwards, or a file that says why not."""
    words = [word.format(out=str(item.result), png=str(item.picture)) for word in item.command]
    module = ["-m", "pytest"] if item.is_test else ["-m", "proxyd.cli.main"]
    failed = RESULTS / f"{item.name}.failed.txt"
    failed.unlink(missing_ok=True)
    begun_s = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, *module, *words[1:]],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        output, code = done.stdout + done.stderr, done.returncode
    except subprocess.TimeoutExpired as error:
        output, code = f"not done after {error.timeout:g} s", -1
    took_s = time.monotonic() - begun_s
    if item.is_test:
        last = output.strip().splitlines()[-1] if output.strip() else "no output"
        item.result.write_text(json.dumps({"passed": code == 0, "summary": last}) + "\n")
    # `simulate targets` answers 1 when a bound is missed; its table is there all the same.
    ok = item.result.exists() and item.result.stat().st_mtime > time.time() - took_s - 1
    if not ok or (item.is_test and code != 0):
        failed.write_text(f"{item.text}\nexit code {code}\n\n{output[-4000:]}\n")
    if ok and item.code:
        item.result.with_suffix(".key").write_text(item.key)
    print(f"{'ok' if ok else 'FAILED':7} {took_s:6.1f} s  {item.name}", flush=True)
    return ok


def read(name: str) -> Any:
    """The figures of a run; None: there are none."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def fill(text: str, name: str, lines: Sequence[str]) -> str:
    """A document's text with a table in its place. Raises LookupError for a document that has none."""
    start, end = f"<!-- table: {name} -->", f"<!-- end of {name} -->"
    before, found, rest = text.partition(start)
    if not found or end not in rest:
        raise LookupError(f"there is no place for the table {name!r}: put {start} and {end} there")
    return f"{before}{start}\n" + "\n".join(lines) + f"\n{end}{rest.partition(end)[2]}"
