"""Asking for slots and holding them: an agent's side of the granting.

One :class:`~proxyd.core.linkbook.LinkBook` per link keeps grants and accounts; this file decides what to ask of which
coordinator and which chunk spends which grant. What was announced is :mod:`proxyd.core.announcing`'s, what happens when
a coordinator falls silent :mod:`proxyd.core.alone`'s business.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from proxyd.core.agent_config import AgentConfig
from proxyd.core.alone import Alone
from proxyd.core.announcer import Announcer
from proxyd.core.announcing import Ahead
from proxyd.core.effects import AgentEffect, Chunk, Pump, SetPace, ToCoordinator
from proxyd.core.events import SendProgress
from proxyd.core.ids import AgentName, LinkName, TransferId, owns_link
from proxyd.core.lending import CAN_SEND, Lending
from proxyd.core.linkbook import NANOS, HeldGrant, LinkBook, PeerCounts
from proxyd.core.messages import CancelRequest, Grant, LinkInfo, Pace, Queued, Request, TransferDone, Welcome
from proxyd.core.owners import Owners, Session
from proxyd.core.peering import Peer
from proxyd.core.permissions import EVERYTHING, Permissions
from proxyd.core.telling import Telling
from proxyd.core.transfer import Outgoing, SendInput, SendState
from proxyd.wire.envelope import ErrorCode, TrafficClass

LIVE_SOURCES = ("default", "estimated", "policed")
"""Of links whose rate is found from live transfers."""
PACE_STEPS = 256
"""A ceiling that would change by less than 1/256 stays: setting it costs system calls on each stream."""


class Asking:
    """Requests, grants and fallback of one agent. Shares ``transfers`` and ``peers`` with the sender."""

    def __init__(
        self,
        config: AgentConfig,
        transfers: dict[TransferId, Outgoing],
        peers: dict[AgentName, Peer],
        effects: list[AgentEffect],
        cancel: Callable[[Outgoing, ErrorCode, str, int], None],
        padded: Callable[[Outgoing, int], None],
    ) -> None:
        self.config = config
        self.transfers = transfers
        self.peers = peers
        self.effects = effects
        self.links: dict[LinkName, LinkBook] = {}
        self.owners = Owners(config.coordinators)
        self._permissions: dict[str, tuple[tuple[str, ...], Permissions]] = {}
        """What each coordinator owns, and what it permits there, as it last said: that holds also while it is away."""
        self._alone = Alone(config, transfers, self.owners, effects, cancel, self._begin)
        self._padded = padded
        self.lending = Lending(transfers, self.request, self._has_slot)
        self.announcer = Announcer(config, self.book, self.unsent_bytes, peers, effects)
        self.telling = Telling(effects)

    # -------------------------------------------------------------------------------- coordinators

    def book(self, link: LinkName) -> LinkBook:
        book = self.links.get(link)
        if book is None:
            book = self.links[link] = LinkBook(link)
            session = self.owners.of(link)
            if session is not None:
                book.begin_session(session.address, session.welcome.epoch, session.info(link), session.heard_ns)
        return book

    def asks(self, out: Outgoing, address: str) -> bool:
        """Whether this coordinator is the one that a transfer has to ask."""
        return out.link is not None and self.book(out.link).coordinator == address

    def session_began(self, address: str, welcome: Welcome, now_ns: int) -> None:
        """A control session stands: take its links over, ask again for all that waits on them."""
        self._permissions[address] = (welcome.owns, welcome.permissions)
        self.owners.began(address, welcome, now_ns)
        for info in welcome.links:
            self.book(info.link)
        for book in self.links.values():
            owner = self.owners.of(book.link)
            present = None if owner is None else owner.address
            if present == address or present != book.coordinator:
                self._move(book, owner, now_ns)

    def permitted(self, address: str, permissions: Permissions) -> None:
        """A coordinator's operator changed who may use what. It is judged where messages are offered."""
        if address in self._permissions:
            self._permissions[address] = (self._permissions[address][0], permissions)

    def denial(self, job: str, link: LinkName, traffic: TrafficClass) -> str:
        """Why a message may not cross, by the word of the first coordinator that owns the link; "" when it may."""
        for address in self.config.coordinators:
            owns, permissions = self._permissions.get(address, ((), EVERYTHING))
            if owns_link(owns, link):
                return permissions.denial(job, link, traffic)
        return ""

    def _move(self, book: LinkBook, owner: Session | None, now_ns: int) -> None:
        """A link is in the hands of a new session, or of nobody: old grants are void, what waits asks anew."""
        before = book.coordinator
        carried = None if owner is None else book.carried(owner.welcome.epoch, now_ns)
        if owner is not None and carried is not None:
            self.effects.append(ToCoordinator(owner.address, carried))
        waiting = [out for out in self.transfers.values() if out.link == book.link and not out.free]
        self._alone.heard(book, now_ns)
        if before is not None and (owner is None or before != owner.address):
            # It would go on granting to what waits there. Its account of this agent settles by itself, as for an agent
            # that fell silent.
            for out in waiting:
                if out.requested:
                    cancel = CancelRequest(out.transfer, "its link has another owner now")
                    self.effects.append(ToCoordinator(before, cancel))
        if owner is None:
            dropped = book.begin_session(None, 0, None, 0)
        else:
            info, keeps = owner.info(book.link), self.owners.same(before, owner.address)
            dropped = book.begin_session(owner.address, owner.welcome.epoch, info, owner.heard_ns, keeps_rate=keeps)
        self.announcer.announced.session_began(book.link)
        for held in dropped:
            if (holder := self.transfers.get(held.transfer)) is not None:
                self._returned(holder, held)
        for out in waiting:
            if out.observed and not book.observed:
                self._observe_no_more(out)
            out.session_base_bytes = out.granted_bytes
            out.lent_bytes = out.owed_bytes = 0
            out.requested = False
            if out.state in (SendState.QUEUED, SendState.SENDING):
                self.request(out, now_ns)

    def session_lost(self, address: str, reason: str) -> None:
        """A control session ended; silence starts to count for its links."""
        self.owners.ended(address, reason)

    def heard(self, address: str, now_ns: int) -> None:
        """Any word of a coordinator is a sign of life for its links."""
        self.owners.heard(address, now_ns)
        for book in self.links.values():
            if book.coordinator == address:
                book.last_heard_ns = now_ns
                self._alone.heard(book, now_ns)

    def update_link(self, address: str, info: LinkInfo, now_ns: int) -> None:
        """Fresh figures of a link, from its owner."""
        book = self.book(info.link)
        if book.coordinator == address:
            before = book.observed
            book.info = info
            if book.observed != before:
                self._observe(book, now_ns)

    def set_fallback(self, address: str, link: LinkName, rate_bytes_per_s: int) -> None:
        """What this agent may send by itself on a link when its coordinator falls silent."""
        book = self.book(link)
        if book.coordinator == address:
            book.fallback_rate_bytes_per_s = rate_bytes_per_s

    # -------------------------------------------------------------------------------------- asking

    def unsent_bytes(self, link: LinkName) -> int:
        """What this agent was asked to send on a link, and what of it the kernel still holds."""
        book = self.book(link)
        asked = sum(out.need_bytes for out in map(self.transfers.get, book.asked) if out is not None)
        return asked + book.backlog_bytes()

    def request(self, out: Outgoing, now_ns: int) -> None:
        """Ask for what a transfer needs; what was granted ahead to its announcement is its own from here on."""
        assert out.link is not None
        assert out.peer is not None
        book = self.book(out.link)
        ahead = self.announcer.announced.get(out.announcement)
        binds = ahead is not None and ahead.transfer is None and ahead.link == out.link
        if ahead is not None and binds:
            out.granted_bytes += ahead.granted_bytes
            out.wanted_bytes += ahead.returned_bytes
        if out.need_bytes == 0 and not binds and not book.observed:
            return
        if book.coordinator is not None:
            if not book.grants and book.turns_to(out.peer):
                # Before the request: what this peer's TCP windows let through decides who is granted how much.
                self._report(book, now_ns)
            out.requested = True
            self._say_request(out, book.coordinator, now_ns)
        if ahead is not None and binds:
            self._bind(out, ahead, book, now_ns)
        if book.observed:
            self._go_unpaced(out, now_ns)
            return
        self.lending.take_over(out, book, now_ns)
        if out.need_bytes:
            book.asked[out.transfer] = None

    # ----------------------------------------------------------------------------------- observing

    def _observe(self, book: LinkBook, now_ns: int) -> None:
        """Its owner began to observe a link only, or ceased to: what is under way goes on in the other way."""
        under_way = [out for out in self.transfers.values() if out.link == book.link and not out.free]
        if book.observed:
            for held in book.drop_all(now_ns):
                self._unspent(held)
            for out in under_way:
                out.lent_bytes = out.owed_bytes = 0
            book.asked.clear()
        for out in under_way:
            if not book.observed and out.observed:
                self._observe_no_more(out)
                if book.coordinator is not None:
                    # What was asked for meanwhile was the whole of it: ask anew for the rest.
                    cancel = CancelRequest(out.transfer, "its link is not only observed any more")
                    self.effects.append(ToCoordinator(book.coordinator, cancel))
            if out.state in (SendState.QUEUED, SendState.SENDING):
                if book.observed:
                    self._go_unpaced(out, now_ns)
                else:
                    self.request(out, now_ns)

    def _go_unpaced(self, out: Outgoing, now_ns: int) -> None:
        """Send at once, without a ceiling."""
        assert out.peer is not None
        peer = self.peers[out.peer]
        out.observed = True
        if out.state is SendState.QUEUED:
            out.step(SendInput.GRANTED)
        if out.transfer not in peer.free:
            peer.free.append(out.transfer)
        self._pass_turn(out.peer, now_ns)

    def _observe_no_more(self, out: Outgoing) -> None:
        """What is left of it needs grants from here on."""
        out.observed = False
        self.resumed(out)
        peer = self.peers.get(out.peer) if out.peer is not None else None
        if peer is not None and out.transfer in peer.free:
            peer.free.remove(out.transfer)
        if out.state is SendState.SENDING:
            out.step(SendInput.STARVED)

    # ------------------------------------------------------------------------------------- granted

    def _say_request(self, out: Outgoing, address: str, now_ns: int) -> None:
        assert out.link is not None
        assert out.peer is not None
        request = Request(
            out.transfer,
            out.link,
            out.peer,
            out.envelope.job,
            out.envelope.traffic_class,
            out.wanted_bytes - out.session_base_bytes,
            out.announcement,
            deadline_in_ns=max(1, out.due_ns - now_ns) if out.due_ns else 0,
            chunk_bytes=out.chunk_bytes,
        )
        self.effects.append(ToCoordinator(address, request))

    def _bind(self, out: Outgoing, ahead: Ahead, book: LinkBook, now_ns: int) -> None:
        """The message of an announcement may go: at once, if its slot is here already."""
        ahead.transfer = out.transfer
        held_bytes = ahead.granted_bytes - ahead.returned_bytes
        bound = book.bind(out.announcement, out.transfer, min(held_bytes, out.nbytes), now_ns)
        out.wanted_bytes += held_bytes - bound
        out.held_bytes += bound
        if bound:
            out.step(SendInput.GRANTED)
            self._has_slot(out, book, now_ns)

    def _has_slot(self, out: Outgoing, book: LinkBook, now_ns: int) -> None:
        """What is held became a transfer's own."""
        first = next(held for held in book.grants if held.transfer == out.transfer)
        self.telling.predict(out, book, max(0, first.start_ns - now_ns), 0, first.rate_bytes_per_s, now_ns)
        self._begin(book, now_ns)
        if out.peer is not None and any(held.begun and held.transfer == out.transfer for held in book.grants):
            self._pass_turn(out.peer, now_ns)

    def queued(self, message: Queued, now_ns: int) -> None:
        """The coordinator has it in its queue, and predicts when it is done."""
        out = self.transfers.get(message.transfer)
        if out is None or out.link is None:
            return
        if message.finishes_in_ns:
            book = self.book(out.link)
            rate = out.need_bytes * NANOS // max(1, message.finishes_in_ns - message.starts_in_ns)
            leaves_in_ns = message.starts_in_ns + book.lasts_ns(out.peer, out.need_bytes, rate)
            self.telling.expect(out, leaves_in_ns, book.one_way_ns, now_ns)
        self.telling.state(out, max(0, out.expected_finish_ns - now_ns))

    def granted(self, address: str, grant: Grant, now_ns: int) -> None:
        """A slot. What the transfer can't use goes back at once."""
        book = self.book(grant.link)
        out = self.transfers.get(grant.transfer)
        # Equal, not "at least": an epoch names the one life of the one coordinator whose account is open here. A grant
        # of any other, earlier or later, has no account that it could be booked in. So it does no harm when epochs
        # don't rise (a wall clock was set back), nor when those of two coordinators are the same.
        if address != book.coordinator or grant.epoch != book.epoch:
            return
        if grant.announcement:
            ahead = self.announcer.announced.get(grant.announcement)
            if ahead is not None and ahead.link == grant.link and ahead.transfer is None and not book.observed:
                ahead.granted_bytes += grant.nbytes
                book.add(grant, grant.nbytes, now_ns)
                self._follow(book, now_ns)
                return
            bound = ahead.transfer if ahead is not None else None
            grant = dataclasses.replace(grant, transfer=bound or grant.transfer, announcement=0)
            out = self.transfers.get(grant.transfer)
        if out is None or out.link != grant.link:
            book.refuse(grant, now_ns)
            return
        usable = min(grant.nbytes, out.need_bytes) if out.state in CAN_SEND and not book.observed else 0
        repaid = self.lending.pay_back(out, grant, grant.nbytes - usable) if out.owed_bytes else []
        if repaid:
            grant = dataclasses.replace(grant, nbytes=grant.nbytes - sum(part.nbytes for _, part in repaid))
        # To the coordinator all of it was granted: what goes back has to be wanted anew, should it be needed.
        out.granted_bytes += grant.nbytes
        out.wanted_bytes += grant.nbytes - usable
        self._hold(out, grant, usable, now_ns)
        for lender, part in repaid:
            self._hold(lender, part, part.nbytes, now_ns, repaid=True)
        if book.urgent is not None:
            self.lending.granted(out, book, now_ns)

    def _hold(self, out: Outgoing, grant: Grant, usable: int, now_ns: int, *, repaid: bool = False) -> None:
        """Put a grant into its link's book; ``usable`` bytes of it are of use to its transfer."""
        book = self.links[grant.link]
        extends = bool(book.grants) and book.grants[0].transfer == grant.transfer
        book.add(grant, usable, now_ns, repaid=repaid)
        if not usable or out.peer is None:
            return
        self._follow(book, now_ns)
        if extends and book.grants[0].begun:
            self._pass_turn(out.peer, now_ns)
        out.held_bytes += usable
        if out.need_bytes == 0:
            book.asked.pop(out.transfer, None)
        out.step(SendInput.GRANTED)
        before_bytes = out.held_bytes - usable
        self.telling.predict(out, book, grant.start_in_ns, before_bytes, grant.rate_bytes_per_s, now_ns)
        self._begin(book, now_ns)

    def paced(self, address: str, message: Pace, now_ns: int) -> None:
        """The bottleneck changed: all that is held on its link goes at this rate, whatever its grants said."""
        book = self.links.get(message.link)
        if book is None or address != book.coordinator or message.epoch != book.epoch or not message.rate_bytes_per_s:
            return
        book.repace(message.rate_bytes_per_s, now_ns)
        self._follow(book, now_ns)
        for held in book.grants:
            out = self.transfers.get(held.transfer)
            if out is not None and held.begun:
                self.telling.predict(out, book, 0, 0, held.rate_bytes_per_s, now_ns)
                break

    def _follow(self, book: LinkBook, now_ns: int) -> None:
        """The rate may have changed: so do the ceilings of peers to which something is under way."""
        names = book.unsent_peers()
        for held in book.grants:
            out = self.transfers.get(held.transfer) if held.begun else None
            if out is not None and out.peer is not None and out.peer not in names:
                names.append(out.peer)
        for name in names:
            if (peer := self.peers.get(name)) is not None and peer.connected:
                self.pace(name, now_ns)

    def _begin(self, book: LinkBook, now_ns: int) -> None:
        """Let the peers of grants pump whose start time has come: that of the first one, whenever another becomes the
        first; that of a later one when the trainer of the first is still copying."""
        for held in book.grants:
            if held.start_ns > now_ns:
                return
            first = book.grants[0]
            leads = held is first and book.leading is not held
            if held.begun and not leads:
                continue
            if not held.begun:
                book.begins(held, now_ns)
            if leads:
                book.leading = held
                if (leader := self.transfers.get(held.transfer)) is not None:
                    book.turn = leader.peer
            elif self._goes(book, first, held):
                continue  # next_chunk passes the turn on when it can't any more
            out = self.transfers.get(held.transfer)
            if out is not None and out.peer is not None:
                self._pass_turn(out.peer, now_ns)

    def _goes(self, book: LinkBook, first: HeldGrant, begun: HeldGrant) -> bool:
        """Whether the first one's transfer had enough for a chunk before another grant, perhaps its own, had begun."""
        out = self.transfers.get(first.transfer)
        piece = out.next_chunk() if out is not None else None
        own = [one for one in book.grants if one.transfer == first.transfer and one.begun and one is not begun]
        return piece is not None and sum(one.left_bytes for one in own) >= piece[1]

    def _pass_turn(self, peer: AgentName, now_ns: int) -> None:
        self.pace(peer, now_ns)
        self.effects.append(Pump(peer))

    def _unspent(self, held: HeldGrant) -> Outgoing | None:
        """What was left of a held grant went back. Answers whose it was, if that is known already."""
        if held.announcement and (ahead := self.announcer.announced.get(held.announcement)) is not None:
            ahead.returned_bytes += held.left_bytes
        out = self.transfers.get(held.transfer)
        if out is not None:
            self._returned(out, held)
        return out

    def _returned(self, out: Outgoing, held: HeldGrant) -> None:
        """Unspent bytes of a grant went back: need them again."""
        out.returned(held.left_bytes)
        if out.held_bytes == 0 and out.state is SendState.SENDING:
            out.step(SendInput.STARVED)

    def turned_down(self, out: Outgoing, now_ns: int) -> None:
        """The receiver lost its memory for it: what it holds goes back."""
        if out.link is not None:
            book = self.links[out.link]
            book.drop_transfer(out.transfer, now_ns)
            book.asked.pop(out.transfer, None)

    def interrupted(self, out: Outgoing, now_ns: int) -> None:
        """The connection to its peer broke: what it holds goes back, and nobody shall grant to it meanwhile."""
        self.announcer.withdraw(out.announcement, now_ns)
        self.lending.ended(out, now_ns)
        out.announcement = out.expected_finish_ns = out.held_bytes = 0
        out.observed = False
        if out.link is None:
            return
        book = self.links[out.link]
        book.drop_transfer(out.transfer, now_ns)
        book.asked.pop(out.transfer, None)
        if out.requested and book.coordinator is not None:
            gone = CancelRequest(out.transfer, "the connection to its agent broke")
            self.effects.append(ToCoordinator(book.coordinator, gone))
        out.requested = False

    def resumed(self, out: Outgoing) -> None:
        """It goes on: what is asked for from here on is what is missing."""
        out.lent_bytes = out.owed_bytes = 0
        out.wanted_bytes = out.granted_bytes + out.untaken_bytes
        out.session_base_bytes = out.granted_bytes

    def close(self, out: Outgoing, ok: bool, arrival_span_ns: int, now_ns: int) -> None:
        """A transfer ended: what it holds goes back, and its coordinator hears of it."""
        self.announcer.withdraw(out.announcement, now_ns)
        self.lending.ended(out, now_ns)
        if out.link is None:
            return
        book = self.links[out.link]
        book.drop_transfer(out.transfer, now_ns)
        book.asked.pop(out.transfer, None)
        if book.coordinator is None or (out.free and not out.requested):
            return
        if not ok:
            self.effects.append(ToCoordinator(book.coordinator, CancelRequest(out.transfer, "transfer failed")))
        nbytes = 0 if out.padding else out.nbytes
        done = TransferDone(out.transfer, out.link, out.envelope.traffic_class, nbytes, ok, arrival_span_ns)
        self.effects.append(ToCoordinator(book.coordinator, done))

    # -------------------------------------------------------------------------------------- chunks

    def next_chunk(self, peer: Peer, now_ns: int) -> Chunk | None:
        book = self.links.get(LinkName(self.config.agent.site, peer.name.site))
        if book is None:
            return None
        for held in book.grants:
            if held.start_ns > now_ns:
                return None  # in order: a later grant doesn't overtake one that waits for its start
            out = self.transfers.get(held.transfer)
            piece = out.next_chunk() if out is not None else None
            if out is None or out.peer is None or piece is None:
                continue
            grants = book.grants_for(held, piece[1], now_ns)
            if not grants:
                continue
            if out.peer != peer.name:
                if held is not book.grants[0]:
                    self._pass_turn(out.peer, now_ns)  # nobody has told it that it goes ahead of the first one
                return None
            chunk = self.take(out, piece, granted=True)
            left = chunk.length
            for grant in grants:
                nbytes = min(left, grant.left_bytes)
                book.spend(grant, peer.name, nbytes, padding=out.padding)
                left -= nbytes
            out.held_bytes -= chunk.length
            if out.held_bytes == 0 and out.state is SendState.SENDING:
                out.step(SendInput.STARVED)
            if out.padding and out.everything_taken:
                self._padded(out, now_ns)
            self._begin(book, now_ns)
            return chunk
        return None

    def take(self, out: Outgoing, piece: tuple[int, int], *, granted: bool) -> Chunk:
        offset, length = piece
        out.take(offset, length)
        if out.everything_taken:
            out.step(SendInput.ALL_SENT)
            self.telling.state(out, 0)
        return Chunk(out.transfer, offset, length, granted, out.padding)

    def pace(self, name: AgentName, now_ns: int) -> None:
        """Set a peer's ceiling to the rate of the first of its grants that has started, or of what is in the kernel."""
        peer = self.peers[name]
        live, yields = False, peer.yields
        if name.site == self.config.agent.site:
            rate = 0
        else:
            book = self.links[LinkName(self.config.agent.site, name.site)]
            live = book.info is not None and book.info.source in LIVE_SOURCES
            rate = 0 if book.observed else book.rate_to(name) or peer.pace_bytes_per_s
            for held in [held for held in book.grants if held.start_ns <= now_ns and not book.observed]:
                if (out := self.transfers.get(held.transfer)) is not None and out.peer == name:
                    rate, yields = held.rate_bytes_per_s, out.envelope.traffic == TrafficClass.BULK
                    break
        other = abs(rate - peer.pace_bytes_per_s) > peer.pace_bytes_per_s // PACE_STEPS
        if rate >= 0 and (other or yields != peer.yields):
            peer.pace_bytes_per_s, peer.yields = rate, yields
            self.effects.append(SetPace(name, rate, live, yields))

    def progress(self, event: SendProgress, now_ns: int) -> None:
        """The kernel's counts for one peer's streams."""
        if event.peer.site == self.config.agent.site:
            return
        peer = self.peers.get(event.peer)
        if peer is None or not peer.connected:
            return  # counts of connections whose bytes have been written off
        book = self.links.get(LinkName(self.config.agent.site, event.peer.site))
        if event.granted_delivered_bytes:
            peer.proven, peer.away_since_ns = True, None
        if book is not None:
            counts = PeerCounts(
                0,
                event.granted_left_bytes,
                event.granted_delivered_bytes,
                event.unsent_bytes,
                event.srtt_ns,
                event.min_rtt_ns,
                event.retransmits,
                event.delivery_rate_bytes_per_s,
                event.path_limited,
                event.window_bytes,
                event.window_grows,
                event.sacked_bytes,
                event.lost_bytes,
                event.back_queue_ns,
            )
            book.progress(event.peer, counts, now_ns)

    # -------------------------------------------------------------------------------------- timers

    def deadlines_ns(self) -> list[int]:
        """Times at which :meth:`tick` has something to do."""
        times = [] if (overdue_ns := self.announcer.announced.overdue_ns()) is None else [overdue_ns]
        for book in self.links.values():
            times += [due_ns for due_ns in (book.report_due_ns, book.lent_due_ns) if due_ns is not None]
            if book.grants:
                times.append(min(held.expires_ns for held in book.grants))
                if (start_ns := next((held.start_ns for held in book.grants if not held.begun), None)) is not None:
                    times.append(start_ns)
                if book.lead_due_ns is not None:
                    times.append(book.lead_due_ns)
            if book.asked:
                times.append(self._alone.due_ns(book))
        return times

    def tick(self, now_ns: int) -> None:
        """Do what is due."""
        self.announcer.tick(now_ns)
        for book in list(self.links.values()):
            for held in book.expire(now_ns):
                if (out := self._unspent(held)) is not None:
                    self.request(out, now_ns)
            if book.lent_due_ns is not None and book.lent_due_ns <= now_ns:
                self.lending.due(book, now_ns)
            self._begin(book, now_ns)
            late = book.asked and (due_ns := self._alone.due_ns(book)) <= now_ns
            if late and not book.second_look(due_ns, now_ns):
                self._alone.go_on(book, now_ns)
            if book.lead_due_ns is not None and book.lead_due_ns <= now_ns:
                book.say_lead(now_ns)
            if book.report_due_ns is not None and book.report_due_ns <= now_ns:
                self._report(book, now_ns)

    def _report(self, book: LinkBook, now_ns: int) -> None:
        report = book.report(now_ns)
        if report is not None and book.coordinator is not None:
            self.effects.append(ToCoordinator(book.coordinator, report))
