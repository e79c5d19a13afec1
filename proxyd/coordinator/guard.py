"""Who may speak to the coordinator's server, and what is told to those who may not.

gRPC does the TLS handshakes itself and says nothing of those that fail but a line of its own on stderr (the reason,
without an address). What can be known here is that a handshake began, because gRPC asks for the certificate then, who
is connected at that moment, which the kernel says, and that a call came over a connection. The difference, once it has
lasted for some seconds, is counted as refused, and the hosts are logged. Which certificate it was stands in the refused
agent's own log.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any

import grpc
import grpc.aio

from proxyd.core.ids import AgentName
from proxyd.runtime.refusals import Refusals
from proxyd.runtime.sockets import Remote, connected_to, remote_of
from proxyd.runtime.tls import TlsIdentity, TlsKeeper, agent_uri, names_agent

SETTLE_S = 3.0
"""A window. Once a handshake has begun, its connection's first call comes within one, or never will."""
FORGET_WINDOWS = 10
"""Closed connections are forgotten every so many windows: sooner than a port can be used again (TIME_WAIT, 60 s)."""
LOOK_S = 0.1
LOOK_SHARE = 0.05
"""Looks are so far apart at least, and take no more of a processor: one reads a line for each connection of this host,
70 ms for ten thousand. Who shakes hands between two looks is not seen; who is turned away comes again."""
HOSTS_SHOWN = 8

_log = logging.getLogger("proxyd.coordinator")
_Context = grpc.aio.ServicerContext[Any, Any]


class Guard:
    """Certificates and refusals of one coordinator.

    :param tls: None: TCP without TLS (the token, or a loopback address, keeps strangers out).
    """

    def __init__(self, tls: TlsKeeper | None = None) -> None:
        self.tls = tls
        self.refusals = Refusals()
        self._lock = threading.Lock()
        self._pending = 0
        """Handshakes over whose connections no call has come: those that came to nothing, and those under way."""
        self._least_pending = 0
        """Of this window. So many came to nothing: none of them can have been under way all the time."""
        self._lost = 0
        self._peers: dict[str, Remote | None] = {}
        """Connections over which calls have come; nobody gets here without a right certificate."""
        self._given: TlsIdentity | None = None
        self._ports: tuple[int, ...] = ()
        self._seen: set[Remote] = set()
        self._seen_before: set[Remote] = set()
        self._look_from_s = 0.0

    def listens_at(self, port: int) -> None:
        """A TCP port with TLS is open."""
        self._ports += (port,)

    def credentials(self, tls: TlsKeeper) -> grpc.ServerCredentials:
        """For a TCP port. The certificate is looked up for each connection."""
        self._given = tls.current()

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            # Called by a thread of gRPC's at each handshake. None: as before.
            self.handshake_begins()
            identity = tls.current()
            with self._lock:
                if identity is self._given:
                    return None
                self._given = identity
            return _configuration(identity)

        return grpc.dynamic_ssl_server_credentials(
            _configuration(self._given),
            fetch,  # type: ignore[arg-type] # None is allowed, the stubs don't know
            require_client_authentication=True,
        )

    def handshake_begins(self) -> None:
        """Somebody has connected and begins to shake hands. May be called by any thread."""
        with self._lock:
            self._pending += 1
            begun_s = time.monotonic()
            if begun_s < self._look_from_s:
                return
            self._look_from_s = begun_s + LOOK_S
        # Now, because afterwards gRPC has closed it, and the kernel knows nothing of it any more.
        seen = connected_to(self._ports)
        with self._lock:
            self._seen |= seen
            took_s = time.monotonic() - begun_s
            self._look_from_s = begun_s + max(LOOK_S, took_s / LOOK_SHARE)

    def saw_call(self, context: _Context) -> None:
        """A call came, so this connection's handshake was good."""
        if self.tls is None or not _is_tls(context.auth_context()):
            return
        peer = context.peer()
        if peer in self._peers:
            return
        self._peers[peer] = remote_of(peer)
        with self._lock:
            self._pending -= 1
            self._least_pending = min(self._least_pending, self._pending)

    def problem(self, context: _Context, agent: AgentName) -> str:
        """Why whoever calls can't be that agent, by its certificate; "" when it can, or where there is no TLS."""
        shown = context.auth_context()
        if self.tls is None or not _is_tls(shown):
            return ""  # the Unix socket, which its file mode guards
        uris = [value.decode("utf-8", "replace") for value in shown.get("peer_uri", ())]
        if names_agent(uris, agent.site, agent.name):
            return ""
        self.refusals.add("control", "certificate_name")
        named = ", ".join(uris) or "nobody"
        return f"the certificate is of {named} and not of {agent_uri(agent.site, agent.name)}"

    async def watch(self) -> None:
        """Count and name handshakes that came to nothing, for ever."""
        while True:
            for _ in range(FORGET_WINDOWS):
                await asyncio.sleep(SETTLE_S)
                self.settle()
            known = list(self._peers)
            self.forget(known, await asyncio.to_thread(connected_to, self._ports))

    def settle(self) -> None:
        """A window has passed: count what came to nothing before it."""
        with self._lock:
            least, self._least_pending = self._least_pending, self._pending
            seen, self._seen_before, self._seen = self._seen_before, self._seen, set()
        # Less than before: one that was given up had its first call late, and what comes next counts.
        before, self._lost = self._lost, least
        if least <= before:
            return
        for _ in range(least - before):
            self.refusals.add("control", "tls")
        _log.warning(
            "%d TLS handshakes at the control port came to nothing, from %s: a certificate was missing, expired or of a"
            " CA that tls_ca does not know. gRPC's own line above says which, the refused agent's log whose it was",
            least - before,
            self._strangers(seen) or "hosts that were gone at once",
        )

    def forget(self, known: Collection[str], connected: Collection[Remote]) -> None:
        """Those of the known peers that are not connected any more: the next one of that name is somebody else."""
        with self._lock:
            recent = self._seen | self._seen_before
        for peer in known:
            remote = self._peers[peer]
            if remote not in connected and remote not in recent:
                del self._peers[peer]

    def _strangers(self, seen: Collection[Remote]) -> str:
        """Hosts of those over whose connections no call has come, as words."""
        served = set(self._peers.values())
        hosts = sorted({one.host for one in seen if one not in served})
        more = f" and {len(hosts) - HOSTS_SHOWN} more" if len(hosts) > HOSTS_SHOWN else ""
        return ", ".join(hosts[:HOSTS_SHOWN]) + more


