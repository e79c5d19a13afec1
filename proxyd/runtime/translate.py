"""Core messages to protobuf and back. The only file that sees both forms.

**Total and strict.** One table says, for each message, how each field crosses; on import it is checked against the
dataclasses and the generated code: a field added on one side only fails at once, and not in production. What comes in
is believed only after each field was checked: a missing part, an unknown kind or enum value, a number beyond anything
real raises :class:`TranslateError`, and the session ends with that text. Numbers are unsigned on the wire: a negative
one cannot come in; one that would go out is a bug of ours and raises InternalError.

**Cheap.** A coordinator translates some ten thousand messages a second. So a message is read and checked by a few calls
that loop in C (``attrgetter``, ``any(map(gt, ...))``), parts are filled in place instead of being built and copied, and
names that were found good once are not looked at again. What is wrong with a message is found out by a second, slower
look.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter, gt, itemgetter
from typing import Any, NamedTuple

from google.protobuf.message import Message

from proxyd.core import messages as core
from proxyd.core.errors import ConfigError, InternalError, RemoteError
from proxyd.core.ids import AgentName, EndpointName, LinkName, TransferId
from proxyd.core.units import MAX_DURATION_NS, MAX_RATE_BYTES_PER_S, MAX_SIZE_BYTES
from proxyd.runtime.addresses import parse_address
from proxyd.v1 import coordination_pb2 as pb
from proxyd.wire.auth import MAC_BYTES, NONCE_BYTES
from proxyd.wire.envelope import MAX_JOB_BYTES, TrafficClass

PROTOCOL_VERSION = 1
MAX_NAME_BYTES = 63
MAX_REASON_BYTES = 4096
MAX_KNOWN_NAMES = 4096
MAX_BATCH_MESSAGES = 100_000
"""A registration of every endpoint of a large agent fits many times over; more is an attack or a bug."""

_U63 = (1 << 63) - 1
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*", re.ASCII)


class TranslateError(RemoteError):
    """The other side sent a message that breaks the protocol. The text names message and field."""


# -- how one field crosses ---------------------------------------------------------------------------------------------


class _BadField(Exception):
    """A value that cannot come in. The path to it is put together on the way out, so good messages don't pay for it."""

    def __init__(self, verdict: str, why: str = "") -> None:
        super().__init__(verdict)
        self.path = ""
        self.verdict = verdict
        self.why = why

    def within(self, name: str) -> _BadField:
        """The same, seen from one level further up."""
        self.path = f"{name}.{self.path}" if self.path else name
        return self


class _Codec(NamedTuple):
    """How one field crosses; what is None needs nothing done."""

    encode: Callable[[Any], Any] | None = None
    """Core value -> what the field is set to."""
    fill: Callable[[Any, Any], None] | None = None
    """``fill(part, core value)`` instead, for a part or a list: they can't be set, only filled."""
    decode: Callable[[Any], Any] | None = None
    """Protobuf value -> core value, or _BadField."""
    limit: int | None = None
    """The most that a number can be and be real."""
    is_message: bool = False


def _number(limit: int) -> _Codec:
    return _Codec(limit=limit)


def _text(limit_bytes: int, *, cut: bool = False) -> _Codec:
    """``cut``: a longer text of ours is shortened (a reason), not refused."""

    def encode(value: str) -> str:
        if 4 * len(value) <= limit_bytes:
            return value
        return value.encode("utf-8", "replace")[:limit_bytes].decode("utf-8", "ignore")

    def decode(value: str) -> str:
        # A text has at most four bytes for each character: most need no counting.
        if 4 * len(value) > limit_bytes and (length := len(value.encode())) > limit_bytes:
            raise _BadField(f"has {length} bytes", f"the limit is {limit_bytes}")
        return value

    return _Codec(encode if cut else None, decode=decode)


