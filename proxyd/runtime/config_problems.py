"""What is wrong with a configuration, in words: pydantic's findings with file, line, key and the nearest right key."""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from proxyd.core.errors import ConfigError
from proxyd.runtime.toml_lines import Path, line_of

# pydantic's words are for programmers; these are for the person who wrote the file.
_TYPE_WORDS = {
    "string_type": "must be a text in quotes",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "bool_type": "must be true or false",
    "tuple_type": "must be a list",
    "model_type": "must be a table",
    "model_attributes_type": "must be a table",
    "finite_number": "must be finite",
    "too_short": "must not be empty",
}


_ARRAYS = ("link", "job", "class", "bottleneck")
"""Tables that may stand more than once."""


@dataclasses.dataclass(frozen=True, order=True)
class ConfigProblem:
    """One finding; ordered by line."""

    line: int
    text: str

    @staticmethod
    def at(lines: Mapping[Path, int], path: Path, text: str) -> ConfigProblem:
        return ConfigProblem(line_of(dict(lines), path), text)


def raise_problems(name: str, problems: Sequence[ConfigProblem]) -> None:
    """Raise one ConfigError with a line for each problem; return when there is none."""
    if problems:
        raise ConfigError("\n".join(f"{name}:{problem.line}: {problem.text}" for problem in sorted(set(problems))))


def explain(
    detail: Mapping[str, Any],
    root: type[BaseModel],
    lines: Mapping[Path, int],
    overridden: Mapping[tuple[str, str], str],
) -> ConfigProblem:
    """One of pydantic's errors as a problem."""
    path, model = _walk(tuple(detail["loc"]), root)
    kind = detail["type"]
    if kind == "extra_forbidden":
        return ConfigProblem.at(lines, path, _unknown(path, model, root))
    if kind == "missing":
        return ConfigProblem.at(lines, path[:-1], f"{_section(path[:-1])} lacks the key '{path[-1]}'")
    if kind in ("value_error", "assertion_error"):
        why = str(detail["ctx"]["error"])
    elif kind == "tuple_type" and len(path) == 1:
        why = f"each {path[0]} stands under its own header with two brackets, [[{path[0]}]]"
    elif kind in _TYPE_WORDS:
        why = f"{_TYPE_WORDS[kind]}, not {detail['input']!r}"
    elif kind == "literal_error":
        why = f"must be {detail['ctx']['expected']}, not {detail['input']!r}"
    else:
        why = f"{detail['msg'][0].lower()}{detail['msg'][1:]}, not {detail['input']!r}"
    label = _section(path[:1])
    if keys := [str(part) for part in path[1:] if not isinstance(part, int)]:
        label += " " + ".".join(keys)
    source = overridden.get((str(path[0]), str(path[1]))) if len(path) > 1 else None
    origin = f" (from the environment variable {source})" if source else ""
    return ConfigProblem.at(lines, path, f"{label}: {why}{origin}")


def _walk(loc: Path, root: type[BaseModel]) -> tuple[Path, type[BaseModel] | None]:
    """The TOML path of a pydantic location, and the model that its last key belongs to.

    pydantic adds the branch of a union it tried to the location; such parts are no keys and are dropped.
    """
    path: list[str | int] = []
    model: type[BaseModel] | None = root
    holder: type[BaseModel] | None = root
    for part in loc:
        if isinstance(part, int):
            path.append(part)
        elif model is not None:
            path.append(part)
            holder = model
            field = next((f for n, f in model.model_fields.items() if (f.alias or n) == part), None)
            model = _inner(field.annotation) if field is not None else None
    return tuple(path), holder


def _inner(annotation: object) -> type[BaseModel] | None:
    """The model inside ``Model | None`` or ``tuple[Model, ...]``, or None."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = (_inner(argument) for argument in typing.get_args(annotation))
    return next((model for model in found if model is not None), None)


def _keys(model: type[BaseModel]) -> list[str]:
    return [field.alias or name for name, field in model.model_fields.items()]


def _section(path: Path) -> str:
    if not path:
        return "the file"
    return f"[[{path[0]}]]" if path[0] in _ARRAYS else f"[{path[0]}]"


def _unknown(path: Path, model: type[BaseModel] | None, root: type[BaseModel]) -> str:
    key = str(path[-1])
    top = len(path) == 1
    what = f"unknown section or key '{key}'" if top else f"unknown key '{key}' in {_section(path[:-1])}"
    keys = _keys(model) if model is not None else []
    near = difflib.get_close_matches(key, keys, 1, 0.6)
    if near:
        return f"{what}; did you mean '{near[0]}'?"
    for name, field in root.model_fields.items():
        inner = _inner(field.annotation)
        label = field.alias or name
        if inner is not None and key in _keys(inner):
            return f"{what}; it belongs to {_section((label,))}"
    return f"{what}; known are {', '.join(keys)}"
