"""A link as a fluid, and one sender that obeys the estimator's pace: what the estimator is tested against.

No TCP and no grants: delivered bytes, bytes in flight, losses and round trips as perfect reports would tell them, 5 ms
apart, a millisecond old. So what a test sees is the estimator's doing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from proxyd.core.bandwidth import LinkEstimator, LinkSettings
from proxyd.core.ids import LinkName
from proxyd.core.messages import Report
from proxyd.core.tally import Flow

MS = 1_000_000
SECOND = 1_000 * MS
LINK = LinkName("a", "b")
PACKET = 8948
STEP_NS = MS // 2
REPORT_NS = 5 * MS
CONTROL_NS = MS


class FluidLink:
    """One bottleneck. ``rate(time_ns)``: payload bytes/s; ``demand(time_ns)``: the most that is offered, bytes/s;
    ``held(time_ns)``: hosts are held up, and no acknowledgement is seen.

    ``windows_bytes``: what TCP's windows let be in flight.

    ``beside``: the link of the other direction, once both exist; acknowledgements wait in its queue, and with ``tells``
    the agents say so (``back_noise`` less, which they can't be sure of)."""

    def __init__(
        self,
        rate: Callable[[int], float],
        *,
        rtt_ns: int = 60 * MS,
        buffer_bytes: float = 3_000_000,
        settings: LinkSettings | None = None,
        demand: Callable[[int], float] = lambda _: float("inf"),
        bucket: tuple[float, float] | None = None,
        noise: Callable[[], int] = lambda: 0,
        held: Callable[[int], bool] = lambda _: False,
        windows_bytes: float = float("inf"),
    ) -> None:
        self.rate, self.demand, self.rtt_ns, self.buffer_bytes, self.noise = rate, demand, rtt_ns, buffer_bytes, noise
        self.held, self.windows_bytes = held, windows_bytes
        self.estimator = LinkEstimator(settings or LinkSettings(LINK, mtu_bytes=9000, live=True))
        self.now_ns = 0
        self.queue_bytes = self.carried_bytes = self.could_bytes = self.offered_bytes = self.lost_bytes = 0.0
        self.queues: list[float] = []
        self.estimates: list[int] = []
        self._bucket = bucket
        self._tokens = bucket[1] if bucket else 0.0
        self._acks: deque[tuple[int, float, float, int, int]] = deque()
        self._sent = self._arrived = self._known_lost = 0.0
        self._srtt_ns = rtt_ns
        self._pace = float(self.estimator.pace_bytes_per_s)
        self._paces: deque[tuple[int, float]] = deque()
        self._told = (0.0, 0.0, 0, 0)
        self.beside: FluidLink | None = None
        self.tells = False
        self._ack_wait_ns = self._told_wait_ns = 0
        self._crossing: deque[tuple[int, float, float, int]] = deque()

    def run(self, for_ns: int) -> None:
        """Let time pass; figures count from here on."""
        run_together([self], for_ns)

    @property
    def in_flight_bytes(self) -> float:
        """Sent, and neither acknowledged nor known to be lost."""
        return self._sent - self._arrived - self._known_lost

    def begin_count(self) -> None:
        """Figures count from here on."""
        self.carried_bytes = self.could_bytes = self.offered_bytes = self.lost_bytes = 0.0
        self.queues.clear()
        self.estimates.clear()

    def step(self) -> None:
        now_ns = self.now_ns = self.now_ns + STEP_NS
        while self._paces and self._paces[0][0] <= now_ns:
            self._pace = self._paces.popleft()[1]
        seconds = STEP_NS / SECOND
        room = max(0.0, self.windows_bytes - self.in_flight_bytes)
        offered = min(min(self._pace, self.demand(now_ns)) * seconds, room)
        could = self.rate(now_ns) * seconds
        lost = 0.0
        if self._bucket is not None:
            self._tokens = min(self._bucket[1], self._tokens + self._bucket[0] * seconds)
            lost = max(0.0, offered - self._tokens)
            self._tokens -= offered - lost
        self.queue_bytes += offered - lost
        served = min(self.queue_bytes, could)
        self.queue_bytes -= served
        dropped = max(0.0, self.queue_bytes - self.buffer_bytes)
        self.queue_bytes -= dropped
        lost += dropped
        self._sent += offered
        self.offered_bytes += offered
        self.lost_bytes += lost
        self.carried_bytes += served
        self.could_bytes += could
        waits_ns = int(self.queue_bytes / max(self.rate(now_ns), 1.0) * SECOND)
        self._crossing.append((now_ns + self.rtt_ns // 2, served, lost, self.rtt_ns + waits_ns))
        while self._crossing and self._crossing[0][0] <= now_ns:
            at_ns, served, lost, rtt_ns = self._crossing.popleft()
            beside = self.beside
            wait_ns = int(beside.queue_bytes / max(beside.rate(now_ns), 1.0) * SECOND) if beside is not None else 0
            self._acks.append((at_ns + wait_ns + self.rtt_ns // 2, served, lost, rtt_ns + wait_ns, wait_ns))
        while self._acks and self._acks[0][0] <= now_ns and not self.held(now_ns):
            _, arrived, gone, rtt_ns, self._ack_wait_ns = self._acks.popleft()
            self._arrived += arrived
            self._known_lost += gone
            self._srtt_ns += (rtt_ns - self._srtt_ns) // 8
        if now_ns % REPORT_NS == 0:
            self.queues.append(self.queue_bytes)
            self.estimates.append(self.estimator.rate_bytes_per_s(now_ns))
            self._report(now_ns + CONTROL_NS // 2)

    def _report(self, now_ns: int) -> None:
        arrived, sent, packets, since_ns = self._told
        lost = int(self._known_lost / PACKET)
        in_flight = int(self.in_flight_bytes)
        self._told = (self._arrived, self._sent, lost, now_ns)
        if self._sent == sent and self._arrived == arrived and in_flight <= 0:
            return  # agents report changes
        flow = Flow(
            delivered_bytes=int(self._arrived - arrived),
            sent_bytes=int(self._sent - sent),
            retransmits=lost - packets,
            since_ns=since_ns,
            at_ns=now_ns,
            horizon_ns=now_ns,
            in_flight_bytes=in_flight,
            missing_bytes=in_flight,
            demand=self.demand(now_ns) > self._pace,
            control_rtt_ns=CONTROL_NS,
            window_limited=in_flight > 0.9 * self.windows_bytes,
        )
        wait_ns = self._ack_wait_ns if self.tells else 0
        flow.ack_wait_ns, flow.ack_waited_ns, self._told_wait_ns = wait_ns, self._told_wait_ns, wait_ns
        flow.horizon_ns -= wait_ns
        report = Report(
            LINK, 0, 0, 0, 0, 0, 0, 0, self._srtt_ns + self.noise(), self.rtt_ns, 0, 0, False, back_queue_ns=wait_ns
        )
        self.estimator.on_report(report, flow, now_ns)
        self._paces.append((now_ns + CONTROL_NS // 2, float(self.estimator.pace_bytes_per_s)))

    @property
    def used(self) -> float:
        """Of what could be carried."""
        return self.carried_bytes / self.could_bytes

    @property
    def loss(self) -> float:
        """Of what was offered."""
        return self.lost_bytes / self.offered_bytes

    def queue_p99_bytes(self) -> float:
        """Over time."""
        return sorted(self.queues)[len(self.queues) * 99 // 100]


def run_together(links: Sequence[FluidLink], for_ns: int) -> None:
    """Let time pass for all of them; figures count from here on."""
    for link in links:
        link.begin_count()
    end_ns = links[0].now_ns + for_ns
    while links[0].now_ns < end_ns:
        for link in links:
            link.step()
