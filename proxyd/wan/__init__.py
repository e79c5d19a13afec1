"""The emulated WAN: network namespaces joined by a userspace bottleneck, with real kernel TCP on top.

For the demo, tests and benchmarks. Start with :class:`Wan`; docs/wan.md says how it works and how exact it is.
"""

from __future__ import annotations

from proxyd.wan.counters import Fidelity, LinkCounters
from proxyd.wan.errors import WanError
from proxyd.wan.faults import LinkFaults
from proxyd.wan.history import History
from proxyd.wan.policer import PolicerSpec
from proxyd.wan.spec import LinkSpec, SharedSpec
from proxyd.wan.topology import Host, Wan, available
from proxyd.wan.trace import RateSteps

__all__ = [
    "Fidelity",
    "History",
    "Host",
    "LinkCounters",
    "LinkFaults",
    "LinkSpec",
    "PolicerSpec",
    "RateSteps",
    "SharedSpec",
    "Wan",
    "WanError",
    "available",
]
