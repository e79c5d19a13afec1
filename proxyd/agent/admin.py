"""The AgentAdmin service: what a person may ask an agent, and ask of it, at a Unix socket of its own.

The trainers' socket is open to their group, and a trainer shall not drain the agent of all others. This one is open to
the agent's user (and root) alone; its file mode is the permission, as the coordinator's is to be on its host.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from proxyd.core.errors import ListenError
from proxyd.runtime import translate_admin, translate_agent
from proxyd.runtime.addresses import MAX_UNIX_PATH_BYTES
from proxyd.runtime.grpc_options import server_options
from proxyd.runtime.translate import TranslateError
from proxyd.runtime.translate_agent import AgentTold, PingTold, PingWanted
from proxyd.runtime.unix_path import UnixPathClaim
from proxyd.v1 import admin_pb2
from proxyd.v1.admin_pb2_grpc import AgentAdminServicer, add_AgentAdminServicer_to_server

STOP_GRACE_S = 0.2

_log = logging.getLogger("proxyd.agent")
_Context = grpc.aio.ServicerContext[Any, Any]


class AgentAdmin(AgentAdminServicer):
    """Answers with what it is given.

    :param status: everything about the agent now.
    :param drain: begins (True) or ends draining.
    :param ping: pings a peer; raises LookupError with the reason when it is not known where that is.
    """

    def __init__(
        self,
        status: Callable[[], AgentTold],
        drain: Callable[[bool], None],
        ping: Callable[[PingWanted], Awaitable[PingTold]],
    ) -> None:
        self._status = status
        self._drain = drain
        self._ping = ping

    async def AgentStatus(
        self, request: admin_pb2.AgentStatusRequest, context: _Context
    ) -> admin_pb2.AgentStatusResponse:
        """Everything at a glance."""
        return translate_agent.agent_status_response(self._status())

    async def Drain(self, request: admin_pb2.DrainRequest, context: _Context) -> admin_pb2.DrainResponse:
        """Begin to drain, or end it; asking for what is already so only tells how far it is."""
        wanted = translate_admin.wants_drain(request)
        if self._status().draining is not wanted:
            self._drain(wanted)
            _log.warning("draining: no new message begins" if wanted else "the draining is over")
        now = self._status()
        return translate_admin.drain_response(
            now.draining, now.outgoing_transfers, now.held_transfers, now.arriving_transfers
        )

    async def Ping(self, request: admin_pb2.PingRequest, context: _Context) -> admin_pb2.PingResponse:
        """To another agent and back."""
        try:
            wanted = translate_agent.wanted_ping(request)
        except TranslateError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        try:
            return translate_agent.ping_response(await self._ping(wanted))
        except LookupError as error:
            await context.abort(grpc.StatusCode.NOT_FOUND, str(error))
            raise


class AdminServer:
    """The socket. The constructor claims its path and raises ListenError; nothing is answered before :meth:`start`."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._claim = UnixPathClaim(path)
        self._server: grpc.aio.Server | None = None

    async def start(self, service: AgentAdminServicer) -> None:
        """Listen, for the owner alone, and answer. Raises ListenError."""
        self._server = grpc.aio.server(options=server_options())
        add_AgentAdminServicer_to_server(service, self._server)
        previous = os.umask(0o177)
        try:
            self._server.add_insecure_port(f"unix:{self.path}")
        except RuntimeError as error:
            raise ListenError(f"cannot listen on the admin socket {self.path}", why=str(error)) from error
        finally:
            os.umask(previous)
        await self._server.start()

    def release(self) -> None:
        """Let the path go; for a start that failed."""
        self._claim.release()

    async def close(self) -> None:
        """Answer no more, and remove the socket."""
        if self._server is not None:
            await self._server.stop(STOP_GRACE_S)
        self._claim.release()


def admin_server(path: str | None) -> AdminServer | None:
    """None: it is off, or there is no room for its path (which is told)."""
    if path is None:
        return None
    if len(os.fsencode(path)) > MAX_UNIX_PATH_BYTES:
        _log.warning(
            "no admin socket: %s is longer than the %d bytes that the kernel allows. Say [agent] admin = PATH, or "
            "proxyd status, ping and drain can't ask this agent",
            path,
            MAX_UNIX_PATH_BYTES,
        )
        return None
    return AdminServer(path)
