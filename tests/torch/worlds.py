"""Worlds of trainer processes with torch: started once, used for many checks.

A process that imports torch takes three seconds, a check a few milliseconds. So a world's processes are forked from a
server that has imported it, stay, run one function after another, each on all ranks, and hand back what it returns or
raises.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any, Self

START_TIMEOUT_S = 90.0
RUN_TIMEOUT_S = 60.0
PRELOADED = ["torch.distributed.fsdp", "torch.distributed.tensor", "proxyd_client.torch"]


class Raised(AssertionError):
    """What a rank raised; ``error`` is the original where it can be pickled."""

    def __init__(self, rank: int, error: BaseException | None, text: str) -> None:
        super().__init__(f"rank {rank}:\n{text}")
        self.rank = rank
        self.error = error
        self.text = text


class World:
    """Processes with ranks 0 to size - 1, each ``init_process_group``-ed unless ``backend`` is None.

    :param sockets: of the agents, by rank; empty for a backend that needs none.
    :param environment: more variables, by rank.
    """

    def __init__(
        self,
        size: int,
        sockets: Sequence[str] = (),
        *,
        backend: str | None = "proxyd",
        environment: Callable[[int], dict[str, str]] | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        from torch.distributed import TCPStore

        self.size = size
        # Held by the parent: it outlives every rank, as a torchrun agent's does.
        self.store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._stack = ExitStack()
        self.processes = []
        self._pipes: list[Connection] = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            variables = {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self.store.port),
                "RANK": str(rank),
                "WORLD_SIZE": str(size),
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo",
                **({"PROXYD_SOCKET": sockets[rank]} if sockets else {}),
                **(environment(rank) if environment else {}),
            }
            process = context.Process(target=_serve, args=(theirs, rank, variables), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self._pipes.append(ours)
        if backend is not None:
            self.run(initialise, backend, size, self.store.port, timeout_s, timeout_s=START_TIMEOUT_S)

    def start(self, function: Callable[..., Any], *args: Any, ranks: Sequence[int] | None = None) -> Sequence[int]:
        """Have ``function(rank, *args)`` run on these ranks; :meth:`finish` collects."""
        chosen = list(range(self.size)) if ranks is None else list(ranks)
        for rank in chosen:
            self._pipes[rank].send((function, args))
        return chosen

    def finish(self, ranks: Sequence[int], timeout_s: float = RUN_TIMEOUT_S) -> list[Any]:
        """What they returned, in the order of ``ranks``. Raises :class:`Raised` for the first that raised.

        A rank that doesn't answer in time is told to say where it is, and is a failure.
        """
        results: list[Any] = []
        failure: Raised | None = None
        for rank in ranks:
            if not self._pipes[rank].poll(timeout_s if failure is None else 5.0):
                if failure is None:
                    os.kill(self.processes[rank].pid, signal.SIGUSR1)
                    failure = Raised(rank, None, f"no answer within {timeout_s:g} s; its stack is on stderr")
                results.append(None)
                continue
            try:
                good, value, text = self._pipes[rank].recv()
            except EOFError:
                failure = failure or Raised(rank, None, f"ended with code {self.processes[rank].exitcode}")
                continue
            if not good and failure is None:
                failure = Raised(rank, value, text)
            results.append(value)
        if failure is not None:
            raise failure
        return results

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        ranks: Sequence[int] | None = None,
        timeout_s: float = RUN_TIMEOUT_S,
    ) -> list[Any]:
        """Run ``function(rank, *args)`` on all ranks (or these), and wait for all."""
        return self.finish(self.start(function, *args, ranks=ranks), timeout_s)

    def kill(self, rank: int) -> None:
        """SIGKILL one."""
        self.processes[rank].kill()
        self.processes[rank].join()

    def close(self) -> None:
        """End all processes."""
        for pipe in self._pipes:
            try:
                pipe.send(None)
            except OSError:
                pass
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in self._pipes:
            pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def initialise(rank: int, backend: str, size: int, port: int, timeout_s: float) -> None:
    """``init_process_group`` on the world's store."""
    import torch.distributed as dist

    import proxyd_client.torch  # noqa: F401

    store = dist.TCPStore("127.0.0.1", port, None, False)
    timeout = datetime.timedelta(seconds=timeout_s)
    dist.init_process_group(
        backend, store=dist.PrefixStore("world", store), rank=rank, world_size=size, timeout=timeout
    )


def _serve(pipe: Connection, rank: int, variables: dict[str, str]) -> None:
    import faulthandler

    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.environ.update(variables)
    import torch

    torch.set_num_threads(1)
    while (order := pipe.recv()) is not None:
        function, args = order
        try:
            answer = True, function(rank, *args), ""
        except BaseException as error:  # noqa: BLE001 - whatever it is, the parent wants to know
            answer = False, error, traceback.format_exc()
        try:
            pipe.send(answer)
        except Exception:  # noqa: BLE001 - not picklable
            pipe.send((False, None, answer[2] or repr(answer[1])))
    import torch.distributed as dist

    sys.stdout.flush()
    if dist.is_initialized():
        dist.destroy_process_group()
