"""The lock in etcd: one key, created only if it is absent, that goes with its lease.

The key's create revision is the fence: etcd gives each creation a higher one than all changes before it had.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import aetcd
import grpc

from proxyd.coordinator.election import LockError, LockLostError
from proxyd.coordinator.etcd_tls import EtcdTls, SecureClient
from proxyd.core.errors import ConfigError
from proxyd.core.units import NS_PER_S
from proxyd.runtime.grpc_options import channel_options

T = TypeVar("T")


class EtcdLock:
    """See :class:`proxyd.coordinator.election.Lock`.

    :param endpoints: ``(host, port)`` of the cluster's members; one that doesn't answer is passed over.
    :param key: what stands for the lock.
    :param me: where this coordinator is reached: the key's value.
    :param ttl_ns: whole seconds; etcd itself has a least ttl of about one and a half election time-outs.
    :param tls: None: etcd is spoken to in the clear. Its files are read at each connection.
    """

    def __init__(
        self, endpoints: Sequence[tuple[str, int]], key: str, me: str, ttl_ns: int, tls: EtcdTls | None = None
    ) -> None:
        self._tls = tls
        self._endpoints = list(endpoints)
        self._key = key.encode()
        self._me = me.encode()
        self._ttl_s = -(-ttl_ns // NS_PER_S)
        self._client: aetcd.Client | None = None
        self._lease: int | None = None
        self._fence = 0
        self.holder = ""

    async def claim(self) -> int | None:
        """Take the key if it is absent."""
        return await self._ask(self._claim)

    async def _claim(self, client: aetcd.Client) -> int | None:
        found = await client.get(self._key)
        if found is not None:
            self.holder = found.value.decode("utf-8", "replace")
            return None
        lease = await client.lease(self._ttl_s)
        create = client.transactions.create(self._key) == 0
        put, get = client.transactions.put(self._key, self._me, lease), client.transactions.get(self._key)
        taken, answers = await client.transaction(compare=[create], success=[put, get], failure=[get])
        _, entry = answers[-1][0]
        if not taken:
            self.holder = entry.value.decode("utf-8", "replace")
            await client.revoke_lease(lease.id)
            return None
        self._lease, self._fence = lease.id, entry.create_revision
        self.holder = self._me.decode()
        return self._fence

    async def renew(self) -> None:
        """Keep the lease alive; the key goes with it."""
        await self._ask(self._renew)

    async def _renew(self, client: aetcd.Client) -> None:
        reply = await client.refresh_lease(self._lease)
        if reply is None or reply.TTL <= 0:
            raise LockLostError("its lease has ended in etcd")
        # A key that was deleted, or written anew by hand, is no lock of ours, though the lease lives.
        found = await client.get(self._key)
        if found is None or found.create_revision != self._fence:
            raise LockLostError("its key in etcd was deleted, or is another one's")

    async def release(self) -> None:
        """Revoke the lease: the key is gone at once."""
        if self._lease is not None:
            lease, self._lease = self._lease, None
            await self._ask(lambda client: client.revoke_lease(lease))

    async def close(self) -> None:
        """Hang up."""
        if self._client is not None:
            client, self._client = self._client, None
            with contextlib.suppress(aetcd.ClientError, grpc.RpcError):
                await client.close()

    async def _ask(self, call: Callable[[aetcd.Client], Awaitable[T]]) -> T:
        host, port = self._endpoints[0]
        try:
            if self._client is None:
                self._client = self._new_client(host, port)
            return await call(self._client)
        except LockLostError:
            raise
        except (aetcd.ClientError, grpc.RpcError, ConfigError, OSError, IndexError, AttributeError) as error:
            # Also what the client makes of answers that it doesn't know: it hands out None for some errors.
            await self.close()
            self._endpoints.append(self._endpoints.pop(0))
            raise LockError(f"etcd at {host}:{port}: {str(error) or type(error).__name__}") from error

    def _new_client(self, host: str, port: int) -> aetcd.Client:
        options: dict[str, Any] = dict(channel_options())
        if self._tls is None:
            return aetcd.Client(host, port, timeout=self._ttl_s, options=options)
        return SecureClient(host, port, self._tls.credentials(), timeout=self._ttl_s, options=options)
