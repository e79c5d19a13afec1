"""Nothing stays: after close, after the death of any part, and without root."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import proxyd.wan
from proxyd.wan import LinkSpec, Wan, WanError, available
from proxyd.wan.topology import module_environment

REASON = available()
pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(REASON is not None and os.environ.get("CI") != "true", reason=f"no emulated WAN: {REASON}"),
]

SPEC = LinkSpec(25_000_000, None, 1_000_000, 200_000)
LINKS = {("a", "b"): SPEC, ("b", "a"): SPEC}

# Builds a WAN, starts a process on a host that itself starts one that detaches from it, and says the pids.
PARENT = """
import json, subprocess, sys, time
from proxyd.wan import LinkSpec, Wan
spec = LinkSpec(25_000_000, None, 1_000_000, 200_000)
wan = Wan({"a": 2, "b": 1}, {("a", "b"): spec, ("b", "a"): spec})
script = '''
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(child.pid, flush=True)
time.sleep(600)
'''
process = wan.host("a", 0).popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
print(json.dumps([process.pid, int(process.stdout.readline()), wan.keeper_pid, wan.emulator_pid]), flush=True)
time.sleep(600)
"""


def network_namespaces() -> set[tuple[int, int]]:
    """Those that some process on this machine is in."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*/ns/net"):
        try:
            status = entry.stat()
        except OSError:
            continue
        found.add((status.st_dev, status.st_ino))
    return found


def namespaces_of(pids: list[int]) -> set[tuple[int, int]]:
    statuses = [os.stat(f"/proc/{pid}/ns/net") for pid in pids]
    return {(status.st_dev, status.st_ino) for status in statuses}


def interfaces() -> set[str]:
    return {line.split(":")[0].strip() for line in Path("/proc/net/dev").read_text().splitlines()[2:]}


def all_end(pids: list[int], timeout_s: float = 10.0) -> list[int]:
    """Those of ``pids`` that still run after the timeout. Zombies that nobody has reaped yet count as ended."""
    fds = {}
    for pid in pids:
        try:
            fds[os.pidfd_open(pid)] = pid
        except ProcessLookupError:
            continue
    deadline = time.monotonic() + timeout_s
    while fds and time.monotonic() < deadline:
        for fd in select.select(list(fds), [], [], 0.5)[0]:
            os.close(fd)
            del fds[fd]
    return list(fds.values())


def run_parent(**options: object) -> tuple[subprocess.Popen[str], list[int]]:
    parent = subprocess.Popen(  # type: ignore[call-overload]
        [sys.executable, "-c", PARENT], env=module_environment(), stdout=subprocess.PIPE, text=True, **options
    )
    line = parent.stdout.readline()
    assert line, f"the parent ended with {parent.wait()}"
    return parent, [int(pid) for pid in line.strip("[]\n").split(",")]


def test_a_killed_parent_leaves_no_process_namespace_or_interface() -> None:
    before = interfaces()
    names_before = set(Path("/run/netns").glob("*"))
    parent, pids = run_parent()
    ours = namespaces_of(pids) - namespaces_of([os.getpid()])
    assert ours
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert all_end(pids) == []
    assert ours & network_namespaces() == set()
    assert interfaces() == before
    assert set(Path("/run/netns").glob("*")) == names_before


def test_close_kills_detached_grandchildren_too() -> None:
    with Wan({"a": 1, "b": 1}, LINKS) as wan:
        script = "import subprocess; print(subprocess.Popen(['sleep', '600'], start_new_session=True).pid, flush=True)"
        process = wan.host("a", 0).popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        grandchild = int(process.stdout.readline())
        assert process.wait(timeout=30) == 0
        pids = [grandchild, wan.keeper_pid, wan.emulator_pid]
        os.kill(grandchild, 0)
    assert all_end(pids) == []
    wan.close()


