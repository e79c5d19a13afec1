"""Values are equal by their fields and have a hash, as those of frozen dataclasses."""

from __future__ import annotations

import dataclasses

from proxyd.core.ids import TransferId
from proxyd.core.messages import Queued


def test_values_are_equal_by_their_fields() -> None:
    one, same = (Queued(TransferId(1, 2), 3, 4, 5, "why") for _ in range(2))
    assert (one, hash(one)) == (same, hash(same))
    assert one != dataclasses.replace(one, position=4)
    assert len({one, same, dataclasses.replace(one, position=4)}) == 2
    assert not hasattr(one, "__dict__")
