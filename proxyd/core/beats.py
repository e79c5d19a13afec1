"""When which site is told of its links next.

Every agent hears a beat at least once in ``beat_ns``. All at the same moment would be simplest, and would keep whoever
asks just then waiting: a beat for each of some hundred agents takes a coordinator ten milliseconds and more. So sites
take turns, evenly spread over a beat's time. The agents of one site are told together, since they share its links.
"""

from __future__ import annotations

from bisect import bisect_left, insort


class BeatTurns:
    """The turns of all sites; none before :meth:`start`."""

    def __init__(self, beat_ns: int) -> None:
        self._beat_ns = beat_ns
        self._sites: list[str] = []
        self._due_ns: dict[str, int] = {}
        self._begun_ns = 0
        self.running = False

    def join(self, site: str) -> None:
        """A site (more than once is harmless): its first turn is at once."""
        if site not in self._due_ns:
            insort(self._sites, site)
            self._due_ns[site] = 0

    def start(self, now_ns: int) -> None:
        """Somebody listens from now on: everybody's turn is now."""
        self.running = True
        self._begun_ns = now_ns
        for site in self._sites:
            self._due_ns[site] = now_ns

    def stop(self) -> None:
        """Nobody listens any more."""
        self.running = False

    def hurry(self, site: str) -> None:
        """There is news for a site: its turn is at once, whatever the time."""
        self._due_ns[site] = 0

    @property
    def next_ns(self) -> int | None:
        """When the next turn is due."""
        return min(self._due_ns.values()) if self.running and self._due_ns else None

    def take(self, now_ns: int) -> list[str]:
        """Sites whose turn it is, sorted; their next one comes within a beat's time."""
        if not self.running:
            return []
        due = [site for site in self._sites if self._due_ns[site] <= now_ns]
        for site in due:
            phase_ns = self._begun_ns + self._beat_ns * bisect_left(self._sites, site) // len(self._sites)
            self._due_ns[site] = phase_ns + ((now_ns - phase_ns) // self._beat_ns + 1) * self._beat_ns
        return due
