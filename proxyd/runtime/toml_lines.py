"""On which line of a TOML text a key stands.

The standard parser gives values without places, and a message without a line sends people searching. This is no second
parser: the text is already known to be valid TOML, so a scan for headers and keys is enough. Where it sees nothing (an
inline table, a key inside a multi-line string) it answers with the nearest enclosing key.
"""

from __future__ import annotations

import re

Path = tuple[str | int, ...]

_HEADER = re.compile(r"\s*(\[\[?)\s*([^\[\]]+?)\s*\]\]?\s*(?:#.*)?")
_KEY = re.compile(r"""\s*((?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*'))*)\s*=""")
_PART = re.compile(r"""[A-Za-z0-9_-]+|"[^"]*"|'[^']*'""")
_MULTI = re.compile(r'"""|' + r"'''")


def key_lines(text: str) -> dict[Path, int]:
    """Path of each table and key, like ``("link", 0, "rtt")``, to its line, counted from 1."""
    lines: dict[Path, int] = {}
    arrays: dict[Path, int] = {}
    table: Path = ()
    inside: str | None = None  # the quotes that end the multi-line string we are in
    for number, line in enumerate(text.splitlines(), 1):
        if inside is not None:
            if inside in line:
                inside = None
            continue
        if header := _HEADER.fullmatch(line):
            table = _parts(header[2])
            if header[1] == "[[":
                lines.setdefault(table, number)
                arrays[table] = arrays.get(table, -1) + 1
                table = (*table, arrays[table])
            lines.setdefault(table, number)
        elif key := _KEY.match(line):
            path = (*table, *_parts(key[1]))
            for end in range(len(table) + 1, len(path) + 1):
                lines.setdefault(path[:end], number)
        quotes = _MULTI.findall(line)
        if len(quotes) % 2 == 1:
            inside = quotes[-1]
    return lines


def line_of(lines: dict[Path, int], path: Path) -> int:
    """The line of *path* or of the nearest key around it; 1 when the text knows nothing of it."""
    while path and path not in lines:
        path = path[:-1]
    return lines.get(path, 1)


def _parts(dotted: str) -> Path:
    return tuple(part.strip("\"'") for part in _PART.findall(dotted))
