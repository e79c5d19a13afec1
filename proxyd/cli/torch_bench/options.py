"""What the PyTorch benchmarks can be told, and the link that follows from it. Light: read for ``--help``."""

from __future__ import annotations

import argparse
import importlib.util
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proxyd.core.errors import ConfigError
from proxyd.core.units import parse_buffer, parse_duration, parse_rate

if TYPE_CHECKING:
    from proxyd.wan.trace import RateSteps

RATE_SHARES = "1,0.6,1.3,0.7,1.4"
HEADER_BYTES = 52
"""IP and TCP with timestamps, in each packet."""

WAYS: dict[str, tuple[str, str | None]] = {
    "gloo cubic": ("gloo", "cubic"),
    "gloo bbr": ("gloo", "bbr"),
    "proxyd": ("proxyd", None),
}
"""Name -> backend, and the congestion control that connections across sites get."""


@dataclass(frozen=True)
class Line:
    """The link between the two sites, the same in both directions."""

    rate_bytes_per_s: int
    rtt_ns: int
    buffer_bytes: int
    mtu: int

    @property
    def payload_bytes_per_s(self) -> float:
        """What TCP can carry of its users' bytes."""
        return self.rate_bytes_per_s * (self.mtu - HEADER_BYTES) / self.mtu

    def describe(self) -> str:
        """For a table's head."""
        bdp = self.rate_bytes_per_s * self.rtt_ns / 1e9
        return (
            f"{self.rate_bytes_per_s * 8 / 1e6:g} Mbit/s each way, RTT {self.rtt_ns / 1e6:g} ms, "
            f"buffer {self.buffer_bytes / bdp:.2g} BDP, MTU {self.mtu}"
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "rate_bits_per_s": self.rate_bytes_per_s * 8,
            "rtt_seconds": self.rtt_ns / 1e9,
            "buffer_bytes": self.buffer_bytes,
            "mtu": self.mtu,
        }


def add_path_arguments(parser: argparse.ArgumentParser, rate: str = "400Mbit") -> None:
    """The link's options, with the defaults of every figure in docs/pytorch.md."""
    parser.add_argument("--rate", default=rate, help=f"of the link, each way (default: {rate})")
    add_line_arguments(parser)
    parser.add_argument("--ways", default=",".join(WAYS), help=f"some of {','.join(WAYS)} (default: all)")


def add_line_arguments(parser: argparse.ArgumentParser, mtu: int = 9000) -> None:
    """What is the same whatever sets the rate. On a slow link a shallow buffer has room for few large packets."""
    parser.add_argument("--rtt", default="60ms", help="round trip without any queue (default: 60ms)")
    parser.add_argument("--buffer", default="0.1bdp", help="drop-tail queue, a size or like 0.1bdp (default: 0.1bdp)")
    parser.add_argument("--mtu", type=int, default=mtu, help=f"bytes of the largest packet (default: {mtu})")
    parser.add_argument("--out", metavar="FILE.json", type=Path, help="write all figures there")


def add_step_arguments(parser: argparse.ArgumentParser) -> None:
    """How the rate moves."""
    parser.add_argument(
        "--steps-of-rate",
        default=RATE_SHARES,
        metavar="SHARE,...",
        help=f"what the rate is, one after the other, again and again; 1 alone: it stays (default: {RATE_SHARES})",
    )
    parser.add_argument("--step-every", default="500ms", help="how long each of them holds (default: 500ms)")


def rate_steps_of(args: argparse.Namespace, rate_bytes_per_s: int) -> RateSteps | None:
    """Steps around a mean rate, from the moment at which a link gets them. None: it stays. Raises ConfigError."""
    try:
        shares = [float(text) for text in args.steps_of_rate.split(",")]
    except ValueError:
        shares = []
    if not shares or not all(0.05 <= share <= 20 for share in shares):
        raise ConfigError(
            f"--steps-of-rate {args.steps_of_rate!r} is no list of shares of the rate",
            next_step="For example 1,0.5,1.5",
        )
    if len(shares) == 1:
        return None
    every_ns, mean = parse_duration(args.step_every), sum(shares) / len(shares)
    from proxyd.wan.trace import RateSteps

    return RateSteps(tuple((every_ns, int(rate_bytes_per_s * share / mean)) for share in shares))


def line_of(args: argparse.Namespace) -> Line:
    """What the options ask for. Raises ConfigError."""
    return line_at(args, parse_rate(args.rate))


def line_at(args: argparse.Namespace, rate: int) -> Line:
    """A link of that rate, bytes/s, and else as the options say. Raises ConfigError."""
    rtt_ns = parse_duration(args.rtt)
    return Line(rate, rtt_ns, max(2 * args.mtu, parse_buffer(args.buffer, rate, rtt_ns)), args.mtu)


def ways_of(args: argparse.Namespace) -> list[str]:
    """The ways asked for. Raises ConfigError."""
    ways = [way.strip() for way in args.ways.split(",")]
    if unknown := [way for way in ways if way not in WAYS]:
        raise ConfigError(f"there is no way {unknown[0]!r}", next_step=f"Known: {', '.join(WAYS)}")
    return ways


def require_torch() -> None:
    """Raises ModuleNotFoundError without torch: the command then names the extra. Loading it takes seconds."""
    if importlib.util.find_spec("torch") is None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")


def prepare(args: argparse.Namespace) -> None:
    """What has to be so before minutes are spent. Raises ConfigError, WanError; ModuleNotFoundError without torch."""
    if args.out is not None and not args.out.resolve().parent.is_dir():
        raise ConfigError(f"cannot write {args.out}", why=f"there is no directory {args.out.parent}")
    require_torch()
    from proxyd.wan import WanError, available

    if (reason := available()) is not None:
        raise WanError(
            f"no emulated WAN here: {reason}",
            next_step="Run as root, or where user namespaces are allowed. On real hosts examples run under torchrun",
        )
    # SIGTERM unwinds like Ctrl-C: daemons, trainers and namespaces end in order.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
