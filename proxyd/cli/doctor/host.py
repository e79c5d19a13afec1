"""Limits of the host and the process, the clock, and the Python packages."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import resource
import sys
import time
from importlib import metadata

from proxyd.cli.doctor.findings import Finding, fail, ok, skip, warn
from proxyd.cli.doctor.kernel import persistent
from proxyd.cli.doctor.subject import Subject
from proxyd.core.units import format_duration, format_size

OLDEST_PYTHON = (3, 11)
TOO_NEW_PYTHON = (3, 14)
PACKAGES = {"grpcio": (1, 76), "protobuf": (6, 31), "pydantic": (2, 7), "uvloop": (0, 19), "rich": (13, 7)}
"""What daemons and this command line need, and since which version."""
FEW_DESCRIPTORS = 4096
WANTED_DESCRIPTORS = 65536
"""LimitNOFILE of the unit files."""
SMALL_SHM_BYTES = 1 << 30
UNSURE_CLOCK_US = 1_000_000
STEP_NS = 5_000_000
LOOK_S = 0.5
_TIME_ERROR = 5
_STA_UNSYNC = 0x0040
_SLOW_CLOCKS = ("hpet", "acpi_pm", "jiffies", "pit")


def python(subject: Subject) -> list[Finding]:
    """Versions of the interpreter and of what the daemons stand on."""
    version = platform.python_version()
    if not OLDEST_PYTHON <= sys.version_info[:2] < TOO_NEW_PYTHON:
        found = [fail("python", f"{version}; 3.11, 3.12 and 3.13 are supported", "python3.12 -m venv /opt/proxyd")]
    else:
        found = [ok("python", f"{version} at {sys.executable}")]
    for package, least in PACKAGES.items():
        name = f"package {package}"
        need = ".".join(map(str, least))
        try:
            have = metadata.version(package)
        except metadata.PackageNotFoundError:
            found.append(fail(name, f"not installed; {need} or later is needed", "pip install 'proxyd[daemon]'"))
            continue
        if _version(have) < least:
            found.append(fail(name, f"{have}; {need} or later is needed", f"pip install -U '{package}>={need}'"))
        else:
            found.append(ok(name, have))
    return found


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2])


def descriptors(subject: Subject) -> list[Finding]:
    """Open files: a socket, a pidfd and two arenas for each trainer, a socket for each stream of each peer."""
    name = "open files"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    have = sys.maxsize if hard == unlimited else hard
    trainers = "any number of" if hard == unlimited else str(have // 8)
    text = f"hard limit {'none' if hard == unlimited else hard} (soft {soft}; daemons take all): {trainers} trainers"
    found = []
    if have < FEW_DESCRIPTORS:
        fix = f"systemd: LimitNOFILE={WANTED_DESCRIPTORS} in the unit; by hand: ulimit -Hn {WANTED_DESCRIPTORS}"
        found.append(warn(name, f"{text}. A peer takes one per stream besides", fix))
    else:
        found.append(ok(name, text))
    used = (subject.read("/proc/sys/fs/file-nr") or "").split()
    if len(used) == 3 and int(used[0]) * 10 > int(used[2]) * 9:
        text = f"{used[0]} of the host's {used[2]} open files are in use"
        found.append(warn("open files of the host", text, persistent(f"fs.file-max = {4 * int(used[2])}")))
    return found


def memlock(subject: Subject) -> list[Finding]:
    """Locked memory: proxyd locks none, what trainers do beside it may."""
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    shown = "unlimited" if hard == resource.RLIM_INFINITY else format_size(hard)
    return [ok("locked memory", f"limit {shown}. proxyd locks none; trainers that use RDMA want it unlimited")]


def memory(subject: Subject) -> list[Finding]:
    """Do the arenas fit into this host, and into the daemon's control group?"""
    name = "memory"
    lines = dict(re.findall(r"^(\w+):\s+(\d+) kB", subject.read("/proc/meminfo") or "", re.MULTILINE))
    if "MemTotal" not in lines:
        return [skip(name, "/proc/meminfo can't be read")]
    total = int(lines["MemTotal"]) << 10
    limit = subject.read("/sys/fs/cgroup/memory.max")
    if limit is not None and limit.isdigit():
        total = min(total, int(limit))
    text = f"{format_size(total)} here"
    if subject.agent is None:
        return [ok(name, f"{text}; no agent is configured whose arenas would need some")]
    wanted = subject.agent.memory_bytes
    text = f"arenas may take {format_size(wanted)} of {format_size(total)}"
    if wanted > total:
        fix = f'memory = "{max(1, total // 2 >> 20)}MiB" in [agent], or a larger control group'
        return [fail(name, f"{text}: when they do, the kernel ends processes", fix)]
    if 2 * wanted > total:
        fix = f'memory = "{max(1, total // 4 >> 20)}MiB" in [agent], if trainers need the rest'
        return [warn(name, f"{text}: trainers have what is left", fix)]
    return [ok(name, text)]


