"""Ports, reach and MTU: who listens where, who answers, and how large a packet may be."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import grp
import os
import pwd
import shlex
import socket
import stat
import struct
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from proxyd.cli.doctor.findings import Finding, Task, fail, ok, skip, warn
from proxyd.cli.doctor.kernel import persistent
from proxyd.cli.doctor.subject import Subject
from proxyd.core.units import format_duration

if TYPE_CHECKING:
    from proxyd.runtime.addresses import Address

_SIOCGIFMTU = 0x8921
_LISTEN = "0A"
_JUMBO = 1500


class Owner(NamedTuple):
    """Who holds a listening port."""

    uid: int
    pid: int
    """0: it isn't shown to this user."""
    command: str

    @property
    def is_ours(self) -> bool:
        return "proxyd" in self.command and ("agent" in self.command or "coordinator" in self.command)

    def __str__(self) -> str:
        if not self.pid:
            return f"a process of uid {self.uid} (sudo proxyd doctor says which)"
        return f"pid {self.pid} ({self.command.strip()[:80] or 'without a name'})"


def listening_owner(subject: Subject, port: int) -> Owner | None:
    """Who listens on a TCP port of this network namespace; None: nobody."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in (subject.read(table) or "").splitlines()[1:]:
            parts = line.split()
            if len(parts) > 9 and parts[3] == _LISTEN and int(parts[1].rpartition(":")[2], 16) == port:
                pid = _pid_of_inode(parts[9])
                return Owner(int(parts[7]), pid, _command(pid) if pid else "")
    return None


def _pid_of_inode(inode: str) -> int:
    wanted = f"socket:[{inode}]"
    for link in glob.iglob("/proc/[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if os.readlink(link) == wanted:
                return int(link.split("/")[2])
    return 0


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def ports(subject: Subject) -> list[Finding]:
    """Everything that this host's daemons listen on: free, theirs, or taken by somebody else."""
    found: list[Finding] = []
    if (agent := subject.agent) is not None:
        found.append(_port(subject, "data_listen", agent.data_listen_address))
        if agent.gateway_listen_address is not None:
            found.append(_port(subject, "gateway_listen", agent.gateway_listen_address))
        found.append(_port(subject, "agent metrics", agent.metrics_address))
    if (coordinator := subject.coordinator) is not None:
        found += [_port(subject, "listen", one) for one in coordinator.listen_addresses if not one.is_unix]
        found.append(_port(subject, "coordinator metrics", coordinator.metrics_address))
    return found or [skip("ports", "no configuration, so no addresses are known")]


def _port(subject: Subject, key: str, address: Address | None) -> Finding:
    name = f"port of {key}"
    if address is None:
        return skip(name, "it is off")
    if address.is_fd or not address.port:
        return skip(name, f"{address}: the port is chosen when the daemon starts")
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, where = found[0]
        with socket.socket(family, kind, protocol) as probe:
            # As the daemons do: a port whose last connections linger is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
            probe.listen(1)
    except OSError as error:
        return _taken(subject, name, address, error)
    return ok(name, f"{address} is free: nothing listens there now")


def _taken(subject: Subject, name: str, address: Address, error: OSError) -> Finding:
    if error.errno == errno.EADDRNOTAVAIL:
        fix = f"ip -br address; then correct it, or listen on 0.0.0.0:{address.port} and say what peers dial"
        return fail(name, f"{address.host} is no address of this host", fix)
    if error.errno == errno.EACCES:
        fix = persistent(f"net.ipv4.ip_unprivileged_port_start = {address.port}")
        return fail(name, f"{address}: ports below 1024 are not for this user", fix)
    if error.errno != errno.EADDRINUSE:
        return fail(name, f"{address}: {error.strerror or error}", "Correct the address")
    owner = listening_owner(subject, address.port)
    if owner is None:
        return warn(name, f"{address} is in use, and nobody is seen listening", f"ss -tanp | grep :{address.port}")
    if owner.is_ours:
        return ok(name, f"{address} is ours: {owner}")
    if not owner.pid:
        return warn(name, f"{address} is held by {owner}", f"sudo ss -tlnp 'sport = :{address.port}'")
    return fail(name, f"{address} is taken by {owner}", f"Stop it (sudo kill {owner.pid}), or choose another port")


def local_socket(subject: Subject) -> list[Finding]:
    """The socket that trainers connect to."""
    path = socket_path(subject)
    if path is None:
        return [skip("agent socket", "no agent is configured and PROXYD_SOCKET is not set")]
    return [socket_finding(path, subject.connect_s)]


