"""What importing the library brings along: a trainer forks, pins its own protobuf, and starts often."""

from __future__ import annotations

import subprocess
import sys


def test_the_import_is_light() -> None:
    code = "import proxyd_client, sys; print(*sorted(sys.modules))"
    loaded = set(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    )
    assert "proxyd_client.endpoint" in loaded
    assert "numpy" in loaded
    heavy = {"grpc", "google.protobuf", "uvloop", "asyncio", "torch", "pydantic", "rich", "xxhash"}
    slow = {"logging", "hashlib", "secrets", "ssl", "subprocess"}
    assert not loaded & (heavy | slow)
    assert {name for name in loaded if name.startswith("proxyd.")} == {
        "proxyd.wire",
        "proxyd.wire.arena",
        "proxyd.wire.auth",
        "proxyd.wire.client",
        "proxyd.wire.codec",
        "proxyd.wire.envelope",
        "proxyd.wire.phase",
        "proxyd.wire.values",
    }


def test_everything_public_is_there() -> None:
    import proxyd_client

    assert all(hasattr(proxyd_client, name) for name in proxyd_client.__all__)
