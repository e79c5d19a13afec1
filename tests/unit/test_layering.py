"""The rules on imports that import-linter cannot say."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GENERATED = ROOT / "proxyd" / "v1"


def sources(*rooms: str) -> list[Path]:
    found = [path for room in rooms for path in sorted((ROOT / room).rglob("*.py"))]
    assert found, f"nothing under {rooms}: the layout has changed and this test with it"
    return [path for path in found if GENERATED not in path.parents]


def imports(path: Path) -> Iterator[str]:
    """Full names of what a file imports: ``from a import b`` gives ``a`` and ``a.b``."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the layer"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def under(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


# The edge names the types that its calls carry; it may not look inside.
ENVELOPES = {"AgentBatch", "CoordinatorBatch"} | {
    f"{call}{end}"
    for call in ("Status", "Links", "Why", "GetPolicy", "ReloadPolicy", "Drain", "AgentStatus", "Ping")
    for end in ("Request", "Response")
}
TRANSLATORS = {"translate.py", "translate_admin.py", "translate_agent.py"}


def messages_used(path: Path) -> set[str]:
    """Names taken from a generated ``*_pb2`` module, however it was imported."""
    tree = ast.parse(path.read_text(), str(path))
    modules, used = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and under(node.module or "", "proxyd.v1"):
            for alias in node.names:
                if alias.name.endswith("_pb2"):
                    modules.add(alias.asname or alias.name)
                elif (node.module or "").endswith("_pb2"):
                    used.add(alias.name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            used.add(node.attr)
    return used


def test_only_translate_looks_into_protobuf_and_the_core_alike() -> None:
    plain = ("proxyd.core.errors", "proxyd.core.units")
    for path in sources("proxyd/agent", "proxyd/coordinator", "proxyd/runtime"):
        core = {name for name in imports(path) if name.startswith("proxyd.core.")}
        if path.name not in TRANSLATORS and any(not any(under(name, one) for one in plain) for name in core):
            assert messages_used(path) <= ENVELOPES, path.relative_to(ROOT)


def test_the_client_takes_only_the_wire_from_proxyd() -> None:
    for path in sources("client"):
        for name in imports(path):
            if under(name, "proxyd") and name != "proxyd":
                assert under(name, "proxyd.wire"), f"{path.relative_to(ROOT)} imports {name}"


def test_the_core_knows_chance_only_as_a_seeded_generator() -> None:
    for path in sources("proxyd/core", "proxyd/wire"):
        for node in ast.walk(ast.parse(path.read_text(), str(path))):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "random":
                assert node.attr == "Random", f"{path.relative_to(ROOT)}:{node.lineno} uses random.{node.attr}"


@pytest.mark.parametrize("path", sources("proxyd", "client"), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_grows_beyond_reading(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 600
