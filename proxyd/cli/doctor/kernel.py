"""The kernel's settings: what a high bandwidth-delay product needs of TCP, with the arithmetic.

A stream moves at most its usable buffer per round trip, and the kernel's bookkeeping takes up to half of a buffer
(docs/configuration.md, deploy/sysctl/90-proxyd.conf). So for a link of bandwidth-delay product B and a limit of M bytes
per buffer, ``ceil(B / (M / 2))`` streams are needed to fill it.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence

from proxyd.cli.doctor.findings import Finding, fail, ok, skip, warn
from proxyd.cli.doctor.subject import LinkPath, Subject
from proxyd.core.units import format_rate, format_size

DROP_IN = "/etc/sysctl.d/90-proxyd.conf"
SHIPPED_BUFFER_BYTES = 64 << 20
"""What deploy/sysctl/90-proxyd.conf sets."""
MODEST_BUFFER_BYTES = 16 << 20
"""Below it, and with no link known to judge by, the limit is named as one."""
MANY_STREAMS = 8
"""More than this for one peer works, with more state, more cold windows and less even sharing."""
MAX_STREAMS = 64
"""The most that an agent opens by itself (proxyd.core.peering)."""
WANTED_STREAMS = 4
"""What the suggested limit is made for."""
OLDEST_KERNEL = (5, 3)
"""pidfd_open, by which an agent notices the end of a trainer."""
PAYLOAD_ELSEWHERE = "only a coordinator is configured here: payload doesn't pass this host"
SHAPERS = ("tbf", "htb", "hfsc", "cake", "netem", "cbq")


def _sysctl(subject: Subject, name: str) -> str | None:
    return subject.read(f"/proc/sys/{name.replace('.', '/')}")


def persistent(setting: str) -> str:
    """A command that sets a sysctl now and for the next boot."""
    return f"echo '{setting}' | sudo tee -a {DROP_IN} && sudo sysctl -p {DROP_IN}"


def kernel(subject: Subject) -> list[Finding]:
    """Is it new enough?"""
    release = platform.release()
    match = re.match(r"(\d+)\.(\d+)", release)
    if platform.system() != "Linux" or match is None:
        return [fail("kernel", f"{platform.system()} {release}: proxyd needs Linux", "Run it on a Linux host")]
    version = int(match[1]), int(match[2])
    if version < OLDEST_KERNEL:
        need = ".".join(map(str, OLDEST_KERNEL))
        return [fail("kernel", f"Linux {release}; {need} is the oldest that works", "Install a newer kernel")]
    note = "" if version >= (6, 5) else "; from 6.5 on the end of trainers in other pid namespaces is noticed too"
    return [ok("kernel", f"Linux {release}{note}")]


def switches(subject: Subject) -> list[Finding]:
    """Settings of TCP that are on or off."""
    if not subject.carries_payload:
        return [skip("sysctl tcp", PAYLOAD_ELSEWHERE)]
    return [
        _switch(
            subject,
            "net.ipv4.tcp_slow_start_after_idle",
            "0",
            warn,
            "the kernel forgets a connection's window in each pause, and slots begin after pauses: a slot then starts"
            " at ten packets, and bursts take up to twice as long",
        ),
        _switch(
            subject,
            "net.ipv4.tcp_mtu_probing",
            "12",
            warn,
            "a path whose MTU is smaller than it says, with ICMP filtered, loses every full packet: handshakes pass and"
            " tensors stop",
        ),
        _switch(
            subject,
            "net.ipv4.tcp_window_scaling",
            "1",
            fail,
            "a window of at most 64 KiB: 8.7 Mbit/s a stream at 60 ms",
        ),
        _switch(subject, "net.ipv4.tcp_sack", "1", warn, "after a loss TCP sends again what has arrived"),
        _switch(subject, "net.ipv4.tcp_timestamps", "1", warn, "round trips are measured once per window only"),
    ]


def _switch(subject: Subject, name: str, wanted: str, bad: Callable[[str, str, str], Finding], why: str) -> Finding:
    label = f"sysctl {name.removeprefix('net.ipv4.')}"
    value = _sysctl(subject, name)
    if value is None:
        return skip(label, f"{name} can't be read in this network namespace")
    if value in wanted:
        return ok(label, f"{name} = {value}")
    return bad(label, f"{name} = {value}: {why}", persistent(f"{name} = {wanted[0]}"))


def streams_needed(bdp_bytes: int, limit_bytes: int) -> int:
    """How many streams of this buffer limit hold a bandwidth-delay product."""
    return max(1, -(-bdp_bytes // max(1, limit_bytes // 2)))


def wanted_limit_bytes(bdp_bytes: int) -> int:
    """A buffer limit by which :data:`WANTED_STREAMS` streams are enough: a power of two, at least the shipped one."""
    need = 2 * -(-bdp_bytes // WANTED_STREAMS)
    return max(SHIPPED_BUFFER_BYTES, 1 << max(0, need - 1).bit_length())


def buffers(subject: Subject, paths: Sequence[LinkPath]) -> list[Finding]:
    """Do TCP's buffer limits hold the links' bandwidth-delay products?"""
    if not subject.carries_payload:
        return [skip("sysctl tcp buffers", PAYLOAD_ELSEWHERE)]
    found = [_buffer(subject, name, paths) for name in ("net.ipv4.tcp_wmem", "net.ipv4.tcp_rmem")]
    found.append(_all_of_tcp(subject, paths))
    return found


def _buffer(subject: Subject, name: str, paths: Sequence[LinkPath]) -> Finding:
    label = f"sysctl {name.removeprefix('net.ipv4.')}"
    value = _sysctl(subject, name)
    values = (value or "").split()
    if len(values) != 3 or not all(one.isdigit() for one in values):
        return skip(label, f"{name} can't be read in this network namespace")
    least, usual, most = map(int, values)
    usable = most // 2
    arithmetic = f"at most {format_size(most)} a stream, of which half ({format_size(usable)}) is payload"
    if not paths:
        at_60_ms = format_rate(usable * 1000 // 60)
        text = f"{arithmetic}: {format_size(usable)} / 60 ms = {at_60_ms} a stream; no link is known to judge it by"
        if most >= MODEST_BUFFER_BYTES:
            return ok(label, text)
        fix = persistent(f"{name} = {least} {usual} {SHIPPED_BUFFER_BYTES}")
        return warn(label, f"{text} (give one: --rate 4Gbit --rtt 60ms)", fix)
    path = max(paths, key=lambda one: one.bdp_bytes)
    streams = streams_needed(path.bdp_bytes, most)
    text = (
        f"{path}: BDP = {format_rate(path.rate_bytes_per_s)} / 8 x {path.rtt_ns / 1e6:g} ms ="
        f" {format_size(path.bdp_bytes)}; {arithmetic}: {streams} {'stream' if streams == 1 else 'streams'} to fill it"
    )
    fix = persistent(f"{name} = {least} {usual} {wanted_limit_bytes(path.bdp_bytes)}")
    if streams > MAX_STREAMS:
        return fail(label, f"{text}, and an agent opens at most {MAX_STREAMS}", fix)
    return warn(label, text, fix) if streams > MANY_STREAMS else ok(label, text)


def _all_of_tcp(subject: Subject, paths: Sequence[LinkPath]) -> Finding:
    label = "sysctl tcp_mem"
    values = (_sysctl(subject, "net.ipv4.tcp_mem") or "").split()
    if len(values) != 3 or not all(one.isdigit() for one in values):
        return skip(label, "net.ipv4.tcp_mem can't be read here; it is the host's, not the network namespace's")
    page = os.sysconf("SC_PAGESIZE")
    pressure, most = int(values[1]) * page, int(values[2]) * page
    need = 2 * sum(path.bdp_bytes for path in paths)
    text = f"all of TCP may take {format_size(most)}, and shrinks its windows from {format_size(pressure)} on"
    if need > pressure:
        pages = -(-2 * need // page)
        fix = persistent(f"net.ipv4.tcp_mem = {pages // 2} {pages} {2 * pages}")
        return warn(label, f"{text}; twice the BDP of all links is {format_size(need)}", fix)
    return ok(label, text)


def backlog(subject: Subject) -> list[Finding]:
    """Who comes in a burst, and tables that run full."""
    found = []
    value = _sysctl(subject, "net.core.somaxconn")
    if value is None:
        found.append(skip("sysctl somaxconn", "net.core.somaxconn can't be read in this network namespace"))
    elif int(value) < 1024:
        text = f"net.core.somaxconn = {value}: when hundreds of agents come back at once, SYNs are dropped for a second"
        found.append(warn("sysctl somaxconn", text, persistent("net.core.somaxconn = 4096")))
    else:
        found.append(ok("sysctl somaxconn", f"net.core.somaxconn = {value}"))
    used = _sysctl(subject, "net.netfilter.nf_conntrack_count")
    most = _sysctl(subject, "net.netfilter.nf_conntrack_max")
    if used is None or most is None:
        found.append(skip("conntrack", "connection tracking isn't loaded here"))
    elif int(used) * 5 > int(most) * 4:
        text = f"{used} of {most} entries are taken; at the end new connections are dropped without a word"
        found.append(warn("conntrack", text, persistent(f"net.netfilter.nf_conntrack_max = {4 * int(most)}")))
    else:
        found.append(ok("conntrack", f"{used} of {most} entries are taken"))
    return found


def congestion_control(subject: Subject) -> list[Finding]:
    """Which algorithm the agent's streams get."""
    name = "congestion control"
    if not subject.carries_payload:
        return [skip(name, PAYLOAD_ELSEWHERE)]
    available = (_sysctl(subject, "net.ipv4.tcp_available_congestion_control") or "").split()
    allowed = (_sysctl(subject, "net.ipv4.tcp_allowed_congestion_control") or "").split()
    idle = _sysctl(subject, "net.ipv4.tcp_slow_start_after_idle") or "1"
    if not available:
        return [skip(name, "net.ipv4.tcp_available_congestion_control can't be read in this network namespace")]
    from proxyd.agent.tcp import choose_congestion_control

    configured = "auto" if subject.agent is None else subject.agent.congestion_control
    chosen = choose_congestion_control(configured, idle, " ".join(available))
    text = f'congestion_control = "{configured}" gives {chosen or "the default"}; available: {" ".join(available)}'
    if chosen and chosen not in available:
        fix = f"sudo modprobe tcp_{chosen} && echo tcp_{chosen} | sudo tee /etc/modules-load.d/proxyd.conf"
        return [fail(name, f"{chosen} is configured and the kernel hasn't loaded it ({' '.join(available)})", fix)]
    if chosen and chosen not in allowed:
        both = " ".join(dict.fromkeys([*allowed, chosen]))
        fix = persistent(f"net.ipv4.tcp_allowed_congestion_control = {both}")
        return [warn(name, f"{text}; an agent without root may use only {' '.join(allowed)}", fix)]
    return [ok(name, text)]