def _texts(limit_bytes: int) -> _Codec:
    """A list of texts; a tuple in the core."""
    one = _text(limit_bytes).decode
    assert one is not None
    return _Codec(
        fill=lambda texts, values: texts.extend(values), decode=lambda texts: tuple([one(text) for text in texts])
    )


def _name_decode(value: str) -> str:
    # A name goes into "SITE/NAME", "a->b" and metric labels: nothing else may hide in it.
    if len(value) > MAX_NAME_BYTES or not _NAME.fullmatch(value):
        raise _BadField(f"is {value[:80]!r}", f"a name has 1 to {MAX_NAME_BYTES} letters, digits, '.', '_', '-'")
    return value


def _address_decode(value: str) -> str:
    try:
        parse_address(value[:300], port_zero_ok=False)
    except ConfigError as error:
        raise _BadField("is no address to connect to", str(error)) from error
    return value


_CLASS_TO_PB = {cls: pb.TrafficClass.Value(f"TRAFFIC_CLASS_{cls.name}") for cls in TrafficClass}
_CLASS_FROM_PB = {value: cls for cls, value in _CLASS_TO_PB.items()}


def _class_decode(value: int) -> TrafficClass:
    try:
        return _CLASS_FROM_PB[pb.TrafficClass.ValueType(value)]
    except KeyError:
        raise _BadField(f"is {value}", "this is no traffic class that this version knows") from None


def _share_decode(value: float) -> float:
    if not 0.0 <= value <= 1.0:  # a NaN is none either
        raise _BadField(f"is {value}", "a share is between 0 and 1")
    return value


class _Spec:
    """One message: the core type, the generated type, and its fields in the order of the core type's."""

    def __init__(self, core_type: Any, pb_type: type[Message], fields: Mapping[str, _Codec]) -> None:
        self.core_type = core_type
        self.pb_type = pb_type
        self.fields = fields
        self._values = attrgetter(*fields)
        """Of a core value and of a generated one: their fields have the same names."""
        self._out = [(name, codec.encode, codec.fill) for name, codec in fields.items()]
        self._in = [
            (place, name, codec.decode, codec.is_message)
            for place, (name, codec) in enumerate(fields.items())
            if codec.decode is not None
        ]
        limits = {place: codec.limit for place, codec in enumerate(fields.values()) if codec.limit is not None}
        self._limits = tuple(limits.values())
        self._limited = itemgetter(*limits) if len(limits) > 1 else lambda values: [values[at] for at in limits]

    def fill(self, message: Any, value: Any) -> None:
        """Set each field of a generated message."""
        # A plain tuple (of a core message's field) has its parts in the same order.
        parts = value if type(value) is tuple else self._values(value)
        for (name, encode, fill), part in zip(self._out, parts, strict=True):
            if fill is not None:
                fill(getattr(message, name), part)
            else:
                setattr(message, name, part if encode is None else encode(part))

    def decode(self, message: Any) -> Any:
        """The core value, or _BadField."""
        values = list(self._values(message))
        for place, name, decode, is_message in self._in:
            try:
                if is_message and not message.HasField(name):
                    raise _BadField("is missing")
                values[place] = decode(values[place])
            except _BadField as error:
                raise error.within(name) from error.__cause__
        if self._limits and any(map(gt, self._limited(values), self._limits)):
            self._too_large(message)
        return self.core_type(*values)

    def _too_large(self, message: Any) -> None:
        for name, codec in self.fields.items():
            if codec.limit is not None and (value := getattr(message, name)) > codec.limit:
                raise _BadField(f"is {value}", f"the most that can be real is {codec.limit}").within(name)

    def one(self, *, known: bool = False) -> _Codec:
        """As a required part of another message.

        :param known: the same few values come again and again (names): check each once.
        """
        decode = _Known(self._values, self.decode) if known else self.decode
        return _Codec(fill=self.fill, decode=decode, is_message=True)

    def many(self) -> _Codec:
        """As a list in another message; a tuple in the core."""

        def fill(parts: Any, values: Iterable[Any]) -> None:
            for value in values:
                self.fill(parts.add(), value)

        return _Codec(fill=fill, decode=lambda parts: tuple([self.decode(part) for part in parts]))


