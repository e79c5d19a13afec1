"""Which job may use which link, and in which traffic class.

The operator says it in the coordinator's file. The coordinator refuses requests that are against it, and tells its
agents, because not everything is asked for: small messages go unscheduled, links that are only observed are free, and
an agent whose coordinator is silent sends by itself. An agent refuses such a message before it is offered. Whether a
trainer is of the job that it names is judged where it connects.
"""

from __future__ import annotations

import dataclasses

from proxyd.core.ids import LinkName, owns_link
from proxyd.wire.envelope import TrafficClass


@dataclasses.dataclass(frozen=True, slots=True)
class JobRule:
    """What one job may use."""

    job: str
    links: tuple[str, ...] = ()
    """Patterns as in ``owns`` (``"hami->*"``); none: every link."""
    classes: tuple[str, ...] = ()
    """Traffic classes by their labels; none: every class."""


@dataclasses.dataclass(frozen=True, slots=True)
class Permissions:
    """All rules. Without any everybody may use everything."""

    rules: tuple[JobRule, ...] = ()
    """At most one for each job."""
    only_named: bool = False
    """Jobs without a rule may use nothing."""

    def denial(self, job: str, link: LinkName, traffic: TrafficClass) -> str:
        """Why this may not be; "" when it may."""
        rule = next((rule for rule in self.rules if rule.job == job), None)
        if rule is None:
            if not self.only_named:
                return ""
            return f"job {job} is not named by a [[job]] of the coordinator, and only those may use its links"
        if rule.links and not owns_link(rule.links, link):
            return f"job {job} may not use link {link} (its [[job]] allows {', '.join(rule.links)})"
        if rule.classes and traffic.label not in rule.classes:
            return f"job {job} may not use class {traffic.label} (its [[job]] allows {', '.join(rule.classes)})"
        return ""


EVERYTHING = Permissions()
