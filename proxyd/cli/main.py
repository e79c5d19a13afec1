"""The ``proxyd`` command: finds the subcommand, imports only its module, turns errors into exit codes.

**A command is a module** named in :data:`COMMANDS` with two functions::

    def add_arguments(parser: argparse.ArgumentParser) -> None: ...
    def run(args: argparse.Namespace) -> int: ...       # the exit code

The module is imported when its command is run or asked for help, never for ``proxyd --help``, which must answer within
300 ms. Keep its top light as well (argparse and ``proxyd.core`` only) and import grpc, the daemons or matplotlib inside
``run``, so that ``proxyd demo --help`` is quick too and works without the extras.

Raise :class:`~proxyd.core.errors.ProxydError` for what a person should read: its text goes to stderr without a
traceback and with its ``code`` (docs/errors.md), and its ``exit_code`` is ours (the root of ``proxyd_client`` is
treated alike). A module that an extra brings and that is not installed ends in a message that names the extra. Anything
else is a bug and shows its traceback.

Exit codes: 0 ok, 1 failed, 2 usage or configuration, 3 degraded, 130 interrupted.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import json
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn, Protocol, cast

from proxyd.core.errors import EXIT_FAILED, EXIT_OK, EXIT_USAGE, MissingExtraError, ProxydError

COMMANDS: dict[str, tuple[str, str]] = {
    "agent": ("proxyd.cli.agent", "run the daemon of a trainer's host or gateway"),
    "coordinator": ("proxyd.cli.coordinator", "run the daemon that owns links and grants slots"),
    "forward": ("proxyd.cli.forward", "paced TCP for programs that know nothing of proxyd: port, SOCKS5, HTTP CONNECT"),
    "dev": ("proxyd.cli.dev", "a coordinator and agents on this machine, to try things out"),
    "demo": ("proxyd.cli.demo", "plain TCP beside proxyd on an emulated WAN"),
    "example pipeline": (
        "proxyd.cli.example_pipeline",
        "a GPT's two halves at two sites, beside gloo",
    ),
    "example data-parallel": ("proxyd.cli.example_data_parallel", "a GPT, data parallel across two sites, beside gloo"),
    "example two-sites": ("proxyd.cli.example_two_sites", "a GPT at two sites: 1F1B, and steps chosen at run time"),
    "status": ("proxyd.cli.status", "links, grants and agents of a running coordinator, or one agent"),
    "top": ("proxyd.cli.top", "links and transfers, live: who sends, who waits and for what"),
    "health": ("proxyd.cli.health", "whether this host's daemons serve, drain, stand by or are down"),
    "ping": ("proxyd.cli.ping", "from this host's agent to another one: round trip, rate, MTU"),
    "why": ("proxyd.cli.why", "how long a transfer waited for what"),
    "replay": ("proxyd.cli.replay", "feed a grant log through a coordinator again: the same must come out"),
    "policy show": ("proxyd.cli.policy_show", "the policy that a running coordinator applies"),
    "policy reload": ("proxyd.cli.policy_reload", "make a running coordinator read its policy again"),
    "drain": ("proxyd.cli.drain", "begin no new transfer at an agent or coordinator, and finish those under way"),
    "undrain": ("proxyd.cli.undrain", "take new transfers again"),
    "doctor": ("proxyd.cli.doctor", "what of this host and its configuration gets in the way, each with its fix"),
    "bugreport": ("proxyd.cli.bugreport", "an archive with what a report needs, without secrets"),
    "config init": ("proxyd.cli.config_init", "a configuration to start from"),
    "config check": ("proxyd.cli.check", "judge a configuration file without starting anything"),
    "config schema": ("proxyd.cli.config_schema", "the JSON schema of the configuration file"),
    "check": ("proxyd.cli.check", "the same as config check"),
    "bench relay": ("proxyd.cli.bench_relay", "speed of client -> agent -> agent -> client on loopback"),
    "bench local": ("proxyd.cli.bench_local", "speed between two trainers of one host, through its agent"),
    "bench grants": ("proxyd.cli.bench_grants", "decisions and grants per second"),
    "bench link": ("proxyd.cli.bench_link", "a link that changes and that nobody configured, beside plain TCP"),
    "bench torch-pipeline": ("proxyd.cli.bench_torch_pipeline", "a PyTorch pipeline across two sites, beside gloo"),
    "bench torch-schedule": ("proxyd.cli.bench_torch_schedule", "steps chosen at run time, beside 1F1B and gloo"),
    "bench torch-allreduce": ("proxyd.cli.bench_torch_allreduce", "a sum over the ranks of two sites, beside gloo"),
    "bench torch-local": ("proxyd.cli.bench_torch_local", "send and recv between two ranks on one host, beside gloo"),
    "bench ways": ("proxyd.cli.bench_ways", "far coordinators, both directions at once, urgent messages"),
    "bench forward": ("proxyd.cli.bench_forward", "a file through proxyd forward, beside tensors"),
    "bench predict": ("proxyd.cli.bench_predict", "how well a receiver knows when a tensor will be there"),
    "simulate link": ("proxyd.cli.simulate_link", "a link that changes, simulated: use, queue, loss, completion times"),
    "simulate faults": ("proxyd.cli.simulate_faults", "crashes, cuts and partitions, simulated: nothing may be lost"),
    "simulate pipeline": ("proxyd.cli.simulate_pipeline", "a training step across sites, simulated, by schedule"),
    "simulate scale": ("proxyd.cli.simulate_scale", "1,000 agents at once, and an hour of 64: how long it takes"),
    "simulate targets": ("proxyd.cli.simulate_targets", "what a live link must show, each run with its bounds"),
    "healthcheck": ("proxyd.cli.healthcheck", "whether the daemon of a configuration accepts, for probes"),
    "completion": ("proxyd.cli.completion", "completion for bash, zsh or tcsh"),
    "version": ("proxyd.cli.version", "print the version"),
}

EXIT_INTERRUPTED = 130

_EXTRA_OF_MODULE = {
    "google": "daemon",
    "grpc": "daemon",
    "grpc_health": "daemon",
    "grpc_reflection": "daemon",
    "prometheus_client": "daemon",
    "pydantic": "daemon",
    "rich": "daemon",
    "shtab": "daemon",
    "uvloop": "daemon",
    "matplotlib": "report",
    "torch": "torch",
}


class Command(Protocol):
    """What a command's module offers."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int: ...


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and answer its exit code; the entry point of the ``proxyd`` script."""
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(args)
    except SystemExit as stop:  # argparse: 0 after --help, 2 on bad usage
        return stop.code if isinstance(stop.code, int) else EXIT_USAGE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) has gone. Keep the interpreter's own flush at exit from complaining.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except ModuleNotFoundError as error:
        extra = _EXTRA_OF_MODULE.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        return _report(_missing_extra(error.name or "", extra), args)
    except ProxydError as error:
        return _report(error, args)
    except Exception as error:
        # The trainer's library has a root of its own. It is looked up, not imported: it would bring numpy.
        client = sys.modules.get("proxyd_client.errors")
        if client is None or not isinstance(error, client.ProxydError):
            raise
        return _say(error, EXIT_FAILED, args)


def _dispatch(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help", "help"):
        print(_overview(), end="", file=sys.stdout if args else sys.stderr)
        return EXIT_OK if args else EXIT_USAGE
    if args[0] in ("-V", "--version"):
        args[0] = "version"
    name, rest = args[0], args[1:]
    kinds = [full.partition(" ")[2] for full in COMMANDS if full.startswith(f"{name} ")]
    if kinds:
        if rest and rest[0] in ("-h", "--help"):
            print(_overview(name), end="")
            return EXIT_OK
        if not rest or rest[0] not in kinds:
            _refuse(f"{name} needs one of: {', '.join(kinds)}" + (f"; {rest[0]!r} is none" if rest else ""))
        name, rest = f"{name} {rest[0]}", rest[1:]
    if name not in COMMANDS:
        words = sorted({full.partition(" ")[0] for full in COMMANDS})
        near = difflib.get_close_matches(name, words, 1, 0.5)
        _refuse(
            f"unknown command {name!r}" + (f" (did you mean {near[0]!r}?)" if near else f" (known: {', '.join(words)})")
        )
    command, parser = command_of(name)
    return command.run(parser.parse_args(rest))


def command_of(name: str) -> tuple[Command, argparse.ArgumentParser]:
    """A command of :data:`COMMANDS` and its parser; its module is imported."""
    module, summary = COMMANDS[name]
    command = cast(Command, importlib.import_module(module))
    parser = argparse.ArgumentParser(prog=f"proxyd {name}", description=summary[0].upper() + summary[1:] + ".")
    command.add_arguments(parser)
    return command, parser


def whole_parser() -> argparse.ArgumentParser:
    """All commands in one parser, for what wants to see all of them (completion). Imports every module."""
    root = argparse.ArgumentParser(prog="proxyd")
    words = root.add_subparsers(metavar="COMMAND", required=True)
    groups: dict[str, argparse._SubParsersAction[argparse.ArgumentParser]] = {}
    for name, (_, summary) in COMMANDS.items():
        group, _, last = name.partition(" ")
        place = words
        if last:
            if group not in groups:
                groups[group] = words.add_parser(group, help=f"{group} ...").add_subparsers(metavar="KIND")
            place = groups[group]
        cast(Command, importlib.import_module(COMMANDS[name][0])).add_arguments(
            place.add_parser(last or group, help=summary)
        )
    return root


def _overview(group: str = "") -> str:
    prefix = f"{group} " if group else ""
    shown = {name: summary for name, (_, summary) in COMMANDS.items() if name.startswith(prefix)}
    width = max(map(len, shown))
    lines = [f"usage: proxyd {prefix}COMMAND [options]", ""]
    if not group:
        lines += ["Green lights for training across data centers: held tensors, paced sends, empty queues.", ""]
    lines += [f"  {name:<{width}}  {summary}" for name, summary in shown.items()]
    lines += ["", "proxyd COMMAND --help says more. Exit codes: 0 ok, 1 failed, 2 usage or configuration, 3 degraded."]
    return "\n".join(lines) + "\n"


def _refuse(problem: str) -> NoReturn:
    print(f"proxyd: {problem}. Try proxyd --help", file=sys.stderr)
    raise SystemExit(EXIT_USAGE)


def _missing_extra(module: str, extra: str) -> MissingExtraError:
    return MissingExtraError(
        f"this command needs the '{extra}' extra",
        why=f"the Python package {module!r} is not installed",
        next_step=f"pip install 'proxyd[{extra}]'",
    )


def _report(error: ProxydError, args: Sequence[str]) -> int:
    return _say(error, error.exit_code, args)


def _say(error: Any, exit_code: int, args: Sequence[str]) -> int:
    """The error for a person, and for a program that asked for JSON in its place what it can read.

    :param error: of the daemons or of the trainer's library: both roots have the same fields.
    """
    print(f"proxyd: {error} [{error.code}]", file=sys.stderr)
    if "--json" in args:
        told = {"code": error.code, "what": error.what, "why": error.why, "next_step": error.next_step}
        print(json.dumps({"error": {**told, "exit_code": exit_code}}, indent=2))
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
