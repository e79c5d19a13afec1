"""What ``mkdocs build`` needs beyond its settings: pages link to files of the repository (``../deploy/...``), so these
come along into the site, as text that a browser shows."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\]\(((?:\.\./)+)([^)#\s]+)(#[^)\s]*)?\)")
ROLE = re.compile(r":(?:class|meth|func|mod|data|attr|exc|obj):<code>~?\.?([^<]+)</code>")
PLACE = "repository"
MAX_BYTES = 1 << 20


def _target(page_uri: str, ups: str, path: str) -> Path | None:
    """The file outside docs/ that a link leads to; None: it stays inside."""
    full = (ROOT / "docs" / page_uri).parent.joinpath(ups, path).resolve()
    return None if full.is_relative_to(ROOT / "docs") else full


def _uri(target: Path) -> str:
    """Where the site has it. Pages, for what is Markdown or a directory; else text."""
    inside = target.relative_to(ROOT).as_posix()
    if target.is_dir():
        return f"{PLACE}/{inside}.md"
    return f"{PLACE}/{inside}" if target.suffix == ".md" else f"{PLACE}/{inside}.txt"


def _listing(target: Path) -> str:
    """A page for a directory: its files, each as it is."""
    parts = [f"# {target.relative_to(ROOT).as_posix()}\n"]
    for path in sorted(one for one in target.rglob("*") if one.is_file() and one.suffix != ".pyc"):
        if path.stat().st_size <= MAX_BYTES:
            text = path.read_text("utf-8")
            fence = "`" * (max(map(len, re.findall("`{3,}", text)), default=2) + 1)
            parts.append(f"## {path.relative_to(target).as_posix()}\n\n{fence}\n{text.rstrip()}\n{fence}\n")
    return "\n".join(parts)


def on_files(files: Files, *, config: Any) -> Files:
    """Add what pages link to."""
    added: set[Path] = set()
    for page in list(files.documentation_pages()):
        for ups, path, _ in LINK.findall(page.content_string):
            target = _target(page.src_uri, ups, path)
            if target is None or target in added or not target.exists() or not target.is_relative_to(ROOT):
                continue  # what doesn't exist stays as it is written: the strict build refuses it
            added.add(target)
            content = _listing(target) if target.is_dir() else target.read_text("utf-8")
            if target.suffix == ".md":
                # Its own links lead to other places of the repository, which the site doesn't have.
                content = re.sub(r"\[([^\]]+)\]\((?!https?:)[^)]*\)", r"\1", content)
            made = File.generated(config, _uri(target), content=content)
            if made.is_documentation_page():
                made.inclusion = made.inclusion.NOT_IN_NAV
            files.append(made)
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Let these links lead there."""

    def moved(match: re.Match[str]) -> str:
        target = _target(page.file.src_uri, match[1], match[2])
        if target is None or not target.exists():
            return match[0]
        uri = posixpath.relpath(_uri(target), posixpath.dirname(page.file.src_uri) or ".")
        return f"]({uri}{match[3] or ''})"

    return LINK.sub(moved, markdown)


def on_page_content(html: str, *, page: Any, config: Any, files: Files) -> str:
    """Docstrings say ``:class:`X``` as Sphinx has it; here that is code."""
    return ROLE.sub(lambda match: f"<code>{match[1].rpartition('.')[2]}</code>", html)
