"""What a coordinator thinks of a link over time, asked at its Admin service from the outside."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from proxyd.core.errors import RemoteError

INTERVAL_S = 0.1
TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Look:
    """One answer. Rates are payload."""

    time_ns: int
    """CLOCK_MONOTONIC, halfway between question and answer."""
    source: str
    estimate_bytes_per_s: int
    pace_bytes_per_s: int
    granted_bytes_per_s: int
    rtt_ns: int
    queue_ns: int
    window_bytes: int
    outstanding_bytes: int
    slot_bytes: int

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


class Watch:
    """A thread that asks every ``interval_s`` until it is closed. Raises RemoteError if nobody answers at first.

    :param beside: links that are looked at in the same instants.
    """

    def __init__(
        self,
        coordinator: str,
        link: tuple[str, str],
        interval_s: float = INTERVAL_S,
        *,
        beside: Sequence[tuple[str, str]] = (),
    ) -> None:
        import grpc

        from proxyd.runtime.grpc_options import channel_options
        from proxyd.v1 import admin_pb2, coordination_pb2
        from proxyd.v1.admin_pb2_grpc import AdminStub

        names = [coordination_pb2.LinkName(src_site=one[0], dst_site=one[1]) for one in (link, *beside)]
        self._request = admin_pb2.LinksRequest(links=names)
        self._channel = grpc.insecure_channel(coordinator, options=channel_options())
        self._stub: Any = AdminStub(self._channel)
        self._error = grpc.RpcError
        self._interval_s = interval_s
        self._stop = threading.Event()
        self.looks: list[Look] = []
        try:
            self._look()
        except grpc.RpcError as error:
            self._channel.close()
            raise RemoteError(f"the coordinator at {coordinator} does not tell of its links", why=str(error)) from error
        self._thread = threading.Thread(target=self._run, name="bench-watch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            try:
                self._look()
            except self._error:
                return  # the coordinator has ended: what was seen until now is what there is

    def _look(self) -> None:
        asked_ns = time.monotonic_ns()
        links = self._stub.Links(self._request, timeout=TIMEOUT_S).links
        now_ns = (asked_ns + time.monotonic_ns()) // 2
        for link in links:
            self.looks.append(
                Look(
                    now_ns,
                    link.source,
                    link.bottleneck_bytes_per_s,
                    link.pace_bytes_per_s,
                    link.granted_rate_bytes_per_s,
                    link.rtt_ns,
                    link.queue_ns,
                    link.window_bytes,
                    link.outstanding_bytes,
                    link.slot_bytes,
                )
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the thread and the channel. Idempotent."""
        self._stop.set()
        self._thread.join()
        self._channel.close()
