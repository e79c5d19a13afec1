#!/usr/bin/env python3
"""Writes the part of docs/cli.md that lists every command and option, from the parsers themselves.

tools/cli_reference.py            write it
tools/cli_reference.py --check    exit code 1 if it is not up to date
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOC = ROOT / "docs/cli.md"
BEGIN = "<!-- begin: every command and option (tools/cli_reference.py writes this) -->\n"
END = "<!-- end: every command and option -->\n"


def reference() -> str:
    """All commands in the order of ``proxyd --help``."""
    sys.path.insert(0, str(ROOT))
    from proxyd.cli.main import COMMANDS, command_of

    parts = []
    for name, (_, summary) in COMMANDS.items():
        _, parser = command_of(name)
        parts.append(f"### `proxyd {name}`\n\n{summary[0].upper()}{summary[1:]}.\n")
        rows = [_row(parser, action) for action in parser._actions if not isinstance(action, argparse._HelpAction)]
        if rows:
            parts.append("\n".join(["| option | meaning |", "| --- | --- |", *rows]) + "\n")
    return "\n".join(parts)


def _row(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    value = ""
    if action.nargs != 0:
        value = str(
            action.metavar or ("{" + ",".join(map(str, action.choices)) + "}" if action.choices else action.dest)
        )
        if action.option_strings and action.metavar is None and not action.choices:
            value = value.upper()
        if action.nargs == "?":
            value = f"[{value}]"
    shown = " ".join(part for part in (", ".join(action.option_strings), value) if part)
    text = parser._get_formatter()._expand_help(action) if action.help else ""
    return f"| `{shown.replace('|', chr(92) + '|')}` | {text.replace('|', chr(92) + '|')} |"


def main() -> int:
    text = DOC.read_text()
    before, found, rest = text.partition(BEGIN)
    _, closed, after = rest.partition(END)
    if not found or not closed:
        sys.exit(f"{DOC} has no lines {BEGIN.strip()} and {END.strip()}")
    wanted = f"{before}{BEGIN}\n{reference()}\n{END}{after}"
    if "--check" in sys.argv[1:]:
        if wanted != text:
            print("docs/cli.md is not what the parsers say; run tools/cli_reference.py", file=sys.stderr)
        return int(wanted != text)
    DOC.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
