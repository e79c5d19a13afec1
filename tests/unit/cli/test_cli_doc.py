"""docs/cli.md lists what the parsers take, and every exit code."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from proxyd.cli.main import COMMANDS, EXIT_INTERRUPTED, command_of
from proxyd.core import errors

ROOT = Path(__file__).resolve().parents[3]
DOC = (ROOT / "docs/cli.md").read_text()
READS = ("status", "why", "policy show", "health", "ping", "doctor", "check", "version", "top", "drain", "undrain")
"""Commands that tell something; each can tell it to a program."""


def test_the_reference_is_what_the_parsers_say() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools/cli_reference.py"), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_and_option_is_documented_with_a_meaning(name: str) -> None:
    _, parser = command_of(name)
    section = DOC.partition(f"### `proxyd {name}`\n")[2].partition("\n### ")[0]
    assert section, f"proxyd {name} is not in docs/cli.md"
    for action in parser._actions:
        for option in action.option_strings:
            assert option in ("-h", "--help") or f"`{option}" in section, option
        assert action.help, f"proxyd {name}: {action.dest} has no help"


@pytest.mark.parametrize("name", READS)
def test_what_reads_has_json(name: str) -> None:
    _, parser = command_of(name)
    assert any("--json" in action.option_strings for action in parser._actions)


def test_every_exit_code_is_documented() -> None:
    table = DOC.partition("## Exit codes\n")[2].partition("\n## ")[0]
    documented = {int(code): words for code, words in re.findall(r"^\| (\d+) \|(.+)$", table, re.MULTILINE)}
    codes = {value for name, value in vars(errors).items() if name.startswith("EXIT_")} | {EXIT_INTERRUPTED}
    assert set(documented) == codes
    kinds = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, errors.ProxydError)]
    for kind in kinds:
        if kind is not errors.ProxydError:
            assert f"`{kind.__name__}`" in documented[kind.exit_code], kind


def test_no_command_imports_anything_heavy_to_take_its_arguments() -> None:
    """Completion and the reference load them all."""
    heavy = ("grpc", "google", "pydantic", "rich", "torch", "matplotlib")
    modules = sorted({module for module, _ in COMMANDS.values()})
    code = (
        f"import importlib, sys\nfor name in {modules!r}: importlib.import_module(name)\n"
        f"sys.exit(', '.join(sorted(set({heavy!r}) & set(sys.modules))) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert all(importlib.util.find_spec(module) for module in modules)
