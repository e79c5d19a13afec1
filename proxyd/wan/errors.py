"""What the emulated WAN raises."""

from __future__ import annotations

from proxyd.core.errors import ProxydError


class WanError(ProxydError):
    """The emulated WAN cannot be built, was misused, or has died; the message says which and what to do next."""

    code = "emulated-wan"
