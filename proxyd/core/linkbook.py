"""What an agent holds on one link: its grants, its accounts, and what it does when the coordinator falls silent.

Grants form a FIFO. The head is served from its start time on; a grant whose transfer has no filled chunk yet lets the
next one go ahead, so a trainer that is still copying doesn't idle the link. All that is held goes at one rate, the one
that the coordinator said last, by a grant or by a ``Pace``; only a higher one waits for the start of its grant. Unspent
bytes of an expired, finished or foreign grant are *returned*: the cumulative ``returned_bytes`` in the next report
frees them at the coordinator.

Counts are relative to the present session with the owning coordinator (see :mod:`proxyd.core.messages`): bytes handed
to the kernel before it began never count, which is why ``taken_before_bytes`` is subtracted from what the kernel
reports.
"""

from __future__ import annotations

import dataclasses
from collections import deque

from proxyd.core.cold import leaving_ns
from proxyd.core.ids import AgentName, LinkName, TransferId
from proxyd.core.messages import Carried, Grant, LinkInfo, Report

FOUND = ("estimated", "policed")
"""Sources of rates that were found from live transfers."""
FALLBACK_AFTER_NS = 500_000_000
"""Silence of the coordinator after which an agent goes on by itself: three lost beats and a half."""
LATE_NS = 5_000_000
"""Later than that, it may be this agent that didn't get to run, and the coordinator's words wait to be read."""
SECOND_LOOK_NS = 100_000_000
"""How long such an agent takes to read them before it calls the coordinator silent."""
FALLBACK_SLICE_NS = 20_000_000
"""Length of a self-issued slot: the same as a granted one."""
NANOS = 1_000_000_000
SLOWER = 2
"""A grant that was begun ends when its bytes could have left twice at its pace: the coordinator, too, then takes it for
lost."""
UNSCHEDULED_SHARE = 20
"""Small messages may use one byte in this many of a link without asking."""
UNSCHEDULED_BURST_NS = 250_000_000
"""So much of that share at once, if half the gateway's buffer holds it."""
UNSCHEDULED_REPORT_NS = 20_000_000
"""How late small messages may be accounted: nothing waits for it."""


@dataclasses.dataclass(slots=True)
class HeldGrant:
    """A grant with bytes left to spend."""

    transfer: TransferId
    left_bytes: int
    rate_bytes_per_s: int
    start_ns: int
    expires_ns: int
    """To be begun by then, or given back."""
    lead_ns: int
    send_ns: int = 0
    """How long its bytes take at its rate."""
    fallback: bool = False
    spent: bool = False
    """Some of it was: the rest may take longer than the pace would, where TCP is slower."""
    begun: bool = False
    """Its start time has passed, and that of all before it."""
    announcement: int = 0
    """Granted ahead to this one, and not bound to its message yet; ``transfer`` means nothing then."""
    repaid: bool = False
    """It was lent, and isn't lent again (:mod:`proxyd.core.lending`)."""


@dataclasses.dataclass(slots=True)
class PeerCounts:
    """Latest cumulative counts of one peer's streams, and the part of them that belongs to earlier sessions."""

    taken_bytes: int = 0
    left_bytes: int = 0
    delivered_bytes: int = 0
    unsent_bytes: int = 0
    srtt_ns: int = 0
    min_rtt_ns: int = 0
    retransmits: int = 0
    delivery_rate_bytes_per_s: int = 0
    path_limited: bool = True
    window_bytes: int = 0
    window_grows: bool = False
    sacked_bytes: int = 0
    lost_bytes: int = 0
    back_queue_ns: int = 0


