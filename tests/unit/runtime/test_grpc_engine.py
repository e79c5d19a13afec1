"""gRPC looks at its variable when it is imported: whoever chooses its engine must come before that."""

from __future__ import annotations

import subprocess
import sys

import pytest

from proxyd.runtime.environment import GRPC_EXPERIMENTS, choose_grpc_engine

BEFORE_THE_CHOICE = """
import sys
import proxyd.cli.main, proxyd.cli.{command}
import proxyd.cli.check, proxyd.runtime.config, proxyd.runtime.environment, proxyd.runtime.logs
assert not [name for name in sys.modules if name.partition(".")[0] == "grpc"]
"""


@pytest.mark.parametrize("command", ["agent", "coordinator", "bench_grants"])
def test_nothing_imports_grpc_before_its_engine_is_chosen(command: str) -> None:
    subprocess.run([sys.executable, "-c", BEFORE_THE_CHOICE.format(command=command)], check=True, timeout=60)


def test_who_has_chosen_keeps_the_choice() -> None:
    environ = {"GRPC_EXPERIMENTS": "event_engine_listener"}
    choose_grpc_engine(environ)
    assert environ == {"GRPC_EXPERIMENTS": "event_engine_listener"}
    nothing: dict[str, str] = {}
    choose_grpc_engine(nothing)
    assert nothing == {"GRPC_EXPERIMENTS": GRPC_EXPERIMENTS}
