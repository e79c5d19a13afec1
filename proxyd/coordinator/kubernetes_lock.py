"""The lock as a Kubernetes Lease (coordination.k8s.io/v1), in the way in which Kubernetes' own parts elect leaders.

Every write names the ``resourceVersion`` that it was made from; the API server refuses one that is older than what
stands there (409), so of two that write at once one wins. A holder that stops renewing is found out by whoever waits:
not by the times that stand in the Lease, which are another host's wall clock, but by watching for one of *our* ttls
that nothing in it changes. ``leaseTransitions`` counts the holders: it is the fence.

Deleting the Lease begins the count anew; while a coordinator of a higher fence is known, agents then refuse the new
ones. Release a lock by ending its holder, not by deleting the object.
"""

from __future__ import annotations

import datetime
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import aiohttp
from kubernetes_asyncio import client, config
from kubernetes_asyncio.client.exceptions import ApiException
from kubernetes_asyncio.config.config_exception import ConfigException

from proxyd.coordinator.election import LockError, LockLostError, boot_clock_ns
from proxyd.core.units import NS_PER_S

T = TypeVar("T")
CONFLICT, NOT_FOUND = 409, 404


class KubernetesLock:
    """See :class:`proxyd.coordinator.election.Lock`.

    :param me: where this coordinator is reached; with a random part of each life it is the holder's identity.
    :param kubeconfig: a file; None: the pod's service account, or else the file that kubectl would use.
    """

    def __init__(
        self,
        namespace: str,
        name: str,
        me: str,
        ttl_ns: int,
        *,
        kubeconfig: str | None = None,
        clock: Callable[[], int] = boot_clock_ns,
    ) -> None:
        self._namespace, self._name = namespace, name
        self._me = f"{me}_{secrets.token_hex(4)}"
        self._ttl_ns = ttl_ns
        self._kubeconfig = kubeconfig
        self._clock = clock
        self._api: client.CoordinationV1Api | None = None
        self._seen: tuple[str, int] | None = None
        """The Lease's resourceVersion, and since when it has been that."""
        self._version = ""
        """What our last write made of it."""
        self._transitions = 0
        self.holder = ""

    async def claim(self) -> int | None:
        """Make the Lease, or take one whose holder has let it go, or has not renewed it for a ttl."""
        return await self._ask(self._claim)

    async def _claim(self, api: client.CoordinationV1Api) -> int | None:
        lease = await self._read(api)
        if lease is None:
            body = self._body(None, transitions=0)
            made = await self._write(lambda: api.create_namespaced_lease(self._namespace, body))
            return self._took(made, 0)
        version, spec = lease.metadata.resource_version, lease.spec
        held_by = (spec.holder_identity if spec is not None else None) or ""
        self.holder = held_by.rpartition("_")[0]
        now_ns = self._clock()
        if self._seen is None or self._seen[0] != version:
            self._seen = (version, now_ns)
        # Its own ttl, should it be configured with a longer one than we are.
        ttl_ns = max(self._ttl_ns, ((spec.lease_duration_seconds if spec is not None else None) or 0) * NS_PER_S)
        if held_by and now_ns - self._seen[1] < ttl_ns:
            return None
        transitions = ((spec.lease_transitions if spec is not None else None) or 0) + 1
        body = self._body(version, transitions)
        made = await self._write(lambda: api.replace_namespaced_lease(self._name, self._namespace, body))
        return self._took(made, transitions)

    def _took(self, made: client.V1Lease | None, transitions: int) -> int | None:
        if made is None:
            return None
        self._version, self._transitions = made.metadata.resource_version, transitions
        self.holder = self._me.rpartition("_")[0]
        return transitions + 1

    async def renew(self) -> None:
        """Write it anew, from what we wrote last."""
        await self._ask(self._renew)

    async def _renew(self, api: client.CoordinationV1Api) -> None:
        body = self._body(self._version, self._transitions)
        made = await self._write(lambda: api.replace_namespaced_lease(self._name, self._namespace, body))
        if made is None:
            lease = await self._read(api)
            if lease is None or lease.spec is None or lease.spec.holder_identity != self._me:
                raise LockLostError(
                    f"the Lease {self._namespace}/{self._name} was deleted, or is another coordinator's now"
                )
            # Somebody else touched it (an annotation), or the answer to our last write was lost.
            self._version = lease.metadata.resource_version
            raise LockError("the Lease was changed by somebody else")
        self._version = made.metadata.resource_version

    async def release(self) -> None:
        """Leave it without a holder."""
        body = self._body(self._version, self._transitions)
        body["spec"]["holderIdentity"] = ""
        await self._ask(
            lambda api: self._write(lambda: api.replace_namespaced_lease(self._name, self._namespace, body))
        )

    async def close(self) -> None:
        """Hang up."""
        if self._api is not None:
            api, self._api = self._api, None
            await api.api_client.close()

    def _body(self, version: str | None, transitions: int) -> dict[str, Any]:
        # For people who look at it: nothing is reckoned from it.
        now = datetime.datetime.fromtimestamp(time.time(), datetime.UTC).isoformat(timespec="microseconds")
        metadata: dict[str, Any] = {"name": self._name, "namespace": self._namespace}
        if version is not None:
            metadata["resourceVersion"] = version
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": metadata,
            "spec": {
                "holderIdentity": self._me,
                "leaseDurationSeconds": -(-self._ttl_ns // NS_PER_S),
                "leaseTransitions": transitions,
                "renewTime": now.replace("+00:00", "Z"),
            },
        }

    async def _read(self, api: client.CoordinationV1Api) -> client.V1Lease | None:
        try:
            return await api.read_namespaced_lease(self._name, self._namespace)
        except ApiException as error:
            if error.status == NOT_FOUND:
                return None
            raise

    @staticmethod
    async def _write(call: Callable[[], Awaitable[T]]) -> T | None:
        """None: somebody else wrote first, or it is not there any more."""
        try:
            return await call()
        except ApiException as error:
            if error.status in (CONFLICT, NOT_FOUND):
                return None
            raise

    async def _ask(self, call: Callable[[client.CoordinationV1Api], Awaitable[T]]) -> T:
        try:
            if self._api is None:
                self._api = client.CoordinationV1Api(await self._connect())
            return await call(self._api)
        except (ApiException, ConfigException, aiohttp.ClientError, OSError, ValueError) as error:
            await self.close()  # a token that was rotated is read anew
            reason = getattr(error, "reason", None) or str(error) or type(error).__name__
            raise LockError(f"Lease {self._namespace}/{self._name}: {reason}") from error

    async def _connect(self) -> client.ApiClient:
        settings = client.Configuration()
        if self._kubeconfig is None:
            try:
                config.load_incluster_config(client_configuration=settings)
            except ConfigException:
                await config.load_kube_config(client_configuration=settings)
        else:
            await config.load_kube_config(config_file=self._kubeconfig, client_configuration=settings)
        return client.ApiClient(settings)
