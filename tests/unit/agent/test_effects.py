"""The hands of the machine: one for each kind of effect."""

from __future__ import annotations

from typing import Any, cast, get_args

from proxyd.agent.effects import Effects
from proxyd.agent.handshake import Identity
from proxyd.core import effects as ef
from proxyd.core.ids import AgentName


def test_every_effect_is_carried_out_by_somebody() -> None:
    nobody = cast(Any, type("Anybody", (), {"__getattr__": lambda self, name: print})())
    hands = Effects(
        Identity(AgentName("a", "0"), 7, b""),
        hub=nobody,
        inbound=nobody,
        sessions=nobody,
        emit=print,
        take=lambda peer: None,
        took=lambda: None,
        congestion_control="cubic",
        peer_timeout_ns=1,
    )
    assert set(hands._make_hands()) == set(get_args(ef.AgentEffect))