def socket_path(subject: Subject) -> str | None:
    return os.environ.get("PROXYD_SOCKET") or (None if subject.agent is None else subject.agent.socket)


def socket_finding(path: str, timeout_s: float) -> Finding:
    """Who answers at an agent's socket, or why nobody does."""
    name = "agent socket"
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(timeout_s)
            probe.connect(path)
            return _greeting(name, path, probe)
    except OSError as error:
        return _no_socket(name, path, error)


def _no_socket(name: str, path: str, error: OSError) -> Finding:
    quoted = shlex.quote(path)
    if isinstance(error, FileNotFoundError):
        text = f"{path} is not there: no agent runs with this configuration"
        return warn(name, text, "sudo systemctl start proxyd-agent; journalctl -u proxyd-agent")
    if isinstance(error, ConnectionRefusedError):
        text = f"{path}: nobody listens; an agent that was killed has left it"
        return warn(name, text, "sudo systemctl restart proxyd-agent; journalctl -u proxyd-agent")
    if isinstance(error, PermissionError):
        return fail(name, f"{path}: {_why_not(path)}", _how_to_join(path))
    if isinstance(error, TimeoutError):
        return fail(name, f"{path}: it accepts nobody; the agent hangs", "sudo systemctl restart proxyd-agent")
    return fail(name, f"{path}: {error.strerror or error}", f"ls -l {quoted}")


def _why_not(path: str) -> str:
    me = f"uid {os.getuid()}"
    try:
        status = os.stat(path)
    except OSError:
        return f"{me} may not look into {Path(path).parent}"
    mode = stat.S_IMODE(status.st_mode)
    return f"it is {mode:04o} of uid {status.st_uid}, gid {status.st_gid}, and {me} is neither owner nor in that group"


def _how_to_join(path: str) -> str:
    try:
        group = grp.getgrgid(os.stat(path).st_gid).gr_name
        user = pwd.getpwuid(os.getuid()).pw_name
    except (OSError, KeyError):
        return f"ls -ld {shlex.quote(str(Path(path).parent))}; the directory must be 0755 for trainers"
    return f"sudo usermod -aG {group} {user}, and log in again (newgrp {group} for this shell)"


def _greeting(name: str, path: str, probe: socket.socket) -> Finding:
    """The agent speaks first; its version must be the client's."""
    from proxyd.wire import client as wire

    decoder = wire.Decoder(allow_payload=False)
    decoder.feed(probe.recv(4096))
    item = decoder.next_frame()
    if item is None or not isinstance(item[0], wire.Challenge):
        return fail(name, f"{path}: what listens there is no proxyd agent", f"sudo ss -xlp src {shlex.quote(path)}")
    pid = int.from_bytes(probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)[:4], "little")
    if item[0].version != wire.PROTOCOL_VERSION:
        text = (
            f"{path}: the agent (pid {pid}) speaks version {item[0].version}, this installation {wire.PROTOCOL_VERSION}"
        )
        return fail(name, text, "Install one version of proxyd for agent and trainers, and restart the agent")
    return ok(name, f"{path} answers (pid {pid}, protocol version {item[0].version})")


def namespace(subject: Subject) -> list[Finding]:
    """Sysctls, interfaces and routes are of one network namespace: are they the agent's that are looked at here?"""
    name = "network namespace"
    path = socket_path(subject)
    pid = 0 if path is None else listener(path, subject.connect_s)
    if not pid:
        return [skip(name, "no agent answers here whose namespace could be another one")]
    if foreign_namespace(pid):
        text = f"the agent (pid {pid}) is in another one: what is said here of sysctls, MTU, ports and reach isn't its"
        return [warn(name, text, f"sudo nsenter --net --target {pid} proxyd doctor")]
    return [ok(name, f"the agent's (pid {pid})")]


def foreign_namespace(pid: int) -> bool:
    """Whether a process is in another network namespace than we are. False where that can't be seen."""
    try:
        return os.readlink(f"/proc/{pid}/ns/net") != os.readlink("/proc/self/ns/net")
    except OSError:
        return False


