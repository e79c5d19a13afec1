"""How the fields of a message cross between core values and protobuf: the machinery under :mod:`translate`'s table.

A coordinator translates some ten thousand messages a second. A loop over a table of fields would cost twice what the
fields themselves cost, so :class:`Spec` writes, at import, the two functions that one would write by hand, as
:mod:`dataclasses` does for ``__init__``::

    def fill(message, value):                       def decode(message):
        fill_link(message.link, value.link)             nbytes = message.nbytes
        message.nbytes = value.nbytes                   if nbytes > 1152921504606846976: find(message)
                                                        try:
                                                            return core_type(decode_link(message.link), nbytes)
                                                        except BadField:
                                                            find(message)

They only find out that something is wrong; what it is, a second and slower look finds (:meth:`Spec.find`). Parts are
filled in place, since protobuf copies by writing and reading what is set as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Any, NamedTuple, NoReturn

from google.protobuf.message import Message

MAX_KNOWN = 4096
"""Values that a part remembers as good. Bounded: peers choose them."""


class BadField(Exception):
    """A value that cannot come in. The path to it is put together on the way out, so good messages don't pay for it."""

    def __init__(self, verdict: str, why: str = "") -> None:
        super().__init__(verdict)
        self.path = ""
        self.verdict = verdict
        self.why = why

    def within(self, name: str) -> BadField:
        """The same, seen from one level further up."""
        self.path = f"{name}.{self.path}" if self.path else name
        return self


class Codec(NamedTuple):
    """How one field crosses; what is None needs nothing done."""

    encode: Callable[[Any], Any] | None = None
    """Core value -> what the field is set to."""
    fill: Callable[[Any, Any], None] | None = None
    """``fill(part, core value)`` instead, for a part or a list: they can't be set, only filled."""
    decode: Callable[[Any], Any] | None = None
    """Protobuf value -> core value, or BadField."""
    limit: int | None = None
    """The most that a number can be and be real."""
    is_message: bool = False


def number(limit: int) -> Codec:
    """A whole number of at most ``limit``."""
    return Codec(limit=limit)


def text(limit_bytes: int, *, cut: bool = False) -> Codec:
    """``cut``: a longer text of ours is shortened (a reason), not refused."""

    def encode(value: str) -> str:
        if 4 * len(value) <= limit_bytes:
            return value
        return value.encode("utf-8", "replace")[:limit_bytes].decode("utf-8", "ignore")

    def decode(value: str) -> str:
        # A text has at most four bytes for each character: most need no counting.
        if 4 * len(value) > limit_bytes and (length := len(value.encode())) > limit_bytes:
            raise BadField(f"has {length} bytes", f"the limit is {limit_bytes}")
        return value

    return Codec(encode if cut else None, decode=decode)


def texts(limit_bytes: int) -> Codec:
    """A list of texts; a tuple in the core."""
    one = text(limit_bytes).decode
    assert one is not None
    return Codec(fill=lambda there, values: there.extend(values), decode=lambda there: tuple([one(it) for it in there]))


class Spec:
    """One message: the core type, the generated type, and its fields in the order of the core type's."""

    def __init__(self, core_type: Any, pb_type: type[Message], fields: Mapping[str, Codec]) -> None:
        self.core_type = core_type
        self.pb_type = pb_type
        self.fields = fields
        self.fill: Callable[[Any, Any], None] = self._write_fill()
        """``fill(message, value)`` sets each field of a generated message."""
        self.decode: Callable[[Any], Any] = self._write_decode()
        """The core value of a generated message, or BadField."""

    def _write_fill(self) -> Callable[[Any, Any], None]:
        names: dict[str, Any] = {}
        lines = ["def fill(message, value):"]
        for place, (name, codec) in enumerate(self.fields.items()):
            # Where a message of the core has a plain tuple, its parts are in the same order.
            value = f"value[{place}]" if issubclass(self.core_type, tuple) else f"value.{name}"
            if codec.fill is not None:
                names[f"fill_{name}"] = codec.fill
                lines.append(f"    fill_{name}(message.{name}, {value})")
            elif codec.encode is not None:
                names[f"encode_{name}"] = codec.encode
                lines.append(f"    message.{name} = encode_{name}({value})")
            else:
                lines.append(f"    message.{name} = {value}")
        return _made("fill", lines, names)

    def _write_decode(self) -> Callable[[Any], Any]:
        names = {"core_type": self.core_type, "find": self.find, "BadField": BadField}
        lines = ["def decode(message):"]
        values, limits = [], []
        for name, codec in self.fields.items():
            if codec.limit is not None:
                lines.append(f"    {name} = message.{name}")
                limits.append(f"{name} > {codec.limit}")
                values.append(name)
            elif codec.decode is not None:
                names[f"decode_{name}"] = codec.decode
                values.append(f"decode_{name}(message.{name})")
                if codec.is_message:
                    limits.append(f"not message.HasField({name!r})")
            else:
                values.append(f"message.{name}")
        if limits:
            lines.append(f"    if {' or '.join(limits)}: find(message)")
        lines += ["    try:", f"        return core_type({', '.join(values)})", "    except BadField: find(message)"]
        return _made("decode", lines, names)

    def find(self, message: Any) -> NoReturn:
        """Raise BadField for the first field of ``message`` that is wrong, with the path to it."""
        for name, codec in self.fields.items():
            try:
                if codec.is_message and not message.HasField(name):
                    raise BadField("is missing")
                value = getattr(message, name)
                if codec.decode is not None:
                    codec.decode(value)
                if codec.limit is not None and value > codec.limit:
                    raise BadField(f"is {value}", f"the most that can be real is {codec.limit}")
            except BadField as error:
                raise error.within(name) from error.__cause__
        raise AssertionError(f"nothing is wrong with {message}")

    def one(self, *, known: bool = False) -> Codec:
        """As a required part of another message.

        :param known: the same few values come again and again (names): check each once.
        """
        decode = _known(attrgetter(*self.fields), self.decode) if known else self.decode
        return Codec(fill=self.fill, decode=decode, is_message=True)

    def many(self) -> Codec:
        """As a list in another message; a tuple in the core."""
        fill_one, decode = self.fill, self.decode

        def fill(parts: Any, values: Iterable[Any]) -> None:
            add = parts.add
            for value in values:
                fill_one(add(), value)

        return Codec(fill=fill, decode=lambda parts: tuple([decode(part) for part in parts]))


def _made(name: str, lines: list[str], names: dict[str, Any]) -> Callable[..., Any]:
    """A function from its text, which is made of field names and limits of our own table only."""
    exec("\n".join(lines), names)
    made: Callable[..., Any] = names[name]
    return made


def _known(values: Callable[[Any], Any], decode: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A decoder that remembers what it has found good."""
    found: dict[Any, Any] = {}
    get = found.get

    def decode_known(message: Any) -> Any:
        key = values(message)
        value = get(key)
        if value is None:
            value = decode(message)
            if len(found) >= MAX_KNOWN:
                found.clear()
            found[key] = value
        return value

    return decode_known
