"""Which targets an exit may connect to."""

from __future__ import annotations

import pytest

from proxyd.core.errors import ConfigError
from proxyd.forward.station import RANKS, chance_rank, exit_rank
from proxyd.runtime.networks import Rule, allowed, parse_network, plain_address


def test_rules_cover_networks_and_ports() -> None:
    rules = [Rule.parse("10.2.0.0/16:22,873"), Rule.parse("[2001:db8::]/32:*".replace("]", "").replace("[", ""))]
    assert allowed(rules, plain_address("10.2.3.4"), 22)
    assert allowed(rules, plain_address("::ffff:10.2.3.4"), 873)
    assert allowed(rules, plain_address("2001:db8::7"), 1)
    assert not allowed(rules, plain_address("10.2.3.4"), 23)
    assert not allowed(rules, plain_address("10.3.0.1"), 22)
    assert not allowed(rules, plain_address("127.0.0.1"), 22)
    assert not allowed([], plain_address("10.2.3.4"), 22)


@pytest.mark.parametrize(
    "text", ["", "10.2.0.0/16", "10.2.0.1/16:22", "10.2.0.0/16:", "10.2.0.0/16:0", "10.2.0.0/16:a", "x:1"]
)
def test_a_wrong_rule_says_how_it_is_written(text: str) -> None:
    with pytest.raises(ConfigError):
        Rule.parse(text)


def test_a_wrong_network_too() -> None:
    with pytest.raises(ConfigError, match="no network"):
        parse_network("10.2.0.0/40")


def test_ranks_of_exits_and_of_others_never_meet() -> None:
    assert exit_rank("hami") == exit_rank("hami") != exit_rank("shenzhen")
    assert all(exit_rank(site) < RANKS <= chance_rank() < 2 * RANKS for site in ("a", "b", "hami"))
