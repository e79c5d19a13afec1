"""Protobuf messages as plain values: what ``--json`` prints, and what the status page shows."""

from __future__ import annotations

from typing import Any


def as_plain(message: Any) -> dict[str, Any]:
    """A protobuf message as JSON values: our field names, numbers as numbers, nothing left out."""
    from google.protobuf.descriptor import FieldDescriptor

    result: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            result[field.name] = [as_plain(one) for one in value] if _is_repeated(field) else as_plain(value)
        elif field.type == FieldDescriptor.TYPE_ENUM:
            name = field.enum_type.values_by_number[value].name
            result[field.name] = name.removeprefix("TRAFFIC_CLASS_").lower()
        else:
            result[field.name] = list(value) if _is_repeated(field) else value
    return result


def _is_repeated(field: Any) -> bool:
    # protobuf 7 has only is_repeated, 6.31 only label.
    return bool(field.is_repeated if hasattr(field, "is_repeated") else field.label == field.LABEL_REPEATED)
