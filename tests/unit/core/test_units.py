from __future__ import annotations

import pickle
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxyd.core import units
from proxyd.core.errors import EXIT_USAGE, ConfigError, ProxydError, UnitError


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("4Gbit", 500_000_000),
        ("4 Gbit", 500_000_000),
        ("400Mbit", 50_000_000),
        ("400Mbps", 50_000_000),
        ("400Mbit/s", 50_000_000),
        ("1.5Gbit/s", 187_500_000),
        ("0.1Gbit", 12_500_000),
        ("1e3Mbit", 125_000_000),
        ("8kbit", 1000),
        ("8bit", 1),
        ("500MB", 500_000_000),
        ("500MB/s", 500_000_000),
        ("50MiB/s", 52_428_800),
        ("1_000Mbit", 125_000_000),
    ],
)
def test_rates(text: str, bytes_per_s: int) -> None:
    assert units.parse_rate(text) == bytes_per_s


def test_bytes_are_eight_times_bits() -> None:
    assert units.parse_rate("500MB") == 8 * units.parse_rate("500Mbit")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("400", "bits or bytes must be said"),
        ("", "must begin with a number"),
        ("fast", "must begin with a number"),
        ("-1Mbit", "must not be negative"),
        ("0Mbit", "more than zero"),
        ("0.1bit", "rounds to zero"),
        ("nan", "finite"),
        ("infMbit", "finite"),
        ("-infMbit", "finite"),
        ("4gbit", "'gbit' is not a unit of rate"),
        ("4Pbit", "'Pbit' is not a unit of rate"),
        ("1e30Gbit", "beyond anything real"),
        ("10MHz", "'MHz' is not a unit of rate"),
    ],
)
def test_bad_rates_name_the_text_the_reason_and_the_forms(text: str, why: str) -> None:
    with pytest.raises(UnitError) as caught:
        units.parse_rate(text)
    message = str(caught.value)
    assert repr(text) in message
    assert why in message
    assert "400Mbit" in message


@pytest.mark.parametrize(
    ("text", "ns"),
    [("60ms", 60_000_000), ("0.5s", 500_000_000), (".5s", 500_000_000), ("250us", 250_000), ("2m", 120 * 10**9)]
    + [("1h", 3600 * 10**9), ("7ns", 7), ("3 µs", 3000)],
)
def test_durations(text: str, ns: int) -> None:
    assert units.parse_duration(text) == ns


@pytest.mark.parametrize("text", ["60", "60 parsec", "-1s", "0s", "0.1ns", "nan", "infs", "99999999h", "", "1 s s"])
def test_bad_durations(text: str) -> None:
    with pytest.raises(UnitError, match="is not a duration"):
        units.parse_duration(text)


def test_zero_is_for_those_who_ask() -> None:
    assert units.parse_duration("0s", zero_ok=True) == 0
    assert units.parse_duration("0", zero_ok=True) == 0
    assert units.parse_size(0, zero_ok=True) == 0
    with pytest.raises(UnitError, match="rounds to zero"):
        units.parse_size("0.2B", zero_ok=True)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("64KiB", 65_536), ("8MiB", 8 << 20), ("300kB", 300_000), ("4GiB", 4 << 30), ("1500", 1500), (1500, 1500)]
    + [("1.5KiB", 1536), ("2M", 2_000_000), ("10 bytes", 10)],
)
def test_sizes(text: str | int, nbytes: int) -> None:
    assert units.parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["8Mbit", "-3B", "0", 0, -1, "nan", "1e25GB", "0.1bdp", True])
def test_bad_sizes(text: str | int) -> None:
    with pytest.raises(UnitError, match="is not a size"):
        units.parse_size(text)


def test_a_buffer_in_bdp() -> None:
    assert units.bdp_bytes(50_000_000, 60_000_000) == 3_000_000
    assert units.parse_buffer("0.1bdp", 50_000_000, 60_000_000) == 300_000
    assert units.parse_buffer("1 BDP", 50_000_000, 60_000_000) == 3_000_000
    assert units.parse_buffer("64KiB", 50_000_000, 60_000_000) == 65_536


@pytest.mark.parametrize("text", ["0bdp", "-1bdp", "bdp", "nanbdp", "1kbdp", "1e-9bdp"])
def test_bad_buffers(text: str) -> None:
    with pytest.raises(UnitError, match=r"0\.1bdp"):
        units.parse_buffer(text, 50_000_000, 60_000_000)


@given(nbytes=st.integers(1, 10**12), rate=st.integers(1, 10**12))
def test_transmission_time_is_the_least_that_carries_the_bytes(nbytes: int, rate: int) -> None:
    took_ns = units.transmit_ns(nbytes, rate)
    assert Fraction(took_ns * rate, units.NS_PER_S) >= nbytes
    assert Fraction((took_ns - 1) * rate, units.NS_PER_S) < nbytes
    assert units.bytes_in(took_ns, rate) >= nbytes


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 bit/s"),
        (50_000_000, "400 Mbit/s"),
        (156_250_000, "1.25 Gbit/s"),
        (124_999_999, "1 Gbit/s"),
        (1, "8 bit/s"),
    ],
)
def test_rates_for_people(value: int, text: str) -> None:
    assert units.format_rate(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 B"), (512, "512 B"), (1536, "1.5 KiB"), (8 << 20, "8 MiB"), ((1 << 20) - 1, "1 MiB")]
)
def test_sizes_for_people(value: int, text: str) -> None:
    assert units.format_size(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 s"), (60_000_000, "60 ms"), (1_500_000_000, "1.5 s"), (120 * 10**9, "2 m"), (-250_000, "-250 us")],
)
def test_durations_for_people(value: int, text: str) -> None:
    assert units.format_duration(value) == text


@given(st.integers(1, units.MAX_RATE_BYTES_PER_S // 8))
def test_a_formatted_rate_reads_back_within_its_digits(rate: int) -> None:
    assert units.parse_rate(units.format_rate(rate)) == pytest.approx(rate, rel=1e-3, abs=1)


@given(st.text(max_size=12))
def test_any_text_gives_a_number_or_our_error(text: str) -> None:
    for parse in (units.parse_rate, units.parse_size, units.parse_duration):
        try:
            assert parse(text) > 0
        except UnitError as error:
            assert repr(text) in str(error)


def test_the_error_is_a_usage_error_and_survives_pickling() -> None:
    with pytest.raises(ConfigError) as caught:
        units.parse_rate("12")
    error = caught.value
    assert isinstance(error, ProxydError)
    assert error.exit_code == EXIT_USAGE
    again = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes
    assert str(again) == str(error)
    assert type(again) is UnitError
