"""Paced connections for programs that know nothing of proxyd: TCP in at one site, out at another."""

from __future__ import annotations
