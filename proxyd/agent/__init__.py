"""The agent daemon's edge: shared memory, local trainers, peer streams; everything that :mod:`proxyd.core.agent`
decides is carried out here."""

from __future__ import annotations
