"""The ``proxyd`` command. See :mod:`proxyd.cli.main` for how a command is added."""

from __future__ import annotations
