"""docs/errors.md lists every error with its code, what it is a kind of and its exit code, and nothing else."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
TREES = {"Commands and daemons": "proxyd", "Trainers": "client/proxyd_client"}


class Kind(NamedTuple):
    """One class of errors, as its source says it."""

    bases: tuple[str, ...]
    code: str | None
    exit_code: int | None


def kinds_of(tree: str) -> dict[str, Kind]:
    """All classes below ``ProxydError`` in a source tree, by name. Read, not imported: torch need not be there."""
    classes: dict[str, Kind] = {}
    for path in sorted((ROOT / tree).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                bases = tuple(ast.unparse(base).rpartition(".")[2] for base in node.bases)
                classes[node.name] = Kind(bases, *(own(node, field) for field in ("code", "exit_code")))
    found = {"ProxydError": classes["ProxydError"]}
    while more := {name for name, kind in classes.items() if name not in found and found.keys() & set(kind.bases)}:
        found |= {name: classes[name] for name in more}
    return found


def own(node: ast.ClassDef, field: str) -> object:
    """What a class itself gives to a field, None: nothing."""
    exits = {"EXIT_FAILED": 1, "EXIT_USAGE": 2}
    for line in node.body:
        target = line.targets[0] if isinstance(line, ast.Assign) else getattr(line, "target", None)
        value = getattr(line, "value", None)
        if isinstance(target, ast.Name) and target.id == field and value is not None:
            return value.value if isinstance(value, ast.Constant) else exits.get(ast.unparse(value))
    return None


def exit_code(kinds: dict[str, Kind], name: str) -> int:
    code = kinds[name].exit_code
    return code if code is not None else exit_code(kinds, next(base for base in kinds[name].bases if base in kinds))


@pytest.mark.parametrize(("title", "tree"), TREES.items())
def test_every_error_is_listed_with_its_code(title: str, tree: str) -> None:
    kinds = kinds_of(tree)
    section = (ROOT / "docs/errors.md").read_text().partition(f"## {title}")[2].partition("\n## ")[0]
    lines = [re.split(r" *\| *", line.strip("| ")) for line in section.splitlines()]
    rows = [[cell.strip("`") for cell in line] for line in lines]
    listed = {row[1]: row for row in rows if len(row) >= 4 and row[1] in kinds}
    assert listed.keys() == kinds.keys(), "each class has its row"
    for name, kind in kinds.items():
        assert kind.code == listed[name][0], f"the code of {name}"
        assert re.fullmatch(r"[a-z]+(-[a-z]+)*", str(kind.code)), kind.code
        parents = [base for base in kind.bases if base in kinds]
        assert listed[name][2] == (kinds[parents[0]].code if parents else ""), f"what {name} is a kind of"
        if tree == "proxyd":
            assert listed[name][3] == str(exit_code(kinds, name)), f"the exit code of {name}"
    codes = [kind.code for kind in kinds.values()]
    assert len(set(codes)) == len(codes), "no two classes share one"
