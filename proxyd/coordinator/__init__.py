"""The coordinator daemon: the pure machine behind gRPC."""

from __future__ import annotations
