"""A lane: what one agent holds on one link, and what it has shown that it can do.

A lane is *busy* while granted bytes may still leave its host. It is *leaving* once its turn is over and their last one
leaves within the lead time: its share of the rate then passes to the successor, who starts when that has happened. So
the rates of busy lanes that are not leaving never sum to more than the link's pace.

**When the last byte leaves** is known from the agent's reports: how much it still had, and how fast it went between the
last two of them. A prediction counts only while its report is fresh, or while what can still be at the host fits into
half the gateway's buffer, so that a sender that stalls right then overlaps with its successor and harms nobody.

**What a lane can really send.** A cold or shrunk TCP window, a slow NIC or a busy host shows in what left, never in the
plan. Once per round trip of uninterrupted sending the meter compares: below 0.9 of the granted rate for several of them
in a row, the lane's *ceiling* becomes what it managed times 1.25 (times 2 while that still grows fast, as in slow
start) and others get the rest; above, the ceiling is raised by half until it no longer binds. One slow round trip says
nothing: a host that was held up for 30 ms catches up at the rate of the grants in its hands, and whoever was started
beside it meets it in the gateway's buffer.
"""

from __future__ import annotations

from proxyd.core.bandwidth import NANOS
from proxyd.core.ids import AgentName
from proxyd.core.messages import Report
from proxyd.core.window import Account

DELIVERS = 0.9
"""A lane that sends at least this part of its rate uses it."""
LONG_SILENCE_NS = 200_000_000
DRIFT = 256
FEW_CHUNKS = 6
SPEED_SPAN_NS = 2_000_000
"""Reports that are closer together say nothing about speed."""
SLOW_EPOCHS = 2
"""Round trips in a row that must have been slow, where TCP itself was the limit."""
SLOW_EPOCHS_UNEXPLAINED = 3
"""The same, where it was the data or the host."""
SLOW_EPOCHS_OF_WIDE_WINDOWS = 10
"""The same, where TCP's windows are known to be wide: streams that wait for a chunk leave their part of the rate
unused, and a ceiling would make those parts smaller still."""
SLOW_START_GROWTH = 40
"""A window that grows by more than 1/40 from report to report (twelve in a round trip or fewer) is in slow start. Later
it grows by a packet per round trip: to reserve a quarter for that would idle a tenth of the link."""
GROWS = 1.4
"""Growth per round trip that only a window in slow start shows."""


