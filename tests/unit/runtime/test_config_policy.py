"""Links, jobs, classes and bottlenecks in the file: what comes out, and what is refused with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from proxyd.cli.main import main
from proxyd.core.errors import ConfigError
from proxyd.core.ids import LinkName
from proxyd.core.policy import BottleneckSettings, JobPolicy, Sharing
from proxyd.runtime.config import parse_config
from proxyd.wire.envelope import TrafficClass

HEAD = "[coordinator]\n"
LINK = '[[link]]\nfrom = "a"\nto = "b"\n'
JOB = '[[job]]\nname = "llama"\n'
MBIT = 125_000


def problems(text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_config(HEAD + text, "f.toml")
    return str(caught.value).split("\n")


def test_everything_that_can_be_said() -> None:
    text = """
time_zone = "Asia/Shanghai"

[[link]]
from = "a"
to = "b"
cap = "1Gbit"
fifo_share = 0.1
calendar = [
  "weekdays 09:00-18:00 100Mbit",  # the office's hours
  "sat,sun 00:00-24:00 2Gbit",
]

[[link]]
from = "b"
to = "a"
estimate = "fixed"
capacity = "400Mbit"
rtt = "60ms"
buffer = "0.1bdp"

[[job]]
name = "llama"
weight = 3
floor = "50Mbit"
cap = "80Mbit"

[[job]]
name = "bert"
weight = 0.5

[[class]]
name = "bulk"
share = "equal"

