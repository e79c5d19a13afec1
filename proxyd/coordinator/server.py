"""The coordinator's gRPC server: addresses, services, health, reflection."""

from __future__ import annotations

import os
import socket

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from proxyd.coordinator.guard import Guard, Shield
from proxyd.core.errors import ListenError
from proxyd.runtime.addresses import Address
from proxyd.runtime.grpc_options import server_options
from proxyd.runtime.unix_path import UnixPathClaim
from proxyd.v1 import admin_pb2, coordination_pb2
from proxyd.v1.admin_pb2_grpc import AdminServicer, add_AdminServicer_to_server
from proxyd.v1.coordination_pb2_grpc import CoordinationServicer, add_CoordinationServicer_to_server

COORDINATION = coordination_pb2.DESCRIPTOR.services_by_name["Coordination"].full_name
ADMIN = admin_pb2.DESCRIPTOR.services_by_name["Admin"].full_name
STOP_GRACE_S = 0.5


class ControlServer:
    """One gRPC server on all listen addresses. :meth:`start` raises ListenError, with everything closed again."""

    def __init__(
        self, sessions: CoordinationServicer, admin: AdminServicer, guard: Guard, *, with_reflection: bool
    ) -> None:
        self._health = health.aio.HealthServicer()
        self._guard = guard
        self._server = grpc.aio.server(options=server_options(), interceptors=[Shield(guard)])
        self._claims: list[UnixPathClaim] = []
        self.addresses: list[str] = []
        """Where it really listens: port 0 replaced by the one that the kernel chose."""
        add_CoordinationServicer_to_server(sessions, self._server)
        add_AdminServicer_to_server(admin, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        if with_reflection:
            names = (COORDINATION, ADMIN, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name)
            reflection.enable_server_reflection((*names, reflection.SERVICE_NAME), self._server)

    async def start(self, addresses: tuple[Address, ...], *, active: bool = True) -> None:
        """Bind everything, then serve.

        :param active: a standby answers too, but is no place to send agents to: NOT_SERVING until :meth:`take_over`.
        """
        try:
            for address in addresses:
                self.addresses.append(self._bind(address))
        except ListenError:
            await self._server.stop(None)
            self._release()
            raise
        await self._server.start()
        for service in ("", COORDINATION, ADMIN):
            await self._health.set(service, health_pb2.HealthCheckResponse.NOT_SERVING)
        if active:
            await self.take_over()

    async def take_over(self) -> None:
        """This coordinator is the active one from now on."""
        await self._health.set(ADMIN, health_pb2.HealthCheckResponse.SERVING)
        await self.serve(True)

    async def serve(self, wanted: bool) -> None:
        """Whether probes shall hear that new work may come here; one that drains is healthy all the same."""
        status = health_pb2.HealthCheckResponse.SERVING if wanted else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in ("", COORDINATION):
            await self._health.set(service, status)

    async def stop(self) -> None:
        """Not serving from now on; calls under way get half a second to end."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(STOP_GRACE_S)
        self._release()

    def _release(self) -> None:
        for claim in self._claims:
            claim.release()
        self._claims.clear()

    def _bind(self, address: Address) -> str:
        if address.is_unix:
            self._claims.append(UnixPathClaim(address.path))
            # Connecting needs write permission on the socket: the owner and the group, nobody else.
            previous = os.umask(0o117)
            try:
                self._add_port(str(address), secure=False)
            finally:
                os.umask(previous)
            return str(address)
        _probe(address)
        return str(address.with_port(self._add_port(str(address), secure=True)))

    def _add_port(self, text: str, *, secure: bool) -> int:
        try:
            if secure and self._guard.tls is not None:
                port = self._server.add_secure_port(text, self._guard.credentials(self._guard.tls))
                self._guard.listens_at(port)
                return port
            return self._server.add_insecure_port(text)
        except RuntimeError as error:
            raise ListenError(
                f"cannot listen on {text}", why=str(error), next_step="Stop what uses it, or choose another address"
            ) from error


def _probe(address: Address) -> None:
    """Bind once ourselves: gRPC's own failure doesn't say whether an address is in use, foreign or forbidden."""
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, where in found:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(where)
                probe.listen(1)
    except OSError as error:
        raise ListenError(
            f"cannot listen on {address}",
            why=(error.strerror or str(error)).lower(),
            next_step="Stop what uses it, or choose another address",
        ) from error
