"""Discrete-event simulation: the daemons' own machines on modelled links. See :mod:`proxyd.sim.scenario`."""

from __future__ import annotations