def shared_memory(subject: Subject) -> list[Finding]:
    """``/dev/shm``: arenas are no files there, but PyTorch's data loaders put theirs into it."""
    name = "/dev/shm"
    try:
        status = os.statvfs("/dev/shm")
    except OSError as error:
        fix = "sudo mount -t tmpfs -o size=8g tmpfs /dev/shm"
        return [warn(name, f"{error.strerror}; PyTorch's DataLoader workers need it", fix)]
    size, free = status.f_frsize * status.f_blocks, status.f_frsize * status.f_bavail
    text = f"{format_size(free)} of {format_size(size)} free. Arenas are not in it (memfd)"
    if size < SMALL_SHM_BYTES:
        fix = "Docker: --shm-size=8g; Kubernetes: an emptyDir with medium: Memory at /dev/shm"
        return [warn(name, f"{text}, PyTorch's DataLoader workers are: they die of SIGBUS when it is full", fix)]
    if free * 20 < size:
        return [warn(name, f"{text}, PyTorch's DataLoader workers are", "ls -lS /dev/shm; remove what nobody uses")]
    return [ok(name, text)]


class _Timex(ctypes.Structure):
    """struct timex of adjtimex(2), as far as it is read here."""

    _fields_ = [
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_long * 40),
    ]


def clock(subject: Subject) -> list[Finding]:
    """Is the wall clock kept, and does it step? Daemons time by a clock that doesn't; certificates, epochs, calendars
    and logs go by this one."""
    before_ns = time.time_ns() - time.monotonic_ns()
    found = [_synchronized()]
    time.sleep(min(LOOK_S, subject.timeout_s / 4))
    step_ns = time.time_ns() - time.monotonic_ns() - before_ns
    if abs(step_ns) > STEP_NS:
        text = f"it stepped by {format_duration(abs(step_ns))} while it was looked at"
        fix = "chronyc tracking; let one program alone set the clock, and slew it (chrony: makestep 1 3)"
        found.append(warn("clock steps", text, fix))
    else:
        found.append(ok("clock steps", f"none within {LOOK_S:g} s"))
    source = subject.read("/sys/devices/system/clocksource/clocksource0/current_clocksource")
    if source is None:
        found.append(skip("clock source", "/sys doesn't show it"))
    elif source in _SLOW_CLOCKS:
        text = f"{source}: reading it is a slow system call, and agents read it for each chunk"
        fix = "Boot with clocksource=tsc if the CPU's TSC is stable: dmesg | grep -i tsc"
        found.append(warn("clock source", text, fix))
    else:
        found.append(ok("clock source", source))
    return found


def _synchronized() -> Finding:
    name = "clock"
    timex = _Timex()
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(timex))
    except (OSError, AttributeError) as error:
        return skip(name, f"adjtimex can't be asked: {error}")
    if state < 0:
        return skip(name, f"adjtimex is not allowed here: {os.strerror(ctypes.get_errno())}")
    if state == _TIME_ERROR or timex.status & _STA_UNSYNC:
        fix = "sudo apt install chrony && sudo systemctl enable --now chrony; chronyc tracking"
        text = "nobody keeps it in step (the kernel says: unsynchronized). Certificates and calendars go by it"
        return warn(name, text, fix)
    error_us = timex.maxerror
    if error_us > UNSURE_CLOCK_US:
        return warn(name, f"it may be {error_us / 1e6:.1f} s off", "chronyc tracking; chronyc sources")
    return ok(name, f"synchronized, at most {error_us / 1000:.1f} ms off")
