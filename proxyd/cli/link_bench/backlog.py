"""Senders that always have something to send: each has ``depth`` messages under way until it is told to stop.

The next message of a sender is ordered when one of its messages has arrived. FCT runs from that order to the receiver's
last byte, so it includes the wait behind the sender's own message before it: the same for plain TCP and for proxyd.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from proxyd.cli.demo.traffic import DemoError, Traffic

ARRIVAL_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Flow:
    """One message that has arrived."""

    sender: int
    number: int
    ordered_ns: int
    end_ns: int

    @property
    def seconds(self) -> float:
        """Its FCT."""
        return (self.end_ns - self.ordered_ns) / 1e9


class Backlog:
    """Drives a :class:`~proxyd.cli.demo.traffic.Traffic`. Raises what that raises."""

    def __init__(self, traffic: Traffic, senders: int, depth: int) -> None:
        self._traffic = traffic
        self._depth = depth
        self._ordered: dict[tuple[int, int], int] = {}
        self._next = [0] * senders
        self.flows: list[Flow] = []

    @property
    def messages(self) -> int:
        """Ordered so far."""
        return sum(self._next)

    def start(self) -> int:
        """Order the first messages; answers when."""
        now_ns = time.monotonic_ns()
        for _ in range(self._depth):
            for sender in range(len(self._next)):
                self._order(sender)
        return now_ns

    def _order(self, sender: int) -> None:
        number = self._next[sender]
        self._next[sender] += 1
        self._ordered[(sender, number)] = now_ns = time.monotonic_ns()
        self._traffic.order_one(sender, number, now_ns)

    def run(self, until_ns: int) -> None:
        """Keep them busy until then, or until the first arrival after it: that one is followed by another order too."""
        while (left_ns := until_ns - time.monotonic_ns()) > 0:
            # Nothing may arrive before then; what is due by then is not late.
            self._order(self._next_flow(left_ns / 1e9 + ARRIVAL_TIMEOUT_S).sender)

    def drain(self) -> int:
        """Wait for what is still under way; answers how many messages there were in all."""
        while self._ordered:
            self._next_flow(ARRIVAL_TIMEOUT_S)
        return self.messages

    def _next_flow(self, timeout_s: float) -> Flow:
        arrival = self._traffic.next_arrival(timeout_s)
        ordered_ns = self._ordered.pop((arrival.sender, arrival.number), None)
        if ordered_ns is None:
            raise DemoError(f"rank {arrival.sender}'s message {arrival.number} arrived twice, or was never sent")
        flow = Flow(arrival.sender, arrival.number, ordered_ns, arrival.end_ns)
        self.flows.append(flow)
        return flow
