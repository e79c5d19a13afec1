"""The parsers under hostile bytes: seeds, everything found so far, and a minute of new inputs.

``make fuzz SECONDS=3600`` looks for longer. An input that breaks something goes to ``tests/fuzz/corpus/TARGET``.
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
import random
import zlib

import pytest

from proxyd.wire import peer
from proxyd.wire.codec import WireError
from tests.fuzz.__main__ import CORPUS, start
from tests.fuzz.seeds import seeds
from tests.fuzz.targets import GROUPS, TARGETS

SECONDS = int(os.environ.get("PROXYD_FUZZ_SECONDS", "60"))
"""For all parsers together."""


def test_every_parser_is_in_a_group() -> None:
    assert sorted(sum(GROUPS.values(), ())) == sorted(TARGETS)


@pytest.mark.parametrize("target", TARGETS)
def test_well_formed_input_is_read(target: str) -> None:
    inputs = seeds(target)
    assert inputs
    for data in inputs:
        TARGETS[target](data)


@pytest.mark.parametrize("path", sorted(CORPUS.glob("*/*")), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_what_was_found_once(path: pathlib.Path) -> None:
    TARGETS[path.parent.name](path.read_bytes())


@pytest.mark.parametrize("target", TARGETS)
def test_every_truncation_and_every_flipped_bit_of_a_header(target: str) -> None:
    """Of each seed: cut at every offset of its first kilobyte, and each bit of its first 64 bytes flipped."""
    chance = random.Random(1)
    for data in chance.sample(seeds(target), min(12, len(seeds(target)))):
        for end in range(min(len(data), 256)):
            TARGETS[target](data[:end])
        for bit in range(min(len(data), 64) * 8):
            flipped = bytearray(data[:1024])
            flipped[bit // 8] ^= 1 << bit % 8
            TARGETS[target](bytes(flipped))


@pytest.mark.parametrize("length", [0, 1, 1 << 31, (1 << 32) - 1])
def test_no_length_is_believed_before_it_is_checked(length: int) -> None:
    """A header whose checksum is right may claim anything; nothing is kept for it."""
    fields = peer._FIELDS.pack(peer.MAGIC, peer.PROTOCOL_VERSION, 5, 0, 1, length, 1, 2, (1 << 64) - 1, 0)
    decoder = peer.ControlDecoder()
    decoder.feed(fields + zlib.crc32(fields).to_bytes(4, "little"))
    try:
        assert decoder.next_frame() is None
    except WireError:
        pass
    assert len(decoder._buffer) <= peer.HEADER_BYTES


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="needs atheris (Linux on x86_64)")
@pytest.mark.parametrize("group", GROUPS)
def test_fuzzing_finds_nothing(group: str, tmp_path: pathlib.Path) -> None:
    done = start(group, max(1, SECONDS // len(GROUPS)), tmp_path)
    assert done.returncode == 0, done.stderr[-6000:]