class _Known:
    """A decoder that remembers what it has found good. Bounded: peers choose the names."""

    def __init__(self, values: Callable[[Any], Any], decode: Callable[[Any], Any]) -> None:
        self._values = values
        self._decode = decode
        self._found: dict[Any, Any] = {}

    def __call__(self, message: Any) -> Any:
        key = self._values(message)
        found = self._found.get(key)
        if found is None:
            found = self._decode(message)
            if len(self._found) >= MAX_KNOWN_NAMES:
                self._found.clear()
            self._found[key] = found
        return found


# -- the table ---------------------------------------------------------------------------------------------------------

_TRAFFIC = _Codec(_CLASS_TO_PB.__getitem__, decode=_class_decode)
_FLAG = _Codec()
_SITE_OR_NAME = _Codec(decode=_name_decode)
_ADDRESS = _Codec(decode=_address_decode)
_JOB = _text(MAX_JOB_BYTES)
_REASON = _text(MAX_REASON_BYTES, cut=True)
_OWNS = _texts(2 * MAX_NAME_BYTES + 2)
_COUNT = _number(_U63)  # ids, epochs
_LIFE = _Codec()  # random incarnations use every bit
_BYTES = _number(MAX_SIZE_BYTES)
_RATE = _number(MAX_RATE_BYTES_PER_S)
_NS = _number(MAX_DURATION_NS)
_SHARE = _Codec(decode=_share_decode)


class _Fallback(NamedTuple):
    link: LinkName
    rate_bytes_per_s: int


class _Gone(NamedTuple):
    endpoint: EndpointName
    incarnation: int
    reason: str


_AGENT_NAME = _Spec(AgentName, pb.AgentName, {"site": _SITE_OR_NAME, "name": _SITE_OR_NAME})
_LINK = _Spec(LinkName, pb.LinkName, {"src_site": _SITE_OR_NAME, "dst_site": _SITE_OR_NAME})
_ENDPOINT = _Spec(EndpointName, pb.EndpointName, {"job": _JOB, "rank": _Codec()})
_TRANSFER = _Spec(TransferId, pb.TransferId, {"incarnation": _LIFE, "sequence": _LIFE})
_LINK_INFO = _Spec(
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
        "source": _text(MAX_NAME_BYTES),
        "confidence": _SHARE,
        "observe": _FLAG,
    },
)
_FALLBACK = _Spec(_Fallback, pb.FallbackRate, {"link": _LINK.one(known=True), "rate_bytes_per_s": _RATE})
_GONE = _Spec(_Gone, pb.EndpointGone, {"endpoint": _ENDPOINT.one(), "incarnation": _LIFE, "reason": _REASON})
_ENTRY = _Spec(
    core.DirectoryEntry,
    pb.DirectoryEntry,
    {
        "endpoint": _ENDPOINT.one(),
        "incarnation": _LIFE,
        "agent": _AGENT_NAME.one(known=True),
        "agent_incarnation": _LIFE,
        "data_address": _ADDRESS,
    },
)

