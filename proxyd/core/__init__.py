"""The pure core: events in, effects out, time passed in as ``now_ns``.

Nothing below this package reads a clock, a socket, a file or the environment, so that the daemons and the simulator
run the very same machines. import-linter holds that in CI.
"""

from __future__ import annotations
