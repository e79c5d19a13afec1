"""Who sends when: bytes on the network interfaces of the sending hosts, sampled from the outside.

Read from ``/proc/PID/net/dev`` of a process in each host's namespace, so that plain TCP and proxyd are seen alike and
neither has to say anything about itself.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from itertools import pairwise

from proxyd.cli.demo.results import Activity
from proxyd.wan import WanError

INTERFACE = "eth0"
INTERVAL_S = 0.01


def sent_bytes(text: str, interface: str = INTERFACE) -> int:
    """Bytes transmitted by an interface, from the text of ``/proc/net/dev``; 0 if it has no such interface."""
    for line in text.splitlines():
        name, separator, figures = line.partition(":")
        if separator and name.strip() == interface:
            return int(figures.split()[8])
    return 0


def tcp_count(text: str, name: str) -> int:
    """One of TCP's counters, from the text of ``/proc/net/snmp``: ``OutSegs``, ``RetransSegs``, ..."""
    heads, values = [line.split() for line in text.splitlines() if line.startswith("Tcp:")]
    return int(values[heads.index(name)])


def read_proc(pid: int, name: str) -> str:
    """``/proc/PID/net/NAME``: of the network namespace that the process lives in."""
    with open(f"/proc/{pid}/net/{name}", encoding="ascii") as file:
        return file.read()


def total_segments(pids: Sequence[int]) -> tuple[int, int]:
    """Segments that all hosts together have sent for the first time, and again; whatever sent them.

    Raises WanError when one of the processes is gone.
    """
    try:
        texts = [read_proc(pid, "snmp") for pid in pids]
        return sum(tcp_count(text, "OutSegs") for text in texts), sum(tcp_count(text, "RetransSegs") for text in texts)
    except OSError as error:
        raise WanError(f"a sender has ended; its last words are on stderr ({error})") from error


class ActivityRecorder:
    """A thread that samples until stopped. Costs about one percent of a core for eight hosts."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = list(pids)
        self._stop = threading.Event()
        self._times_ns: list[int] = []
        self._totals: list[list[int]] = [[] for _ in self._pids]
        self._thread = threading.Thread(target=self._run, name="demo-activity", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(INTERVAL_S):
            try:
                totals = [sent_bytes(read_proc(pid, "dev")) for pid in self._pids]
            except OSError:
                return  # a sender has ended: what was seen until now is what there is
            self._times_ns.append(time.monotonic_ns())
            for series, total in zip(self._totals, totals, strict=True):
                series.append(total)

    def stop(self) -> Activity:
        """End the thread and answer what it saw."""
        self._stop.set()
        self._thread.join()
        return Activity(
            list(self._times_ns),
            [[after - before for before, after in pairwise(series)] for series in self._totals],
        )
