"""The edge that both daemons share: configuration, logs, metrics, the driver of the pure machines."""

from __future__ import annotations
