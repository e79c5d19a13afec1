"""The Admin service: what a person may ask, from this host only.

Two things can be changed by it: the coordinator can be made to read its own file again, as SIGHUP does, and to drain.
What stands in the file is the operator's, who could as well restart it.

Sessions prove the shared token; a single question can't (there is no challenge in it), so a listener that other hosts
can reach answers questions only to callers on this one.
"""

from __future__ import annotations

import ipaddress
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import unquote

import grpc
import grpc.aio

from proxyd import __version__
from proxyd.coordinator.drain import REASON, DrainGate
from proxyd.coordinator.policy_keeper import PolicyKeeper
from proxyd.coordinator.story import Stories
from proxyd.core.coordinator import CoordinatorMachine
from proxyd.runtime import translate_admin
from proxyd.runtime.tls import TlsKeeper
from proxyd.runtime.translate import TranslateError
from proxyd.v1 import admin_pb2
from proxyd.v1.admin_pb2_grpc import AdminServicer

_log = logging.getLogger("proxyd.coordinator")
_Context = grpc.aio.ServicerContext[Any, Any]


class AdminService(AdminServicer):
    """Answers from the machine's status, once there is one (:meth:`activate`)."""

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns, why_standby: Callable[[], str] = str) -> None:
        self.policy: PolicyKeeper | None = None
        """Set by the daemon; without one there is no file to read."""
        self.tls: TlsKeeper | None = None
        """Set by the daemon where there is TLS."""
        self.serve: Callable[[bool], Awaitable[None]] | None = None
        """Set by the daemon: whether probes hear that it serves."""
        self._drain: DrainGate | None = None
        self._machine: CoordinatorMachine | None = None
        self._stories: Stories | None = None
        self._why_standby = why_standby
        self._clock = clock
        self._started_ns = clock()

    def activate(self, machine: CoordinatorMachine, stories: Stories, drain: DrainGate | None = None) -> None:
        """This coordinator is the active one from now on."""
        self._machine, self._stories, self._drain = machine, stories, drain

    async def _active(self, context: _Context) -> tuple[CoordinatorMachine, Stories]:
        """What is asked; ends the call where the caller is elsewhere, or the one to ask is another."""
        await _local_only(context)
        if self._machine is None or self._stories is None:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, self._why_standby())
        assert self._machine is not None
        assert self._stories is not None
        return self._machine, self._stories

    async def Status(self, request: admin_pb2.StatusRequest, context: _Context) -> admin_pb2.StatusResponse:
        """Everything at a glance."""
        await self._active(context)
        return self.told(self._clock())

    def told(self, now_ns: int) -> admin_pb2.StatusResponse:
        """The answer to Status, of an active coordinator."""
        assert self._machine is not None
        response = translate_admin.status_response(self._machine.status(now_ns), __version__, now_ns - self._started_ns)
        response.certificate = "" if self.tls is None else self.tls.state
        if self._drain is not None:
            response.draining, response.held_transfers = self._drain.draining, self._drain.held
        return response

    async def Links(self, request: admin_pb2.LinksRequest, context: _Context) -> admin_pb2.LinksResponse:
        """The links alone."""
        machine, _ = await self._active(context)
        status = machine.status(self._clock())
        return translate_admin.links_response(status, translate_admin.wanted_links(request))

    async def Why(self, request: admin_pb2.WhyRequest, context: _Context) -> admin_pb2.WhyResponse:
        """The story of one transfer."""
        machine, stories = await self._active(context)
        try:
            transfer = translate_admin.wanted_transfer(request)
        except TranslateError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        told = stories.of(transfer, self._clock())
        if told is None and self._drain is not None and self._drain.holds(transfer):
            await context.abort(grpc.StatusCode.NOT_FOUND, f"transfer {transfer} is held: {REASON}")
        if told is None:
            await context.abort(
                grpc.StatusCode.NOT_FOUND,
                f"transfer {transfer} is not known: it was never requested here, or too long ago",
            )
        return translate_admin.why_response(told._replace(now=machine.why(transfer) or ""))

    async def GetPolicy(self, request: admin_pb2.GetPolicyRequest, context: _Context) -> admin_pb2.GetPolicyResponse:
        """The policy in force."""
        machine, _ = await self._active(context)
        keeper = self.policy
        if keeper is None:
            return translate_admin.policy_response(
                machine.policy, file="", minute_of_week=0, time_zone="", reloads=0, refused=0
            )
        return translate_admin.policy_response(
            keeper.policy,
            file=keeper.path or "",
            minute_of_week=keeper.minute_of_week,
            time_zone=keeper.config.require_coordinator().time_zone,
            reloads=keeper.reloads.used,
            refused=keeper.reloads.refused,
        )

    async def ReloadPolicy(
        self, request: admin_pb2.ReloadPolicyRequest, context: _Context
    ) -> admin_pb2.ReloadPolicyResponse:
        """Read the operator's own file again, as SIGHUP does.

        Which file that is was said at start; a caller can neither name another one nor send a policy.
        """
        await self._active(context)
        if self.policy is None:
            return translate_admin.reload_response(False, "this coordinator was started without a file", ())
        result = self.policy.reload()
        return translate_admin.reload_response(result.applied, result.message, result.needs_restart)

    async def Drain(self, request: admin_pb2.DrainRequest, context: _Context) -> admin_pb2.DrainResponse:
        """Begin to drain, or end it; asking for what is already so only tells how far it is."""
        machine, _ = await self._active(context)
        gate = self._drain
        if gate is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "there are no sessions here that could be drained")
        assert gate is not None
        wanted = translate_admin.wants_drain(request)
        if gate.draining is not wanted:
            gate.drain(wanted)
            _log.warning("draining: no new transfer begins" if wanted else "the draining is over")
            if self.serve is not None:
                await self.serve(not wanted)
        under_way = sum(agent.transfers for agent in machine.status(self._clock(), transfers_per_link=0).agents)
        return translate_admin.drain_response(gate.draining, under_way, gate.held)


async def _local_only(context: _Context) -> None:
    peer = context.peer()
    if not is_local_peer(peer):
        await context.abort(
            grpc.StatusCode.PERMISSION_DENIED,
            "admin questions are answered on the coordinator's own host only; run proxyd status there",
        )


def is_local_peer(peer: str) -> bool:
    """Whether a peer (``ipv4:127.0.0.1:4711``, ``ipv6:%5B::1%5D:4711``, ``unix:...``) is on this host."""
    kind, _, rest = peer.partition(":")
    if kind in ("unix", "unix-abstract"):
        return True
    host = unquote(rest).rpartition(":")[0].strip("[]").partition("%")[0]
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(ip, "ipv4_mapped", None)
    return ip.is_loopback or (mapped is not None and mapped.is_loopback)
