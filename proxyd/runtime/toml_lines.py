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
    """Path of each table, key and text in a list, like ``("link", 0, "rtt")``, to its line, counted from 1."""
    lines: dict[Path, int] = {}
    arrays: dict[Path, int] = {}
    table: Path = ()
    inside: str | None = None  # the quotes that end the multi-line string we are in
    all_lines = text.splitlines()
    for number, line in enumerate(all_lines, 1):
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
            if line[key.end() :].lstrip().startswith("["):
                rest = "\n".join([line[key.end() :], *all_lines[number:]])
                for index, there in enumerate(_elements(rest, number)):
                    lines.setdefault((*path, index), there)
        quotes = _MULTI.findall(line)
        if len(quotes) % 2 == 1:
            inside = quotes[-1]
    return lines


def _elements(text: str, first_line: int) -> list[int]:
    """The lines of an array's texts, in order; ``text`` begins at its bracket, on ``first_line``.

    Arrays of texts is all that the configuration has. Commas and brackets inside quotes and comments don't count.
    """
    found: list[int] = []
    line, depth, quote, comment = first_line, 0, "", False
    for char, before in zip(text, " " + text, strict=False):
        if char == "\n":
            line, comment = line + 1, False
        elif comment:
            continue
        elif quote:
            if char == quote and before != "\\":
                quote = ""
        elif char in "\"'":
            quote = char
            if depth == 1:
                found.append(line)
        elif char == "#":
            comment = True
        elif char in "[]":
            depth += 1 if char == "[" else -1
            if not depth:
                break
    return found


def line_of(lines: dict[Path, int], path: Path) -> int:
    """The line of *path* or of the nearest key around it; 1 when the text knows nothing of it."""
    while path and path not in lines:
        path = path[:-1]
    return lines.get(path, 1)


def _parts(dotted: str) -> Path:
    return tuple(part.strip("\"'") for part in _PART.findall(dotted))