def test_a_killed_keeper_is_noticed_and_takes_the_emulator_with_it() -> None:
    with Wan({"a": 1, "b": 1}, LINKS) as wan:
        emulator = wan.emulator_pid
        os.kill(wan.keeper_pid, signal.SIGKILL)
        assert all_end([emulator]) == []
        with pytest.raises(WanError, match="ended"):
            wan.counters()


def test_a_killed_emulator_is_noticed() -> None:
    with Wan({"a": 1, "b": 1}, LINKS) as wan:
        os.kill(wan.emulator_pid, signal.SIGKILL)
        assert all_end([wan.emulator_pid]) == []
        with pytest.raises(WanError, match="emulator process ended"):
            wan.counters()


def test_a_trace_that_cannot_be_read_is_noticed(tmp_path: Path) -> None:
    spec = LinkSpec(None, tmp_path / "missing", 1_000_000, 200_000)
    with pytest.raises(WanError, match="missing"):
        Wan({"a": 1, "b": 1}, {("a", "b"): spec})


def test_host_processes_survive_the_thread_that_started_them() -> None:
    import threading

    with Wan({"a": 1, "b": 1}, LINKS) as wan:
        started: list[subprocess.Popen[str]] = []
        thread = threading.Thread(
            target=lambda: started.append(
                wan.host("a", 0).popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
        )
        thread.start()
        thread.join()
        out, _ = started[0].communicate("still here", timeout=30)
        assert out == "still here"


# What an ordinary user does: build, send with a congestion control of choice, set a sysctl, leave nothing.
ORDINARY = """
import os, sys
from proxyd.wan import LinkSpec, Wan, available
assert available() is None, available()
spec = LinkSpec(25_000_000, None, 10_000_000, 200_000)
with Wan({"a": 1, "b": 1}, {("a", "b"): spec, ("b", "a"): spec}) as wan:
    assert wan.user_fd is not None
    server = wan.host("b", 0).popen([sys.executable, "-c", '''
import socket
s = socket.create_server(("0.0.0.0", 5001)); print("up", flush=True)
c, _ = s.accept()
n = 0
while d := c.recv(1 << 20): n += len(d)
print(n)
'''], stdout=-1, text=True)
    server.stdout.readline()
    wan.host("a", 0).run([sys.executable, "-c", f'''
import socket
s = socket.socket(); s.setsockopt(6, socket.TCP_CONGESTION, b"cubic"); s.connect(("{wan.host("b", 0).address}", 5001))
s.sendall(bytes(5_000_000))
'''])
    assert server.stdout.read() == "5000000\\n"
    wan.set_slow_start_after_idle(False)
    sleeper = wan.host("a", 0).popen(["sleep", "600"])
assert sleeper.wait() == -9
print("done as", os.geteuid())
"""


def run_shell(shell: str) -> subprocess.CompletedProcess[str]:
    """In a mount namespace of its own: what it mounts is gone with it."""
    return subprocess.run(
        ["unshare", "-m", "sh", "-ec", shell],
        env={**module_environment(), "SCRIPT": ORDINARY},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="gives up root's privileges, so it must have them")
def test_as_an_ordinary_user() -> None:
    """As nobody, with a /dev/net/tun that is open to all, as most distributions have it."""
    package = Path(proxyd.wan.__file__).parents[1]
    python = Path(sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}")
    done = run_shell(
        "mount -t tmpfs -o mode=755 none /dev/net; mknod -m 666 /dev/net/tun c 10 200; "
        # Copies in the open: this checkout and this interpreter may lie where only root can look.
        f"mkdir /dev/net/code /dev/net/python; cp -r {package} /dev/net/code/proxyd; chmod -R a+rX /dev/net/code; "
        f"mount --bind {sys.base_prefix} /dev/net/python; cd /; "
        "export PYTHONPATH=/dev/net/code LD_LIBRARY_PATH=/dev/net/python/lib; "
        "exec setpriv --reuid 65534 --regid 65534 --clear-groups --inh-caps=-all "
        f'/dev/net/python/bin/{python.name} -c "$SCRIPT"'
    )
    assert done.stdout.strip() == "done as 65534", done.stderr
