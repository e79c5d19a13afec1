"""docs/metrics.md lists what the daemons export, with type, unit and labels, and nothing else."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, cast

import pytest

from proxyd.agent.agent_metrics import agent_families
from proxyd.agent.clients import ClientHub
from proxyd.agent.front.merging import WorkerSeen, worker_families
from proxyd.agent.handshake import Identity
from proxyd.coordinator.coordinator_metrics import coordinator_families, session_families, standby_families
from proxyd.coordinator.observer import Observer
from proxyd.coordinator.servicer import SessionServicer
from proxyd.core.agent import AgentMachine, PathState
from proxyd.core.agent_config import AgentConfig
from proxyd.core.agent_status import AgentStatus, LinkSending
from proxyd.core.bandwidth import LinkSettings
from proxyd.core.coordinator import CoordinatorConfig, CoordinatorMachine
from proxyd.core.coordinator_status import JobStatus
from proxyd.core.effects import ToAgent
from proxyd.core.ended import BOUNDS_NS, EndedMessages
from proxyd.core.events import SessionMessage, SessionOpened
from proxyd.core.ids import AgentName, LinkName, TransferId
from proxyd.core.messages import AgentHello, Grant, Request, TransferDone
from proxyd.core.shadow import Distribution, ShadowClass, ShadowStatus
from proxyd.core.sharing import BottleneckStatus
from proxyd.runtime.drain_metrics import drain_families
from proxyd.runtime.limits import Door
from proxyd.runtime.metrics import MAX_LABEL_SETS, MetricFamily
from proxyd.runtime.refusals import Refusals
from proxyd.runtime.reloading import Reloads
from proxyd.runtime.tls import TlsKeeper, security_families
from proxyd.wire.envelope import TrafficClass

ROOT = Path(__file__).resolve().parents[2]
ROW = re.compile(r"\| `(proxyd_\w+)` \| (\w+) \| (.+?) \| (.*?) ?\| .+ \|")
UNITS = {"_bytes_per_second": "bytes/s", "_timestamp_seconds": "seconds (Unix time)", "_seconds": "seconds"}
LINK = LinkName("a", "b")
ME = AgentName("a", "0")
PEER = AgentName("b", "0")


class Row(NamedTuple):
    type: str
    labels: frozenset[str]


def documented() -> dict[str, dict[str, Row]]:
    """Section -> name -> what its row says."""
    sections: dict[str, dict[str, Row]] = {}
    title = ""
    for line in (ROOT / "docs" / "metrics.md").read_text().splitlines():
        if line.startswith("## "):
            title = line[3:]
        elif line.startswith("| `proxyd_"):
            match = ROW.fullmatch(line)
            assert match is not None, f"not one family with type, unit, labels and meaning: {line}"
            name, kind, unit, labels = match.groups()
            base = name.removesuffix("_total")
            wanted = next((text for end, text in UNITS.items() if base.endswith(end)), "")
            assert unit == (wanted or ("bytes" if "_bytes" in base else "1")), name
            rows = sections.setdefault(title, {})
            assert name not in rows, f"{name} is there twice"
            rows[name] = Row(kind, frozenset(filter(None, labels.split(", "))))
    return sections


def exported(families: Iterable[MetricFamily]) -> dict[str, Row]:
    """What a scrape shows."""
    found: dict[str, Row] = {}
    for family in families:
        assert family.samples, f"{family.name}: the test has to show a series of it"
        kinds = {frozenset(sample.labels) - {"le"} for sample in family.samples}
        assert len(kinds) == 1, f"{family.name}: labels differ from series to series"
        assert family.name not in found, f"{family.name} is there twice"
        found[family.name] = Row(family.type, *kinds)
    return found


def both() -> list[MetricFamily]:
    refusals = Refusals()
    refusals.add("data", "token")

    class Kept:
        seconds_left = reloads = refused_reloads = 0
        families = TlsKeeper.families

    return [
        *security_families(refusals, cast(TlsKeeper, Kept())),
        *Reloads().families(),
        *drain_families(draining=True, held=1),
    ]


def observer() -> Observer:
    """One that has seen a transfer's life."""
    one, transfer = Observer(), TransferId(1, 1)
    traffic = TrafficClass.SYNC
    one.saw(0, SessionOpened(1, AgentHello(ME, 1, "a:1")))
    one.saw(0, SessionMessage(1, Request(transfer, LINK, PEER, "j", traffic, 10)))
    one.performed(0, [ToAgent(1, Grant(1, transfer, LINK, 10, 1, 0, 1, 1, 0, ""))])
    one.saw(0, SessionMessage(1, TransferDone(transfer, LINK, traffic, 10, True, 0)))
    return one


