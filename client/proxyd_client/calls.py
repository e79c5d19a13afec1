"""Callbacks of the caller's, out of the library's way.

What ended an operation holds the session's lock, and may be any thread of the trainer's, in the middle of something
else: there a callback of somebody's would deadlock or surprise. So one thread per endpoint calls them, in the order of
the ends, and is started by the first one: most endpoints never have any.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable

LINGER_S = 10.0
"""The thread ends after so long without a call, so that an endpoint that was dropped leaves none behind."""


FINISH_TIMEOUT_S = 2.0
"""Callbacks are short; one that isn't must not keep a process from ending."""


class Calls:
    """A queue of callbacks and the thread that makes them."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def put(self, callback: Callable[[], None]) -> None:
        """Have it called soon, by another thread. Never waits."""
        with self._lock:
            self._queue.put(callback)
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="proxyd-callbacks", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # at interpreter exit: nobody is left who could make use of it
                    return
                self._thread = thread

    def finish(self) -> None:
        """Make the calls that wait, and leave no thread: one that is inside somebody's C++ code when the interpreter
        goes ends the process by SIGABRT."""
        with self._lock:
            thread = self._thread
            if thread is None or thread is threading.current_thread():
                return
            self._queue.put(sys.exit)
        thread.join(FINISH_TIMEOUT_S)

    def _run(self) -> None:
        while True:
            try:
                callback = self._queue.get(timeout=LINGER_S)
            except queue.Empty:
                with self._lock:
                    if not self._queue.empty():
                        continue
                    self._thread = None
                    return
            try:
                callback()
            except SystemExit:
                with self._lock:
                    self._thread = None
                return
            except Exception:  # noqa: BLE001 - a stranger's callback must not end the others'; it is reported
                kind, error, trace = sys.exc_info()
                if kind is not None:
                    threading.excepthook(threading.ExceptHookArgs((kind, error, trace, threading.current_thread())))
            del callback  # else the last one, and what it holds, would live until the next
