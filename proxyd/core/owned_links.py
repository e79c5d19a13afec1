"""The links that a coordinator owns: each one's granter and fallback rates, and what counts for all of them.

Configured links are there from the start; others are made when a site is first heard of, with the safe start's figures.
"""

from __future__ import annotations

import dataclasses
from bisect import insort
from collections.abc import Collection, Iterator

from proxyd.core.bandwidth import LinkSettings
from proxyd.core.coordinator_config import MAX_UNCONFIGURED_LINKS, CoordinatorConfig
from proxyd.core.coordinator_status import LinkStatus
from proxyd.core.fallback import FallbackRates
from proxyd.core.grants import LinkGranter
from proxyd.core.ids import LinkName, owns_link
from proxyd.core.link_status import link_problem, link_status
from proxyd.core.policy import Policy
from proxyd.core.shadow import ShadowLink
from proxyd.core.sharing import SharedBottlenecks


@dataclasses.dataclass(slots=True)
class OwnedLink:
    """One link."""

    granter: LinkGranter
    fallback: FallbackRates
    shadow: ShadowLink | None = None
    """In observe mode: the granter grants nothing, and this reckons what it would have."""


class OwnedLinks:
    """All of them, by name. Iterates in the order in which they were made."""

    def __init__(self, config: CoordinatorConfig, epoch: int) -> None:
        self._config = config
        self._epoch = epoch
        self._links: dict[LinkName, OwnedLink] = {}
        self._from_site: dict[str, list[LinkName]] = {}
        """Links out of a site, sorted."""
        self._sites: set[str] = set()
        self._settle_until_ns = 0
        self.shared = SharedBottlenecks(config.bottlenecks, config.links)
        self.policy = Policy()
        self._minute_of_week: int | None = None
        """As the driver last said; None: it has not, so the strictest windows hold."""
        for settings in config.links:
            if owns_link(config.owns, settings.link):
                self.add(settings, 0)

    def __iter__(self) -> Iterator[OwnedLink]:
        return iter(self._links.values())

    def __getitem__(self, name: LinkName) -> OwnedLink:
        return self._links[name]

    @property
    def names(self) -> Collection[LinkName]:
        """Of all that are known, configured or not."""
        return self._links.keys()

    def get(self, name: LinkName) -> OwnedLink | None:
        """A link; None: it isn't known (yet)."""
        return self._links.get(name)

    def from_site(self, site: str) -> list[OwnedLink]:
        """Links out of a site, by name."""
        return [self._links[name] for name in self._from_site.get(site, ())]

    def add(self, settings: LinkSettings, now_ns: int) -> OwnedLink:
        """Make one that isn't there."""
        if self._config.observe and settings not in self._config.links:
            settings = dataclasses.replace(settings, observe=True)
        granter = LinkGranter(
            settings,
            epoch=self._epoch,
            control_rtt_ns=self._config.control_rtt_ns,
            lease_ns=self._config.lease_ns,
            settle_until_ns=self._settle_until_ns,
        )
        granter.set_policy(self.policy, self._minute_of_week, now_ns)
        link = OwnedLink(granter, FallbackRates(granter.rate_bytes_per_s(now_ns)))
        if settings.observe:
            link.shadow = ShadowLink(granter, self._config.control_rtt_ns, self._config.lease_ns)
            link.shadow.set_policy(self.policy, self._minute_of_week, now_ns)
        self._links[settings.link] = link
        self.shared.join(granter)
        insort(self._from_site.setdefault(settings.link.src_site, []), settings.link)
        return link

    def missing(self, site: str) -> list[LinkName]:
        """Links between a site and those known before it that are owned and not there yet; the site is known then."""
        if site in self._sites:
            return []
        self._sites.add(site)
        found: list[LinkName] = []
        most = len(self._config.links) + MAX_UNCONFIGURED_LINKS
        for other in sorted(self._sites - {site}):
            for link in (LinkName(site, other), LinkName(other, site)):
                if link not in self._links and owns_link(self._config.owns, link):
                    if len(self._links) + len(found) >= most:
                        return found
                    found.append(link)
        return found

    def set_epoch(self, epoch: int) -> None:
        """This life has another name than it thought."""
        self._epoch = epoch
        for link in self:
            link.granter.epoch = epoch

    def settle_until(self, until_ns: int) -> None:
        """Others may still send at the rates which an earlier life left them."""
        self._settle_until_ns = until_ns
        for link in self:
            link.granter.reserves.settle(until_ns)

    def set_policy(self, policy: Policy, now_ns: int) -> None:
        """What the operator wants holds from now on."""
        self.policy = policy
        self._apply_policy(now_ns)

    def set_minute_of_week(self, minute_of_week: int, now_ns: int) -> None:
        """The minute that the policy is read for."""
        self._minute_of_week = minute_of_week
        self._apply_policy(now_ns)

    def _apply_policy(self, now_ns: int) -> None:
        for link in self:
            link.granter.set_policy(self.policy, self._minute_of_week, now_ns)
            if link.shadow is not None:
                link.shadow.set_policy(self.policy, self._minute_of_week, now_ns)

    def statuses(self, now_ns: int, transfers_per_link: int) -> tuple[LinkStatus, ...]:
        """How each of them stands, by name; of its queue at most the first ``transfers_per_link``."""
        return tuple(
            link_status(link.granter, link.fallback, link.shadow, now_ns, transfers_per_link)
            for _, link in sorted(self._links.items())
        )

    def audit(self, now_ns: int) -> str:
        """What must hold after every event; "" when it does, else what doesn't."""
        for link in self:
            if problem := link_problem(link.granter, now_ns):
                return problem
            if problem := link.fallback.problem():
                return f"{link.granter.link}: {problem}"
        return self.shared.audit(now_ns)