class Lane:
    """One session's lane on one link."""

    __slots__ = (
        "_epoch_left_bytes",
        "_epoch_limited",
        "_epoch_ns",
        "_last_rate",
        "_measured_bytes_per_s",
        "_silences",
        "_slow_epochs",
        "_window_bytes",
        "_window_bytes_per_s",
        "account",
        "ack_wait_ns",
        "agent",
        "arrived_bytes",
        "ceiling_sticks",
        "control_rtt_ns",
        "counted_ns",
        "ended",
        "harmless",
        "leaves_ns",
        "leaving",
        "lost_bytes",
        "out_of_reach",
        "out_of_turn",
        "padding",
        "rate_bytes_per_s",
        "reported_ns",
        "reserve_bytes_per_s",
        "reserve_until_ns",
        "room_then_bytes_per_s",
        "session",
        "silent_until_ns",
        "slowest_bytes_per_s",
    )

    def __init__(self, session: int, agent: AgentName, control_rtt_ns: int = 1_000_000) -> None:
        self.session = session
        self.agent = agent
        self.control_rtt_ns = control_rtt_ns
        """To its agent and back, as measured by the echoes of beats."""
        self.account = Account()
        self.rate_bytes_per_s = 0
        """Of its latest grant, or what it was told since."""
        self.slowest_bytes_per_s = 0
        """The lowest rate of the grants that it may still hold bytes of, unless it was told another since: what was
        granted first goes first, at that rate."""
        self.room_then_bytes_per_s = 0
        """What the lanes that can be told something had of the link's pace when that rate was set."""
        self._measured_bytes_per_s = 0
        """What it has shown that it can send; 0: no limit known."""
        self._window_bytes = 0
        self._window_bytes_per_s = 0
        """What its TCP windows let it send now; 0: no limit."""
        self.ceiling_sticks = False
        """The ceiling says something about the path or the host, not only about data that wasn't there."""
        self.padding = False
        """What it was granted last is an agent's padding: it fills a cold window, and says nothing of the link."""
        self.out_of_turn = False
        """Busy, and not in the plan: somebody waits for it to leave."""
        self.leaving = False
        """Its share has been passed on; so it stays until it is granted anew."""
        self.harmless = False
        """It is leaving, and what it still has fits into the gateway's buffer, however slowly it comes."""
        self.leaves_ns = 0
        """When its last granted byte leaves, as predicted."""
        self.reported_ns = 0
        self.counted_ns = 0
        """When its kernel was last read, as far as its reports say; see :meth:`read_at`."""
        self.ack_wait_ns = 0
        """How long its latest acknowledgements waited in queues of the other direction."""
        self.arrived_bytes = 0
        """Delivered, in order or behind a hole."""
        self.lost_bytes = 0
        """Left and lost, and not sent again yet."""
        self.silent_until_ns = 0
        """The time of its grants ran out without a word: it hangs. It gets nothing until it reports, or until then."""
        self._silences = 0
        self.ended = False
        """Its session is gone: nothing more will be reported."""
        self.out_of_reach = False
        """Its session stands, and nothing is heard."""
        self.reserve_bytes_per_s = 0
        self.reserve_until_ns = 0
        """An agent without coordinator may go on at its fallback rate: kept free until its lease has ended."""
        self._epoch_ns = 0
        self._epoch_left_bytes = 0
        self._epoch_limited = True
        self._last_rate = 0
        self._slow_epochs = 0

    @property
    def hears(self) -> bool:
        """It can be told something."""
        return not (self.ended or self.out_of_reach)

    @property
    def stuck(self) -> bool:
        """It can't be told anything, and goes on."""
        return (self.ended or self.out_of_reach) and not self.leaving

    @property
    def ceiling_bytes_per_s(self) -> int:
        """What it can send: as its TCP windows say, and as it has shown; 0: no limit known."""
        measured, window = self._measured_bytes_per_s, self._window_bytes_per_s
        return min(measured, window) if measured and window else measured or window

    def see_window(self, window_bytes: int, rtt_ns: int, pace_bytes_per_s: int, now_ns: int) -> None:
        """A report said how wide its TCP windows are: cold or cut ones hold it back from now on, and what they leave of
        the link is for others at once. One in slow start may grow by a quarter until its next reports say by how much
        it did."""
        rate = window_bytes * NANOS // max(rtt_ns, 1_000_000)
        rate += rate // (4 if window_bytes > self._window_bytes + self._window_bytes // SLOW_START_GROWTH else 64)
        self._window_bytes = window_bytes
        if not 0 < rate < pace_bytes_per_s:
            self._window_bytes_per_s = 0
            return
        self._window_bytes_per_s = max(rate, pace_bytes_per_s // 64, 1)

    def binding_rate(self, now_ns: int) -> int:
        """The part of the link that this lane may be using, what it may send by itself included."""
        rate = self.account.binding_rate(now_ns)
        if self.reserve_until_ns > now_ns and rate < self.reserve_bytes_per_s:
            return self.reserve_bytes_per_s
        return rate

    def busy(self, now_ns: int) -> bool:
        """Granted bytes may still be at its host."""
        account = self.account
        return (now_ns < account.binds_until_ns and account.top_rate_bytes_per_s > 0) or now_ns < self.reserve_until_ns

    def granted(self, nbytes: int, rate_bytes_per_s: int, start_ns: int, room_bytes_per_s: int, idle: bool) -> None:
        """A grant was issued, at a time when lanes like it had ``room_bytes_per_s`` of the link together."""
        if idle:
            self._epoch_ns = start_ns
            self._epoch_left_bytes = self.account.left_bytes
            self._epoch_limited = True
            self.leaves_ns = start_ns + self.control_rtt_ns // 2
        self.leaves_ns = max(self.leaves_ns, start_ns) + nbytes * NANOS // rate_bytes_per_s
        self.rate_bytes_per_s = rate_bytes_per_s
        self.slowest_bytes_per_s = rate_bytes_per_s if idle else min(self.slowest_bytes_per_s, rate_bytes_per_s)
        self.room_then_bytes_per_s = room_bytes_per_s
        self.leaving = self.out_of_turn = self.harmless = False

    def repace(self, rate_bytes_per_s: int, room_bytes_per_s: int, now_ns: int) -> None:
        """The link's pace changed, and the agent is told its part of it for all that it holds."""
        if self.leaves_ns > now_ns:
            self.leaves_ns = now_ns + (self.leaves_ns - now_ns) * self.rate_bytes_per_s // rate_bytes_per_s
        self.rate_bytes_per_s = self.slowest_bytes_per_s = rate_bytes_per_s
        self.room_then_bytes_per_s = room_bytes_per_s
        self.account.repace(rate_bytes_per_s, now_ns)

    def reported(self, report: Report, now_ns: int) -> int:
        """Take in a report; answers the bytes that it settled."""
        control_rtt_ns = self.control_rtt_ns
        account = self.account
        left_before = account.left_bytes
        settled = account.report(report, now_ns)
        self._silences = 0
        if not self.out_of_reach:
            self.silent_until_ns = 0
        at_host = account.at_host_bytes
        if at_host <= 0 or not self.rate_bytes_per_s:
            self.leaves_ns = now_ns
        else:
            rate = self.rate_bytes_per_s
            # The agent knows what its grants wait for; that it can't be faster than its rate is known here.
            leaves_in = report.leaves_in_ns + account.unseen_bytes * NANOS // rate
            at_rate = at_host * NANOS // rate
            if at_rate > leaves_in:
                leaves_in = at_rate
            # Its first byte left half a control round trip after the grant was issued; the news took the other half.
            begun_ns = self._epoch_ns + control_rtt_ns
            elapsed_ns = now_ns - (begun_ns if begun_ns > self.reported_ns else self.reported_ns)
            if elapsed_ns > SPEED_SPAN_NS:
                speed = (account.left_bytes - left_before) * NANOS // elapsed_ns
                if speed < rate - rate // 4:
                    leaves_in = max(leaves_in, min(at_host * NANOS // max(speed, 1), NANOS))
            leaves_in = (leaves_in if leaves_in < NANOS else NANOS) - control_rtt_ns // 2
            self.leaves_ns = now_ns + leaves_in if leaves_in > 0 else now_ns
        self.reported_ns = now_ns
        arrived = account.delivered_bytes
        if report.sacked_bytes > 0:
            arrived += report.sacked_bytes
        if arrived < self.arrived_bytes:
            arrived = self.arrived_bytes
        self.arrived_bytes = arrived if arrived < account.left_bytes else account.left_bytes
        self.lost_bytes = report.lost_bytes if report.lost_bytes > 0 else 0
        self.ack_wait_ns = max(0, min(report.back_queue_ns, report.srtt_ns - report.min_rtt_ns))
        return settled

    def read_at(self, elapsed_ns: int, changed: bool, now_ns: int) -> int:
        """When the reading was taken that a report tells, on our clock.

        Both clocks run alike, and a report can only be late: so its reading is as much younger than the one before as
        its agent says, and never younger than the report. The difference is let go slowly, because clocks drift.
        """
        before_ns = self.counted_ns
        if not elapsed_ns:
            if changed:
                self.counted_ns = now_ns
            return self.counted_ns
        if elapsed_ns > LONG_SILENCE_NS or not before_ns:
            self.counted_ns = now_ns
        else:
            at_ns = before_ns + elapsed_ns
            self.counted_ns = min(now_ns, at_ns + (now_ns - at_ns) // DRIFT)
        return self.counted_ns

    @property
    def in_flight_bytes(self) -> int:
        """On their way: left, not arrived, not lost, not forgiven."""
        account = self.account
        nbytes = account.left_bytes - self.arrived_bytes - self.lost_bytes
        if nbytes > account.outstanding_bytes:
            nbytes = account.outstanding_bytes
        return nbytes if nbytes > 0 else 0

    @property
    def behind_holes_bytes(self) -> int:
        """Arrived, and not settled: something before them is missing. The path is rid of them."""
        account = self.account
        nbytes = min(self.arrived_bytes - account.delivered_bytes, account.outstanding_bytes)
        return nbytes if nbytes > 0 else 0

    def fell_silent(self, now_ns: int, lease_ns: int) -> None:
        """The time of its grants is over and it has not said what became of them: try again later, and ever later."""
        if now_ns >= self.silent_until_ns:
            self.silent_until_ns = now_ns + (lease_ns << min(self._silences, 4))
            self._silences += 1

    def near_end(self, now_ns: int, lead_ns: int, fresh_ns: int, harmless_bytes: int) -> bool:
        """Its last granted byte leaves within the lead time, as far as can be known (see the module's text)."""
        if self.ended or now_ns < self.reserve_until_ns or now_ns < self.leaves_ns - lead_ns:
            return False
        if now_ns - self.reported_ns <= fresh_ns:
            return True
        return self.account.at_host_bytes <= harmless_bytes

    def measure(
        self,
        report: Report,
        now_ns: int,
        rtt_ns: int,
        pace_bytes_per_s: int,
        saturated: bool = False,
        chunk_bytes: int = 0,
    ) -> str:
        """Judge the last round trip of sending; answers in words what changed, or "".

        :param saturated: the link was the limit within that time, so whatever didn't get through was not this agent's
            fault.
        :param chunk_bytes: what the agent sends at a time.
        """
        if report.backlog_bytes <= 0 or saturated:
            # Nothing to send, or the link itself is full: the time says nothing about this agent's path. What was only
            # a lack of data is forgotten.
            self._epoch_ns = now_ns
            self._epoch_left_bytes = self.account.left_bytes
            self._epoch_limited = True
            self._slow_epochs = 0
            if not self.ceiling_sticks and not saturated:
                self._measured_bytes_per_s = 0
            return ""
        self._epoch_limited = self._epoch_limited and report.limited
        elapsed_ns = now_ns - self._epoch_ns
        if elapsed_ns < 20_000_000 or elapsed_ns < rtt_ns:
            return ""
        measured = (self.account.left_bytes - self._epoch_left_bytes) * NANOS // elapsed_ns
        few = elapsed_ns * self.rate_bytes_per_s < FEW_CHUNKS * chunk_bytes * NANOS
        if few and measured < DELIVERS * self.rate_bytes_per_s:
            return ""  # what little a low rate sends goes in lumps: too few of them don't show that it is slow
        limited, last = self._epoch_limited, self._last_rate
        self._epoch_ns = now_ns
        self._epoch_left_bytes = self.account.left_bytes
        self._epoch_limited = True
        self._last_rate = measured
        rate = self.rate_bytes_per_s
        if measured >= DELIVERS * rate:
            self._slow_epochs = 0
            if self._measured_bytes_per_s:
                raised = self._measured_bytes_per_s + self._measured_bytes_per_s // 2
                self._measured_bytes_per_s = raised if raised < pace_bytes_per_s else 0
            return ""
        self._slow_epochs += 1
        unexplained = SLOW_EPOCHS_OF_WIDE_WINDOWS if self._window_bytes else SLOW_EPOCHS_UNEXPLAINED
        if self._slow_epochs < (SLOW_EPOCHS if limited else unexplained):
            return ""
        grows = last == 0 or measured > GROWS * last
        ceiling = measured * 2 if grows else measured + measured // 4
        self._measured_bytes_per_s = max(min(ceiling, pace_bytes_per_s), pace_bytes_per_s // 64, 1)
        self.ceiling_sticks = limited
        self.account.believe(self._measured_bytes_per_s, now_ns)
        return (
            f"{self.agent} sends only {measured} of {rate} bytes/s granted"
            f"{'' if limited else ' (it lacks data)'}: others get what it leaves"
        )
