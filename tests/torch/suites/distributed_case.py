"""torch's own ``distributed_test``, from the installed wheel, as a test case of ours. ``BACKEND`` names the backend.

Import it with ``BACKEND``, ``WORLD_SIZE`` and ``TEMP_DIR`` in the environment: torch's module reads them while it is
imported, and its gates ("only gloo supports ...") are decided then.

Ranks are forked from a server that has imported torch, not spawned: each test starts three processes, and importing
torch takes each of them three seconds.
"""

from __future__ import annotations

import ast
import inspect
import logging
import multiprocessing
import os
import textwrap
import unittest
from collections.abc import Callable
from typing import Any

from torch.testing._internal import common_distributed
from torch.testing._internal.distributed import distributed_test

MODE = os.environ.get("PROXYD_TEST_MODE", "gloo")
"""See :mod:`tests.torch.suites.__main__`."""
SOCKETS = os.environ.get("PROXYD_TEST_SOCKETS", "")
"""The agent's socket of each rank, separated by colons; PROXYD_TEST_* must not reach a rank as PROXYD_*."""

if MODE != "gloo":
    import proxyd_client.torch  # noqa: F401 # registers the backend

    common_distributed.DistTestCases.backend_feature["plugin"].add("proxyd")
if MODE == "opened":
    from tests.torch.suites import opened

    opened.register_as_gloo()
if MODE == "opened-mpi":
    # torch makes groups of "mpi" without a store, so ours can't go by that name: the gates see it, the tests don't.
    distributed_test.BACKEND = "proxyd"


class _Reasons(logging.Handler):
    """Where the ranks' words on why they skip go: torch's test case only logs them."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def emit(self, record: logging.LogRecord) -> None:
        if "skipping test" in record.msg and isinstance(record.args, tuple):
            with open(self.path, "a") as file:
                file.write(f"{record.args[2]}\n")


def _enter(environment: dict[str, str], rank: int, target: Callable[..., None], args: Any, kwargs: Any) -> None:
    """A rank begins: the server was started with the environment of an earlier test."""
    os.environ.clear()
    os.environ.update(environment)
    if SOCKETS:
        os.environ["PROXYD_SOCKET"] = SOCKETS.split(":")[rank]
    common_distributed.logger.addHandler(_Reasons(os.path.join(environment["TEMP_DIR"], "reasons")))
    common_distributed.logger.setLevel(logging.INFO)
    target(*args, **kwargs)


def _process(*, target: Callable[..., None], name: str, args: Any, kwargs: Any) -> Any:
    """Takes what ``multiprocessing.Process`` takes."""
    context = multiprocessing.get_context("forkserver")
    return context.Process(target=_enter, name=name, args=(dict(os.environ), args[0], target, args, kwargs))


class DistributedCase(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    """What torch's own subclass for spawned processes does."""

    def setUp(self) -> None:
        super().setUp()
        self._start_processes(_process)

    def tearDown(self) -> None:
        path = os.path.join(os.environ["TEMP_DIR"], "reasons")
        if os.path.exists(path):
            with open(path) as file:
                self.reasons = sorted({line.strip() for line in file})
        super().tearDown()


def is_ddp(name: str) -> bool:
    """Whether a test is one of DistributedDataParallel's, or of what only works on it: it says so in its own code."""
    words = ("ddp", "distributeddataparallel", "localsgd", "syncbatchnorm", "static_graph", "no_sync")
    test = getattr(DistributedCase, name)
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(test)))
    said = {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}
    said |= {node.attr for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)}
    return any(word in text.lower() for text in {name, *said} for word in words)


def names() -> list[str]:
    """The non-DDP subset, sorted."""
    return [name for name in unittest.TestLoader().getTestCaseNames(DistributedCase) if not is_ddp(name)]
