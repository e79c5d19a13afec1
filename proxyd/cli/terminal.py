"""How wide the terminal is and whether it takes colours. NO_COLOR (no-color.org) and FORCE_COLOR are heeded."""

from __future__ import annotations

import os
import shutil
import sys

PIPE_COLUMNS = 200
"""Without a terminal nothing needs to be cut; programs that read lines get long ones."""
_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}


def has_colours() -> bool:
    """Whether what goes to stdout may be coloured."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return sys.stdout.isatty() and os.environ.get("TERM", "") != "dumb"


def paint(text: str, style: str) -> str:
    """``text`` in a style of :data:`_CODES`, where colours are wanted."""
    return f"\x1b[{_CODES[style]}m{text}\x1b[0m" if has_colours() else text


def width() -> int:
    """Columns to write into: the terminal's, or COLUMNS; at least 40."""
    return max(40, shutil.get_terminal_size((120 if sys.stdout.isatty() else PIPE_COLUMNS, 24)).columns)
