"""tools/overhead.py: the places that it changes are there, and its copy has less, or more, of the feature."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def overhead(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("overhead")


@pytest.mark.parametrize("name", ["checksums", "acknowledgements", "tokens"])
def test_a_copy_differs_where_it_should_and_is_still_python(overhead: ModuleType, tmp_path: Path, name: str) -> None:
    assert set(overhead.FEATURES) == {"checksums", "acknowledgements", "tokens"}
    copy = overhead.copy_of(overhead.FEATURES[name].changes, tmp_path)
    changed = {path for path, _, _ in overhead.FEATURES[name].changes}
    for path in (*(copy / "proxyd").rglob("*.py"), *(copy / "proxyd_client").rglob("*.py")):
        inside = path.relative_to(copy).as_posix()
        original = ROOT / ("client/" if inside.startswith("proxyd_client") else "") / inside
        assert (path.read_bytes() != original.read_bytes()) == (inside in changed)
    for path in changed:
        compile((copy / path).read_text(), path, "exec")


def test_a_place_that_has_gone_is_said(overhead: ModuleType, tmp_path: Path) -> None:
    change = overhead.Change("proxyd/agent/streams.py", "there is no such line", "")
    with pytest.raises(SystemExit, match=r"streams\.py has 0 places like 'there is no such line', 1 is expected"):
        overhead.copy_of((change,), tmp_path)