def _is_tls(shown: Mapping[str, Any]) -> bool:
    return b"ssl" in shown.get("transport_security_type", ())


def _configuration(identity: TlsIdentity) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(identity.key_pem, identity.chain_pem)], identity.ca_pem)


def reference(error: BaseException, what: str) -> str:
    """Log an exception from inside; answers what may be told of it: a number that finds it in the log."""
    number = secrets.token_hex(4)
    _log.error("%s: internal error, reference %s", what, number, exc_info=error)
    return f"internal error; the coordinator's log has it under reference {number}"


class Shield(grpc.aio.ServerInterceptor):
    """Answers INTERNAL with a reference where a handler of a single question raised something unexpected.

    gRPC would send the exception's text, with whatever stands in it. Sessions, the only streams of ours, do the same
    themselves.
    """

    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    async def intercept_service(  # type: ignore[override] # the stubs of two releases differ
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        # The stubs know only the other kind of server's handlers, and not that there may be none.
        handler: Any = await continuation(handler_call_details)
        if handler is None or handler.unary_unary is None:
            return handler  # type: ignore[no-any-return]
        inner = handler.unary_unary
        method = handler_call_details.method

        async def guarded(request: Any, context: _Context) -> Any:
            self._guard.saw_call(context)
            try:
                answer = inner(request, context)
                return await answer if isinstance(answer, Awaitable) else answer
            except (asyncio.CancelledError, grpc.aio.AbortError):
                raise
            except Exception as error:  # noqa: BLE001 # whatever it is, the other side gets none of it
                await context.abort(grpc.StatusCode.INTERNAL, reference(error, str(method)))

        return grpc.unary_unary_rpc_method_handler(
            guarded,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )
