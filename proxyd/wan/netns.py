"""Linux namespaces without names: made with unshare, held by file descriptors, gone with the last holder.

``ip netns add`` would leave a name in /run/netns behind when its maker is killed; a descriptor can't.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from proxyd.wan.errors import WanError

CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000
PR_SET_PDEATHSIG = 1
PR_SET_TIMERSLACK = 29

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """Leave the namespaces in ``flags`` for new ones. Raises OSError."""
    _check(_libc.unshare(flags), "unshare")


def setns(fd: int, kind: int) -> None:
    """Enter the namespace behind ``fd``. Raises OSError."""
    _check(_libc.setns(fd, kind), "setns")


def prctl(option: int, value: int) -> None:
    """Set one attribute of this process. Raises OSError."""
    _check(_libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0), f"prctl({option}, {value})")


def enter_user_namespace() -> None:
    """Become root of a new user namespace that maps only the caller. Raises OSError; needs a single thread."""
    uid, gid = os.geteuid(), os.getegid()
    unshare(CLONE_NEWUSER)
    # Without "deny" the kernel refuses an unprivileged gid_map: dropping a group could open files to its members.
    Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
    Path("/proc/self/uid_map").write_text(f"0 {uid} 1", encoding="ascii")
    Path("/proc/self/gid_map").write_text(f"0 {gid} 1", encoding="ascii")


def open_own(kind: str) -> int:
    """A descriptor of this thread's ``net`` or ``user`` namespace."""
    return os.open(f"/proc/thread-self/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC)


def new_network_namespace() -> int:
    """Make a network namespace, enter it, and return its descriptor."""
    unshare(CLONE_NEWNET)
    return open_own("net")


@contextmanager
def inside(net_fd: int) -> Iterator[None]:
    """Run a block with this thread in another network namespace."""
    back = open_own("net")
    try:
        setns(net_fd, CLONE_NEWNET)
        yield
    finally:
        setns(back, CLONE_NEWNET)
        os.close(back)


def find_ip() -> str | None:
    """Path of iproute2's ``ip``; it is often in /usr/sbin, which is not on everybody's PATH."""
    return shutil.which("ip", path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"]))


def ip_batch(lines: Sequence[str], pass_fds: Sequence[int] = ()) -> None:
    """Run ``ip`` commands in this thread's network namespace; all or an error naming what ``ip`` said."""
    ip = find_ip()
    if ip is None:
        raise WanError("the `ip` command is missing; install iproute2")
    done = subprocess.run(
        [ip, "-batch", "-"],
        input="\n".join(lines) + "\n",
        text=True,
        capture_output=True,
        pass_fds=pass_fds,
        check=False,
    )
    if done.returncode != 0:
        raise WanError(f"`ip -batch` failed: {done.stderr.strip()} (the batch: {'; '.join(lines)})")


def write_sysctl(name: str, value: str, *, optional: bool = False) -> None:
    """Set ``net.…`` in this thread's network namespace (/proc/sys/net shows the reader's own).

    ``optional``: a key that this kernel does not have is passed over.
    """
    path = Path("/proc/sys") / name.replace(".", "/")
    try:
        path.write_text(value, encoding="ascii")
    except FileNotFoundError as error:
        if not optional:
            raise WanError(f"this kernel has no sysctl {name}") from error
    except OSError as error:
        raise WanError(f"cannot set sysctl {name} = {value}: {error.strerror}; is /proc/sys writable here?") from error


def processes_inside(net_fds: Sequence[int]) -> list[int]:
    """Process ids, in this pid namespace, whose network namespace is one of ``net_fds``; not the caller."""
    wanted = {(os.fstat(fd).st_dev, os.fstat(fd).st_ino) for fd in net_fds}
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            status = os.stat(f"/proc/{entry}/ns/net")
        except OSError:
            continue  # it ended, is a zombie, or belongs to somebody else: then it can't be in our namespaces
        if (status.st_dev, status.st_ino) in wanted:
            found.append(int(entry))
    return found
