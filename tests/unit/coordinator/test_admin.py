"""Who may ask a coordinator, and that all of its status crosses."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from proxyd.coordinator.admin import AdminService, is_local_peer
from proxyd.coordinator.coordinator_metrics import coordinator_families
from proxyd.coordinator.drain import DrainGate
from proxyd.coordinator.observer import Observer
from proxyd.coordinator.story import Stories
from proxyd.core.bandwidth import LinkSettings
from proxyd.core.coordinator import CoordinatorConfig, CoordinatorMachine
from proxyd.core.events import SessionMessage, SessionOpened
from proxyd.core.ids import AgentName, EndpointName, LinkName, TransferId
from proxyd.core.messages import AgentHello, EndpointUp, Request
from proxyd.core.policy import BottleneckSettings
from proxyd.runtime import translate_admin
from proxyd.runtime.metrics import Sample, make_registry
from proxyd.v1 import admin_pb2
from proxyd.wire.envelope import TrafficClass

AB = LinkName("a", "b")


@pytest.mark.parametrize(
    ("peer", "local"),
    [
        ("unix:", True),
        ("unix:/run/x.sock", True),
        ("ipv4:127.0.0.1:40000", True),
        ("ipv4:127.9.9.9:40000", True),
        ("ipv6:%5B::1%5D:40000", True),
        ("ipv6:[::1]:40000", True),
        ("ipv6:%5B::ffff:127.0.0.1%5D:1", True),
        ("ipv4:10.0.0.5:40000", False),
        ("ipv6:%5B2001:db8::1%5D:40000", False),
        ("ipv6:%5B::ffff:10.0.0.5%5D:1", False),
        ("", False),
        ("ipv4:", False),
        ("vsock:3:1", False),
    ],
)
def test_only_this_host_may_ask(peer: str, local: bool) -> None:
    assert is_local_peer(peer) is local


class Elsewhere:
    """The context of a call from another host."""

    def __init__(self) -> None:
        self.code: grpc.StatusCode | None = None

    def peer(self) -> str:
        return "ipv4:10.0.0.5:40000"

    async def abort(self, code: grpc.StatusCode, text: str) -> None:
        self.code = code
        raise ConnectionAbortedError(text)


SERVICE = admin_pb2.DESCRIPTOR.services_by_name["Admin"]


@pytest.mark.parametrize("method", [method.name for method in SERVICE.methods])
def test_no_question_and_no_order_from_elsewhere(method: str) -> None:
    context = Elsewhere()
    request = getattr(admin_pb2, SERVICE.methods_by_name[method].input_type.name)()
    service = AdminService()
    machine = machine_with_work()
    gate = DrainGate(machine, lambda event: None, lambda effect: None)
    service.activate(machine, Stories(machine), gate)
    with pytest.raises(ConnectionAbortedError, match="own host only"):
        asyncio.run(getattr(service, method)(request, context))
    assert context.code is grpc.StatusCode.PERMISSION_DENIED
    assert not gate.draining


def machine_with_work() -> CoordinatorMachine:
    """Two agents, an endpoint, and two transfers of which one waits."""
    settings = LinkSettings(AB, 50_000_000, 60_000_000, 300_000, mtu_bytes=9000)
    machine = CoordinatorMachine(CoordinatorConfig("central", ("*->*",), (settings,)), epoch=7)
    for number, site in enumerate("ab", 1):
        machine.handle(SessionOpened(number, AgentHello(AgentName(site, "one"), number, "127.0.0.1:7601")), 1000)
    machine.handle(SessionMessage(2, EndpointUp(EndpointName("job", 3), 55)), 1000)
    for sequence in (1, 2):
        request = Request(TransferId(9, sequence), AB, AgentName("b", "one"), "job", TrafficClass.SYNC, 64 << 20)
        machine.handle(SessionMessage(1, request), 1000 + sequence)
    return machine


def test_all_of_a_status_crosses() -> None:
    status = machine_with_work().status(2_000_000)
    response = translate_admin.status_response(status, "1.2.3", 99)
    assert (response.coordinator, response.version, response.epoch, response.uptime_ns) == ("central", "1.2.3", 7, 99)
    assert [agent.agent.site for agent in response.agents] == ["a", "b"]
    assert response.endpoints[0].endpoint.rank == 3
    [link] = [link for link in response.links if link.link.dst_site == "b"]
    [ours] = [link for link in status.links if link.link == AB]
    for field in ("pace_bytes_per_s", "window_bytes", "outstanding_bytes", "rtt_ns", "slot_bytes", "waiting_bytes"):
        assert getattr(link, field) == getattr(ours, field), field
    assert link.outstanding_bytes > 0
    assert link.totals.granted_bytes == ours.totals.granted_bytes > 0
    assert [lane.agent.site for lane in link.lanes] == ["a"]
    assert {item.transfer.sequence for item in link.waiting} == {1, 2}
    assert link.waiting[0].reason
    [job] = link.jobs
    assert (job.name, job.weight, job.waiting_transfers) == ("job", 1, 2)
    assert job.granted_bytes == link.totals.granted_bytes


def test_links_can_be_picked() -> None:
    status = machine_with_work().status(2_000_000)
    assert [one.link.src_site for one in translate_admin.links_response(status, [AB]).links] == ["a"]
    assert len(translate_admin.links_response(status, []).links) == len(status.links)


def test_metrics_name_every_shared_line() -> None:
    line = BottleneckSettings("a", True, 50_000_000)
    machine = CoordinatorMachine(CoordinatorConfig("central", ("*->*",), bottlenecks=(line,)), epoch=7)
    by_name = {family.name: family for family in coordinator_families(machine.status(2_000_000), Observer())}
    labels = {"bottleneck": "a egress"}
    assert Sample(labels, 0) in by_name["proxyd_bottleneck_window_violations_total"].samples
    [rate] = by_name["proxyd_bottleneck_rate_bytes_per_second"].samples
    assert rate.labels == labels
    assert 45_000_000 < (rate.value or 0) < 49_000_000
    for name in ("granted_rate_bytes_per_second", "window_bytes", "outstanding_bytes"):
        assert by_name[f"proxyd_bottleneck_{name}"].samples == [Sample(labels, 0)]


def test_metrics_name_every_link_and_parse() -> None:
    machine = machine_with_work()
    families = list(coordinator_families(machine.status(2_000_000), Observer()))
    by_name = {family.name: family for family in families}
    assert len(by_name) == len(families)
    assert Sample({"link": "a->b"}, 0) in by_name["proxyd_window_violations_total"].samples
    assert by_name["proxyd_agent_sessions"].samples[0].value == 2
    for name in (
        "proxyd_granted_bytes_total",
        "proxyd_fallback_bytes_total",
        "proxyd_unscheduled_bytes_total",
        "proxyd_link_rate_bytes_per_second",
        "proxyd_link_window_bytes",
        "proxyd_link_outstanding_bytes",
        "proxyd_link_queue_seconds",
        "proxyd_job_granted_bytes_total",
        "proxyd_link_limit_bytes_per_second",
    ):
        assert "a->b" in {sample.labels["link"] for sample in by_name[name].samples}, name
    registry = make_registry(lambda: families)
    assert registry.get_sample_value("proxyd_granted_bytes_total", {"link": "a->b"}) > 0