def qdisc(subject: Subject) -> list[Finding]:
    """What stands in front of the interfaces: the agent paces by itself, a shaper below it would queue again."""
    name = "qdisc"
    if not subject.carries_payload:
        return [skip(name, PAYLOAD_ELSEWHERE)]
    program = shutil.which("tc", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    default = _sysctl(subject, "net.core.default_qdisc") or "?"
    if program is None:
        return [skip(name, "the command tc is not here: sudo apt install iproute2")]
    try:
        shown = subprocess.run(
            [program, "qdisc", "show"], capture_output=True, text=True, timeout=subject.connect_s, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return [skip(name, f"tc qdisc show did not answer: {error}")]
    roots = re.findall(r"^qdisc (\S+) \S+ dev (\S+) root", shown, re.MULTILINE)
    roots = [(kind, device) for kind, device in roots if device != "lo"]
    shapers = [(kind, device) for kind, device in roots if kind in SHAPERS]
    told = ", ".join(f"{device}: {kind}" for kind, device in roots) or "only lo"
    if shapers:
        kind, device = shapers[0]
        text = f"{device} has {kind}: what it holds back is a queue that grants don't know of"
        return [warn(name, text, f"If it isn't meant: sudo tc qdisc replace dev {device} root fq")]
    return [ok(name, f"{told}; default {default}. TCP paces by itself, with fq and without")]
