"""What is known of a link's bottleneck, how old it is and how sure; and the pace that follows from it.

Theory of operation
-------------------
One rate controller for all senders of a link together. Every report updates the link's totals (:class:`Flow`), and
with them *E*, the estimate of what the bottleneck carries, and *P*, the pace that is granted in all.

**Where the truth is.** A delivered rate never exceeds the bottleneck's, so any sample may raise E. A sample may lower E
only while the link is the limit: data waited at the hosts all the time that the sample's bytes were sent, their TCP
windows were wide enough, and a queue stood at the gateway (or packets were lost). Samples of idle, bursty or cold
senders therefore never drag the estimate down (the "application-limited" samples of
draft-cheng-iccrg-delivery-rate-estimation), and a sender paced below the bottleneck, whose delivered rate merely equals
its pace, neither.

**Where the link is kept.** At a small standing queue q*: a fiftieth of a round trip, more where the rate moves within
one. While it stands, the delivered rate *is* the capacity, half a round trip old; that is the delay target of TCP Vegas
(Brakmo and Peterson, 1995) and Copa (Arun and Balakrishnan, NSDI 2018), held by one controller for all senders instead
of one each. The pace steers what is in flight to what the path holds::

    P = E + (E x (R + q*) - in flight) / (R + control round trip)

(twice that where it is negative). Bytes in flight are known at once, so the term acts like a Smith predictor: what was
sent in the last round trip is counted before its effect can be seen. A hole in the pipe (after idleness) is not made up
for, that would only build a queue; so the term is not positive until the pipe has been full for a round trip.

**Up.** A rate that grows slowly shows by itself: the queue's stand-in keeps pushing by q*/R per round trip. Where no
queue shows for a whole round trip, the pace probes above E, by 2 % and doubling from round trip to round trip, as far
as half the buffer holds the excess. **Down.** A queue beyond the target drains within about a round trip.

**Start-up** without a hint begins at 100 Mbit/s and doubles per round trip until a queue, a loss or a plateau shows.

**Losses** lower E once per event, to what was delivered then: afterwards TCP has cut its window and what it delivers
says nothing about the path. Repeated losses without any queue before them are a *policer's* (Flach et al., SIGCOMM
2016): its bucket's burst is not its rate, so E becomes the average of two seconds, and probing waits, ever longer.
Where they keep TCP's windows so small that nothing comes near E for two seconds, E falls to a tenth above what came.

**A queue that isn't ours** (other tenants' traffic, a longer route) doesn't drain however little we send. What has
stood for eight round trips counts as distance from then on; without that the link would be left to the others.

**A queue of the other direction** makes round trips longer too, but only acknowledgements wait in it. Agents tell it
apart (:mod:`proxyd.core.oneway`); it is no queue here, and what is in flight may be more by it.

**Age.** E keeps its value without samples for a quarter of an hour, then it falls back to the hint (or the safe start)
by half every five minutes. It is never 0, infinite or NaN.

Rates here are **payload** bytes per second, as ``SO_MAX_PACING_RATE`` and grants count them: the wire's rate less IP
and TCP headers.
"""

from __future__ import annotations

import dataclasses
from collections import deque

from proxyd.core.errors import ConfigError
from proxyd.core.ids import LinkName
from proxyd.core.link_estimate import LinkEstimate
from proxyd.core.messages import Report
from proxyd.core.rtt import RttTracker
from proxyd.core.tally import Flow, Tally
from proxyd.core.windowed import WindowedMin

NANOS = 1_000_000_000
HEADERS_BYTES = 52
"""IPv4 (20), TCP (20) and its timestamps (12) in each packet."""
DEFAULT_CAPACITY_BYTES_PER_S = 100_000_000 // 8
DEFAULT_RTT_NS = 50_000_000
DEFAULT_BUFFER_SHARE_OF_BDP = 0.1
"""The safe start for a link of which nothing is configured: 100 Mbit/s, 50 ms, a shallow buffer."""
DEFAULT_BUFFER_NS = 5_000_000
"""No buffer is taken to hold less until losses show it: the queue that is aimed at would be lost in the hosts' noise,
each of which lowers the estimate. 200 Mbit/s to 1 Gbit/s at 5 ms were used to 11 to 63 % (85 to 99.9 with it)."""
LEAST_BYTES_PER_S = 10_000
"""No estimate is lower (80 kbit/s): below, a report interval holds less than a packet."""
MOST_BYTES_PER_S = 100_000_000_000
"""No estimate is higher (800 Gbit/s)."""

