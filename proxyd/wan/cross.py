"""Traffic of somebody else on the same link: what no coordinator grants and no agent paces.

with CrossTraffic(wan, ("a", 8), ("b", 1)) as cross:
    cross.flood(5_000_000)        # a steady stream of datagrams; 0 ends it
    cross.tcp("cubic")            # a plain TCP flow that takes what it can get; "" ends it
"""

from __future__ import annotations

import sys
import time
from typing import Self

from proxyd.wan.burst import WORKER
from proxyd.wan.crew import Crew
from proxyd.wan.topology import Wan

SINK_PORT, TCP_PORT = 5401, 5402
ENDLESS_BYTES = 1 << 45
START_TIMEOUT_S = 30.0


class CrossTraffic:
    """One host that sends to another; both should be nobody else's. Raises WanError if a process can't be started."""

    def __init__(self, wan: Wan, source: tuple[str, int], target: tuple[str, int]) -> None:
        self._wan = wan
        self._source, self._target = wan.host(*source), wan.host(*target)
        self._receivers = Crew()
        self._flood: Crew | None = None
        self._tcp: Crew | None = None
        try:
            for role, port in (("sink", SINK_PORT), ("receive", TCP_PORT)):
                argv = [sys.executable, "-I", "-S", WORKER, role, str(port)]
                self._receivers.start(self._target, f"cross {role} on {self._target.name}", argv)
            self._receivers.gather("listening", 2, START_TIMEOUT_S)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def flood(self, rate_bytes_per_s: int, packet_bytes: int = 0) -> None:
        """Datagrams at this rate (of IP packets) from now on; 0: none. Packets are as large as the MTU by default."""
        if self._flood is not None:
            self._flood.close()
            self._flood = None
        if rate_bytes_per_s <= 0:
            return
        self._flood = Crew()
        arguments = [self._target.address, SINK_PORT, rate_bytes_per_s, packet_bytes or self._wan.mtu]
        argv = [sys.executable, "-I", "-S", WORKER, "flood", *map(str, arguments)]
        self._flood.start(self._source, f"cross flood on {self._source.name}", argv)
        self._flood.gather("flooding", 1, START_TIMEOUT_S)

    def tcp(self, congestion_control: str) -> None:
        """A plain TCP flow without an end from now on; "": none."""
        if self._tcp is not None:
            self._tcp.close()
            self._tcp = None
        if not congestion_control:
            return
        self._tcp = Crew()
        argv = [sys.executable, "-I", "-S", WORKER, "send", "0"]
        sender = self._tcp.start(self._source, f"cross flow on {self._source.name}", argv)
        sender.command(op="connect", address=self._target.address, port=TCP_PORT, congestion=congestion_control)
        self._tcp.gather("connected", 1, START_TIMEOUT_S)
        sender.command(op="send", sequence=0, bytes=ENDLESS_BYTES, at_ns=time.monotonic_ns())

    def close(self) -> None:
        """End all of it."""
        for crew in (self._flood, self._tcp, self._receivers):
            if crew is not None:
                crew.close()
        self._flood = self._tcp = None
