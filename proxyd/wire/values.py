"""Dataclasses of which thousands a second are made: frozen for the type checker, cheap at run time.

``dataclasses.dataclass(frozen=True)`` sets each field through ``object.__setattr__``: a message of ten fields takes
five times as long to make as an unfrozen one, and a coordinator makes ten of them for each grant. Nobody may change a
value all the same: mypy sees a frozen dataclass, and equality and hash are those of one.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

__all__ = ["value"]

if TYPE_CHECKING:
    from dataclasses import dataclass as value
else:

    def value(*, frozen: bool, slots: bool):
        """``@value(frozen=True, slots=True)``; see the module's text."""
        return dataclasses.dataclass(slots=slots, unsafe_hash=frozen)