QUEUE_TARGET = 0.02
"""q* as a part of the round trip. 0.04 uses 1 to 3 % more of a wildly moving link, and doubles the losses in a buffer
of 0.1 BDP."""
QUEUE_TARGET_LEAST_NS = 3_000_000
"""A smaller target would be lost in the noise of hosts (the buffer may demand a smaller one all the same)."""
NOISE_NS = 1_500_000
"""So much of a round trip is no queue: hosts add 0.3 to 0.9 ms when they are calm, and a millisecond and more when they
are busy. A limit of 0.6 ms kept probes from growing there: a moving link was used to 88 instead of 94 %."""
QUEUE_TARGET_OF_BUFFER = 0.3
QUEUE_TARGET_MOST = 0.1
MOVES_LITTLE = 0.05
"""A rate that moves by more than this within a round trip (on average) is met with a longer queue, by as much: what it
rises by is lost until a round trip later. Modelled at 360 ms and half a BDP (5.5 Gbit/s, four traces each), used: wild
89.6 instead of 86.2 %, moderate 92.5 instead of 92.0. At 60 ms 0.03 made a wild link's queues longer."""
MOVES_ROUNDS = 8
PROBE = 0.02
"""First excess of a probe; it doubles from round trip to round trip."""
SHALLOW = 0.2
SHALLOW_MARGIN = 0.02
"""In a buffer of less than a fifth of a round trip the pace stays so much below the estimate, as a believed one does: a
queue of 2 % of a round trip, and a probe of 2 %, are most of what such a buffer holds beside the hosts' own bursts.
Simulated at 0.1 BDP (with margin, without): calm 97.1 % used and 0.01 % lost (94.5, 0.04), drift 93.1 and 0.10 (91.8,
0.21), moderate 85.1 and 0.70 (86.3, 0.92), wild 72.7 and 1.35 (77.4, 1.46)."""
KNOWN = 0.6
PROBE_KNOWN = 0.16
PROBE_MOST_KNOWN = 0.25
PROBE_MOST_OF_DIP = 1.0
REGAIN_NS = 375_000_000
KNOWN_SPAN_NS = 20 * NANOS
"""Below so much of what it carried within that time, probes begin higher and grow further than the buffer allows."""
DRAIN_LEAST = 0.4
FILL_MOST = 1.25
"""The pace stays within these multiples of the estimate."""
DRAIN_GAIN = 2
"""What is in flight beyond the pipe leaves within half a round trip: it is known without delay, so this can't ring. A
whole one makes the longest queues of a moving link a fifth longer; a third shows no further gain, and uses less."""
STARTUP_GAIN = 1.5
STARTUP_USED = 0.6
"""Start-up is not ended by queues while so little of the pace arrives: those are the senders' own first bursts."""
PLATEAU = 1.25
PLATEAU_ROUNDS = 3
"""Start-up is over when the delivered rate grew by less than this, so often in a row (as in BBR)."""
QUEUE_STRONG_NS = 3_000_000
QUEUE_STRONG_OF_RTT = 16
"""A queue beyond both is no host's noise."""
PRESSED_ROUNDS = 3
"""A queue that is strong without a break for so many round trips is the link's doing, though windows that losses have
made small explain the rate: where the estimate is far too high, acknowledgements clock the senders, and they send what
arrives. A link of 10 Mbit/s would pass for one of 100 for seconds."""
SHORT = 4
FULL_PIPE = 0.5
WEAK = 0.9
"""A lower rate that the senders explain themselves says nothing, whatever the round trips are."""
DIP = 0.35
"""What an estimate may fall to within a round trip: the links that are known to move have dips to a quarter."""
SHOWS = 8
"""A link that suddenly carries less piles up what it doesn't: at least an eighth of the time lost shows as queue. Hosts
that were held up deliver late and pile up nothing."""
LOSSES = 3
LOSS_SHARE = 0.005
"""A loss event: at least so many retransmitted packets in a round trip, and this part of what was delivered."""
POLICER_EVENTS = 3
POLICER_SPAN_NS = 15 * NANOS
LONG_WINDOW_NS = 2 * NANOS
NEAR = 0.8
UNREACHED = 1.1
"""What has not come near the estimate for a long window, while packets are lost without a queue, isn't there, though
TCP's windows explain it. A tenth more than was delivered is believed: by less, chance losses would take more."""
HOLD_LEAST_NS = 1 * NANOS
HOLD_MOST_NS = 16 * NANOS
"""After losses without a queue, probing waits so long, doubling."""
HELD = 0.85
STANDING_ROUNDS = 8
STALE_NS = 15 * 60 * NANOS
HALF_LIFE_NS = 5 * 60 * NANOS


