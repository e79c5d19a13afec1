"""The coordinator as a machine: sessions and messages in, answers and grants out.

Theory of operation
-------------------
Everything here is soft state. A *session* is one agent's open control stream; its first message says who it is, and the
newest one of an agent replaces any other. Endpoints that agents register make up the directory, which every session has
a copy of (all of it at first, then changes, in batches). Each owned *link* has a
:class:`~proxyd.core.grants.LinkGranter` that decides alone; this module brings it requests and reports and carries its
grants.

What an agent says is checked before it counts: it can only send on links out of its own site that this coordinator
owns, and numbers beyond the possible are clamped. A request that can't be served gets ``Denied`` with the reason; a
stream that breaks the protocol is closed.

An agent of which nothing is heard keeps what it was granted until that can't matter any more. Its fallback rate is kept
free from the moment on at which it may begin to use it, for one lease after its session has ended, and for as long as
other agents are connected with it: cut off from here it sends on (:mod:`proxyd.core.absent`). A restarted coordinator,
or a standby that took over, has a new epoch: grants of the old one are void, and it grants what the agents' fallback
leaves over until they are back (:mod:`proxyd.core.takeover`).
"""

from __future__ import annotations

from bisect import insort

from proxyd.core.absent import Absent
from proxyd.core.allocation import CLASSES, NO_DEADLINE_NS
from proxyd.core.announced import Announced
from proxyd.core.bandwidth import NANOS, LinkSettings, default_settings
from proxyd.core.beats import OUT_OF_REACH_NS, AgentSession, Beats, BeatTurns
from proxyd.core.coordinator_config import CoordinatorConfig, refusal
from proxyd.core.coordinator_status import CoordinatorStatus, LinkStatus
from proxyd.core.effects import CloseSession, CoordinatorEffect, ToAgent
from proxyd.core.events import (
    CoordinatorEvent,
    LocalTime,
    PolicyChanged,
    SessionClosed,
    SessionMessage,
    SessionOpened,
)
from proxyd.core.grants import LinkGranter
from proxyd.core.ids import AgentName, LinkName, TransferId
from proxyd.core.lanes import Lane
from proxyd.core.link_status import link_info
from proxyd.core.messages import (
    AgentHello,
    AgentMessage,
    Announce,
    Beat,
    CancelRequest,
    Carried,
    CoordinatorMessage,
    Denied,
    Echo,
    EndpointDown,
    EndpointUp,
    LinkInfo,
    Queued,
    Report,
    Request,
    Seen,
    TransferDone,
    Welcome,
)
from proxyd.core.owned_links import OwnedLink, OwnedLinks
from proxyd.core.policy import Policy
from proxyd.core.reasons import Waits
from proxyd.core.registry import Registry
from proxyd.core.takeover import RETURN_NS, Takeover
from proxyd.core.window import MAX_CHUNK_FAST_BYTES, MIN_CHUNK_BYTES
from proxyd.wire.envelope import MAX_TRANSFER_BYTES

__all__ = ["MAX_EPOCH", "RETURN_NS", "CoordinatorConfig", "CoordinatorMachine"]

MAX_EPOCH = 1 << 62
DIRECTORY_BATCH_NS = 5_000_000
"""Directory changes travel at most this often: a job of 1,000 ranks that starts would else cost 1,000 x 1,000
messages."""


