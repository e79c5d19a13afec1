"""The client protocol's frames: what the decoder refuses, and the small types around it."""

from __future__ import annotations

import pytest

from proxyd.wire import client as wire
from proxyd.wire.auth import mac_is_right, token_mac
from proxyd.wire.codec import WireError
from proxyd.wire.envelope import EndpointName, Envelope, TrafficClass, TransferId

ENVELOPE = Envelope("job", 0, 1, "tp", -7, 0, 12, "float32", (3,))


def decoder(*data: bytes, allow_payload: bool = False) -> wire.Decoder:
    made = wire.Decoder(allow_payload=allow_payload)
    for piece in data:
        made.feed(piece)
    return made


@pytest.mark.parametrize(
    ("header", "text"),
    [
        (wire.HEADER.pack(0, 999, 0, 0), "frame type 999"),
        (wire.HEADER.pack(8, wire.SendDone.TYPE, 1, 0), "flags 1"),
        (wire.HEADER.pack(wire.MAX_BODY_BYTES + 1, wire.Bye.TYPE, 0, 0), "claims a body of 65537"),
        (wire.HEADER.pack(16, wire.SendData.TYPE, 0, 1), "claims 1 payload bytes"),
        (b"\x80\x04\x95" + bytes(20), "is unknown"),  # how a pickle begins
    ],
)
def test_the_header_is_judged_before_anything_is_awaited(header: bytes, text: str) -> None:
    with pytest.raises(WireError, match=text):
        decoder(header).next_frame()


def test_payload_belongs_to_two_frames_and_has_a_limit() -> None:
    for kind, size in ((wire.SendDone, 1), (wire.RecvData, wire.MAX_PAYLOAD_BYTES + 1), (wire.RecvData, 1 << 60)):
        with pytest.raises(WireError, match="payload"):
            decoder(wire.HEADER.pack(8, kind.TYPE, 0, size), allow_payload=True).next_frame()


def test_payload_comes_from_the_buffer_and_then_from_the_socket() -> None:
    made = decoder(wire.encode(wire.SendData(1, 0), 10) + b"01234", allow_payload=True)
    assert made.next_frame() == (wire.SendData(1, 0), 10)
    assert made.next_frame() is None
    assert made.take_payload(3) == b"012"
    with pytest.raises(WireError):  # the buffer still holds some: the order would be lost
        made.payload_received(5)
    assert made.take_payload(9) == b"34"
    assert made.payload_left_bytes == 5
    with pytest.raises(WireError, match="6 payload bytes taken while 5 were due"):
        made.payload_received(6)
    made.payload_received(5)
    made.feed(wire.encode(wire.SendDone(2)))
    assert made.next_frame() == (wire.SendDone(2), 0)


def test_bodies_must_fit_exactly() -> None:
    body = wire.encode(wire.SendDone(1))[wire.HEADER_BYTES :]
    for wrong, text in ((body[:-1], "ends at byte 7"), (body + b"!", "1 bytes after the last field")):
        with pytest.raises(WireError, match=text):
            decoder(wire.HEADER.pack(len(wrong), wire.SendDone.TYPE, 0, 0) + wrong).next_frame()


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"\x05\x00abc", "claims 5 bytes"),
        (b"\xff\xff" + bytes(100), "claims 65535 bytes"),
        (b"\x01\x00\xff", "not UTF-8"),
    ],
)
def test_texts_are_checked(body: bytes, text: str) -> None:
    data = (5).to_bytes(8, "little") + body  # ArenaRefused: wanted bytes, then the message
    with pytest.raises(WireError, match=text):
        decoder(wire.HEADER.pack(len(data), wire.ArenaRefused.TYPE, 0, 0) + data).next_frame()


def test_flags_and_lists_are_checked() -> None:
    hello = wire.encode(wire.Hello(1, "j", 0, 1, 2, b"n", b"", shared_memory=True))
    flag_at = len(hello) - 17  # two numbers follow it
    with pytest.raises(WireError, match="boolean field holds 2"):
        decoder(hello[:flag_at] + b"\x02" + hello[flag_at + 1 :]).next_frame()
    post = wire.PostSend(1, ENVELOPE, 1, 4096, 0)
    data = bytearray(wire.encode(post))
    at = data.index((1).to_bytes(2, "little") + (3).to_bytes(8, "little"))
    data[at : at + 2] = b"\xff\x00"
    with pytest.raises(WireError, match="255 entries"):
        decoder(bytes(data)).next_frame()