@dataclasses.dataclass(frozen=True, slots=True)
class LinkSettings:
    """One link as configured. Raises ConfigError for values that no link can have."""

    link: LinkName
    capacity_bytes_per_s: int = 0
    """On the wire, headers included: where a live estimate starts, or (``live`` off) what is believed for ever. 0: not
    known."""
    rtt_ns: int = 0
    """0: not known."""
    buffer_bytes: int = 0
    """The gateway's drop-tail buffer; 0: not known, so a shallow one is assumed until losses show it."""
    pace_share: float = 0.98
    """Part of a fixed capacity that is granted; the rest drains what hand-overs queue up."""
    mtu_bytes: int = 1500
    source: str = "configured"
    live: bool = False
    """The rate is found from live transfers and followed; else the configured one is believed."""
    observe: bool = False
    """Shadow mode: nothing is granted, only reckoned (:mod:`proxyd.core.shadow`)."""

    def __post_init__(self) -> None:
        if self.rtt_ns < 0 or self.buffer_bytes < 0 or self.capacity_bytes_per_s < 0:
            raise ConfigError(
                f"link {self.link}: capacity {self.capacity_bytes_per_s} bytes/s, rtt {self.rtt_ns} ns and buffer "
                f"{self.buffer_bytes} bytes are not those of a link",
                why="none of them can be negative",
            )
        if self.capacity_bytes_per_s < 1000 and not (self.live and self.capacity_bytes_per_s == 0):
            raise ConfigError(
                f"link {self.link}: capacity {self.capacity_bytes_per_s} bytes/s is not that of a link",
                why="the capacity must be at least 8 kbit/s, or be left out where the estimate is live",
            )
        if not 0 < self.pace_share <= 1:
            raise ConfigError(f"link {self.link}: pace {self.pace_share} must be above 0 and at most 1")
        if self.mtu_bytes < 256:
            raise ConfigError(f"link {self.link}: mtu {self.mtu_bytes} is too small", why="the least is 256 bytes")

    @property
    def payload_bytes_per_s(self) -> int:
        """What the capacity leaves for payload in full packets; of an unknown one, the safe start's."""
        return self.payload_of(self.capacity_bytes_per_s or DEFAULT_CAPACITY_BYTES_PER_S)

    def payload_of(self, wire_bytes_per_s: int) -> int:
        """What a rate on the wire leaves for payload in full packets."""
        return wire_bytes_per_s * (self.mtu_bytes - HEADERS_BYTES) // self.mtu_bytes

    @property
    def start_rtt_ns(self) -> int:
        """The round trip until one was measured."""
        return self.rtt_ns or DEFAULT_RTT_NS


def default_settings(link: LinkName) -> LinkSettings:
    """The documented safe start for an owned link that isn't configured: everything is found from live transfers."""
    return LinkSettings(link, source="default", live=True)


