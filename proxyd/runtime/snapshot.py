"""A machine's whole state as plain JSON values, and back: the checkpoints of the grant log.

Theory of operation
-------------------
A machine is a graph of objects that point at each other. Each is written once, as a *node*; where another one points at
it stands its number, as a list of one (``[17]``). Numbers, texts, booleans and None stand for themselves. A node is a
list that begins with its kind::

    ["list", values]   ["tuple", values]   ["set", values]   ["frozenset", values]   ["bytes", hex]
    ["deque", longest, values]             ["dict" | "ordered" | "mapping", keys, values]
    ["enum", class, name]                  ["named", class, values]                  ["class", class]
    ["method", owner, name]                ["object", layout, values]

Classes are numbers in a list of ``module:name``; layouts are numbers in a list of a class and its attributes' names.

**Nothing runs while it is read.** Only classes that stand in modules of :mod:`proxyd.core` and :mod:`proxyd.wire` are
made, by ``object.__new__``; their attributes are put in place without any constructor, property or hook; methods are
only those that a class of the core defines. So a file of a stranger's making can hold wrong values, not code.

**Order.** What a value is hashed by must be in it before it becomes a key. So values that can't change (tuples, named
tuples, frozen dataclasses) are filled as they are made; everything else is made empty and filled in its turn, which is
also what lets objects point at each other in circles.
"""

from __future__ import annotations

import collections
import enum
import functools
import importlib
import operator
import re
import types
from collections.abc import Callable, Iterable
from typing import Any

_MODULE = re.compile(r"proxyd\.(core|wire)(\.[a-z][a-z0-9_]*)*")
_PLAIN = frozenset((int, float, str, bool, type(None)))
_SEQUENCES: dict[type, str] = {list: "list", tuple: "tuple", set: "set", frozenset: "frozenset"}
_MAPPINGS: dict[type, str] = {dict: "dict", collections.OrderedDict: "ordered", types.MappingProxyType: "mapping"}


class SnapshotError(Exception):
    """A graph holds what has no plain form, or plain values are no graph. The message says which."""


@functools.cache
def _slots(kind: type) -> tuple[str, ...]:
    """Names of the slots of a class and those above it."""
    found: list[str] = []
    for one in kind.__mro__:
        slots = vars(one).get("__slots__", ())
        found += [slots] if isinstance(slots, str) else slots
    return tuple(dict.fromkeys(name for name in found if name not in ("__dict__", "__weakref__")))


@functools.cache
def _hashed_by_value(kind: type) -> bool:
    """It is a frozen dataclass: filled as it is made."""
    parameters = getattr(kind, "__dataclass_params__", None)
    return parameters is not None and bool(parameters.frozen)


@functools.cache
def _is_core(kind: type) -> bool:
    return bool(_MODULE.fullmatch(kind.__module__)) and "." not in kind.__qualname__


# -- writing -----------------------------------------------------------------------------------------------------------


def take(root: object) -> dict[str, Any]:
    """The graph behind ``root`` as what ``json`` can write. Raises SnapshotError."""
    return _Writer().write(root)


class _Writer:
    """Works through the objects in the order in which they were found. A coordinator waits for it: 3 us an object."""

    def __init__(self) -> None:
        self._objects: list[Any] = []
        """By number. Also keeps them, so that no two have one ``id``."""
        self._numbers: dict[int, int] = {}
        self._classes: dict[type, int] = {}
        self._layouts: dict[tuple[type, tuple[str, ...]], int] = {}
        self._ways: dict[type, Callable[[Any], list[Any]]] = {}

    def write(self, root: object) -> dict[str, Any]:
        self._value(root)
        nodes: list[list[Any]] = []
        ways = self._ways
        for value in self._objects:  # it grows meanwhile
            kind = type(value)
            way = ways.get(kind)
            if way is None:
                way = ways[kind] = self._way(value, kind)
            nodes.append(way(value))
        layouts = [[self._class(kind), [*names]] for kind, names in self._layouts]
        classes = [f"{kind.__module__}:{kind.__name__}" for kind in self._classes]
        return {"classes": classes, "layouts": layouts, "nodes": nodes}

    def _value(self, value: Any) -> Any:
        if type(value) in _PLAIN:
            return value
        key = id(value)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._objects)
            self._objects.append(value)
        return (number,)

    def _values(self, values: Iterable[Any]) -> list[Any]:
        plain, put = _PLAIN, self._value
        return [one if type(one) in plain else put(one) for one in values]

    def _class(self, kind: type) -> int:
        if not _is_core(kind):
            raise SnapshotError(f"a {kind.__module__}.{kind.__qualname__} has no plain form")
        return self._classes.setdefault(kind, len(self._classes))

    def _way(self, value: Any, kind: type) -> Callable[[Any], list[Any]]:
        """How values of a type become nodes."""
        values = self._values
        if kind in _SEQUENCES:
            name = _SEQUENCES[kind]
            return lambda one: [name, values(one)]
        if kind in _MAPPINGS:
            name = _MAPPINGS[kind]
            return lambda one: [name, values(one.keys()), values(one.values())]
        if kind is collections.deque:
            return lambda one: ["deque", one.maxlen, values(one)]
        if kind is bytes:
            return lambda one: ["bytes", one.hex()]
        if kind is types.MethodType:
            return lambda one: ["method", self._value(one.__self__), one.__name__]
        if isinstance(value, type):
            return lambda one: ["class", self._class(one)]
        number = self._class(kind)
        if isinstance(value, enum.Enum):
            return lambda one: ["enum", number, one.name]
        if isinstance(value, tuple):
            return lambda one: ["named", number, values(one)]
        if isinstance(value, (list, dict, set, frozenset, int, str, float, bytes, BaseException)):
            raise SnapshotError(f"a {kind.__name__} is more than its attributes")
        return self._object_way(kind)

    def _object_way(self, kind: type) -> Callable[[Any], list[Any]]:
        slots, values = _slots(kind), self._values

        def by_name(value: Any) -> list[Any]:
            found = {name: getattr(value, name) for name in slots if hasattr(value, name)}
            found |= getattr(value, "__dict__", {})
            return ["object", self._layout(kind, (*found,)), values(found.values())]

        if kind.__dictoffset__ or len(slots) < 2:
            return by_name
        layout, get = self._layout(kind, slots), operator.attrgetter(*slots)

        def quick(value: Any) -> list[Any]:
            try:
                return ["object", layout, values(get(value))]
            except AttributeError:
                return by_name(value)  # a slot is empty

        return quick

    def _layout(self, kind: type, names: tuple[str, ...]) -> int:
        return self._layouts.setdefault((kind, names), len(self._layouts))


