"""The status pages in a real browser: a headless Chromium looks at daemons that move bytes."""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from proxyd.cli.cluster import LinkFigures
from tests.e2e.rig import MIB, Net, pattern, until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking", "--disable-sync"]
LINE = LinkFigures("80Mbit", "5ms", "1bdp", estimate="fixed")
RANKS = ((0, 1), (2, 3))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        assert os.environ.get("CI") != "true", "tools/prepare.sh tests did not bring chromium"
        pytest.skip("no Chromium is installed (tools/prepare.sh tests installs it, as root)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=program, args=FLAGS)
        yield opened
        opened.close()


class Watched:
    """A page, and what it complained about and asked for."""

    def __init__(self, browser: Browser, url: str, **options: Any) -> None:
        self.page: Page = browser.new_page(**options)
        self.complaints: list[str] = []
        self.hosts: set[str] = set()
        self.page.on("console", lambda line: line.type in ("error", "warning") and self.complaints.append(line.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.hosts.add(request.url.split("/")[2]))
        self.page.goto(url)

    def text(self, what: str) -> str:
        return self.page.locator(what).inner_text()


def home(metrics: str) -> str:
    return metrics.removesuffix("metrics")


@pytest.fixture
def busy(start: Callable[..., Net]) -> Iterator[Net]:
    """Two senders on a link that is too narrow for them, until the test has seen enough."""
    net = start({"a": 2, "b": 1}, links={("a", "b"): LINE, ("b", "a"): LINE})
    enough = threading.Event()

    def send(source: int, target: int, agent: int) -> None:
        sender, receiver = net.connect(source, "a", agent), net.connect(target, "b")
        while not enough.is_set():
            handles = [sender.isend(pattern(4 * MIB), dst=target, tag=1) for _ in range(2)]
            for handle in handles:
                receiver.recv(src=source, tag=1, timeout_s=60)
                handle.wait(60)

    threads = [threading.Thread(target=send, args=(*pair, number)) for number, pair in enumerate(RANKS)]
    for thread in threads:
        thread.start()
    yield net
    enough.set()
    for thread in threads:
        thread.join(60)


def test_the_coordinators_page_shows_links_slots_queue_and_reasons(busy: Net, browser: Browser, tmp_path: Path) -> None:
    metrics = busy.cluster.coordinator.metrics
    seen = Watched(browser, home(metrics), viewport={"width": 1100, "height": 1200})
    page = seen.page
    link = page.locator(".link").filter(has=page.get_by_role("heading", name="a->b"))
    link.wait_for(timeout=20_000)
    slots = link.locator("canvas.slots")
    until(lambda: "2 agents: a/a-0, a/a-1" in (slots.get_attribute("aria-label") or ""), "slots of both are drawn", 20)
    figures = link.locator(".figures").inner_text()
    assert re.search(r"estimate \(configured\)\n7\d\.\d Mbit/s", figures), figures  # payload's part of 80
    until(lambda: "pipeline" in link.locator(".scroll table").inner_text(), "a transfer waits", 20)
    row = link.locator(".scroll tbody tr").first.inner_text()
    assert "b/b-0" in row
    assert "of 4.00 MiB" in row
    assert seen.text("#agents").count("127.0.0.1:") == 3
    assert "epoch" in seen.text("#facts")
    assert link.locator(".uplot canvas").count() == 1
    painted = "c => new Set(c.getContext('2d').getImageData(0, 0, c.width, c.height).data).size"
    assert slots.evaluate(painted) > 3
    assert page.locator("script[src^='http'], link[href^='http']").count() == 0
    assert seen.hosts == {metrics.split("/")[2]}
    assert seen.complaints == []
    page.screenshot(path=tmp_path / "coordinator.png", full_page=True)


def test_it_can_be_read_on_a_phone(busy: Net, browser: Browser, tmp_path: Path) -> None:
    seen = Watched(
        browser,
        home(busy.cluster.coordinator.metrics),
        viewport={"width": 360, "height": 740},
        device_scale_factor=2,
        color_scheme="dark",
    )
    seen.page.locator(".link").first.wait_for(timeout=20_000)
    until(lambda: "a/a-0" in seen.text("#agents"), "agents are listed", 20)
    assert seen.page.evaluate("document.documentElement.scrollWidth") <= 360
    assert seen.complaints == []
    seen.page.screenshot(path=tmp_path / "phone.png", full_page=True)


def test_the_agents_page_and_a_coordinator_that_is_gone(start: Callable[..., Net], browser: Browser) -> None:
    workers = {("a", 0): {"workers": 2, "arena": "16MiB"}}
    net = start({"a": 1, "b": 1}, links={("a", "b"): LINE, ("b", "a"): LINE}, each_agent=workers)
    sender, receiver = net.connect(0, "a"), net.connect(1, "b")
    handle = sender.isend(pattern(MIB), dst=1, tag=1)
    receiver.recv(src=0, tag=1, timeout_s=30)
    handle.wait(30)
    agent = Watched(browser, home(net.cluster.agents[0].metrics))
    until(lambda: "a->b" in agent.text("#links"), "its link is shown", 20)
    assert "granted by" in agent.text("#links")
    assert "stands" in agent.text("#coordinators")
    assert "b/b-0" in agent.text("#peers")
    assert net.job in agent.text("#trainers")
    assert re.search(r"a-0#0\s.*\n.*a-0#1\s", agent.text("#workers"))
    other = Watched(browser, home(net.cluster.agents[1].metrics))
    until(lambda: net.job in other.text("#trainers"), "the other agent's page is filled", 20)
    assert not other.page.locator("#workers").is_visible()
    coordinator = Watched(browser, home(net.cluster.coordinator.metrics))
    until(lambda: "a/a-0" in coordinator.text("#agents"), "agents are listed", 20)
    net.cluster.coordinator.process.kill()
    net.cluster.coordinator.process.wait()
    net.injects_fault("the coordinator is killed")
    until(lambda: "No answer" in coordinator.text("#facts"), "the page says that nobody answers", 20)
    assert "a/a-0" in coordinator.text("#agents")  # what was last known
    until(lambda: "fallback" in agent.text("#links"), "the agent's page says how it goes on", 20)
    assert agent.complaints == []