class LinkEstimator:
    """The estimate of one link, and the pace that follows from it (see the module's text)."""

    __slots__ = (
        "_base_ns",
        "_buffer_ns",
        "_buffer_seen_bytes",
        "_confirmed_ns",
        "_excess",
        "_flow",
        "_full_since_ns",
        "_hold_ns",
        "_hold_rate",
        "_hold_until_ns",
        "_holes",
        "_known_rate",
        "_known_rtt_ns",
        "_least_queue",
        "_loss_events_ns",
        "_lossy_until_ns",
        "_moves",
        "_near_ns",
        "_plateaus",
        "_pressed",
        "_queue_ns",
        "_rate",
        "_round_least_ns",
        "_round_low_ns",
        "_round_ns",
        "_round_rate",
        "_rounds",
        "_settings",
        "_starting",
        "_tally",
        "_weak_rate",
        "back_queue_ns",
        "pace_bytes_per_s",
        "policed",
        "rtt",
        "saturated_ns",
    )

    def __init__(self, settings: LinkSettings) -> None:
        self._settings = settings
        self.rtt = RttTracker()
        self._rate = float(settings.payload_bytes_per_s)
        """E."""
        self._starting = settings.live and settings.capacity_bytes_per_s == 0
        self.pace_bytes_per_s = (
            int(self._rate) if settings.live else max(1, int(settings.payload_bytes_per_s * settings.pace_share))
        )
        """P: what may be granted in all now."""
        self.policed = False
        self.saturated_ns = -(1 << 62)
        """When the link was last seen to be the limit."""
        self._flow = Flow()
        self._known_rtt_ns = 0
        """The least round trip when it was last measured: idleness doesn't move a link."""
        self._tally = Tally(settings.mtu_bytes)
        self._holes = False
        self._full_since_ns: int | None = None
        """Everything delivered from then on was sent without a gap; None: there is a gap now."""
        self._confirmed_ns: int | None = None
        self._queue_ns = 0
        self.back_queue_ns = 0
        """Of the other direction: acknowledgements wait in it. Bytes are outstanding for longer by it."""
        self._base_ns = 0
        """Standing queue that isn't ours: counted as distance."""
        self._least_queue = WindowedMin(STANDING_ROUNDS * DEFAULT_RTT_NS)
        self._buffer_ns = 0
        self._buffer_seen_bytes = 0
        """The gateway's buffer as losses showed it; 0: never."""
        self._known_rate = WindowedMin(KNOWN_SPAN_NS)
        """Of the negative estimate: its highest of late."""
        self._excess = 0.0
        self._moves = 0.0
        """By how much the rate differs from that of a round trip before, as a part of it, on average."""
        self._round_ns = 0
        self._round_rate = 0.0
        self._round_least_ns = 0
        """The largest queue that all agents saw in this round trip."""
        self._round_low_ns = 0
        """The smallest one."""
        self._pressed = 0
        """Round trips in a row in which it was no host's noise."""
        self._rounds = 0
        self._plateaus = 0
        self._weak_rate = self._rate
        self._near_ns = 0
        """When the estimate was last nearly reached, or nobody tried to."""
        self._lossy_until_ns = 0
        self._loss_events_ns: deque[int] = deque()
        self._hold_ns = 0
        self._hold_until_ns = 0
        self._hold_rate = 0.0
        """Nothing pushes the estimate up while probes wait, so no noise may take it lower than this meanwhile."""

    # ------------------------------------------------------------------------------------------------------- answers

    def min_rtt_ns(self, now_ns: int) -> int:
        """The least round trip.

        Of a live link it is what was measured (and a queue that has stood too long to be ours). Of a fixed one it
        stays within 1 to 1.5 times the configured one: stacks and relays add to what the wire takes, and a window that
        ignored it would idle the link; but a persistent queue must not pass for distance.
        """
        measured_ns = self.rtt.min_rtt_ns(now_ns)
        if self._settings.live:
            return (measured_ns or self._known_rtt_ns or self._settings.start_rtt_ns) + self._base_ns
        configured_ns = self._settings.start_rtt_ns
        return min(max(measured_ns, configured_ns), configured_ns + configured_ns // 2)

    def resume(self, rate_bytes_per_s: int, age_ns: int, now_ns: int) -> None:
        """An earlier life found this rate, so long ago: a link of which nothing was seen in this one begins there."""
        if rate_bytes_per_s > 0 and self._settings.live and self._confirmed_ns is None:
            self._rate = self._weak_rate = float(min(max(rate_bytes_per_s, LEAST_BYTES_PER_S), MOST_BYTES_PER_S))
            self.pace_bytes_per_s = int(self._rate)
            self._starting = False
            self._confirmed_ns = now_ns - age_ns

    @property
    def buffer_bytes(self) -> int:
        """The gateway's buffer: configured, or as losses showed it; 0 when neither is."""
        return self._settings.buffer_bytes or self._buffer_seen_bytes

    def rate_bytes_per_s(self, now_ns: int) -> int:
        """E, aged (see the module's text)."""
        rate = self._rate
        if self._settings.live and self._confirmed_ns is not None:
            stale_ns = now_ns - self._confirmed_ns - STALE_NS
            if stale_ns > 0:
                floor = self._settings.payload_bytes_per_s
                rate = floor + (rate - floor) * 0.5 ** (stale_ns / HALF_LIFE_NS)
        return int(min(max(rate, LEAST_BYTES_PER_S), MOST_BYTES_PER_S))

    def estimate(self, now_ns: int) -> LinkEstimate:
        """The present estimate."""
        settings = self._settings
        age_ns = now_ns - self._confirmed_ns if self._confirmed_ns is not None else 0
        if not settings.live:
            source, age_ns, confidence = settings.source, 0, 1.0
        elif self._confirmed_ns is None:
            source = settings.source if settings.capacity_bytes_per_s else "default"
            confidence = 0.5 if settings.capacity_bytes_per_s else 0.0
        else:
            source = "policed" if self.policed else "estimated"
            confidence = (0.5 if self._starting else 1.0) * 0.5 ** (age_ns / STALE_NS)
        return LinkEstimate(
            bottleneck_bytes_per_s=self.rate_bytes_per_s(now_ns),
            min_rtt_ns=self.min_rtt_ns(now_ns),
            queue_ns=self.rtt.queue_ns(now_ns),
            buffer_bytes=self.buffer_bytes,
            age_ns=age_ns,
            confidence=confidence,
            source=source,
        )

    def saturated(self, now_ns: int, for_ns: int) -> bool:
        """The link itself was the limit within the last ``for_ns``: what a sender didn't get through was not its
        fault."""
        return now_ns - self.saturated_ns <= for_ns

    # ------------------------------------------------------------------------------------------------------- samples

    def on_arrival(self, nbytes: int, span_ns: int, now_ns: int) -> None:
        """A whole message arrived within ``span_ns`` (last minus first arrival at the receiver). Short bursts, whose
        sender is idle before a round trip is over, show their rate only there: during start-up it can raise the
        estimate, up to what was granted. Later it would only add the receiver's hiccups."""
        if not self._starting or span_ns < 1_000_000 or nbytes < 1 << 20:
            return
        nbytes -= nbytes // 8  # what came with the first arrival
        rate = min(nbytes * NANOS / span_ns, float(self.pace_bytes_per_s))
        if rate > self._rate and not self.policed:
            self._rate = rate
            self._confirmed_ns = now_ns
            self._set_pace(now_ns, self.min_rtt_ns(now_ns))

    def on_report(self, report: Report, flow: Flow, now_ns: int) -> None:
        """One agent reported; ``flow``: what that adds to the link's totals."""
        self._flow = flow
        back_ns = max(0, min(report.back_queue_ns, report.srtt_ns - report.min_rtt_ns))
        self.rtt.add(report.srtt_ns - back_ns, report.min_rtt_ns, now_ns)
        if not self._settings.live:
            return
        self._known_rtt_ns = self.rtt.min_rtt_ns(now_ns) or self._known_rtt_ns
        rtt_ns = self.min_rtt_ns(now_ns)
        if not flow.demand:
            self._full_since_ns = None
        elif self._full_since_ns is None:
            self._full_since_ns = now_ns + rtt_ns + flow.control_rtt_ns
        self._tally.add(flow, rtt_ns, self.pace_bytes_per_s)
        if flow.delivered_bytes and report.srtt_ns and report.min_rtt_ns:
            # Of an agent whose acknowledgements flow; against its own least, since hosts differ in distance.
            queue_ns = max(0, report.srtt_ns - back_ns - report.min_rtt_ns - self._base_ns)
            self._tally.intervals[-1].seen(queue_ns, back_ns)
        if flow.horizon_ns >= self._tally.judged_ns + self._tally.width_ns:
            self._judge(rtt_ns, now_ns)
            self._set_pace(now_ns, rtt_ns)

    def _judge(self, rtt_ns: int, now_ns: int) -> None:
        """What the complete intervals say of the bottleneck."""
        tally, flow = self._tally, self._flow
        tally.settle(flow.horizon_ns, self._rate, rtt_ns)
        self._queue_ns, self.back_queue_ns = tally.queue_ns(), tally.back_queue_ns()
        ack_ns = rtt_ns + self.back_queue_ns  # when acknowledgements come, without a queue of our own
        count = tally.window(rtt_ns)
        if tally.complete < count:
            return
        rate = tally.delivered_rate(count)
        # What is in flight must bear it out: bytes that wait are in flight, a host's delays are not.
        waiting_ns = int(flow.in_flight_bytes * NANOS / max(rate, 1.0)) - ack_ns
        self._queue_ns = max(0, min(self._queue_ns, waiting_ns))
        decides = tally.link_decides(rate, self._rate, count, rtt_ns + self._queue_ns)
        full = self._full_since_ns is not None and self._full_since_ns <= tally.begins_ns(count)
        self._holes = tally.has_holes(rtt_ns)
        if not full or rate > NEAR * self._rate:
            self._near_ns = now_ns
        lossy = self._lost(rtt_ns, full, decides, rate, now_ns)
        queued = full and self._queue_ns > self._shows_ns(rtt_ns)
        strong = self._queue_ns > self._strong_ns(rtt_ns)
        pressed = self._pressed >= PRESSED_ROUNDS
        explained = rate < WEAK * self._rate or (self._holes and not strong)
        if queued and not decides and explained and not pressed:
            queued = False  # cold windows or gaps, and a busy host's round trips
        if not pressed and flow.missing_bytes * NANOS < FULL_PIPE * self._rate * rtt_ns:
            # Who fills the pipe so little, isn't held back by its narrow end: a link that became slower has more in it.
            queued = False
        if queued and not decides and not strong and now_ns < self._hold_until_ns:
            queued = False  # nothing pushes back up while probes wait
        if self._starting and queued and not pressed:
            queued = strong and decides and rate > STARTUP_USED * self.pace_bytes_per_s
        self._next_round(rtt_ns, rate, full, now_ns)
        if rate > self._rate and not self.policed:
            self._rate = max(self._rate, tally.lasting_rate(rate, self._rate, count, rtt_ns))
        if queued or lossy:
            self.saturated_ns = self._confirmed_ns = now_ns
            self._excess = 0.0
            if queued and not self._starting:
                # Where there is no doubt, what the last few reports say is closer than half a round trip's mean.
                latest = tally.delivered_rate(SHORT) if strong and decides else rate
                least = 0.0 if strong or now_ns >= self._hold_until_ns else self._hold_rate
                self._rate = min(max(min(rate, latest), least), self._rate)
            # No dip is deeper within a round trip; a window that hardly holds a report may look so.
            shown = 0.0 if strong or lossy else 1 - SHOWS * self._queue_ns / (count * tally.width_ns)
            self._rate = max(self._rate, self._weak_rate * max(DIP, shown))
            if self._starting and full:
                self._starting = False
        elif full and rate >= 0.95 * self._rate:
            self._confirmed_ns = now_ns
        self._rate = min(max(self._rate, LEAST_BYTES_PER_S), MOST_BYTES_PER_S)

    def _next_round(self, rtt_ns: int, rate: float, full: bool, now_ns: int) -> None:
        """Once per round trip: plateaus, probes, standing queues."""
        self._round_least_ns = max(self._round_least_ns, self._queue_ns)
        self._round_low_ns = min(self._round_low_ns, self._queue_ns)
        if now_ns - self._round_ns < rtt_ns:
            return
        quiet = self._round_least_ns <= self._shows_ns(rtt_ns)
        self._round_ns = now_ns
        self._pressed = self._pressed + 1 if full and self._round_low_ns > self._strong_ns(rtt_ns) else 0
        before, self._weak_rate = self._weak_rate, self._rate
        if full and not self._starting:
            self._moves += (abs(self._rate - before) / max(self._rate, before) - self._moves) / MOVES_ROUNDS
        last, self._round_rate = self._round_rate, rate
        if self._starting:
            self._plateaus = self._plateaus + 1 if full and rate < PLATEAU * last else 0
            if self._plateaus >= PLATEAU_ROUNDS and not self._flow.window_limited:
                self._starting = False
        if full and quiet and now_ns >= self._hold_until_ns and not self._starting:
            followed = rate >= self._rate * (1 + self._excess / 2) * 0.98
            more = 2 * self._excess if self._excess and followed else PROBE
            most = max(self._buffer_share(rtt_ns) / 2, PROBE)
            if self._rate < -KNOWN * (self._known_rate.get(now_ns) or 0):
                # It has carried much more a few seconds ago: a dip, or a mistake of ours. Round trips that take longer
                # ask for more, if the buffer is known to hold it: a far link lay idle for seconds after each dip.
                most = max(min(most, PROBE_MOST_OF_DIP), PROBE_MOST_KNOWN)
                more = max(more, PROBE_KNOWN, rtt_ns / REGAIN_NS)
            self._excess = min(more, most)
        self._known_rate.add(-int(self._rate), now_ns)
        if self.policed and full and now_ns > self._hold_until_ns + LONG_WINDOW_NS and rate > self._rate:
            self.policed = False  # it carries more now; should that be a bucket's burst, losses will say so
        self._stand(rtt_ns, full, now_ns)
        self._round_least_ns = self._round_low_ns = self._queue_ns

    def _stand(self, rtt_ns: int, full: bool, now_ns: int) -> None:
        """A queue that stands although we drain it isn't ours: count it as distance, and look again when it is gone."""
        self._least_queue.span_ns = STANDING_ROUNDS * rtt_ns
        self._least_queue.add(self._queue_ns, now_ns)
        self._rounds = self._rounds + 1 if full else 0
        if self._rounds < STANDING_ROUNDS:
            return
        standing_ns = self._least_queue.get(now_ns) or 0
        if standing_ns > 3 * self._target_ns(rtt_ns):
            self._base_ns += standing_ns - self._target_ns(rtt_ns)
            self._rounds = 0
        elif self._base_ns and self._queue_ns == 0:
            self._base_ns //= 2
            self._rounds = 0

    def _lost(self, rtt_ns: int, full: bool, decides: bool, rate: float, now_ns: int) -> bool:
        """Whether a loss event begins now, and what follows from it."""
        packets, delivered_bytes = self._tally.lost(rtt_ns)
        least = max(LOSSES, int(delivered_bytes * LOSS_SHARE) // self._settings.mtu_bytes)
        if packets < least:
            return False
        if now_ns < self._lossy_until_ns:
            self._lossy_until_ns = now_ns + rtt_ns if self._queue_ns else self._lossy_until_ns
            return False
        self._lossy_until_ns = now_ns + 2 * rtt_ns
        queue_ns = self._tally.queue_before_ns(6 * rtt_ns)
        if queue_ns > max(2_000_000, rtt_ns // 50):
            # At first the estimate may be far above the link's rate: what arrives isn't.
            seen = int(queue_ns * min(self._rate, max(rate, self._round_rate))) // NANOS
            self._buffer_seen_bytes = max(seen, self._buffer_seen_bytes * 7 // 8)
            if not self._starting:  # then it is still the highest rate that was delivered: not above the link's
                # Retransmissions go on for a while: each of them must not take another tenth.
                floor = HELD * self._tally.long_rate()[0]
                self._rate = min(self._rate, max(rate if decides else self._rate * WEAK, floor))
            return True
        self._loss_events_ns.append(now_ns)
        while self._loss_events_ns[0] < now_ns - POLICER_SPAN_NS:
            self._loss_events_ns.popleft()
        self._hold_ns = min(max(2 * self._hold_ns, HOLD_LEAST_NS), HOLD_MOST_NS)
        self._hold_until_ns = now_ns + self._hold_ns
        self._hold_rate = HELD * self._rate
        long_rate, long_ns = self._tally.long_rate()
        if len(self._loss_events_ns) >= POLICER_EVENTS and full and decides and long_ns > LONG_WINDOW_NS // 2:
            self.policed = True
            self._rate = long_rate
        elif len(self._loss_events_ns) >= POLICER_EVENTS and now_ns - self._near_ns > LONG_WINDOW_NS:
            self._rate = min(self._rate, long_rate * UNREACHED)
        else:
            # No further than what the last two seconds delivered, and not at all while senders mend their windows:
            # every loss that they find late would take a tenth.
            self._rate = self._rate if self._holes else min(self._rate, max(rate, long_rate, self._rate * WEAK))
        return True

    # ---------------------------------------------------------------------------------------------------------- pace

    def _buffer_share(self, rtt_ns: int) -> float:
        """The gateway's buffer in round trips; a shallow one where nothing is known."""
        known = self.buffer_bytes
        # The rate may be nothing at this point: all was lost within a window.
        least = max(DEFAULT_BUFFER_SHARE_OF_BDP, DEFAULT_BUFFER_NS / rtt_ns)
        return known * NANOS / (max(self._rate, LEAST_BYTES_PER_S) * rtt_ns) if known else least

    def _shallow(self, rtt_ns: int) -> bool:
        """The gateway's buffer is known, and holds hardly anything."""
        return self.buffer_bytes > 0 and self._buffer_share(rtt_ns) < SHALLOW

    def _target_ns(self, rtt_ns: int) -> int:
        """q*: the standing queue that is aimed at."""
        share = min(max(QUEUE_TARGET, self._moves - MOVES_LITTLE), QUEUE_TARGET_MOST)
        target_ns = max(int(rtt_ns * share), QUEUE_TARGET_LEAST_NS)
        return min(target_ns, int(rtt_ns * self._buffer_share(rtt_ns) * QUEUE_TARGET_OF_BUFFER))

    def _shows_ns(self, rtt_ns: int) -> int:
        """A queue above this is one: half the target, or what is no host's noise if that is less than the target."""
        target_ns = self._target_ns(rtt_ns)
        return max(target_ns // 2, min(NOISE_NS, target_ns * 4 // 5))

    def _strong_ns(self, rtt_ns: int) -> int:
        """A queue above this is no host's noise."""
        return max(QUEUE_STRONG_NS, rtt_ns // QUEUE_STRONG_OF_RTT)

    def _set_pace(self, now_ns: int, rtt_ns: int) -> None:
        rate = self._rate
        if self._starting:
            self.pace_bytes_per_s = int(rate * STARTUP_GAIN)
            return
        flow = self._flow
        target_ns = self._target_ns(rtt_ns)
        if now_ns < self._hold_until_ns:
            target_ns, self._excess = 0, 0.0
        gain = 1 + self._excess
        if self._shallow(rtt_ns):
            gain -= SHALLOW_MARGIN
        # Nothing is sent for what waits for its acknowledgement only, and it isn't held against the link either.
        pipe_bytes = rate * gain * (rtt_ns + self.back_queue_ns + target_ns) / NANOS
        correction = (pipe_bytes - flow.in_flight_bytes) * NANOS / (rtt_ns + flow.control_rtt_ns)
        if correction < 0:
            correction *= DRAIN_GAIN
        full_ns = self._full_since_ns
        if self._holes or full_ns is None or now_ns < full_ns:
            correction = min(correction, 0.0)
        most = rate if now_ns < self._hold_until_ns else rate * max(FILL_MOST, gain)
        pace = min(max(rate * gain + correction, rate * DRAIN_LEAST), most)
        self.pace_bytes_per_s = max(1, int(pace))
