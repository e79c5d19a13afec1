"""Core values as plain JSON values and back, for what is written to files: the grant log.

Each dataclass and named tuple becomes the list of its fields, in order, without their names: compact, and as quick to
make as one ``attrgetter``. Which names stood at which place is told once, in the file's header (:meth:`Plain.schema`);
a reader of a later version puts fields by name, leaves out those that it no longer has, and gives new ones their
defaults. One of several classes (a message, an event) is ``[name, fields]``.

Everything follows from the type annotations, so a new field or message needs no line here; a type that has no plain
form raises InternalError when the codec is made, not when the first value comes.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

from proxyd.core.errors import InternalError, RemoteError

Step = Callable[[Any], Any]
Schema = Mapping[str, Sequence[str]]


class PlainError(RemoteError):
    """A value that was read is not of the form that its type has."""

    code = "form"


class _Codec(typing.NamedTuple):
    """``None`` stands for "as it is"."""

    encode: Step | None
    decode: Step | None


_AS_IS = _Codec(None, None)


class Plain:
    """Encoders and decoders by type.

    :param schema: field names by class as in the file that is read; None: those of this version.
    """

    def __init__(self, schema: Schema | None = None) -> None:
        self._written = schema
        self._codecs: dict[Any, _Codec] = {}
        self._schema: dict[str, list[str]] = {}

    def schema(self) -> dict[str, list[str]]:
        """Field names of every class that a codec was made for."""
        return self._schema

    def encoder(self, kind: Any) -> Step:
        """From a value of ``kind`` to what ``json`` can write."""
        return self._codec(kind).encode or _same

    def decoder(self, kind: Any) -> Step:
        """Inverse of :meth:`encoder`. It raises PlainError for what doesn't fit."""
        decode = self._codec(kind).decode or _same

        def checked(value: Any) -> Any:
            try:
                return decode(value)
            except (TypeError, ValueError, KeyError, IndexError) as error:
                raise PlainError(
                    f"{str(value)[:120]} is no {getattr(kind, '__name__', kind)}", why=str(error)
                ) from error

        return checked

    def _codec(self, kind: Any) -> _Codec:
        found = self._codecs.get(kind)
        if found is None:
            found = self._codecs[kind] = self._make(kind)
        return found

    def _make(self, kind: Any) -> _Codec:
        origin, args = typing.get_origin(kind), typing.get_args(kind)
        if origin in (typing.Union, types.UnionType):
            return self._union(args)
        if origin in (typing.Literal,):
            return _AS_IS
        if origin in (tuple, list):
            return self._sequence(origin, args)
        if origin in (frozenset, set):
            member = self._codec(args[0])
            return _Codec(lambda value: sorted(_each(member.encode, value)), lambda v: origin(_each(member.decode, v)))
        if origin in (dict, collections.abc.Mapping):
            return self._mapping(args)
        if isinstance(kind, type):
            if issubclass(kind, enum.IntEnum):
                return _Codec(None, kind)
            if issubclass(kind, enum.Enum):
                return _Codec(attrgetter("value"), kind)
            if dataclasses.is_dataclass(kind) or hasattr(kind, "_fields"):
                return self._record(kind)
            if kind in (int, float, str, bool, type(None)):
                return _AS_IS
        raise InternalError(f"{kind} has no plain form")

    def _union(self, args: tuple[Any, ...]) -> _Codec:
        present = [one for one in args if one is not type(None)]
        if len(present) == 1:
            encode, decode = self._codec(present[0])
            return _Codec(
                encode and (lambda value: None if value is None else encode(value)),
                decode and (lambda value: None if value is None else decode(value)),
            )
        if all(one in (int, float, str, bool) for one in present):
            return _AS_IS
        codecs = {one: self._codec(one) for one in present}
        encoders = {one: (one.__name__, codec.encode or _same) for one, codec in codecs.items()}
        decoders = {one.__name__: codec.decode or _same for one, codec in codecs.items()}

        def encode_tagged(value: Any) -> Any:
            if value is None:
                return None
            name, one = encoders[type(value)]
            return (name, one(value))

        def decode_tagged(value: Any) -> Any:
            return None if value is None else decoders[value[0]](value[1])

        return _Codec(encode_tagged, decode_tagged)

    def _sequence(self, origin: type, args: tuple[Any, ...]) -> _Codec:
        if (len(args) == 2 and args[1] is Ellipsis) or origin is list:
            member = self._codec(args[0])
            return _Codec(
                member.encode and (lambda value: [*map(typing.cast(Step, member.encode), value)]),
                lambda value: origin(_each(member.decode, value)),
            )
        members = [self._codec(one) for one in args]
        encode = None
        if any(member.encode for member in members):
            steps = [member.encode or _same for member in members]
            encode = lambda value: [step(part) for step, part in zip(steps, value, strict=True)]  # noqa: E731
        back = [member.decode or _same for member in members]
        return _Codec(encode, lambda value: tuple(step(part) for step, part in zip(back, value, strict=True)))

    def _mapping(self, args: tuple[Any, ...]) -> _Codec:
        key, value = self._codec(args[0]), self._codec(args[1])
        put_key, put_value = key.encode or _same, value.encode or _same
        get_key, get_value = key.decode or _same, value.decode or _same
        return _Codec(
            lambda pairs: [(put_key(k), put_value(v)) for k, v in pairs.items()],
            lambda pairs: {get_key(k): get_value(v) for k, v in pairs},
        )

    def _record(self, kind: Any) -> _Codec:
        hints = typing.get_type_hints(kind)
        if dataclasses.is_dataclass(kind):
            names = [field.name for field in dataclasses.fields(kind) if field.init]
        else:
            names = list(kind._fields)
        self._schema[kind.__name__] = names
        codecs = [self._codec(hints[name]) for name in names]
        encode = _encode_fields(kind, names, [codec.encode for codec in codecs])
        written = names if self._written is None else list(self._written.get(kind.__name__, names))
        steps = [codec.decode or _same for codec in codecs]
        plain = all(codec.decode is None for codec in codecs)
        if written == names:
            if plain:
                return _Codec(encode, lambda values: kind(*values))
            return _Codec(encode, lambda values: kind(*[f(v) for f, v in zip(steps, values, strict=True)]))
        by_name = dict(zip(names, steps, strict=True))

        def decode(values: Any) -> Any:
            pairs = zip(written, values, strict=True)
            return kind(**{name: by_name[name](value) for name, value in pairs if name in by_name})

        return _Codec(encode, decode)


def _encode_fields(kind: Any, names: list[str], steps: list[Step | None]) -> Step | None:
    """The quickest way to a list of fields. A named tuple of plain fields already is one to ``json``."""
    is_tuple = issubclass(kind, tuple)
    if not any(steps):
        if is_tuple:
            return None
        if len(names) > 1:
            return attrgetter(*names)
        return (lambda value: ()) if not names else (lambda value: (getattr(value, names[0]),))
    if len(names) == 1 and steps[0] is not None:
        only = steps[0]
        return lambda value: (only(getattr(value, names[0])),)
    get: Step = _same if is_tuple else attrgetter(*names)
    places = [(index, step) for index, step in enumerate(steps) if step is not None]

    def encode(value: Any) -> Any:
        parts = [*get(value)]
        for index, step in places:
            parts[index] = step(parts[index])
        return parts

    return encode


def _same(value: Any) -> Any:
    return value


def _each(step: Step | None, values: Any) -> Any:
    return values if step is None else map(step, values)
