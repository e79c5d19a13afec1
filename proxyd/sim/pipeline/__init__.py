"""Pipelines that train across sites, simulated: stages, the WAN between them, memory, and the bounds of it all."""

from __future__ import annotations
