"""An API server that knows Leases only, for there is no cluster where the tests run.

What the lock leans on is as in the real one: each write makes a new ``resourceVersion`` (one counter for all objects),
a write that names another than the present one is refused with 409 Conflict, so is creating what exists; what is not
there is 404; and a Status object says so. A ``fail`` of the test answers 503, or loses the answer to a write that was
carried out. Who asks may do what the Role in deploy/kubernetes says, and gets 403 Forbidden for anything else.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web

MANIFEST = Path(__file__).resolve().parents[2] / "deploy" / "kubernetes" / "coordinator-lock.yaml"
VERBS = {"GET": "get", "POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
PATH = "/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"


class FakeApiServer:
    """Listens on 127.0.0.1 between :meth:`start` and :meth:`close`."""

    def __init__(self) -> None:
        self.leases: dict[tuple[str, str], dict[str, Any]] = {}
        self.writes: list[dict[str, Any]] = []
        self.fail = ""
        """"503": answer nothing; "lost": carry the next write out, and break the connection."""
        self._version = 1000
        self._runner: web.AppRunner | None = None

    async def start(self, directory: Path) -> str:
        """Answers the path of a kubeconfig for it."""
        app = web.Application(middlewares=[_authorize])
        app.router.add_get(PATH + "/{name}", self._get)
        app.router.add_put(PATH + "/{name}", self._put)
        app.router.add_post(PATH, self._post)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        port = self._runner.addresses[0][1]
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
            "clusters": [{"name": "test", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
            "users": [{"name": "test", "user": {"token": "0123456789abcdef"}}],
        }
        path = directory / "kubeconfig"
        path.write_text(json.dumps(config))
        return str(path)

    async def close(self) -> None:
        """The end."""
        if self._runner is not None:
            await self._runner.cleanup()

    def touch(self, key: tuple[str, str]) -> None:
        """Somebody annotates the object."""
        self._version += 1
        self.leases[key]["metadata"]["resourceVersion"] = str(self._version)

    async def _get(self, request: web.Request) -> web.StreamResponse:
        if self.fail == "503":
            return _status(503, "ServiceUnavailable")
        lease = self.leases.get((request.match_info["namespace"], request.match_info["name"]))
        return _status(404, "NotFound") if lease is None else web.json_response(lease)

    async def _post(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        key = (request.match_info["namespace"], body["metadata"]["name"])
        if self.fail == "503":
            return _status(503, "ServiceUnavailable")
        if key in self.leases:
            return _status(409, "AlreadyExists")
        assert "resourceVersion" not in body["metadata"], "the real one refuses it"
        return self._write(key, body, 201)

    async def _put(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        key = (request.match_info["namespace"], request.match_info["name"])
        if self.fail == "503":
            return _status(503, "ServiceUnavailable")
        if key not in self.leases:
            return _status(404, "NotFound")
        wanted = body["metadata"].get("resourceVersion")
        if wanted and wanted != self.leases[key]["metadata"]["resourceVersion"]:
            return _status(409, "Conflict")
        return self._write(key, body, 200)

    def _write(self, key: tuple[str, str], body: dict[str, Any], status: int) -> web.StreamResponse:
        assert request_is_a_lease(body), body
        self._version += 1
        lease = copy.deepcopy(body)
        lease["metadata"]["resourceVersion"] = str(self._version)
        self.leases[key] = lease
        self.writes.append(lease)
        if self.fail == "lost":
            self.fail = ""
            return _status(504, "Timeout")
        return web.json_response(lease, status=status)


def request_is_a_lease(body: dict[str, Any]) -> bool:
    """What the API server's own validation would look at."""
    spec = body["spec"]
    return (
        body["kind"] == "Lease"
        and body["apiVersion"] == "coordination.k8s.io/v1"
        and isinstance(spec["leaseDurationSeconds"], int)
        and spec["leaseDurationSeconds"] > 0
        and isinstance(spec["leaseTransitions"], int)
        and spec["renewTime"].endswith("Z")
    )


def allowed(verb: str, name: str | None) -> bool:
    """Whether the manifest's Role lets a coordinator do that to a Lease (None: the name is not in the address)."""
    [role] = [one for one in yaml.safe_load_all(MANIFEST.read_text()) if one["kind"] == "Role"]
    return any(
        "coordination.k8s.io" in rule["apiGroups"]
        and "leases" in rule["resources"]
        and verb in rule["verbs"]
        and ("resourceNames" not in rule or name in rule["resourceNames"])
        for rule in role["rules"]
    )


@web.middleware
async def _authorize(request: web.Request, handler: Any) -> web.StreamResponse:
    if not allowed(VERBS[request.method], request.match_info.get("name")):
        return _status(403, "Forbidden")
    answer: web.StreamResponse = await handler(request)
    return answer


def _status(code: int, reason: str) -> web.Response:
    return web.json_response(
        {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "code": code}, status=code
    )