_AGENT_KINDS: dict[str, _Spec] = {
    "hello": _Spec(
        core.AgentHello,
        pb.AgentHello,
        {"agent": _AGENT_NAME.one(known=True), "incarnation": _LIFE, "data_address": _ADDRESS, "epoch_seen": _COUNT},
    ),
    "endpoint_up": _Spec(core.EndpointUp, pb.EndpointUp, {"endpoint": _ENDPOINT.one(), "incarnation": _LIFE}),
    "endpoint_down": _Spec(
        core.EndpointDown, pb.EndpointDown, {"endpoint": _ENDPOINT.one(), "incarnation": _LIFE, "reason": _REASON}
    ),
    "request": _Spec(
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
    "announce": _Spec(
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
    "cancel": _Spec(core.CancelRequest, pb.CancelRequest, {"transfer": _TRANSFER.one(), "reason": _REASON}),
    "done": _Spec(
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
    "report": _Spec(
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
        },
    ),
    "echo": _Spec(core.Echo, pb.Echo, {"number": _COUNT, "held_ns": _NS}),
}

_COORDINATOR_KINDS: dict[str, _Spec] = {
    "welcome": _Spec(
        core.Welcome,
        pb.Welcome,
        {
            "coordinator": _SITE_OR_NAME,
            "epoch": _COUNT,
            "owns": _OWNS,
            "beat_ns": _NS,
            "lease_ns": _NS,
            "links": _LINK_INFO.many(),
        },
    ),
    "queued": _Spec(
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
    "grant": _Spec(
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
    "pace": _Spec(core.Pace, pb.Pace, {"link": _LINK.one(known=True), "rate_bytes_per_s": _RATE, "epoch": _COUNT}),
    "denied": _Spec(core.Denied, pb.Denied, {"transfer": _TRANSFER.one(), "reason": _REASON}),
    "beat": _Spec(
        core.Beat,
        pb.Beat,
        {"epoch": _COUNT, "fallback": _FALLBACK.many(), "links": _LINK_INFO.many(), "number": _COUNT},
    ),
    "directory": _Spec(core.Directory, pb.Directory, {"entries": _ENTRY.many(), "gone": _GONE.many(), "full": _FLAG}),
}

_AUTH_FIELDS = {"protocol_version", "nonce", "mac"}
"""Fields of the generated types that no core message has: the session's own business."""


def _check_table() -> None:
    """Every field of every message stands in the table, on both sides, in the core's order."""
    specs = [_AGENT_NAME, _LINK, _TRANSFER, _ENDPOINT, _LINK_INFO, _FALLBACK, _GONE, _ENTRY]
    for spec in [*specs, *_AGENT_KINDS.values(), *_COORDINATOR_KINDS.values()]:
        kind = spec.core_type
        ours = [f.name for f in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else list(kind._fields)
        theirs = {field.name for field in spec.pb_type.DESCRIPTOR.fields} - _AUTH_FIELDS
        if list(spec.fields) != ours or set(ours) != theirs:
            raise InternalError(f"the translation table of {kind.__name__} is out of step: {ours}, {sorted(theirs)}")
    for kinds, oneof, auth in (
        (_AGENT_KINDS, pb.AgentMessage.DESCRIPTOR.oneofs_by_name["kind"], set()),
        (_COORDINATOR_KINDS, pb.CoordinatorMessage.DESCRIPTOR.oneofs_by_name["kind"], {"challenge"}),
    ):
        if {field.name for field in oneof.fields} - auth != set(kinds):
            raise InternalError(f"the translation table lacks a kind of {oneof.containing_type.name}")


_check_table()
_AGENT_BY_TYPE = {spec.core_type: (name, spec) for name, spec in _AGENT_KINDS.items()}
_COORDINATOR_BY_TYPE = {spec.core_type: (name, spec) for name, spec in _COORDINATOR_KINDS.items()}


def _encode(table: Mapping[Any, tuple[str, _Spec]], wrapper: Any, message: Any) -> None:
    """Into an empty AgentMessage or CoordinatorMessage."""
    name, spec = table[type(message)]
    try:
        spec.fill(getattr(wrapper, name), message)
    except (ValueError, TypeError) as error:
        # protobuf refuses negative and oversized numbers: a machine that says one has lost count of something.
        raise InternalError(f"{message!r} cannot be sent", why=str(error)) from error


def _decode_batch(kinds: Mapping[str, _Spec], messages: Sequence[Any]) -> list[Any]:
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
        except _BadField as error:
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
