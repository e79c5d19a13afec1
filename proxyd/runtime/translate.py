"""Core messages to protobuf and back. The only file that sees both forms.

**Total and strict.** One table says, for each message, how each field crosses; on import it is checked against the
dataclasses and the generated code: a field added on one side only fails at once, and not in production. What comes in
is believed only after each field was checked: a missing part, an unknown kind or enum value, a number beyond anything
real raises :class:`TranslateError`, and the session ends with that text. Numbers are unsigned on the wire: a negative
one cannot come in; one that would go out is a bug of ours and raises InternalError.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from proxyd.core import messages as core
from proxyd.core.errors import ConfigError, InternalError, RemoteError
from proxyd.core.ids import AgentName, EndpointName, LinkName, TransferId
from proxyd.core.permissions import JobRule, Permissions
from proxyd.core.units import MAX_DURATION_NS, MAX_RATE_BYTES_PER_S, MAX_SIZE_BYTES
from proxyd.runtime.addresses import parse_address
from proxyd.runtime.crossing import BadField, Codec, Spec, number, text, texts
from proxyd.v1 import coordination_pb2 as pb
from proxyd.wire import routing
from proxyd.wire.auth import MAC_BYTES, NONCE_BYTES
from proxyd.wire.envelope import MAX_JOB_BYTES, TrafficClass

PROTOCOL_VERSION = 1
MAX_NAME_BYTES = 63
MAX_REASON_BYTES = 4096
MAX_BATCH_MESSAGES = 100_000
"""A registration of every endpoint of a large agent fits many times over; more is an attack or a bug."""

_U63 = (1 << 63) - 1
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*", re.ASCII)


class TranslateError(RemoteError):
    """The other side sent a message that breaks the protocol. The text names message and field."""

    code = "protocol"


# -- how one field crosses ---------------------------------------------------------------------------------------------


def _name_decode(value: str) -> str:
    # A name goes into "SITE/NAME", "a->b" and metric labels: nothing else may hide in it.
    if len(value) > MAX_NAME_BYTES or not _NAME.fullmatch(value):
        raise BadField(f"is {value[:80]!r}", f"a name has 1 to {MAX_NAME_BYTES} letters, digits, '.', '_', '-'")
    return value


def _agent_decode(value: str) -> str:
    _name_decode(routing.configured_name(value))
    return value


def _address_decode(value: str) -> str:
    try:
        parse_address(value[:300], port_zero_ok=False)
    except ConfigError as error:
        raise BadField("is no address to connect to", str(error)) from error
    return value


_CLASS_TO_PB = {cls: pb.TrafficClass.Value(f"TRAFFIC_CLASS_{cls.name}") for cls in TrafficClass}
_CLASS_FROM_PB = {value: cls for cls, value in _CLASS_TO_PB.items()}


def _class_decode(value: int) -> TrafficClass:
    try:
        return _CLASS_FROM_PB[pb.TrafficClass.ValueType(value)]
    except KeyError:
        raise BadField(f"is {value}", "this is no traffic class that this version knows") from None


def _share_decode(value: float) -> float:
    if not 0.0 <= value <= 1.0:  # a NaN is none either
        raise BadField(f"is {value}", "a share is between 0 and 1")
    return value


# -- the table ---------------------------------------------------------------------------------------------------------

_TRAFFIC = Codec(_CLASS_TO_PB.__getitem__, decode=_class_decode)
_FLAG = Codec()
_SITE_OR_NAME = Codec(decode=_name_decode)
_AGENT = Codec(decode=_agent_decode)
_ADDRESS = Codec(decode=_address_decode)
_JOB = text(MAX_JOB_BYTES)
_REASON = text(MAX_REASON_BYTES, cut=True)
_OWNS = texts(2 * MAX_NAME_BYTES + 2)
_COUNT = number(_U63)  # ids, epochs
_LIFE = Codec()  # random incarnations use every bit
_BYTES = number(MAX_SIZE_BYTES)
_RATE = number(MAX_RATE_BYTES_PER_S)
_NS = number(MAX_DURATION_NS)
_SHARE = Codec(decode=_share_decode)


class _Fallback(NamedTuple):
    link: LinkName
    rate_bytes_per_s: int


class _Gone(NamedTuple):
    endpoint: EndpointName
    incarnation: int
    reason: str


_AGENT_NAME = Spec(AgentName, pb.AgentName, {"site": _SITE_OR_NAME, "name": _AGENT})
_LINK = Spec(LinkName, pb.LinkName, {"src_site": _SITE_OR_NAME, "dst_site": _SITE_OR_NAME})
_ENDPOINT = Spec(EndpointName, pb.EndpointName, {"job": _JOB, "rank": Codec()})
_TRANSFER = Spec(TransferId, pb.TransferId, {"incarnation": _LIFE, "sequence": _LIFE})
_LINK_INFO = Spec(
    core.LinkInfo,
    pb.LinkInfo,
    {
        "link": _LINK.one(known=True),
        "rate_bytes_per_s": _RATE,
        "rtt_ns": _NS,
        "buffer_bytes": _BYTES,
        "queue_ns": _NS,
        "slot_bytes": _BYTES,
        "chunk_bytes": _BYTES,
        "waiting_bytes": _BYTES,
        "age_ns": _NS,
        "source": text(MAX_NAME_BYTES),
        "confidence": _SHARE,
        "observe": _FLAG,
        "fallback_bytes_per_s": _RATE,
    },
)
_FALLBACK = Spec(_Fallback, pb.FallbackRate, {"link": _LINK.one(known=True), "rate_bytes_per_s": _RATE})
_GONE = Spec(_Gone, pb.EndpointGone, {"endpoint": _ENDPOINT.one(), "incarnation": _LIFE, "reason": _REASON})
_ENTRY = Spec(
    core.DirectoryEntry,
    pb.DirectoryEntry,
    {
        "endpoint": _ENDPOINT.one(),
        "incarnation": _LIFE,
        "agent": _AGENT_NAME.one(known=True),
        "agent_incarnation": _LIFE,
        "data_address": _ADDRESS,
        "age_ns": _NS,
    },
)

_JOB_RULE = Spec(JobRule, pb.JobRule, {"job": _JOB, "links": _OWNS, "classes": texts(MAX_NAME_BYTES)})
_PERMISSIONS = Spec(Permissions, pb.Permissions, {"rules": _JOB_RULE.many(), "only_named": _FLAG})

_AGENT_KINDS: dict[str, Spec] = {
    "hello": Spec(
        core.AgentHello,
        pb.AgentHello,
        {"agent": _AGENT_NAME.one(known=True), "incarnation": _LIFE, "data_address": _ADDRESS, "epoch_seen": _COUNT},
    ),
    "endpoint_up": Spec(
        core.EndpointUp, pb.EndpointUp, {"endpoint": _ENDPOINT.one(), "incarnation": _LIFE, "age_ns": _NS}
    ),
    "endpoint_down": Spec(
        core.EndpointDown, pb.EndpointDown, {"endpoint": _ENDPOINT.one(), "incarnation": _LIFE, "reason": _REASON}
    ),
    "request": Spec(
        core.Request,
        pb.Request,
        {
            "transfer": _TRANSFER.one(),
            "link": _LINK.one(known=True),
            "destination": _AGENT_NAME.one(known=True),
            "job": _JOB,
            "traffic": _TRAFFIC,
            "wanted_bytes": _BYTES,
            "announcement": _COUNT,
            "deadline_in_ns": _NS,
            "chunk_bytes": _BYTES,
        },
    ),
    "announce": Spec(
        core.Announce,
        pb.Announce,
        {
            "announcement": _COUNT,
            "link": _LINK.one(known=True),
            "job": _JOB,
            "traffic": _TRAFFIC,
            "nbytes": _BYTES,
            "ready_in_ns": _NS,
        },
    ),
    "cancel": Spec(core.CancelRequest, pb.CancelRequest, {"transfer": _TRANSFER.one(), "reason": _REASON}),
    "done": Spec(
        core.TransferDone,
        pb.TransferDone,
        {
            "transfer": _TRANSFER.one(),
            "link": _LINK.one(known=True),
            "traffic": _TRAFFIC,
            "nbytes": _BYTES,
            "ok": _FLAG,
            "arrival_span_ns": _NS,
        },
    ),
    "report": Spec(
        core.Report,
        pb.Report,
        {
            "link": _LINK.one(known=True),
            "left_bytes": _BYTES,
            "delivered_bytes": _BYTES,
            "returned_bytes": _BYTES,
            "unscheduled_bytes": _BYTES,
            "fallback_bytes": _BYTES,
            "backlog_bytes": _BYTES,
            "leaves_in_ns": _NS,
            "srtt_ns": _NS,
            "min_rtt_ns": _NS,
            "retransmits": _COUNT,
            "delivery_rate_bytes_per_s": _RATE,
            "limited": _FLAG,
            "observed_left_bytes": _BYTES,
            "observed_delivered_bytes": _BYTES,
            "window_bytes": _BYTES,
            "sacked_bytes": _BYTES,
            "lost_bytes": _BYTES,
            "elapsed_ns": _NS,
            "back_queue_ns": _NS,
        },
    ),
    "echo": Spec(core.Echo, pb.Echo, {"number": _COUNT, "held_ns": _NS}),
    "carried": Spec(
        core.Carried,
        pb.Carried,
        {
            "link": _LINK.one(known=True),
            "fallback_bytes_per_s": _RATE,
            "fallback_total_bytes_per_s": _RATE,
            "unsent_bytes": _BYTES,
            "unsent_rate_bytes_per_s": _RATE,
            "estimate_bytes_per_s": _RATE,
            "estimate_age_ns": _NS,
        },
    ),
    "seen": Spec(core.Seen, pb.Seen, {"agents": _AGENT_NAME.many()}),
}

_COORDINATOR_KINDS: dict[str, Spec] = {
    "welcome": Spec(
        core.Welcome,
        pb.Welcome,
        {
            "coordinator": _SITE_OR_NAME,
            "epoch": _COUNT,
            "owns": _OWNS,
            "beat_ns": _NS,
            "lease_ns": _NS,
            "links": _LINK_INFO.many(),
            "fence": _COUNT,
            "permissions": _PERMISSIONS.one(),
        },
    ),
    "permissions": _PERMISSIONS,
    "queued": Spec(
        core.Queued,
        pb.Queued,
        {
            "transfer": _TRANSFER.one(),
            "position": _COUNT,
            "starts_in_ns": _NS,
            "finishes_in_ns": _NS,
            "reason": _REASON,
        },
    ),
    "grant": Spec(
        core.Grant,
        pb.Grant,
        {
            "grant": _COUNT,
            "transfer": _TRANSFER.one(),
            "link": _LINK.one(known=True),
            "nbytes": _BYTES,
            "rate_bytes_per_s": _RATE,
            "start_in_ns": _NS,
            "ttl_ns": _NS,
            "epoch": _COUNT,
            "lead_ns": _NS,
            "reason": _REASON,
            "announcement": _COUNT,
        },
    ),
    "pace": Spec(core.Pace, pb.Pace, {"link": _LINK.one(known=True), "rate_bytes_per_s": _RATE, "epoch": _COUNT}),
    "denied": Spec(core.Denied, pb.Denied, {"transfer": _TRANSFER.one(), "reason": _REASON}),
    "beat": Spec(
        core.Beat,
        pb.Beat,
        {
            "epoch": _COUNT,
            "fallback": _FALLBACK.many(),
            "links": _LINK_INFO.many(),
            "number": _COUNT,
            "missing": _AGENT_NAME.many(),
        },
    ),
    "directory": Spec(
        core.Directory,
        pb.Directory,
        {"entries": _ENTRY.many(), "gone": _GONE.many(), "full": _FLAG, "unsure": _ENDPOINT.many()},
    ),
}

_AUTH_FIELDS = {"protocol_version", "nonce", "mac"}
"""Fields of the generated types that no core message has: the session's own business."""