def listener(path: str, timeout_s: float) -> int:
    """The process that listens on a Unix socket; 0: none does, or not for us."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(timeout_s)
            probe.connect(path)
            return int.from_bytes(probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)[:4], "little")
    except OSError:
        return 0


def coordinator_tasks(subject: Subject) -> list[Task]:
    """Does each coordinator that the agent is configured with answer?"""
    addresses: list[str] = list(() if subject.agent is None else subject.agent.coordinators)
    if subject.agent is None and subject.coordinator is not None:
        addresses = [str(_to_dial(one)) for one in subject.coordinator.listen_addresses[:1]]
    if subject.coordinator_address is not None and subject.coordinator_address not in addresses:
        addresses.append(subject.coordinator_address)
    if not addresses:
        name = "reach coordinator"
        return [(name, lambda: [skip(name, "none is configured; give one with --coordinator")])]
    return [(f"reach coordinator {one}", partial(_coordinator, subject, one)) for one in addresses]


def _to_dial(address: Address) -> Address:
    """Where a listener is reached from its own host."""
    if not address.is_unspecified:
        return address
    return type(address)(host="::1" if ":" in address.host else "127.0.0.1", port=address.port)


def _coordinator(subject: Subject, text: str) -> list[Finding]:
    from proxyd.runtime.addresses import parse_address

    name = f"reach coordinator {text}"
    address = parse_address(text, unix_ok=True)
    if address.is_unix:
        return [_health(subject, name, text, 0)]
    begun_ns = time.monotonic_ns()
    try:
        socket.create_connection((address.host, address.port), subject.connect_s).close()
    except OSError as error:
        return [unreachable(name, text, error, "journalctl -u proxyd-coordinator, on its host")]
    return [_health(subject, name, text, time.monotonic_ns() - begun_ns)]


def unreachable(name: str, address: str, error: OSError, on_its_host: str) -> Finding:
    """Why a TCP connection came to nothing, and what that usually means."""
    host, _, port = address.rpartition(":")
    if isinstance(error, ConnectionRefusedError):
        return fail(name, f"{address}: its host answers, and nothing listens there", f"Start it; {on_its_host}")
    if isinstance(error, TimeoutError):
        fix = f"Open TCP {port} between the hosts: nc -vz {host} {port}; then the firewalls on the way"
        return fail(name, f"{address}: no answer at all. A firewall drops it, or there is no way there", fix)
    if isinstance(error, socket.gaierror):
        return fail(name, f"{address}: the name is unknown ({error.strerror})", f"getent hosts {host}")
    return fail(name, f"{address}: {error.strerror or error}", f"ip route get {host}; nc -vz {host} {port}")


def _health(subject: Subject, name: str, text: str, connect_ns: int) -> Finding:
    """Ask gRPC's health service, as a probe would."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from proxyd.cli.doctor.ask import channel_to

    took = f"connected in {format_duration(connect_ns)}; " if connect_ns else ""
    try:
        with channel_to(subject, text) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=subject.connect_s)
    except grpc.RpcError as error:
        details = cast("grpc.Call", error).details()
        fix = "Is it a coordinator that listens there, and does it speak TLS as this agent does? Its log says why"
        return fail(name, f"{text}: {took}no answer to a health question: {details}", fix)
    serving = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        text = f"{text}: {took}it says {serving}: a standby, or drained"
        return warn(name, text, "proxyd health and proxyd undrain, on its host; of several coordinators one is active")
    return ok(name, f"{text}: {took}serving")


def interface_mtu(device: str) -> int:
    """Of an interface of this network namespace (/sys may be another one's); 0: it is gone."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFMTU, struct.pack("=16si12x", device.encode(), 0))
        except OSError:
            return 0
    value: int = struct.unpack_from("=i", answer, 16)[0]  # struct ifreq: name, then the MTU
    return value


def mtu(subject: Subject) -> list[Finding]:
    """What interfaces carry, beside what links are configured with."""
    name = "mtu"
    if not subject.carries_payload:
        return [skip(name, "only a coordinator is configured here: payload doesn't pass this host")]
    found: dict[str, int] = {}
    for _, device in socket.if_nameindex():
        if device != "lo" and (value := interface_mtu(device)):
            found[device] = value
    if not found:
        return [skip(name, "this network namespace has no interface but lo")]
    told = ", ".join(f"{device} {value}" for device, value in sorted(found.items()))
    most = max(found.values())
    findings = []
    site = None if subject.agent is None else subject.agent.site
    for link in subject.links:
        if link.mtu > most and site in (None, link.from_site, link.to_site):
            text = f"link {link.name} is configured with mtu = {link.mtu}, and no interface here has more than {most}"
            fix = f"mtu = {most} for the link {link.name}, or: sudo ip link set DEVICE mtu {link.mtu}"
            findings.append(warn(f"mtu of {link.name}", f"{text}: the share of headers is reckoned wrong", fix))
    probing = subject.read("/proc/sys/net/ipv4/tcp_mtu_probing")
    more = "; beyond 1500 the path is more often smaller than it says" if most > _JUMBO and probing == "0" else ""
    findings.append(ok(name, f"{told} (proxyd ping PEER shows the path's){more}"))
    return findings
