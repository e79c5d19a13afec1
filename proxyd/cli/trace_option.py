"""A trace that an option names: a file, where the word is no class."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from proxyd.core.errors import ConfigError
from proxyd.core.trace_files import parse_trace
from proxyd.core.traces import RateTrace


def read_trace(name: str, words: Sequence[str]) -> RateTrace:
    """The trace in a file; what its reader should know of it goes to stderr.

    :param words: what the option takes besides. Raises ConfigError for what is neither, and for what is no trace.
    """
    try:
        text = Path(name).read_text(encoding="ascii")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else "it is not a text file"
        raise ConfigError(
            f"--trace {name}: no such class, and as a file it can't be read",
            why=why,
            next_step=f"Classes: {', '.join(words)}",
        ) from error
    found = parse_trace(text, name)
    if found.remark:
        print(f"{name}: {found.remark}", file=sys.stderr)
    return found.trace
