"""proxyd: green lights for training across data centers.

Kept free of imports: a trainer reaches ``proxyd.wire`` through this package and must not pay for a daemon.
"""

from __future__ import annotations

__version__ = "0.1.0"
