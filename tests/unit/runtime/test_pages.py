"""The status page's server side: whom it answers, and with what."""

from __future__ import annotations

import json
import re

import pytest

from proxyd.runtime.pages import PLACE, Pages

HERE = "127.0.0.1"


@pytest.fixture
def pages() -> Pages:
    return Pages("coordinator.html", lambda: {"links": [1]})


def test_it_shows_a_page_its_files_and_its_data(pages: Pages) -> None:
    document = pages.answer("/", "localhost:9600", HERE)
    assert document is not None
    assert (document.status, document.content_type) == ("200 OK", "text/html; charset=utf-8")
    for name in re.findall(r'(?:src|href)="([^"]+)"', document.body.decode()):
        if name != "metrics":
            file = pages.answer(f"/{name}", "localhost:9600", HERE)
            assert file is not None, name
            assert file.status == "200 OK"
    data = pages.answer("/status.json", "127.0.0.1:9600", HERE)
    assert data is not None
    assert json.loads(data.body) == {"links": [1]}


@pytest.mark.parametrize("path", ["/metrics", "/healthz", "/../pages.py", "/uPlot.LICENSE", "/agent.html", "//", ""])
def test_nothing_else_is_a_page(pages: Pages, path: str) -> None:
    assert pages.answer(path, "localhost", HERE) is None


@pytest.mark.parametrize("peer", ["10.1.0.5", "2001:db8::1", "::ffff:10.1.0.5", "what"])
@pytest.mark.parametrize("path", ["/", "/status.json", "/page.js"])
def test_other_hosts_are_told_how(pages: Pages, path: str, peer: str) -> None:
    answer = pages.answer(path, "localhost", peer)
    assert answer is not None
    assert answer.status.startswith("403")
    assert b"ssh -L" in answer.body
    assert b"links" not in answer.body


@pytest.mark.parametrize("peer", [HERE, "::1", "127.3.4.5", "::ffff:127.0.0.1", ""])
def test_this_host_is_answered(pages: Pages, peer: str) -> None:
    answer = pages.answer("/status.json", "localhost", peer)
    assert answer is not None
    assert answer.status == "200 OK"


@pytest.mark.parametrize("host", ["evil.example", "evil.example:9600", "127.0.0.1.evil.example", "", "[evil]:1"])
def test_a_foreign_name_that_leads_here_is_refused(pages: Pages, host: str) -> None:
    """Else a page from elsewhere could read this one: its own name may resolve to 127.0.0.1."""
    answer = pages.answer("/status.json", host, HERE)
    assert answer is not None
    assert answer.status.startswith("421")


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:9600", "127.0.0.1:9600", "[::1]:9600", "gw.localhost", "10.1.0.5:9600"]
)
def test_own_names_and_addresses_are_not(pages: Pages, host: str) -> None:
    answer = pages.answer("/status.json", host, HERE)
    assert answer is not None
    assert answer.status == "200 OK"


def test_data_that_can_not_be_made_is_an_answer_too() -> None:
    def broken() -> object:
        raise ZeroDivisionError("secret")

    answer = Pages("agent.html", broken).answer("/status.json", "localhost", HERE)
    assert answer is not None
    assert answer.status.startswith("500")
    assert b"secret" not in answer.body


def test_pages_load_nothing_from_elsewhere_and_make_no_markup_of_names() -> None:
    for path in PLACE.iterdir():
        text = path.read_text()
        if path.suffix == ".html":
            assert not re.search(r"""(?:src|href)=["'](?:https?:)?//""", text), path.name
            assert "<script>" not in text, path.name
            assert " style=" not in text, path.name
        if path.suffix == ".js" and not path.name.startswith("uPlot"):
            assert "innerHTML" not in text, path.name
            assert "eval(" not in text, path.name