class LinkBook:
    """Grants and accounts of one link at one agent."""

    def __init__(self, link: LinkName) -> None:
        self.link = link
        self.coordinator: str | None = None
        """Address of the session that owns the link; None: no coordinator known."""
        self.epoch = 0
        self.info: LinkInfo | None = None
        self.grants: deque[HeldGrant] = deque()
        self.leading: HeldGrant | None = None
        """The first grant whose peer was last told that it is its turn."""
        self.fallback_rate_bytes_per_s = 0
        self.fallback_next_ns = 0
        self.look_again_ns = 0
        self.used = False
        """A message that needs grants was offered on it."""
        self._looked_for_ns = -1
        self.last_heard_ns = 0
        self.unscheduled_bytes = 0
        self._unscheduled_left_bytes = 0
        self._unscheduled_ns: int | None = None
        self.fallback_bytes = 0
        self.peers: dict[AgentName, PeerCounts] = {}
        self.turn: AgentName | None = None
        """The peer that was last told that it is its turn, or took bytes."""
        self._counted: AgentName | None = None
        """The one of which the kernel was asked last."""
        self.granted_taken_bytes = 0
        """Payload handed to streams under the coordinator's grants, since start."""
        self.padding_bytes = 0
        """The same of warm-ups, which are no payload."""
        self.observed_taken_bytes = 0
        """The same without grants, because the link was only observed; since start."""
        self._observed_bytes = 0
        """In this session."""
        self._observed_left_bytes = self._observed_delivered_bytes = 0
        self._other_bytes = 0
        """All that was taken ever, but for what was observed in this session."""
        self._granted_bytes = 0
        self._returned_bytes = 0
        self._taken_bytes = 0
        self._lost_bytes = 0
        """Taken bytes that died with their connection: they count as delivered, since nothing of them is
        outstanding."""
        self._taken_before_bytes = 0
        self._limited = True
        self._reported: Report | None = None
        self._read_ns = self._reported_read_ns = 0
        """When the kernel's counters were read last, and which reading was reported last."""
        self._leaves_ns = 0
        """When the backlog will have left, as last reckoned."""
        self._lead_said = True
        self._spent_rate_bytes_per_s = 0
        self.report_due_ns: int | None = None
        self.asked: dict[TransferId, None] = {}
        """Transfers that wait for (more) grants, in the order in which they asked."""
        self.urgent: TransferId | None = None
        """The latest of them that wanted what is held for less urgent ones, and more."""
        self.lent_due_ns: int | None = None
        """When whoever lent grants asks for them by itself; None: nobody did."""

    @property
    def observed(self) -> bool:
        """Its owner only observes: what is to be sent goes at once, unpaced."""
        return self.coordinator is not None and self.info is not None and self.info.observe

    @property
    def one_way_ns(self) -> int:
        """Half the known round trip; 0 when nothing is known."""
        return self.info.rtt_ns // 2 if self.info is not None else 0

    # ------------------------------------------------------------------------------------ sessions

    def begin_session(
        self,
        coordinator: str | None,
        epoch: int,
        info: LinkInfo | None,
        heard_ns: int,
        *,
        keeps_rate: bool = False,
    ) -> list[HeldGrant]:
        """A session with the owner begins, or nobody owns the link any more: forget the old one's grants (returned
        here, so that transfers can account).

        :param heard_ns: when the owner was last heard.
        :param keeps_rate: what this agent may send by itself stands, until the owner says otherwise.
        """
        if not keeps_rate:
            self.fallback_rate_bytes_per_s = 0
        dropped = [grant for grant in self.grants if not grant.fallback]
        self.grants = deque(grant for grant in self.grants if grant.fallback)
        self.coordinator = coordinator
        self.epoch = epoch
        self.info = info or self.info
        self.last_heard_ns = heard_ns
        self._granted_bytes = self._returned_bytes = 0
        self._taken_before_bytes += self._taken_bytes
        self._taken_bytes = 0
        self._other_bytes += self._observed_bytes
        self._observed_bytes = self._observed_left_bytes = self._observed_delivered_bytes = 0
        self._reported = None
        return dropped

    def carried(self, epoch: int, now_ns: int) -> Carried | None:
        """What an earlier life of its owner left here, for the present one; None: there was none, or it left nothing.

        To be asked before :meth:`begin_session`, which forgets the grants that are held: only what is in the kernel,
        and slots of its own, go on leaving.
        """
        if epoch == self.epoch or self.info is None or self.coordinator is None:
            return None
        info = self.info
        found = info.source in FOUND
        return Carried(
            link=self.link,
            fallback_bytes_per_s=self.fallback_rate_bytes_per_s,
            fallback_total_bytes_per_s=info.fallback_bytes_per_s,
            unsent_bytes=sum(max(0, counts.taken_bytes - counts.left_bytes) for counts in self.peers.values())
            + sum(held.left_bytes for held in self.grants if held.fallback),
            unsent_rate_bytes_per_s=self._spent_rate_bytes_per_s,
            estimate_bytes_per_s=info.rate_bytes_per_s if found else 0,
            estimate_age_ns=info.age_ns + max(0, now_ns - self.last_heard_ns) if found else 0,
        )

    def silent(self, now_ns: int) -> bool:
        """The owner hasn't been heard for too long."""
        return now_ns - self.last_heard_ns > FALLBACK_AFTER_NS

    def second_look(self, due_ns: int, now_ns: int) -> bool:
        """Whether to wait a little before the owner counts as silent: once per silence, when we come late ourselves."""
        if now_ns - due_ns <= LATE_NS or self._looked_for_ns == self.last_heard_ns:
            return False
        self._looked_for_ns = self.last_heard_ns
        self.look_again_ns = now_ns + SECOND_LOOK_NS
        return True

    # --------------------------------------------------------------------------------- unscheduled

    def may_go_unscheduled(self, nbytes: int, least_bytes: int, now_ns: int) -> bool:
        """Whether a small message may go without asking; if so it is counted against the budget.

        The budget fills at a twentieth of the link's rate (divided among its agents as the fallback rates are), up to a
        quarter of a second's worth (half the gateway's buffer, where that is less), and always holds one message when
        it is full: many small messages can't flood a link.

        :param least_bytes: the largest message that needs no grant.
        """
        info = self.info
        if not nbytes or info is None:
            return True
        rate = info.rate_bytes_per_s // UNSCHEDULED_SHARE
        if self.fallback_rate_bytes_per_s:
            # What this agent may send by itself: its part of 0.8 of the link.
            rate = min(rate, self.fallback_rate_bytes_per_s * 5 // 4 // UNSCHEDULED_SHARE)
        burst = rate * UNSCHEDULED_BURST_NS // NANOS
        burst = max(least_bytes, min(burst, info.buffer_bytes // 2) if info.buffer_bytes else burst)
        if self._unscheduled_ns is None:
            self._unscheduled_left_bytes, self._unscheduled_ns = burst, now_ns
        elif added := rate * (now_ns - self._unscheduled_ns) // NANOS:
            self._unscheduled_left_bytes += added
            self._unscheduled_ns = now_ns
        self._unscheduled_left_bytes = min(burst, self._unscheduled_left_bytes)
        if nbytes > self._unscheduled_left_bytes:
            return False
        self._unscheduled_left_bytes -= nbytes
        return True

    def unscheduled(self, nbytes: int, now_ns: int) -> None:
        """A chunk of a small message is handed to a stream."""
        self.unscheduled_bytes += nbytes
        due_ns = now_ns + UNSCHEDULED_REPORT_NS
        if self.report_due_ns is None or self.report_due_ns > due_ns:
            self.report_due_ns = due_ns

    # -------------------------------------------------------------------------------------- grants

    def add(self, grant: Grant, nbytes: int, now_ns: int, *, repaid: bool = False) -> None:
        """Hold ``nbytes`` of a grant (what its transfer can use; the rest has been returned)."""
        self._granted_bytes += grant.nbytes
        self._returned_bytes += grant.nbytes - nbytes
        if not nbytes:
            self.report_due_ns = now_ns
            return
        start_ns = now_ns + grant.start_in_ns
        send_ns = nbytes * NANOS // max(1, grant.rate_bytes_per_s)
        # What is held already goes before it: that it waits for this is no reason to give it back. The coordinator
        # counts in the same way.
        before_ns = self.backlog_bytes() * NANOS // max(1, grant.rate_bytes_per_s)
        expires_ns = max(start_ns, now_ns + before_ns) + grant.ttl_ns
        tail = self.grants[-1] if self.grants else None
        same = tail is not None and (tail.transfer, tail.announcement) == (grant.transfer, grant.announcement)
        if tail is not None and same and tail.repaid == repaid and not tail.fallback and start_ns <= now_ns:
            # The same sender's next slot, issued ahead: one longer grant at the newest rate.
            tail.left_bytes += nbytes
            tail.rate_bytes_per_s = grant.rate_bytes_per_s
            tail.send_ns += send_ns
            tail.expires_ns = expires_ns + (SLOWER * tail.send_ns if tail.spent else 0)
            tail.lead_ns = grant.lead_ns
        else:
            self.grants.append(
                HeldGrant(
                    grant.transfer,
                    nbytes,
                    grant.rate_bytes_per_s,
                    start_ns,
                    expires_ns,
                    grant.lead_ns,
                    send_ns,
                    announcement=grant.announcement,
                    repaid=repaid,
                )
            )
        self._newest_rate(grant.rate_bytes_per_s, start_ns <= now_ns)
        self._lead_said = False
        self._reckon(now_ns)

    def _newest_rate(self, rate_bytes_per_s: int, at_once: bool) -> bool:
        """The coordinator's newest word on the rate counts for all that is held; a later one may lower it at once, and
        raise it from its start on. Answers whether anything changed."""
        changed = False
        for held in self.grants:
            if not held.fallback and (held.rate_bytes_per_s > rate_bytes_per_s or at_once):
                changed = changed or held.rate_bytes_per_s != rate_bytes_per_s
                held.rate_bytes_per_s = rate_bytes_per_s
        if self._spent_rate_bytes_per_s > rate_bytes_per_s or at_once:
            changed = changed or self._spent_rate_bytes_per_s != rate_bytes_per_s
            self._spent_rate_bytes_per_s = rate_bytes_per_s
        return changed

    def repace(self, rate_bytes_per_s: int, now_ns: int) -> None:
        """All that is held, and what of it is in the kernel, goes at this rate from now on.

        The backlog leaves at another time then: that is reported at once, and again one lead time early. While
        something is under way the next counts are some ms off and will say it: an answer to each of a coordinator's
        steps would make it step on.
        """
        if self._newest_rate(rate_bytes_per_s, True):
            self._lead_said = False
            if not self.unsent_peers():
                self.report_due_ns = now_ns
            self._reckon(now_ns)

    def turns_to(self, peer: AgentName) -> bool:
        """Something is asked for towards a peer, and nothing is held. True when its windows are news."""
        before, self.turn = self.turn, peer
        counts = self.peers.get(peer)
        return before != peer and counts is not None and counts.window_bytes > 0

    def begins(self, held: HeldGrant, now_ns: int) -> None:
        """The start of a grant has come: its rate counts for those before it too."""
        held.begun = True
        if held.fallback:
            return
        for earlier in self.grants:
            if earlier is held:
                break
            if not earlier.fallback and earlier.rate_bytes_per_s < held.rate_bytes_per_s:
                earlier.rate_bytes_per_s = held.rate_bytes_per_s
                self._reckon(now_ns)

    def unsent_peers(self) -> list[AgentName]:
        """Peers for which something is in the kernel and, as far as is known, has not left."""
        return [name for name, counts in self.peers.items() if counts.taken_bytes > counts.left_bytes]

    def rate_to(self, peer: AgentName) -> int:
        """The rate of what is in the kernel for a peer and has not left; 0 when there is nothing."""
        counts = self.peers.get(peer)
        unsent = counts is not None and counts.taken_bytes > counts.left_bytes
        return self._spent_rate_bytes_per_s if unsent else 0

    def add_fallback(self, transfer: TransferId, nbytes: int, rate_bytes_per_s: int, now_ns: int) -> None:
        """Hold a self-issued grant."""
        self.grants.append(HeldGrant(transfer, nbytes, rate_bytes_per_s, now_ns, now_ns + NANOS, 0, fallback=True))

    def refuse(self, grant: Grant, now_ns: int) -> None:
        """A grant that nothing here can use: give it back at once."""
        self._granted_bytes += grant.nbytes
        self._returned_bytes += grant.nbytes
        self.report_due_ns = now_ns

    def give_back(self, held: HeldGrant, now_ns: int) -> None:
        """Return what is left of a held grant that was taken out of the queue."""
        if held.left_bytes and not held.fallback:
            self._returned_bytes += held.left_bytes
            self.report_due_ns = now_ns

    def drop_transfer(self, transfer: TransferId, now_ns: int) -> None:
        """A transfer ended: return all that it holds."""
        for held in self.grants:
            if held.transfer == transfer:
                self.give_back(held, now_ns)
        self.grants = deque(held for held in self.grants if held.transfer != transfer)

    def bind(self, announcement: int, transfer: TransferId, need_bytes: int, now_ns: int) -> int:
        """What is held for an announcement is its message's from now on, as far as that needs it; the rest goes back.
        Answers the bytes that it holds now."""
        bound = 0
        for held in [held for held in self.grants if held.announcement == announcement]:
            usable = min(held.left_bytes, need_bytes - bound)
            self._returned_bytes += held.left_bytes - usable
            if usable < held.left_bytes:
                self.report_due_ns = now_ns
            held.transfer, held.announcement, held.left_bytes = transfer, 0, usable
            bound += usable
        self.grants = deque(held for held in self.grants if held.left_bytes)
        return bound

    def drop_announcement(self, announcement: int, now_ns: int) -> None:
        """Its message will not come, or needs none: return all that is held for it."""
        dropped = [held for held in self.grants if held.announcement == announcement]
        for held in dropped:
            self.give_back(held, now_ns)
            self.grants.remove(held)

    def expire(self, now_ns: int) -> list[HeldGrant]:
        """Take out and return grants whose time to begin is over."""
        if not any(held.expires_ns <= now_ns for held in self.grants):
            return []
        expired = [held for held in self.grants if held.expires_ns <= now_ns]
        self.grants = deque(held for held in self.grants if held.expires_ns > now_ns)
        for held in expired:
            self.give_back(held, now_ns)
        return expired

    def spend(self, held: HeldGrant, peer: AgentName, nbytes: int, *, padding: bool = False) -> None:
        """A chunk is handed to a stream under ``held``."""
        held.left_bytes -= nbytes
        if not held.spent:
            held.spent = True
            held.expires_ns += SLOWER * held.send_ns
        self._spent_rate_bytes_per_s = held.rate_bytes_per_s
        self.turn = peer
        self._other_bytes += nbytes
        counts = self.peers.setdefault(peer, PeerCounts())
        counts.taken_bytes += nbytes
        if held.fallback:
            self.fallback_bytes += nbytes
            self._taken_before_bytes += nbytes
        else:
            self._taken_bytes += nbytes
            if padding:
                self.padding_bytes += nbytes
            else:
                self.granted_taken_bytes += nbytes
        if held.left_bytes == 0:
            self.grants.remove(held)

    def observe(self, peer: AgentName, nbytes: int) -> None:
        """A chunk is handed to a stream without a grant, because the link is only observed."""
        self.turn = peer
        self.peers.setdefault(peer, PeerCounts()).taken_bytes += nbytes
        self.observed_taken_bytes += nbytes
        self._observed_bytes += nbytes
        self._taken_before_bytes += nbytes

    def drop_all(self, now_ns: int) -> list[HeldGrant]:
        """Return all that is held; answers it."""
        dropped = list(self.grants)
        self.grants.clear()
        for held in dropped:
            self.give_back(held, now_ns)
        return dropped

    def grants_for(self, held: HeldGrant, nbytes: int, now_ns: int) -> list[HeldGrant]:
        """``held``, and where it is too small for a chunk of ``nbytes`` later grants of its transfer that have started;
        none when they don't suffice together."""
        if held.left_bytes >= nbytes:
            return [held]
        found: list[HeldGrant] = []
        for grant in self.grants:
            if grant.transfer == held.transfer and grant.start_ns <= now_ns:
                found.append(grant)
                nbytes -= grant.left_bytes
                if nbytes <= 0:
                    return found
        return []

    @property
    def untaken_bytes(self) -> int:
        """Granted and not handed to a stream."""
        return sum(held.left_bytes for held in self.grants)

    # ------------------------------------------------------------------------------------ accounts

    def progress(self, peer: AgentName, counts: PeerCounts, now_ns: int) -> None:
        """Take in the kernel's counts for one peer's streams."""
        counts.taken_bytes = self.peers[peer].taken_bytes if peer in self.peers else 0
        self._counted = peer
        self._read_ns = now_ns
        self.peers[peer] = counts
        self.report_due_ns = now_ns
        self._reckon(now_ns)

    def peer_gone(self, peer: AgentName, now_ns: int) -> None:
        """A peer's streams ended: what was taken and not delivered can't be outstanding any more."""
        counts = self.peers.pop(peer, None)
        if counts is not None:
            self._lost_bytes += counts.taken_bytes
            self.report_due_ns = now_ns

    def _session_share(self, cumulative_bytes: int) -> int:
        return max(0, min(self._taken_bytes, cumulative_bytes - self._taken_before_bytes))

    def _observed_share(self, before_bytes: int, cumulative_bytes: int) -> int:
        return max(before_bytes, min(self._observed_bytes, cumulative_bytes - self._other_bytes))

    def backlog_bytes(self) -> int:
        """Granted and not yet left this host."""
        return self.untaken_bytes + sum(counts.unsent_bytes for counts in self.peers.values())

    def _rate(self) -> int:
        """The pace at which the backlog leaves: the head grant's, or, once all is in the kernel, the last one's."""
        return max(1, self.grants[0].rate_bytes_per_s if self.grants else self._spent_rate_bytes_per_s)

    def leaves_in_ns(self) -> int:
        """When the backlog will have left at the head grant's pace, or as fast as TCP's window lets it where that is
        slower; 0 without a backlog."""
        backlog = self.backlog_bytes()
        if not backlog:
            return 0
        return self.lasts_ns(self.turn, backlog, self._rate())

    def lasts_ns(self, peer: AgentName | None, nbytes: int, rate_bytes_per_s: int) -> int:
        """How long so much for a peer takes to leave at a pace, through the TCP windows that it has now."""
        counts = self.peers.get(peer) if peer is not None else None
        if counts is None or not counts.window_bytes:
            return nbytes * NANOS // max(1, rate_bytes_per_s)
        rtt_ns = counts.srtt_ns or counts.min_rtt_ns
        return leaving_ns(nbytes, max(1, rate_bytes_per_s), counts.window_bytes, rtt_ns, counts.window_grows)

    def _reckon(self, now_ns: int) -> None:
        waits_ns = max(0, self.grants[0].start_ns - now_ns) if self.grants else 0
        self._leaves_ns = now_ns + waits_ns + self.leaves_in_ns()

    @property
    def lead_due_ns(self) -> int | None:
        """When to say that the backlog leaves, one lead time early; None: nothing to say (or said already)."""
        if self._lead_said or not self.grants:
            return None
        return self._leaves_ns - self.grants[-1].lead_ns

    def say_lead(self, now_ns: int) -> None:
        """The lead time has come: a report is due."""
        self._lead_said = True
        self.report_due_ns = now_ns

    def problem(self) -> str:
        """What of the accounts doesn't add up; "" when all does."""
        held = sum(grant.left_bytes for grant in self.grants if not grant.fallback)
        counts = (self._granted_bytes, self._returned_bytes, held, self._taken_bytes)
        if min(counts) < 0 or self._granted_bytes != self._returned_bytes + held + self._taken_bytes:
            return "granted {}, returned {}, untaken {}, taken {} bytes".format(*counts)
        if any(grant.left_bytes <= 0 for grant in self.grants):
            return f"a grant with nothing left is held: {[grant.left_bytes for grant in self.grants]}"
        return ""

    def report(self, now_ns: int) -> Report | None:
        """The report that is due, or None when nothing has changed since the last one."""
        self.report_due_ns = None
        live = list(self.peers.values())
        left = self._lost_bytes + sum(c.left_bytes for c in live)
        delivered = self._lost_bytes + sum(c.delivered_bytes for c in live)
        leaves_in_ns = self.leaves_in_ns()
        if leaves_in_ns and self.grants:
            leaves_in_ns += max(0, self.grants[0].start_ns - now_ns)
        self._observed_left_bytes = self._observed_share(self._observed_left_bytes, left)
        self._observed_delivered_bytes = self._observed_share(self._observed_delivered_bytes, delivered)
        turn = self.peers.get(self.turn) if self.turn is not None else None
        # Of a peer to which nothing is under way the kernel says for ever what it saw last: its smoothed round trip
        # would pass for a queue that stands.
        fresh = [c for name, c in self.peers.items() if c.taken_bytes > c.delivered_bytes or name == self._counted]
        report = Report(
            link=self.link,
            left_bytes=self._session_share(left),
            delivered_bytes=self._session_share(delivered),
            returned_bytes=self._returned_bytes,
            unscheduled_bytes=self.unscheduled_bytes,
            fallback_bytes=self.fallback_bytes,
            backlog_bytes=self.backlog_bytes(),
            leaves_in_ns=leaves_in_ns,
            srtt_ns=max((c.srtt_ns for c in fresh), default=0),
            min_rtt_ns=min((c.min_rtt_ns for c in live if c.min_rtt_ns), default=0),
            retransmits=sum(c.retransmits for c in live),
            delivery_rate_bytes_per_s=sum(c.delivery_rate_bytes_per_s for c in fresh),
            limited=self._limited and (bool(self.grants) or self.observed) and any(c.path_limited for c in fresh),
            observed_left_bytes=self._observed_left_bytes,
            observed_delivered_bytes=self._observed_delivered_bytes,
            window_bytes=turn.window_bytes if turn is not None else 0,
            sacked_bytes=sum(c.sacked_bytes for c in live),
            lost_bytes=sum(c.lost_bytes for c in live),
            back_queue_ns=min((c.back_queue_ns for c in fresh), default=0),
        )
        self._limited = bool(self.backlog_bytes())
        if report == self._reported:
            return None
        self._reported = report
        elapsed_ns = self._read_ns - self._reported_read_ns if self._reported_read_ns else 0
        self._reported_read_ns = self._read_ns
        return dataclasses.replace(report, elapsed_ns=elapsed_ns) if elapsed_ns else report
