"""Names of things, as values: sites, links, agents. Endpoints and transfers are named by
:mod:`proxyd.wire.envelope`."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import NamedTuple

from proxyd.wire.envelope import EndpointName, TransferId

__all__ = ["AgentName", "EndpointName", "LinkName", "TransferId", "owns_link"]


class AgentName(NamedTuple):
    """An agent: its site and its name within it. Sorts by site, then name."""

    site: str
    name: str

    def __str__(self) -> str:
        return f"{self.site}/{self.name}"

    @classmethod
    def parse(cls, value: str) -> AgentName:
        """``"hami/gw1"`` -> AgentName. Raises ValueError."""
        site, separator, name = value.partition("/")
        if not (separator and site and name):
            raise ValueError(f"agent name {value!r} is not of the form SITE/NAME")
        return cls(site, name)


class LinkName(NamedTuple):
    """One direction between two sites; the two directions are two links."""

    src_site: str
    dst_site: str

    def __str__(self) -> str:
        return f"{self.src_site}->{self.dst_site}"

    @classmethod
    def parse(cls, value: str) -> LinkName:
        """``"hami->shenzhen"`` -> LinkName. Raises ValueError."""
        src, separator, dst = value.partition("->")
        if not (separator and src.strip() and dst.strip()):
            raise ValueError(f"link name {value!r} is not of the form SITE->SITE")
        return cls(src.strip(), dst.strip())

    @property
    def is_local(self) -> bool:
        """Within one site: no bottleneck of ours, no grants."""
        return self.src_site == self.dst_site


def owns_link(patterns: tuple[str, ...], link: LinkName) -> bool:
    """Whether one of ``patterns`` (``"hami->*"``, shell-style wildcards per side) covers ``link``."""
    for pattern in patterns:
        src, _, dst = pattern.partition("->")
        if fnmatchcase(link.src_site, src.strip()) and fnmatchcase(link.dst_site, dst.strip()):
            return True
    return False