def _check_table() -> None:
    """Every field of every message stands in the table, on both sides, in the core's order."""
    specs = [_JOB_RULE, _AGENT_NAME, _LINK, _TRANSFER, _ENDPOINT, _LINK_INFO, _FALLBACK, _GONE, _ENTRY]
    for spec in [*specs, *_AGENT_KINDS.values(), *_COORDINATOR_KINDS.values()]:
        kind = spec.core_type
        ours = [f.name for f in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else list(kind._fields)
        theirs = {field.name for field in spec.pb_type.DESCRIPTOR.fields} - _AUTH_FIELDS
        if list(spec.fields) != ours or set(ours) != theirs:
            raise InternalError(f"the translation table of {kind.__name__} is out of step: {ours}, {sorted(theirs)}")
    for kinds, oneof, auth in (
        (_AGENT_KINDS, pb.AgentMessage.DESCRIPTOR.oneofs_by_name["kind"], set()),
        (_COORDINATOR_KINDS, pb.CoordinatorMessage.DESCRIPTOR.oneofs_by_name["kind"], {"challenge", "standby"}),
    ):
        if {field.name for field in oneof.fields} - auth != set(kinds):
            raise InternalError(f"the translation table lacks a kind of {oneof.containing_type.name}")


_check_table()
_AGENT_BY_TYPE = {spec.core_type: (name, spec) for name, spec in _AGENT_KINDS.items()}
_COORDINATOR_BY_TYPE = {spec.core_type: (name, spec) for name, spec in _COORDINATOR_KINDS.items()}


def _encode(table: Mapping[Any, tuple[str, Spec]], wrapper: Any, message: Any) -> None:
    """Into an empty AgentMessage or CoordinatorMessage."""
    name, spec = table[type(message)]
    try:
        part = getattr(wrapper, name)
        part.SetInParent()  # also where everything in it is empty
        spec.fill(part, message)
    except (ValueError, TypeError) as error:
        # protobuf refuses negative and oversized numbers: a machine that says one has lost count of something.
        raise InternalError(f"{message!r} cannot be sent", why=str(error)) from error


def _decode_batch(kinds: Mapping[str, Spec], messages: Sequence[Any]) -> list[Any]:
    """The core value of each message."""
    if len(messages) > MAX_BATCH_MESSAGES:
        raise TranslateError(f"a batch of {len(messages)} messages", why=f"the limit is {MAX_BATCH_MESSAGES}")
    found = []
    for message in messages:
        kind = message.WhichOneof("kind")
        spec = kinds.get(kind)
        if spec is None:
            raise TranslateError(
                "a message of a kind that this version doesn't know" if kind is None else f"a {kind} has no place here"
            )
        try:
            found.append(spec.decode(getattr(message, kind)))
        except BadField as error:
            path = error.within(spec.core_type.__name__).path
            raise TranslateError(f"{path} {error.verdict}", why=error.why) from error
    return found


# -- agent -> coordinator ----------------------------------------------------------------------------------------------


def agent_batch(messages: Iterable[core.AgentMessage]) -> pb.AgentBatch:
    """Messages of an open session, in order. Raises InternalError for a value that cannot be sent."""
    batch = pb.AgentBatch()
    for message in messages:
        _encode(_AGENT_BY_TYPE, batch.messages.add(), message)
    return batch


def agent_messages(batch: pb.AgentBatch) -> list[core.AgentMessage]:
    """Inverse of :func:`agent_batch`. Raises TranslateError; also for a second hello."""
    found = _decode_batch(_AGENT_KINDS, batch.messages)
    if core.AgentHello in map(type, found):
        raise TranslateError("a second hello in one session")
    return found


class SignedHello(NamedTuple):
    """An agent's hello with its proof."""

    hello: core.AgentHello
    nonce: bytes
    mac: bytes


def hello_batch(signed: SignedHello) -> pb.AgentBatch:
    """The first batch of a session."""
    batch = agent_batch([signed.hello])
    (message,) = batch.messages
    message.hello.protocol_version = PROTOCOL_VERSION
    message.hello.nonce = signed.nonce
    message.hello.mac = signed.mac
    return batch


def read_hello(batch: pb.AgentBatch) -> SignedHello:
    """The first batch of a session: a hello and nothing else. Raises TranslateError."""
    if len(batch.messages) != 1 or batch.messages[0].WhichOneof("kind") != "hello":
        raise TranslateError("a session begins with one hello and nothing else")
    raw = batch.messages[0].hello
    _check_version(raw.protocol_version, "the agent", "the coordinator")
    _check_proof(raw.nonce, raw.mac, "AgentHello")
    (hello,) = _decode_batch(_AGENT_KINDS, batch.messages)
    return SignedHello(hello, raw.nonce, raw.mac)


# -- coordinator -> agent ----------------------------------------------------------------------------------------------


def coordinator_batch(
    messages: Iterable[core.CoordinatorMessage], sign: Callable[[core.Welcome], bytes] | None = None
) -> pb.CoordinatorBatch:
    """Messages of a session, in order; ``sign`` gives the proof that goes into a Welcome."""
    batch = pb.CoordinatorBatch()
    for message in messages:
        one = batch.messages.add()
        _encode(_COORDINATOR_BY_TYPE, one, message)
        if sign is not None and isinstance(message, core.Welcome):
            one.welcome.mac = sign(message)
    return batch


def coordinator_messages(batch: pb.CoordinatorBatch) -> list[core.CoordinatorMessage]:
    """Inverse of :func:`coordinator_batch`, without the Welcome's proof. Raises TranslateError."""
    return _decode_batch(_COORDINATOR_KINDS, batch.messages)


def challenge_batch(nonce: bytes) -> pb.CoordinatorBatch:
    """The coordinator's first batch."""
    challenge = pb.Challenge(protocol_version=PROTOCOL_VERSION, nonce=nonce)
    return pb.CoordinatorBatch(messages=[pb.CoordinatorMessage(challenge=challenge)])


class Standby(NamedTuple):
    """Instead of a Welcome: another coordinator of this name is the active one."""

    coordinator: str
    active: str
    """Where it says that it is reached; "" when there is none."""


def standby_batch(coordinator: str, active: str) -> pb.CoordinatorBatch:
    """What a standby answers to a hello."""
    standby = pb.Standby(coordinator=coordinator, active=active)
    return pb.CoordinatorBatch(messages=[pb.CoordinatorMessage(standby=standby)])


def read_standby(batch: pb.CoordinatorBatch) -> Standby | None:
    """The answer of a standby; None: it is none. Raises TranslateError."""
    if len(batch.messages) != 1 or batch.messages[0].WhichOneof("kind") != "standby":
        return None
    standby = batch.messages[0].standby
    if len(standby.active) > MAX_REASON_BYTES or not standby.active.isprintable():
        raise TranslateError("Standby.active is no address")
    try:
        return Standby(_name_decode(standby.coordinator), standby.active)
    except BadField as error:
        raise TranslateError(f"Standby.coordinator {error.verdict}", why=error.why) from error


def read_challenge(batch: pb.CoordinatorBatch) -> bytes:
    """The nonce of the coordinator's first batch. Raises TranslateError."""
    if len(batch.messages) != 1 or batch.messages[0].WhichOneof("kind") != "challenge":
        raise TranslateError("a session begins with one challenge and nothing else")
    challenge = batch.messages[0].challenge
    _check_version(challenge.protocol_version, "the coordinator", "the agent")
    _check_proof(challenge.nonce, b"", "Challenge")
    return challenge.nonce


def read_welcome(batch: pb.CoordinatorBatch) -> tuple[core.Welcome, bytes, list[core.CoordinatorMessage]]:
    """The Welcome, its proof, and what else came with it. Raises TranslateError when there is no Welcome in front."""
    decoded = _decode_batch(_COORDINATOR_KINDS, batch.messages)
    if not decoded or not isinstance(decoded[0], core.Welcome):
        raise TranslateError("the answer to a hello begins with a welcome")
    mac = batch.messages[0].welcome.mac
    if len(mac) not in (0, MAC_BYTES):
        raise TranslateError(f"Welcome.mac has {len(mac)} bytes", why=f"it has {MAC_BYTES}, or none")
    return decoded[0], mac, decoded[1:]


def _check_version(version: int, theirs: str, ours: str) -> None:
    if version != PROTOCOL_VERSION:
        raise TranslateError(
            f"{theirs} speaks control protocol version {version}, {ours} {PROTOCOL_VERSION}",
            next_step="Upgrade the older one",
        )


def _check_proof(nonce: bytes, mac: bytes, where: str) -> None:
    if len(nonce) != NONCE_BYTES:
        raise TranslateError(f"{where}.nonce has {len(nonce)} bytes", why=f"it has {NONCE_BYTES}")
    if len(mac) not in (0, MAC_BYTES):
        raise TranslateError(f"{where}.mac has {len(mac)} bytes", why=f"it has {MAC_BYTES}, or none")