def some(count: int) -> list[Distribution]:
    return [Distribution() for _ in range(count)]


def coordinator_side() -> list[MetricFamily]:
    machine = CoordinatorMachine(CoordinatorConfig(links=(LinkSettings(LINK, 1_000_000, 1_000_000, observe=True),)), 1)
    status = machine.status(0)
    job = JobStatus("j", 1.0, 0, 0, 0, 0, 0, False)
    line = BottleneckStatus("line", *[0] * (len(dataclasses.fields(BottleneckStatus)) - 1))  # type: ignore[arg-type]
    shadow = ShadowStatus((ShadowClass(TrafficClass.SYNC, *some(3)),), *some(2), open=0, behind=0, abandoned=0)
    links = tuple(dataclasses.replace(link, jobs=(job,), shadow=shadow) for link in status.links)
    status = dataclasses.replace(status, links=links, bottlenecks=(line,))
    servicer = SessionServicer(b"", lambda event: None)
    return [*coordinator_families(status, observer()), *session_families(servicer), *both()]


def hub() -> ClientHub:
    def nothing(*_: object) -> PathState:
        return PathState("", "none", 0, 0, 0, 0, 0, "")

    me = Identity(ME, 7, b"")
    return ClientHub(me, memory_bytes=1, arena_bytes=1, linger_ns=1, emit=lambda _: None, link_state=nothing)


def agent_status(*links: LinkName) -> AgentStatus:
    ended = EndedMessages()
    for link in links:
        for traffic in TrafficClass:
            ended.add(link, traffic, True, 10, 20_000_000)
            ended.add(link, traffic, False, 10, 1)
    sending = LinkSending(LINK, "", False, *[0] * 7)
    machine = AgentMachine(AgentConfig(ME, 1, "a:1", ()))
    return dataclasses.replace(machine.status(0), links=(sending,), ended=ended.all())


def agent_side(status: AgentStatus) -> list[MetricFamily]:
    class One:
        name, room = "data", ()

        def refusals(self) -> list[tuple[str, int]]:
            return [("hello", 0)]

    local = hub()
    local.job_waits.joined("j", 1, 0)
    door = cast(Door, One())
    families = agent_families(status, local, [("c:1", True)], slow_start_after_idle=False, doors=[door])
    return [*families, *both()]


def test_what_is_said_of_workers_is_documented() -> None:
    found = exported(worker_families([WorkerSeen(0, up=True, restarts=0, passed={"data": 1})]))
    assert found == documented()["Workers"]


@pytest.mark.parametrize("side", ["Coordinator", "Agent"])
def test_every_metric_is_documented_and_every_documented_one_exists(side: str) -> None:
    sections = documented()
    found = exported(coordinator_side() if side == "Coordinator" else agent_side(agent_status(LINK)))
    assert found == sections["Both"] | sections[side]


def test_a_standby_shows_what_the_active_one_shows() -> None:
    sections = documented()
    for name, row in exported(standby_families()).items():
        assert (sections["Both"] | sections["Coordinator"])[name] == row


def test_histograms_of_many_links_stay_below_the_limit_and_lose_nothing() -> None:
    names = [LinkName("a", f"b{n:02}") for n in range(40)]
    [family] = [one for one in agent_side(agent_status(*names)) if one.name == "proxyd_transfer_seconds"]
    assert len(family.samples) <= MAX_LABEL_SETS
    counts = [sample for sample in family.samples if sample.suffix == "_count"]
    assert sum(sample.value for sample in counts) == 40 * len(TrafficClass)
    assert sum(sample.value for sample in family.samples if sample.suffix == "_sum") == pytest.approx(40 * 3 * 0.02)


def test_a_completion_time_is_in_its_bucket() -> None:
    [family] = [one for one in agent_side(agent_status(LINK)) if one.name == "proxyd_transfer_seconds"]
    of_sync = {
        s.labels["le"]: s.value
        for s in family.samples
        if s.labels.get("traffic_class") == "sync" and s.suffix == "_bucket"
    }
    assert len(of_sync) == len(BOUNDS_NS) + 1
    assert (of_sync["0.01"], of_sync["0.02"], of_sync["+Inf"]) == (0, 1, 1)