class CoordinatorMachine:
    """See the module's text.

    :param epoch: this life's name; should be higher than that of any earlier one. Without a file nobody here can know
        whether it is (a wall clock may have been set back), but the agents do: until the first Welcome has gone out the
        epoch is raised above what the hello says was seen. An agent that comes later and has seen more is welcomed all
        the same. That is harmless, because agents compare for equality only: rising epochs are for people who read
        logs and graphs.
    :param fence: of the lock that this coordinator holds, and then the epoch too; 0: there is no lock.
    """

    def __init__(self, config: CoordinatorConfig, epoch: int, *, fence: int = 0) -> None:
        self.config = config
        self.fence = fence
        self.epoch = epoch = fence or epoch
        self._epoch_told = fence != 0
        self.protocol_errors = 0
        self._effects: list[CoordinatorEffect] = []
        self._sessions: dict[int, AgentSession] = {}
        self._session_of: dict[AgentName, int] = {}
        self._members: dict[str, list[int]] = {}
        """Sessions of a site's agents, sorted."""
        self._links = OwnedLinks(config, epoch)
        self._registry = Registry()
        self._orders = 0
        self._event_ns = 0
        self._takeover = Takeover(config.lease_ns, succeeds=fence != 0)
        self._absent = Absent(config.lease_ns)
        self._turns = BeatTurns(config.beat_ns)
        self._told_directory_ns = -DIRECTORY_BATCH_NS
        self._complete_ns: int | None = None
        """When a restarted coordinator's directory counts as complete."""
        self._beats = Beats()
        self._link_deadlines: dict[LinkName, int] = {}
        self._announced = Announced(
            self._granting,
            self._lane_of,
            self._decide_on,
            self._next_order,
            self._wake,
        )
        self._next_ns: int | None = None
        for link in self._links:
            self._turns.join(link.granter.link.src_site)

    # ---------------------------------------------------------------------------------------------------------- driving

    def handle(self, event: CoordinatorEvent, now_ns: int) -> list[CoordinatorEffect]:
        """One event; what to do about it, in order."""
        if self._takeover.begun_ns is None:
            self._begin(now_ns)
        elif now_ns - self._event_ns >= OUT_OF_REACH_NS and self._sessions:
            self._was_stopped(now_ns)
        self._event_ns = now_ns
        self._effects = []
        match event:
            case SessionMessage():
                self._message(event.session, event.message, now_ns)
            case SessionOpened(session, message):
                self._opened(session, message, now_ns)
            case SessionClosed(session, reason):
                self._closed(session, reason, now_ns)
            case PolicyChanged(policy):
                if policy.permissions != self.policy.permissions:
                    for number in sorted(self._sessions):
                        self._tell(number, policy.permissions)
                self._links.set_policy(policy, now_ns)
                self._decide_all(now_ns)
            case LocalTime(minute_of_week):
                self._links.set_minute_of_week(minute_of_week, now_ns)
                self._decide_all(now_ns)
            case _:
                pass
        if self._next_ns is not None and self._next_ns <= now_ns:
            self._tick(now_ns)
            self._next_ns = self._deadline_ns()
        effects, self._effects = self._effects, []
        return effects

    def _was_stopped(self, now_ns: int) -> None:
        """With sessions there are beats, so this process didn't run. Its agents have heard nothing meanwhile: before
        anything is granted, what they send by themselves has to be kept free."""
        for site, members in self._members.items():
            links = self._links.from_site(site)
            for number in members:
                self._out_of_reach(number, links, now_ns)
            self._turns.hurry(site)
        self._wake(now_ns)

    def next_deadline_ns(self) -> int | None:
        """When ``handle(TimePassed())`` is due; None: only when something happens.

        It may be early (a report moved what it was for), never late: looking for the earliest after each event would
        cost more than a vain call now and then.
        """
        return self._next_ns

    def _begin(self, now_ns: int) -> None:
        self._takeover.begin(now_ns)
        if self._takeover.succeeds:
            self._links.settle_until(self._takeover.settled_ns)

    def _wake(self, due_ns: int) -> None:
        if self._next_ns is None or due_ns < self._next_ns:
            self._next_ns = due_ns

    def _deadline_ns(self) -> int | None:
        times = [*self._link_deadlines.values(), *self._announced.joins_ns.values()]
        if (beat_ns := self._turns.next_ns) is not None:
            times.append(beat_ns)
        if self._registry.changed:
            times.append(self._told_directory_ns + DIRECTORY_BATCH_NS)
        if self._complete_ns is not None:
            times.append(self._complete_ns)
        if (lost_ns := self._registry.next_deadline_ns()) is not None:
            times.append(lost_ns)
        return min(times, default=None)

    def _tick(self, now_ns: int) -> None:
        """Do what is due."""
        for name in [name for name, due_ns in self._link_deadlines.items() if due_ns <= now_ns]:
            self._decide(self._links[name], now_ns)
        self._announced.tick(now_ns)
        self._registry.expire(now_ns)
        if self._complete_ns is not None and self._complete_ns <= now_ns:
            self._complete_ns = None
            whole = self._registry.whole(now_ns, full=True)
            for session in sorted(self._sessions):
                self._tell(session, whole)
        if self._registry.changed and now_ns - self._told_directory_ns >= DIRECTORY_BATCH_NS:
            self._told_directory_ns = now_ns
            changes = self._registry.take_changes(now_ns)
            for session in sorted(self._sessions):
                self._tell(session, changes)
        for site in self._turns.take(now_ns):
            self._beat(site, now_ns)

    def _tell(self, session: int, message: CoordinatorMessage) -> None:
        self._effects.append(ToAgent(session, message))

    # --------------------------------------------------------------------------------------------------------- sessions

    def _opened(self, number: int, message: AgentMessage, now_ns: int) -> None:
        if not isinstance(message, AgentHello) or number in self._sessions:
            self._refuse(number, f"a session begins with one hello, not with {type(message).__name__}", now_ns)
            return
        if not self._epoch_told:
            self._epoch_told = True
            if self.epoch <= message.epoch_seen < MAX_EPOCH:
                self.epoch = message.epoch_seen + 1
                self._links.set_epoch(self.epoch)
        agent = message.agent
        before = self._session_of.get(agent)
        same = self._absent.returned(agent, message.incarnation)
        if before is not None:
            same = self._sessions[before].hello.incarnation == message.incarnation
        for link in self._links.from_site(agent.site):
            held = 0 if before is None else link.fallback.may_hold(before)
            held = max(held, link.granter.reserves.agent_returned(agent))
            # Sessions come and go, the agent goes on with what it was told, unless it was started anew.
            link.fallback.carried(number, held if same else 0)
        if before is not None:
            self._end(before, now_ns, reserve=False)
            self._effects.append(CloseSession(before, f"agent {agent} has opened a newer session"))
        self._registry.agent_returned(agent, now_ns + self.config.lease_ns)
        self._wake(self._told_directory_ns + DIRECTORY_BATCH_NS)
        if message.epoch_seen not in (0, self.epoch) and not self._takeover.succeeds:
            self._takeover.succeeds = True
            self._links.settle_until(self._takeover.settled_ns)
            self._decide_all(now_ns)  # who was granted all of a link that nobody seemed to use before has to be told
        self._sessions[number] = AgentSession(number, message, agent, now_ns)
        self._session_of[agent] = number
        insort(self._members.setdefault(agent.site, []), number)
        self._know_site(agent.site)
        self._turns.join(agent.site)
        links = self._links.from_site(agent.site)
        infos = tuple(link_info(link.granter, link.fallback, now_ns) for link in links)
        config = self.config
        self._tell(
            number,
            Welcome(
                *(config.name, self.epoch, config.owns, config.beat_ns, config.lease_ns, infos, self.fence),
                permissions=self.policy.permissions,
            ),
        )
        # After a restart agents come back one by one: whoever isn't here yet isn't gone.
        learning = self._takeover.succeeds and now_ns < self._takeover.complete_ns
        if learning:
            self._complete_ns = self._takeover.complete_ns
            self._wake(self._complete_ns)
        self._tell(number, self._registry.whole(now_ns, full=not learning))
        if not self._turns.running:
            self._turns.start(now_ns)
            self._wake(now_ns)
        else:
            self._tell_beat(number, links, infos)

    def _closed(self, number: int, reason: str, now_ns: int) -> None:
        if number in self._sessions:
            self._absent.lost(self._sessions[number].agent, self._sessions[number].hello.incarnation, now_ns)
            self._end(number, now_ns, reserve=True)

    def _refuse(self, number: int, reason: str, now_ns: int) -> None:
        """The stream broke the protocol."""
        self.protocol_errors += 1
        if number in self._sessions:
            self._end(number, now_ns, reserve=False)
        self._effects.append(CloseSession(number, reason))

    def _end(self, number: int, now_ns: int, *, reserve: bool) -> None:
        session = self._sessions.pop(number)
        self._session_of.pop(session.agent, None)
        self._members[session.agent.site].remove(number)
        for waiting in (*session.transfers.values(), *self._announced.session_ended(number)):
            self._links[waiting.link].granter.queue.end(waiting, "its agent's session ended")
        for link in self._links.from_site(session.agent.site):
            if link.shadow is not None:
                link.shadow.session_ended(number, now_ns)
            link.granter.session_ended(number, session.agent, link.fallback.may_hold(number) if reserve else 0, now_ns)
            self._decide(link, now_ns)
        self._registry.session_lost(number, session.agent, now_ns, now_ns + self.config.absent_ns)
        self._wake(now_ns)
        if not self._sessions:
            self._turns.stop()

    def _carried(self, session: AgentSession, message: Carried, now_ns: int) -> None:
        """What an earlier life left with an agent that is back."""
        name = message.link
        link = self._links.get(name)
        if name.src_site != session.agent.site or link is None:
            return
        granter = link.granter
        granter.estimator.resume(message.estimate_bytes_per_s, message.estimate_age_ns, now_ns)
        lane = self._lane(link, session)
        granter.reserves.carried(lane, message.unsent_bytes, message.unsent_rate_bytes_per_s, now_ns)
        if self._takeover.settles(now_ns):
            link.fallback.rebase(self._links.shared.fallback_bytes_per_s(granter, now_ns))
        link.fallback.carried(session.number, message.fallback_bytes_per_s)
        if self._takeover.settles(now_ns):
            total = link.fallback.total_bytes_per_s
            granter.reserves.returned(self._takeover.returned(session.agent, message, total))
        self._decide(link, now_ns)

    def _seen(self, message: Seen, now_ns: int) -> None:
        """Others are connected with agents of which nothing is heard here: they live, and go on by themselves."""
        for agent in self._absent.seen(message.agents, now_ns):
            self._registry.agent_seen(agent, now_ns + self.config.absent_ns)
            for link in self._links.from_site(agent.site):
                link.granter.reserves.agent_seen(agent, now_ns)

    # --------------------------------------------------------------------------------------------------------- messages

    def _message(self, number: int, message: AgentMessage, now_ns: int) -> None:
        session = self._sessions.get(number)
        if session is None:
            return  # it crossed our close
        session.heard_ns = now_ns
        match message:
            case Report():
                self._report(session, message, now_ns)
            case Request():
                self._request(session, message, now_ns)
            case TransferDone():
                self._done(session, message, now_ns)
            case CancelRequest(transfer, reason):
                self._drop(session, transfer, f"cancelled: {reason}", now_ns)
            case Announce():
                if self.policy.permissions.denial(message.job, message.link, message.traffic) and message.nbytes:
                    return  # its request will be denied, with the reason
                self._announced.announce(number, session.agent, session.control_rtt_ns, message, now_ns)
            case EndpointUp(endpoint, incarnation, age_ns):
                if not self._registry.up(number, session.hello, endpoint, incarnation, now_ns - age_ns):
                    self._refuse(number, "too many endpoints in one session", now_ns)
                self._wake(self._told_directory_ns + DIRECTORY_BATCH_NS)
            case EndpointDown(endpoint, incarnation, reason):
                self._registry.down(number, endpoint, incarnation, reason)
                self._wake(self._told_directory_ns + DIRECTORY_BATCH_NS)
            case Echo():
                self._echo(session, message, now_ns)
            case Carried():
                self._carried(session, message, now_ns)
            case Seen():
                self._seen(message, now_ns)
            case AgentHello():
                self._refuse(number, "a second hello in one session", now_ns)

    def _echo(self, session: AgentSession, echo: Echo, now_ns: int) -> None:
        """A beat came back: how far is this agent?"""
        if not self._beats.echoed(session, echo, now_ns):
            return
        reached = session.out_of_reach and not session.look(now_ns)
        for link in self._links.from_site(session.agent.site):
            link.fallback.heard(session.number, echo.number)
            lane = link.granter.lanes.get(session.number)
            if lane is not None:
                lane.control_rtt_ns = max(session.control_rtt_ns, self.config.control_rtt_ns)
                if reached:
                    link.granter.reserves.in_reach(lane, now_ns)
                    self._decide(link, now_ns)

    def _lane(self, link: OwnedLink, session: AgentSession) -> Lane:
        lane = link.granter.lane(session.number, session.agent)
        if session.control_rtt_ns > lane.control_rtt_ns:
            lane.control_rtt_ns = session.control_rtt_ns  # a new lane of an agent whose distance is known
        return lane

    def _report(self, session: AgentSession, report: Report, now_ns: int) -> None:
        link = self._links.get(report.link)
        if link is None or report.link.src_site != session.agent.site:
            return
        lane = link.granter.lanes.get(session.number) or self._lane(link, session)
        if link.shadow is not None:
            link.shadow.reported(lane, report, now_ns)
        else:
            link.granter.report(lane, report, now_ns)
        self._decide(link, now_ns)

    def _request(self, session: AgentSession, message: Request, now_ns: int) -> None:
        waiting = session.transfers.get(message.transfer)
        if waiting is None:
            permissions, count = self.policy.permissions, len(session.transfers)
            reason = refusal(self.config, permissions, session.agent, message, self._links.names, count)
            if reason:
                self._tell(session.number, Denied(message.transfer, reason))
                return
        link = self._links.get(message.link) or self._add_link(default_settings(message.link))
        queue = link.granter.queue
        if waiting is None:
            self._lane(link, session)
            waiting = self._announced.asked_for(session.number, message, now_ns)
            if message.chunk_bytes > 0:
                waiting.chunk_bytes = min(max(message.chunk_bytes, MIN_CHUNK_BYTES), MAX_CHUNK_FAST_BYTES)
            if message.deadline_in_ns > 0 and not waiting.queued:
                waiting.due_ns = min(now_ns + message.deadline_in_ns, NO_DEADLINE_NS)
            session.transfers[message.transfer] = waiting
        elif waiting.link != message.link:
            self._tell(session.number, Denied(message.transfer, f"it was first requested for link {waiting.link}"))
            return
        if link.shadow is not None:
            waiting.reason = "its link is only observed: it goes at once"
            link.shadow.request(session.agent, waiting, message.wanted_bytes, now_ns)
            self._decide(link, now_ns)
            return
        transfers, nbytes = queue.ahead_of(waiting.traffic, waiting.job)
        if queue.want(waiting, min(message.wanted_bytes, MAX_TRANSFER_BYTES)):
            waiting.waits.begin(now_ns)
            granter = link.granter
            pace = granter.pace_bytes_per_s(now_ns)
            in_flight_bytes = pace * granter.estimator.min_rtt_ns(now_ns) // NANOS
            starts_in_ns = (nbytes + max(0, granter.outstanding_bytes - in_flight_bytes)) * NANOS // pace
            finishes_in_ns = starts_in_ns + waiting.need_bytes * NANOS // pace
            reason = (
                f"{waiting.traffic.label}: {transfers} transfers ({nbytes} bytes) of its class or above are before it"
            )
            waiting.reason = reason
            self._tell(session.number, Queued(message.transfer, transfers, starts_in_ns, finishes_in_ns, reason))
            self._decide(link, now_ns)

    def _done(self, session: AgentSession, message: TransferDone, now_ns: int) -> None:
        link = self._links.get(message.link)
        if link is not None and message.ok and message.traffic in CLASSES:
            nbytes = max(0, min(message.nbytes, MAX_TRANSFER_BYTES))
            link.granter.finished(message.traffic, nbytes)
            link.granter.estimator.on_arrival(nbytes, message.arrival_span_ns, now_ns)
        self._drop(session, message.transfer, "done" if message.ok else "failed", now_ns)

    def _drop(self, session: AgentSession, transfer: TransferId, reason: str, now_ns: int) -> None:
        waiting = session.transfers.pop(transfer, None)
        if waiting is not None:
            link = self._links[waiting.link]
            stood_in_line = waiting.queued
            link.granter.queue.end(waiting, reason)
            if link.shadow is not None:
                link.shadow.ended(transfer, reason == "done", now_ns)
                stood_in_line = True
            if stood_in_line:  # else it had all it wanted, and its end leaves nobody more than before
                self._decide(link, now_ns)

    # Methods, not lambdas: a machine's state is kept in the grant log, and functions without a name can't be.

    def _lane_of(self, link: LinkName, session: int) -> Lane:
        return self._lane(self._links[link], self._sessions[session])

    def _decide_on(self, link: LinkName, now_ns: int) -> None:
        self._decide(self._links[link], now_ns)

    def _granting(self, name: LinkName) -> LinkGranter | None:
        link = self._links.get(name)
        return link.granter if link is not None and link.shadow is None else None

    def _next_order(self) -> int:
        self._orders += 1
        return self._orders

    # ------------------------------------------------------------------------------------------------------------ links

    def _add_link(self, settings: LinkSettings) -> OwnedLink:
        link = self._links.add(settings, self._takeover.begun_ns or 0)
        self._turns.join(settings.link.src_site)
        return link

    def _know_site(self, site: str) -> None:
        """Make links to and from a new site, so that agents know their sizes before the first transfer."""
        for link in self._links.missing(site):
            self._add_link(default_settings(link))
            if link.src_site != site:
                self._turns.hurry(link.src_site)
                self._wake(0)

    def _decide_all(self, now_ns: int) -> None:
        for link in self._links:
            self._decide(link, now_ns)

    def _decide(self, link: OwnedLink, now_ns: int) -> None:
        for name in self._links.shared.order(link.granter, now_ns):
            self._decide_one(self._links[name], now_ns)

    def _decide_one(self, link: OwnedLink, now_ns: int) -> None:
        granter = link.granter
        for session, grant in granter.decide(now_ns):
            self._effects.append(ToAgent(session, grant))
        due_ns = granter.next_deadline_ns(now_ns)
        if link.shadow is not None and (shadow_ns := link.shadow.run(now_ns)) is not None:
            due_ns = shadow_ns if due_ns is None else min(due_ns, shadow_ns)
        if due_ns is None:
            self._link_deadlines.pop(granter.link, None)
        else:
            # Never "now": what could be done now was done.
            self._link_deadlines[granter.link] = due_ns = max(due_ns, now_ns + 1)
            self._wake(due_ns)

    def _beat(self, site: str, now_ns: int) -> None:
        """Tell the agents of a site of its links."""
        beat = self._beats.next(now_ns)
        members = self._members.get(site, [])
        links = self._links.from_site(site)
        out_of_reach = [number for number in members if self._out_of_reach(number, links, now_ns)]
        for link in links:
            granter = link.granter
            link.fallback.rebase(self._links.shared.fallback_bytes_per_s(granter, now_ns))
            if now_ns >= granter.reserves.settle_until_ns:  # before that all have what an earlier life left them
                link.fallback.share(members, granter.reserves.total_bytes_per_s(now_ns), out_of_reach, beat=beat)
            if out_of_reach:
                self._decide(link, now_ns)  # the others hear that there is less for them
        infos = tuple(link_info(link.granter, link.fallback, now_ns) for link in links)
        missing = self._absent.names(now_ns)
        for number in members:
            self._tell_beat(number, links, infos, beat, missing)

    def _out_of_reach(self, number: int, links: list[OwnedLink], now_ns: int) -> bool:
        """Whether an agent with a session may have begun to send by itself: a beat and its echo are lost at a time."""
        session = self._sessions[number]
        if not session.look(now_ns):
            return False
        for link in links:
            link.granter.reserves.out_of_reach(self._lane(link, session), link.fallback.may_hold(number), now_ns)
        return True

    def _tell_beat(
        self,
        session: int,
        links: list[OwnedLink],
        infos: tuple[LinkInfo, ...],
        number: int = 0,
        missing: tuple[AgentName, ...] = (),
    ) -> None:
        # What it has no part of yet it keeps as an earlier life left it.
        rates = ((link.granter.link, link.fallback.of(session)) for link in links)
        self._tell(session, Beat(self.epoch, tuple(one for one in rates if one[1]), infos, number, missing))

    # ----------------------------------------------------------------------------------------------------------- status

    @property
    def policy(self) -> Policy:
        """What the operator wants, as last said."""
        return self._links.policy

    @property
    def waiting(self) -> int:
        """Transfers that wait for grants, over all links."""
        return sum(link.granter.queue.count for link in self._links)

    def status(self, now_ns: int, transfers_per_link: int = 100) -> CoordinatorStatus:
        """All there is to see, as plain values; of each link's queue at most the first ``transfers_per_link``."""
        sessions = sorted(self._sessions.items())
        return CoordinatorStatus(
            name=self.config.name,
            epoch=self.epoch,
            owns=self.config.owns,
            agents=tuple(session.status(self._registry.count(number), now_ns) for number, session in sessions),
            endpoints=self._registry.entries,
            links=self.links_status(now_ns, transfers_per_link),
            protocol_errors=self.protocol_errors,
            bottlenecks=self._links.shared.status(now_ns),
        )

    def links_status(self, now_ns: int, transfers_per_link: int = 0) -> tuple[LinkStatus, ...]:
        """The links alone."""
        return self._links.statuses(now_ns, transfers_per_link)

    def audit(self, now_ns: int) -> str:
        """What must hold after every event, on every link; "" when it does, else what doesn't."""
        return self._links.audit(now_ns)

    def waits(self, session: int, transfer: TransferId) -> Waits | None:
        """How long a transfer of a session waited for what; None: it isn't known (or is over)."""
        known = self._sessions.get(session)
        waiting = None if known is None else known.transfers.get(transfer)
        return None if waiting is None else waiting.waits

    def why(self, transfer: TransferId) -> str | None:
        """Why a transfer stands where it stands, in words; None: it isn't known (or is over)."""
        for _, session in sorted(self._sessions.items()):
            waiting = session.transfers.get(transfer)
            if waiting is not None:
                granted = f"{waiting.granted_bytes} of {waiting.wanted_bytes} bytes granted"
                return f"{session.agent} on {waiting.link}: {granted}; {waiting.reason}"
        return None
