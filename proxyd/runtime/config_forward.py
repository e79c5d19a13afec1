"""``[[forward]]``: doors and exits of ``proxyd forward``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, StrictStr, model_validator

from proxyd.core.errors import ConfigError
from proxyd.runtime.addresses import parse_address
from proxyd.runtime.config_fields import Name
from proxyd.runtime.config_links import Section
from proxyd.runtime.networks import Rule, parse_network


def _place(value: str) -> str:
    try:
        address = parse_address(value)
    except ConfigError as error:
        raise ValueError(str(error)) from error
    if address.is_unix or address.is_fd:
        raise ValueError(f'{value!r} is no host and port, like "127.0.0.1:8022"')
    return value


def _rule(value: str) -> str:
    try:
        Rule.parse(value)
    except ConfigError as error:
        raise ValueError(str(error)) from error
    return value


def _network(value: str) -> str:
    try:
        parse_network(value)
    except ConfigError as error:
        raise ValueError(str(error)) from error
    return value


RuleText = Annotated[StrictStr, AfterValidator(_rule)]
NetworkText = Annotated[StrictStr, AfterValidator(_network)]
PlaceText = Annotated[StrictStr, AfterValidator(_place)]


class ForwardConfig(Section):
    """A door (``listen``) or the site's exit (``allow``)."""

    kind: Literal["tcp", "socks5", "http", "exit"] = "tcp"
    listen: PlaceText | None = None
    """Where clients connect."""
    to: Name | None = None
    """The site whose exit is asked."""
    target: PlaceText | None = None
    """Where ``tcp`` goes, as the exit sees it."""
    traffic: Literal["pipeline", "sync", "bulk"] = "bulk"
    clients: tuple[NetworkText, ...] = ()
    """Networks of clients beyond this host."""
    allow: tuple[RuleText, ...] = ()
    """Of an exit: ``NETWORK:PORTS`` that it may connect to."""

    @model_validator(mode="after")
    def _fits(self) -> ForwardConfig:
        if self.kind == "exit":
            if not self.allow:
                raise ValueError('an exit needs allow = ["10.2.0.0/16:22,873"], for it connects to nothing else')
            wrong = [name for name in ("listen", "to", "target", "clients") if getattr(self, name)]
            if wrong:
                raise ValueError(f"an exit has no {wrong[0]}; doors are [[forward]] tables of their own")
            return self
        if self.allow:
            raise ValueError('allow belongs to kind = "exit": it is the other site that connects')
        if self.listen is None or self.to is None:
            raise ValueError(f"a door of kind {self.kind!r} needs listen and to")
        if (self.kind == "tcp") != (self.target is not None):
            raise ValueError("kind tcp needs a target, and the other kinds' clients name it themselves")
        address = parse_address(self.listen)
        if not address.is_loopback and not self.clients:
            raise ValueError(
                f"{self.listen} can be reached from other hosts: say whose clients may come in, like "
                'clients = ["10.1.0.0/16"], or listen on 127.0.0.1'
            )
        return self