[[bottleneck]]
site = "a"
direction = "egress"
capacity = "1Gbit"
cap = "900Mbit"
"""
    config = parse_config(HEAD + text, "f.toml")
    policy = config.policy
    assert policy.job("llama") == JobPolicy(3, 50 * MBIT, 80 * MBIT)
    assert policy.job("bert") == JobPolicy(0.5)
    assert policy.job("other") == JobPolicy()
    there = policy.link(LinkName("a", "b"))
    assert (there.cap_bytes_per_s, there.fifo_share) == (1000 * MBIT, 0.1)
    assert there.limit_bytes_per_s(10 * 60) == 100 * MBIT
    assert there.limit_bytes_per_s(6 * 1440) == 2000 * MBIT
    assert policy.link(LinkName("b", "a")).calendar == ()
    assert policy.sharing_of(TrafficClass.BULK) is Sharing.EQUAL
    assert policy.sharing_of(TrafficClass.PIPELINE) is Sharing.ONE
    live, fixed = (link.settings for link in config.links)
    assert (live.live, live.capacity_bytes_per_s, live.rtt_ns, live.source) == (True, 0, 0, "default")
    assert (fixed.live, fixed.capacity_bytes_per_s, fixed.buffer_bytes) == (False, 400 * MBIT, 300_000)
    assert config.bottlenecks[0].settings == BottleneckSettings("a", True, 1000 * MBIT, 900 * MBIT)
    assert config.require_coordinator().time_zone == "Asia/Shanghai"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (JOB + "wieght = 2\n", "f.toml:4: unknown key 'wieght' in [[job]]; did you mean 'weight'?"),
        (JOB + "weight = 0\n", "f.toml:4: [[job]] weight: 0 is not a weight"),
        (JOB + "weight = -1.5\n", "f.toml:4: [[job]] weight: -1.5 is not a weight"),
        (JOB + "weight = nan\n", "f.toml:4: [[job]] weight: nan is not a weight"),
        (JOB + "weight = true\n", "f.toml:4: [[job]] weight: True is not a weight"),
        (JOB + 'floor = "5"\n', "f.toml:4: [[job]] floor: '5' is not a rate: it has no unit"),
        (
            JOB + 'floor = "2Mbit"\ncap = "1Mbit"\n',
            "f.toml:5: [[job]] cap: 1Mbit is below the floor of job llama, 2Mbit",
        ),
        (JOB + JOB, "f.toml:4: job llama stands here again; [[job]] number 1 has it"),
        ('[[job]]\nname = "a/b"\n', "f.toml:3: [[job]] name: 'a/b' is not a job"),
        ('[job]\nname = "a"\n', "f.toml:2: [[job]]: each job stands under its own header with two brackets, [[job]]"),
        (
            '[[class]]\nname = "urgent"\nshare = "one"\n',
            "f.toml:3: [[class]] name: must be 'pipeline', 'sync' or 'bulk', not 'urgent'",
        ),
        (
            '[[class]]\nname = "sync"\nshare = "half"\n',
            "f.toml:4: [[class]] share: must be 'one' or 'equal', not 'half'",
        ),
        ('[[class]]\nname = "sync"\n', "f.toml:2: [[class]] lacks the key 'share'"),
        (LINK + 'estimate = "fixed"\n', 'f.toml:2: [[link]]: estimate = "fixed" needs the capacity'),
        (LINK + 'buffer = "0.1bdp"\n', "f.toml:2: [[link]]: buffer = '0.1bdp' is a share of capacity x rtt: give both"),
        (
            LINK + "fifo_share = 0.3\n",
            "f.toml:5: [[link]] fifo_share: input should be less than or equal to 0.2, not 0.3",
        ),
        (LINK + 'cap = "fast"\n', "f.toml:5: [[link]] cap: 'fast' is not a rate"),
        (
            LINK + 'calendar = ["mon 10:00-09:00 1Mbit"]\n',
            "f.toml:5: [[link]] calendar: the window 10:00-09:00 ends before",
        ),
        (
            LINK + 'calendar = [\n"mon 08:00-09:00 1Mbit",\n"mom 09:00-10:00 1Mbit"]\n',
            "f.toml:7: [[link]] calendar: 'mom' is not a day",
        ),
        (
            LINK
            + 'calendar = [\n# a "quoted" word, and [brackets]\n"mon 08:00-09:30 1Mbit", "sat 08:00-09:00 1Mbit",\n\n'
            '"weekdays 09:00-10:00 2Mbit",\n]\n',
            "f.toml:9: [[link]] calendar: 'weekdays 09:00-10:00 2Mbit' overlaps 'mon 08:00-09:30 1Mbit' on line 7: two",
        ),
        (
            '[[bottleneck]]\nsite = "a"\ndirection = "out"\n',
            "f.toml:4: [[bottleneck]] direction: must be 'egress' or 'ingress'",
        ),
        ('[[bottleneck]]\nsite = "a"\ndirection = "egress"\n' * 2, "f.toml:5: bottleneck a egress stands here again"),
        ('time_zone = "Mars/Olympus"\n', "f.toml:2: [coordinator] time_zone: 'Mars/Olympus' is not a time zone"),
    ],
)
def test_what_is_wrong_has_its_line(text: str, expected: str) -> None:
    found = problems(text)
    assert len(found) == 1, found
    assert expected in found[0]


@pytest.mark.parametrize(
    ("link", "what"),
    [
        ('capacity = "100Mbit"\n', "the capacity of link a->b, 100 Mbit/s"),
        ('cap = "100Mbit"\n', "the strictest cap of link a->b, 100 Mbit/s"),
        ('capacity = "1Gbit"\ncalendar = ["mon 00:00-01:00 100Mbit"]\n', "the strictest cap of link a->b, 100 Mbit/s"),
    ],
)
def test_floors_above_a_link_are_refused_at_the_last_floor(link: str, what: str) -> None:
    jobs = '[[job]]\nname = "x"\nfloor = "60Mbit"\n[[job]]\nname = "y"\nfloor = "60Mbit"\n[[job]]\nname = "z"\n'
    [found] = problems(jobs + LINK + link)
    assert found.startswith(
        f"f.toml:7: [[job]] floor: the floors of all jobs sum to 120 Mbit/s, which is above {what}."
    )
    parse_config(HEAD + jobs + LINK, "f.toml")


def test_floors_above_a_bottleneck_are_refused() -> None:
    [found] = problems('[[bottleneck]]\nsite = "a"\ndirection = "egress"\ncap = "5Mbit"\n' + JOB + 'floor = "6Mbit"\n')
    assert found.startswith(
        "f.toml:8: [[job]] floor: the floors of all jobs sum to 6 Mbit/s, which is above what the a"
    )


def test_all_findings_come_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "f.toml"
    file.write_text(HEAD + LINK + 'calendar = ["mon 1:00-2:00 1Mbit", "mon 1:00-3:00 2Mbit"]\n' + LINK + JOB + JOB)
    assert main(["check", str(file)]) == 2
    lines = [line.rpartition("f.toml:")[2][:2] for line in capsys.readouterr().err.splitlines()]
    assert lines == ["5:", "6:", "11"]
