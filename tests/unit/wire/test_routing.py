"""Workers' names, and the preamble that says which of them a connection is for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxyd.runtime.config import AgentConfig
from proxyd.wire import routing
from proxyd.wire.codec import WireError

WORKERS = st.integers(0, routing.MAX_WORKERS - 1)


@given(WORKERS)
def test_a_preamble_says_which_worker_from_its_first_byte_on(worker: int) -> None:
    said = routing.preamble(worker)
    assert len(said) == routing.PREAMBLE_BYTES == 16
    assert all(routing.may_be_preamble(said[:end]) for end in range(1, 17))
    assert routing.read_preamble(said) == worker


@given(st.binary(min_size=1, max_size=40))
def test_nothing_else_is_taken_for_one(data: bytes) -> None:
    if routing.may_be_preamble(data) and len(data) >= routing.PREAMBLE_BYTES:
        assert data.startswith(routing.preamble(0)[:14])
    for wrong in (data, routing.preamble(1)[:-1], routing.preamble(1) + data):
        if len(wrong) != routing.PREAMBLE_BYTES:
            with pytest.raises(WireError):
                routing.read_preamble(wrong)
    with pytest.raises(WireError, match="no preamble"):
        routing.read_preamble(b"\x16\x03\x01" + bytes(13))


def test_neither_tls_nor_a_frame_begins_like_one() -> None:
    for first in (b"\x16\x03\x01", b"\x15\x03\x03", b"xP", b"Px"):
        assert not routing.may_be_preamble(first)


@given(WORKERS)
def test_a_workers_name_is_that_of_no_configured_agent(worker: int) -> None:
    name = routing.worker_name("gw-1.a", worker)
    assert routing.worker_of(name) == worker
    assert routing.configured_name(name) == "gw-1.a"
    with pytest.raises(ValueError, match="is not a name"):
        AgentConfig.model_validate({"site": "a", "name": name})


@pytest.mark.parametrize("name", ["gw", "gw#", "#1", "gw#01", "gw#64", "gw#-1", "gw#1#2", "gw#x", "gw#1 "])
def test_other_names_mean_no_worker(name: str) -> None:
    assert routing.worker_of(name) is None
    assert routing.configured_name(name) == name
