"""Errors of the client as a user of torch.distributed expects them: RuntimeErrors, in terms of groups and ranks."""

from __future__ import annotations

from proxyd_client.errors import ProxydError


def for_torch(error: ProxydError, what: str) -> ProxydError:
    """The same kind of error, also a RuntimeError, whose text begins with the operation of torch that it ended.

    :param what: ``recv of float32[3] from group rank 1 (global rank 3, site b), tag 0, in group pp``; empty where the
        error's own text says it.
    """
    details = {name: value for name, value in error.__dict__.items() if name != "what" and not name.startswith("_")}
    return _kind(type(error))(f"{what}: {error.what}" if what else error.what, **details)


_KINDS: dict[str, type[ProxydError]] = {}


def _kind(kind: type[ProxydError]) -> type[ProxydError]:
    # Callers of torch.distributed catch RuntimeError; callers of the client their own kind. Both find it.
    if issubclass(kind, RuntimeError):
        return kind
    name = kind.__name__
    if name not in _KINDS:
        _KINDS[name] = type(name, (kind, RuntimeError), {"__doc__": kind.__doc__, "__module__": kind.__module__})
    return _KINDS[name]
