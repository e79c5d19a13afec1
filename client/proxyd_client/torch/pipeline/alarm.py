"""One stage fails, all stages hear of it.

Theory. A stage whose neighbour dies hears that from the network. A stage further away doesn't: it waits for an input
that its neighbour, which has raised and may live on, will never send. So whoever gives a step up writes why into the
group's store, once for the life of the group, and whoever has waited for long looks there. After a step that was given
up, messages of it may still be under way, and a next step would take them for its own: the group carries no step any
more, for any schedule.

The key must be one that no earlier life of the group has written. A proxyd group's name is unique; for others each
member counts its lives in the store, and members that come together have the same count.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

from proxyd_client.torch.group import ProcessGroupProxyd

LOOK_EVERY_S = 1.0
"""Of a wait; a look is one round trip to the store."""


class Alarm:
    """Of one group. :func:`alarm_of` finds it."""

    def __init__(self, group: Any) -> None:
        self.raised = ""
        """Why this rank gave up."""
        self._store = group.get_group_store()
        if isinstance(group, ProcessGroupProxyd):
            life = group.membership.name
        else:
            life = str(self._store.add(f"proxyd/pipeline/lives/{group.rank()}", 1))
        self._key = f"proxyd/pipeline/failed/{life}"

    def ring(self, text: str) -> None:
        """Tell everybody. The first one's reason is the one that they hear."""
        self.raised = self.raised or text
        # The store may be what has failed; whoever waits then has the network's word, and the time limit.
        with contextlib.suppress(RuntimeError):
            self._store.compare_set(self._key, "", text)

    def heard(self) -> str:
        """Why another rank gave up; empty when none has. Raises RuntimeError when the store is gone."""
        return str(self._store.get(self._key).decode()) if self._store.check([self._key]) else ""


_alarms: weakref.WeakKeyDictionary[Any, Alarm] = weakref.WeakKeyDictionary()


def alarm_of(group: Any) -> Alarm:
    """The group's alarm, made at the first call; all members of the group have to make it."""
    found = _alarms.get(group)
    if found is None:
        found = _alarms[group] = Alarm(group)
    return found
