"""The documentation as a site: complete, self-contained, and every link leads somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "--site-dir", place],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return place


def test_every_page_is_there_and_in_the_menu(site: Path) -> None:
    menu = (ROOT / "mkdocs.yml").read_text()
    for page in DOCS.glob("*.md"):
        assert (site / f"{page.stem}.html").is_file()
        assert f": {page.name}\n" in menu, f"{page.name} is not in mkdocs.yml"


def test_no_page_asks_another_host_for_anything(site: Path) -> None:
    loaded = re.compile(r"""<(?:script|link|img|iframe|source)\b[^>]*?(?:src|href)=["']?(?:https?:)?//[^>]*>""")
    for page in site.rglob("*.html"):
        assert loaded.findall(page.read_text()) == [], page.name
    for style in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?(?:https?:)?//", style.read_text()), style.name


def test_files_of_the_repository_come_along(site: Path) -> None:
    sysctl = site / "repository" / "deploy" / "sysctl" / "90-proxyd.conf.txt"
    assert sysctl.read_text() == (ROOT / "deploy" / "sysctl" / "90-proxyd.conf").read_text()
    assert "DaemonSet" in (site / "repository" / "deploy" / "kubernetes.html").read_text()


def test_the_reference_has_every_public_name(site: Path) -> None:
    import proxyd_client

    page = (site / "api.html").read_text()
    for name in proxyd_client.__all__:
        assert f'id="proxyd_client.{name}"' in page or f'id="proxyd_client.errors.{name}"' in page, name
    assert ":class:" not in page
    assert ":meth:" not in page


def test_a_link_that_leads_nowhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("[gone](../deploy/gone.md) [away](nowhere.md)\n")
    settings = (ROOT / "mkdocs.yml").read_text().partition("nav:")[0]
    settings = settings.replace("hooks: [tools", f"hooks: [{ROOT}/tools").replace(
        "paths: [client", f"paths: [{ROOT}/client"
    )
    (tmp_path / "mkdocs.yml").write_text(settings)
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict"],
        cwd=tmp_path,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert done.returncode != 0
    assert "gone.md" in done.stderr
    assert "nowhere.md" in done.stderr
