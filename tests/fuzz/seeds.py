"""What the fuzzers begin with: a few well-formed inputs of each parser, made by the writers of today."""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
from typing import Any

from proxyd.core.bandwidth import LinkSettings
from proxyd.core.coordinator import CoordinatorConfig, CoordinatorMachine
from proxyd.core.effects import ToAgent
from proxyd.core.events import LocalTime, PolicyChanged, SessionMessage, SessionOpened, TimePassed
from proxyd.core.ids import AgentName, EndpointName, LinkName
from proxyd.core.messages import (
    AgentHello,
    CoordinatorMessage,
    EndpointUp,
    Report,
    Request,
)
from proxyd.core.policy import Policy
from proxyd.runtime import snapshot, translate
from proxyd.runtime.grant_log import Recorder
from proxyd.wire import arena, client, peer
from proxyd.wire.codec import encode_body
from proxyd.wire.envelope import Envelope, TrafficClass, TransferId

ROOT = pathlib.Path(__file__).parents[2]
TRANSFER = TransferId(5, 6)
ENVELOPE = Envelope("job", 0, 1, "g", 3, TrafficClass.SYNC, 100_000, "float32", (25_000,))
LINK = LinkName("a", "b")
HELLO = AgentHello(AgentName("a", "0"), 9, "a-0:7500")
SAMPLES = {"int": 1, "float": 1.0, "str": "x", "bytes": bytes(32), "bool": True, "tuple[int, ...]": (1, 2)}


def _sample(cls: type[Any]) -> Any:
    """A frame with something in each field."""
    values = {field.name: SAMPLES.get(str(field.type), ENVELOPE) for field in dataclasses.fields(cls)}
    return cls(**values)


PEER_FRAMES = [_sample(cls) for cls in peer.FRAMES.values()]
CLIENT_FRAMES = [_sample(cls) for cls in client.FRAMES.values()]
HANDSHAKES = (
    peer.Challenge(peer.PROTOCOL_VERSION, bytes(32)),
    dataclasses.replace(_sample(peer.Hello), version=peer.PROTOCOL_VERSION, to_site="a", to_name="0"),
    _sample(peer.Welcome),
    _sample(peer.Refused),
)


def _machine() -> tuple[CoordinatorMachine, list[CoordinatorMessage], bytes]:
    """A coordinator that has granted something, what it said, and its grant log."""
    lines: list[bytes] = []
    recorder = Recorder(lines.append)
    settings = CoordinatorConfig(links=(LinkSettings(LINK, 10_000_000, 20_000_000),))
    machine = CoordinatorMachine(settings, 3)
    recorder.begun(0)
    lines.append(recorder.header(machine, 3, "life", 1, 0, checkpoint=False))
    said: list[CoordinatorMessage] = []
    report = Report(LINK, 1000, 500, 0, 0, 0, 0, 0, 20_000_000, 20_000_000, 0, 10_000_000, True)
    events = (
        PolicyChanged(Policy()),
        LocalTime(5),
        SessionOpened(1, HELLO),
        SessionMessage(1, EndpointUp(EndpointName("job", 0), 5)),
        SessionMessage(1, Request(TRANSFER, LINK, AgentName("b", "0"), "job", TrafficClass.BULK, 500_000)),
        TimePassed(),
        SessionMessage(1, report),
        TimePassed(),
    )
    for number, event in enumerate(events):
        now_ns = number * 50_000_000
        recorder.saw(now_ns, event)
        effects = machine.handle(event, now_ns)
        recorder.performed(effects)
        said += [effect.message for effect in effects if isinstance(effect, ToAgent)]
    recorder.flush()
    return machine, said, b"".join(lines)


def _grpc() -> list[bytes]:
    _, said, _ = _machine()
    hello = translate.hello_batch(translate.SignedHello(HELLO, bytes(32), b""))
    up = translate.agent_batch([EndpointUp(EndpointName("job", 0), 5)])
    asks = translate.agent_batch([Request(TRANSFER, LINK, AgentName("b", "0"), "job", TrafficClass.BULK, 5)])
    found = [b"\0" + hello.SerializeToString(), b"\1" + up.SerializeToString(), b"\1" + asks.SerializeToString()]
    batches = [translate.coordinator_batch([message]).SerializeToString() for message in said]
    return [*found, *(b"\2" + one for one in batches[:1]), *(b"\3" + one for one in batches)]


def _arena() -> list[bytes]:
    page = bytearray(arena.PAGE_BYTES)
    view = memoryview(page)
    arena.write_header(view, arena.ArenaHeader(client.ArenaKind.SEND, 1, 1 << 20, 5, 6))
    arena.record_delivered(view, 7, 8)
    block = bytearray(arena.PAGE_BYTES)
    arena.write_block_prefix(memoryview(block), arena.BlockPrefix(TRANSFER, 100_000, 65536))
    return [bytes(page), bytes(block)]


def seeds(target: str) -> list[bytes]:
    """Well-formed inputs of one target."""
    match target:
        case "wire_client":
            return [client.encode(frame) for frame in CLIENT_FRAMES]
        case "wire_peer":
            return [b"\0" + b"".join(peer.encode(frame, TRANSFER) for frame in PEER_FRAMES)] + [
                peer.encode(frame, TRANSFER) for frame in PEER_FRAMES
            ]
        case "wire_chunk_header":
            head = peer.encode_data_header(TRANSFER, 65536, 34464, 77)
            return [head, b"\x80" + head, peer.encode_padding_header(1000)]
        case "wire_codec":
            frames = [*PEER_FRAMES, *CLIENT_FRAMES, ENVELOPE]
            return [bytes([number]) + encode_body(frame) for number, frame in enumerate(frames)]
        case "wire_envelope":
            return [encode_body(ENVELOPE)]
        case "wire_arena":
            return _arena()
        case "agent_handshake":
            return [bytes(pair) + peer.encode(frame) for pair in ((0, 0), (255, 0)) for frame in HANDSHAKES]
        case "config_toml":
            # Written examples of every section are in the documentation and beside the units of systemd.
            files = sorted(itertools.chain(ROOT.glob("deploy/**/*.toml"), ROOT.glob("tests/scenarios/burst.toml")))
            short = b'[agent]\nsite = "a"\ncoordinators = ["c:7600"]\n[coordinator]\nlisten = "127.0.0.1:7600"\n'
            link = b'[[link]]\nfrom = "a"\nto = "b"\ncapacity = "4Gbit"\nrtt = "60ms"\nbuffer = "0.1bdp"\n'
            job = b'[[job]]\nname = "j*"\nweight = 2.0\n[[window]]\nlink = "a->b"\n'
            return [path.read_bytes() for path in files] + [short, short + link, short + link + job]
        case "policy_words":
            words = ("mon-fri 08:00-18:00", "a->b", "a/0", "00000000000000ff-7", "4Gbit", "64MiB", "1.5s", "[::1]:7500")
            return [bytes([number]) + word.encode() for number, word in enumerate(words)]
        case "trace_file":
            return [b"0\n1\n1\n2\n\n250\n", b"100000\n", b"# s, bit/s\n0, 4e9\n0.1, 0\n0.2 2e9\n9,1e9\n"]
        case "grant_log_file":
            return [_machine()[2]]
        case "snapshot_json":
            small = json.dumps(snapshot.take([LINK, {"a": (1, 2.5)}, TrafficClass.SYNC, ENVELOPE.nbytes]))
            return [small.encode(), json.dumps(snapshot.take(_machine()[0])).encode()]
        case "grpc_messages":
            return _grpc()
        case _:
            return []