def test_what_does_not_fit_its_field_is_not_sent() -> None:
    for frame, text in (
        (wire.SendDone(1 << 64), "does not fit"),
        (wire.SendState(1, 256, 0, 0), "does not fit"),
        (wire.AnnounceSend(1, "x" * 256, 0, 0, 1, 0), "limit of 255"),
        (wire.AnnounceSend(1, "\ud800", 0, 0, 1, 0), "UTF-8"),
        (wire.PostSend(1, Envelope("j", 0, 1, "", 1 << 63, 0, 0, "", ()), 0, 0, 0), "does not fit"),
        (wire.PostSend(1, Envelope("j", 0, 1, "", 1, 0, 0, "", (1,) * 65), 0, 0, 0), "limit of 64"),
    ):
        with pytest.raises(WireError, match=text):
            wire.encode(frame)


def test_a_text_for_people_is_shortened_rather_than_not_sent() -> None:
    """It quotes what others said: a frame that can't be encoded would take the agent with it."""
    for message in ("\u20ac" * 5000, "\U0001f600" * 5000, "x" * 5000):
        item = decoder(wire.encode(wire.RecvFailed(1, 2, 4, message, 0))).next_frame()
        assert item is not None
        (frame, _) = item
        assert isinstance(frame, wire.RecvFailed)
        assert 4093 <= len(frame.message.encode()) <= 4096
        assert message.startswith(frame.message)
    assert wire.encode(wire.Bye(0, "\ud800")) == wire.encode(wire.Bye(0, "?"))


def test_an_error_leaves_the_buffer_usable_for_the_traceback_only() -> None:
    """A caught error keeps frames alive; feeding must still raise WireError and nothing else."""
    made = decoder(wire.HEADER.pack(3, wire.SendDone.TYPE, 0, 0) + b"abc")
    with pytest.raises(WireError) as caught:
        made.next_frame()
    made.feed(b"more")
    with pytest.raises(WireError):
        made.next_frame()
    assert caught.value


def test_types_are_unique_and_phases_have_words() -> None:
    assert len(wire.FRAMES) == len(wire.Frame.__args__)
    assert all(phase.label for phase in wire.SendPhase)


def test_hellos_are_bound_to_side_nonces_and_identity() -> None:
    client, agent = b"c" * 32, b"a" * 32
    macs = {
        wire.hello_mac(b"token", agent, client, "job", 1, 5),
        wire.hello_mac(b"other", agent, client, "job", 1, 5),
        wire.hello_mac(b"token", client, agent, "job", 1, 5),
        wire.hello_mac(b"token", agent, client, "job", 2, 5),
        wire.hello_mac(b"token", agent, client, "job", 1, 6),
        wire.welcome_mac(b"token", agent, client, "job", "1"),
    }
    assert len(macs) == 6
    assert wire.hello_mac(b"", agent, client, "job", 1, 5) == b""
    mac = token_mac(b"token", "dial", agent, client, "me")
    assert mac_is_right(b"token", "dial", agent, client, "me", mac)
    assert not mac_is_right(b"token", "accept", agent, client, "me", mac)
    assert not mac_is_right(b"token", "dial", agent, client, "me", b"")
    assert mac_is_right(b"", "dial", agent, client, "me", b"anything")


def test_envelopes_and_names() -> None:
    assert ENVELOPE.source == EndpointName("job", 0)
    assert str(ENVELOPE.destination) == "job/1"
    assert ENVELOPE.traffic_class is TrafficClass.PIPELINE
    assert ENVELOPE.describe() == "job/0 -> job/1, tag -7, group 'tp', float32[3] (12 bytes)"
    assert TrafficClass.parse("bulk").label == "bulk"
    with pytest.raises(ValueError, match="pipeline"):
        TrafficClass.parse("urgent")
    transfer = TransferId(0xABC, 7)
    assert TransferId.parse(str(transfer)) == transfer
    assert wire.Offered(1, 2, ENVELOPE, 0, 0).transfer == TransferId(1, 2)