# -- reading -----------------------------------------------------------------------------------------------------------


def make(taken: Any) -> Any:
    """Inverse of :func:`take`. Raises SnapshotError for what is no graph."""
    try:
        return _Reader(taken).read()
    except (TypeError, ValueError, LookupError, AttributeError, ImportError, RecursionError) as error:
        raise SnapshotError(f"not a graph of the core's objects: {error}") from error


class _Reader:
    def __init__(self, taken: Any) -> None:
        self._classes = [_find(name) for name in taken["classes"]]
        self._layouts = [(self._classes[number], [str(name) for name in names]) for number, names in taken["layouts"]]
        self._nodes: list[list[Any]] = taken["nodes"]
        self._made: dict[int, Any] = {}
        self._making: set[int] = set()
        self._fill: collections.deque[Callable[[], None]] = collections.deque()

    def read(self) -> Any:
        root = self._get((0,))
        while self._fill:
            self._fill.popleft()()
        return root

    def _get(self, value: Any) -> Any:
        if type(value) in _PLAIN:
            return value
        (number,) = value
        if number in self._made:
            return self._made[number]
        if number in self._making:
            raise SnapshotError(f"node {number} can't be made without itself")
        self._making.add(number)
        self._made[number] = made = self._make(self._nodes[number])
        self._making.discard(number)
        return made

    def _make(self, node: list[Any]) -> Any:
        kind, *rest = node
        get = self._get
        if kind in ("tuple", "frozenset"):
            return (tuple if kind == "tuple" else frozenset)(get(one) for one in rest[0])
        if kind in ("list", "set", "deque"):
            made: Any = collections.deque(maxlen=rest[0]) if kind == "deque" else [] if kind == "list" else set()
            extend = made.update if kind == "set" else made.extend
            self._fill.append(lambda: extend(map(get, rest[-1])))
            return made
        if kind in ("dict", "ordered", "mapping"):
            mapping: dict[Any, Any] = collections.OrderedDict() if kind == "ordered" else {}
            self._fill.append(lambda: mapping.update(zip(map(get, rest[0]), map(get, rest[1]), strict=True)))
            return types.MappingProxyType(mapping) if kind == "mapping" else mapping
        if kind == "bytes":
            return bytes.fromhex(rest[0])
        if kind == "method":
            return _method(get(rest[0]), rest[1])
        if kind == "object":
            of, names = self._layouts[rest[0]]
            return self._object(of, names, rest[1])
        if kind not in ("class", "enum", "named"):
            raise SnapshotError(f"there are no nodes of kind {str(kind)[:40]}")
        of = self._classes[rest[0]]
        if kind == "class":
            return of
        if kind == "enum":
            return self._subclass(of, enum.Enum)[rest[1]]
        return tuple.__new__(self._subclass(of, tuple), [get(one) for one in rest[1]])

    def _subclass(self, of: type, kind: type) -> Any:
        if not issubclass(of, kind):
            raise SnapshotError(f"{of.__name__} is no {kind.__name__}")
        return of

    def _object(self, of: type, names: list[str], values: list[Any]) -> Any:
        made: Any = object.__new__(of)

        def fill() -> None:
            slots = _slots(of)
            for name, value in zip(names, map(self._get, values), strict=True):
                if name in slots:
                    object.__setattr__(made, name, value)
                else:
                    vars(made)[name] = value

        if _hashed_by_value(of):
            fill()
        else:
            self._fill.append(fill)
        return made


def _find(name: str) -> type:
    """A class of the core by ``module:name``; importing one of its modules is all that may happen."""
    module, _, within = name.partition(":")
    if not _MODULE.fullmatch(module):
        raise SnapshotError(f"a snapshot holds no {name[:80]}")
    found = vars(importlib.import_module(module)).get(within)
    if not isinstance(found, type) or found.__module__ != module or not _is_core(found):
        raise SnapshotError(f"there is no class {name[:80]}")
    return found


def _method(owner: Any, name: str) -> Any:
    """Only plain methods that a class of the core defines."""
    for kind in type(owner).__mro__:
        found = vars(kind).get(name)
        if found is not None:
            if _is_core(kind) and isinstance(found, types.FunctionType):
                return types.MethodType(found, owner)
            break
    raise SnapshotError(f"{type(owner).__name__}.{str(name)[:40]} is no method of the core")
