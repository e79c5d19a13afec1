"""Which coordinator an agent listens to for a link.

Agents are configured with all coordinators and have a session with each. Some share a name: one of them holds that
name's lock and the others stand by. Each holder has a higher *fence* than the one before. What one with a lower fence
says means nothing, even while its session stands: it was stopped, or cut off from the lock, and doesn't know yet that
another has taken its place.
"""

from __future__ import annotations

import dataclasses

from proxyd.core.ids import LinkName, owns_link
from proxyd.core.messages import LinkInfo, Welcome


@dataclasses.dataclass(slots=True)
class Session:
    """A control session with a coordinator."""

    address: str
    welcome: Welcome
    alive: bool
    heard_ns: int

    def info(self, link: LinkName) -> LinkInfo | None:
        """A link's figures as of the Welcome."""
        return next((info for info in self.welcome.links if info.link == link), None)


FENCE_MEMORY_NS = 60_000_000_000
"""A holder of which nothing was heard for so long binds no longer. Its successors have higher fences all the same, but
for a lock service that was set up anew and counts from the beginning."""


class Fences:
    """Which Welcomes an agent takes: of one name, none with a lower fence than the highest one that it has heard of."""

    def __init__(self) -> None:
        self._highest: dict[str, tuple[int, int]] = {}
        """By name: fence, and when its holder was heard last."""

    def admits(self, welcome: Welcome, now_ns: int) -> str:
        """ "" when it does; else why not."""
        fence, heard_ns = self._highest.get(welcome.coordinator, (0, 0))
        if welcome.fence < fence and now_ns - heard_ns < FENCE_MEMORY_NS:
            return (
                f"it holds fence {welcome.fence} of {welcome.coordinator!r}, and the holder of {fence} was heard "
                f"{(now_ns - heard_ns) / 1e9:.1f} s ago: its lock was taken over"
            )
        self._highest[welcome.coordinator] = (welcome.fence, now_ns)
        return ""

    def heard(self, welcome: Welcome, now_ns: int) -> None:
        """The coordinator of an admitted Welcome said something."""
        if self._highest.get(welcome.coordinator, (0, 0))[0] == welcome.fence:
            self._highest[welcome.coordinator] = (welcome.fence, now_ns)


class Owners:
    """Sessions by address. One that was lost stays, with what it owned.

    :param addresses: as configured, in this order.
    """

    def __init__(self, addresses: tuple[str, ...]) -> None:
        self.addresses = addresses
        self._sessions: dict[str, Session] = {}
        self.lost: dict[str, str] = {}
        """Why a coordinator's session ended, or never stood."""

    def get(self, address: str) -> Session | None:
        """The present session with a coordinator, or the last one."""
        return self._sessions.get(address)

    def began(self, address: str, welcome: Welcome, now_ns: int) -> None:
        """A session stands."""
        self._sessions[address] = Session(address, welcome, alive=True, heard_ns=now_ns)

    def ended(self, address: str, reason: str) -> None:
        """A session ended, or couldn't begin."""
        self.lost[address] = reason
        if (session := self._sessions.get(address)) is not None:
            session.alive = False

    def heard(self, address: str, now_ns: int) -> None:
        """Any word of a coordinator is a sign of life."""
        if (session := self._sessions.get(address)) is not None:
            session.heard_ns = now_ns

    def superseded(self, address: str) -> bool:
        """Another one of its name has a higher fence."""
        mine = self._sessions.get(address)
        return mine is not None and any(
            other.welcome.coordinator == mine.welcome.coordinator and other.welcome.fence > mine.welcome.fence > 0
            for other in self._sessions.values()
        )

    def of(self, link: LinkName) -> Session | None:
        """Whose link it is: the first configured coordinator that ever said so, whether it lives or not.

        While a dead owner is replaced its link runs at the fallback rate. Another coordinator whose ``owns`` covers the
        link too does not step in: agents that still reach the owner would fill the link under its grants, and those
        that don't would fill it once more. Its standby does step in: the lock keeps the two apart.
        """
        for address in self.addresses:
            session = self._sessions.get(address)
            if session is not None and owns_link(session.welcome.owns, link) and not self.superseded(address):
                return session
        return None

    def alive(self) -> frozenset[str]:
        """Addresses of the coordinators whose session stands and whose word counts."""
        return frozenset(a for a, session in self._sessions.items() if session.alive and not self.superseded(a))

    def same(self, one: str | None, other: str | None) -> bool:
        """Both are coordinators of one name: one stands by for the other."""
        first, second = self._sessions.get(one or ""), self._sessions.get(other or "")
        if one == other or first is None or second is None:
            return one == other
        return first.welcome.coordinator == second.welcome.coordinator and first.welcome.fence > 0

    def why_nobody(self, link: LinkName) -> str:
        """Why a link has no owner, and what to do."""
        known = []
        for address in self.addresses:
            session = self._sessions.get(address)
            if session is None:
                known.append(f"{address} was not reached: {self.lost.get(address, 'no answer yet')}")
            else:
                known.append(f"{address} owns {', '.join(session.welcome.owns)}")
        return (
            f"no coordinator owns {link} ({'; '.join(known) or 'none is configured'}); start the one that does, "
            f"or add {str(link)!r} to the `owns` of one"
        )
