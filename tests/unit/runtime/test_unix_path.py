"""A live server's socket is left alone, a dead one's is replaced."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from proxyd.core.errors import ListenError
from proxyd.runtime.unix_path import UnixPathClaim


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.sock"


def test_a_free_path_is_claimed_and_released(path: Path) -> None:
    claim = UnixPathClaim(str(path))
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        claim.release()
    assert not path.exists()
    UnixPathClaim(str(path)).release()


def test_two_claims_on_one_path(path: Path) -> None:
    claim = UnixPathClaim(str(path))
    with pytest.raises(ListenError, match="in use: another process holds its lock"):
        UnixPathClaim(str(path))
    claim.release()


def test_a_live_server_without_a_lock_is_noticed(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen(1)
        with pytest.raises(ListenError, match="in use: a live server answers there"):
            UnixPathClaim(str(path))
    assert path.exists()


def test_a_stale_socket_is_removed(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    claim = UnixPathClaim(str(path))
    assert not path.exists()
    claim.release()


def test_a_file_is_not_removed(path: Path) -> None:
    path.write_text("precious")
    with pytest.raises(ListenError, match="no socket stands there"):
        UnixPathClaim(str(path))
    assert path.read_text() == "precious"


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(ListenError, match=r"none/a\.sock\.lock: No such file.*Create"):
        UnixPathClaim(str(tmp_path / "none" / "a.sock"))
