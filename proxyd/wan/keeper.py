"""The process that owns the namespaces: builds them, hands their descriptors out, and ends everything.

It is a child of the process that made the :class:`~proxyd.wan.topology.Wan` and watches that process through a pidfd:
when it dies, even by SIGKILL, the keeper kills whatever runs in the namespaces, the emulator dies with the keeper, and
the last descriptor is gone. Nothing has a name, so nothing is left over.

Protocol, on a SOCK_SEQPACKET socket: one JSON request per message, one JSON reply; the reply to the first (what to
build) is followed by messages that carry descriptors.
"""

from __future__ import annotations

import errno
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

from proxyd.wan import netns
from proxyd.wan.counters import page_bytes
from proxyd.wan.errors import WanError
from proxyd.wan.spec import FDS_PER_MESSAGE, GATEWAY_OCTET, MESSAGE_BYTES_MAX, address
from proxyd.wan.tun import open_tun

TUN_QUEUE_PACKETS = 20_000


@dataclass
class Network:
    """Everything that was built; descriptors only."""

    user_fd: int | None
    routers: list[int]
    hosts: list[int]
    tuns: list[int]


def enter_privileged() -> int | None:
    """Get the right to make network namespaces: as we are, or in a user namespace of our own (then its descriptor)."""
    home = netns.open_own("net")
    try:
        netns.unshare(netns.CLONE_NEWNET)
        netns.setns(home, netns.CLONE_NEWNET)
        return None
    except PermissionError:
        pass
    finally:
        os.close(home)
    try:
        netns.enter_user_namespace()
        netns.unshare(netns.CLONE_NEWNET)
    except OSError as error:
        raise WanError(
            f"cannot make network namespaces: no CAP_SYS_ADMIN, and user namespaces are refused ({error.strerror}); "
            "run as root, or allow them (sysctl user.max_user_namespaces > 0, "
            "kernel.apparmor_restrict_unprivileged_userns = 0)"
        ) from error
    return netns.open_own("user")


def build(config: dict[str, Any]) -> Network:
    """Routers with bridge and TUN, hosts with one interface each. Leaves this process in some namespace of its own."""
    user_fd = enter_privileged()
    mtu = config["mtu"]
    routers: list[int] = []
    hosts: list[int] = []
    tuns: list[int] = []
    for site, count in enumerate(config["sites"]):
        router = netns.new_network_namespace()
        routers.append(router)
        _common_sysctls()
        netns.write_sysctl("net.ipv4.ip_forward", "1")
        tuns.append(open_tun("wan"))
        netns.ip_batch(
            [
                "link set lo up",
                "link add lan type bridge",
                f"link set lan mtu {mtu} up",
                f"addr add {address(site, GATEWAY_OCTET)}/24 dev lan",
                f"link set wan mtu {mtu} txqueuelen {TUN_QUEUE_PACKETS} up",
                "route add 10.77.0.0/16 dev wan",
            ]
        )
        for number in range(count):
            host = netns.new_network_namespace()
            hosts.append(host)
            _common_sysctls()
            for name, value in config["host_sysctls"].items():
                netns.write_sysctl(name, value)
            netns.ip_batch(
                [
                    "link set lo up",
                    f"link add eth0 mtu {mtu} type veth peer name h{number} mtu {mtu} netns /proc/self/fd/{router}",
                    f"addr add {address(site, number + 1)}/24 dev eth0",
                    "link set eth0 up",
                ],
                pass_fds=(router,),
            )
        with netns.inside(router):
            netns.ip_batch([line for n in range(count) for line in (f"link set h{n} master lan", f"link set h{n} up")])
        for host in hosts[len(hosts) - count :]:
            with netns.inside(host):
                netns.ip_batch([f"route add default via {address(site, GATEWAY_OCTET)}"])
    return Network(user_fd, routers, hosts, tuns)


def _common_sysctls() -> None:
    # IPv6 would send neighbour discovery into the TUN devices; nothing here uses it.
    netns.write_sysctl("net.ipv6.conf.all.disable_ipv6", "1", optional=True)
    netns.write_sysctl("net.ipv6.conf.default.disable_ipv6", "1", optional=True)


def start_emulator(config: dict[str, Any], network: Network, page_fd: int) -> subprocess.Popen[bytes]:
    """The TUN process, as our child."""
    argument = json.dumps(
        {
            "parent": os.getpid(),
            "page_fd": page_fd,
            "tuns": network.tuns,
            "mtu": config["mtu"],
            "links": config["links"],
            "shared": config["shared"],
            "samples": config["samples"],
            "sample_ns": config["sample_ns"],
        }
    )
    return subprocess.Popen(
        [sys.executable, "-m", "proxyd.wan.emulator", argument],
        stdin=subprocess.PIPE,
        pass_fds=(*network.tuns, page_fd),
    )


def kill_inside(network: Network) -> int:
    """SIGKILL every process in our namespaces until none is left; returns how many were hit."""
    killed = set()
    deadline_ns = time.monotonic_ns() + 5_000_000_000
    while time.monotonic_ns() < deadline_ns:
        # A process may fork between the scan and the signal, hence the loop.
        found = netns.processes_inside([*network.routers, *network.hosts])
        if not found:
            break
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
            except ProcessLookupError:
                continue
        time.sleep(0.002)
    return len(killed)


def receive(control: socket.socket) -> dict[str, Any] | None:
    """One request; None if the other side is gone."""
    data = control.recv(MESSAGE_BYTES_MAX)
    return json.loads(data) if data else None


def serve(control: socket.socket, parent_fd: int, network: Network, emulator: subprocess.Popen[bytes]) -> None:
    """Answer requests until ``close``, end of file, or the parent's death."""
    assert emulator.stdin is not None
    while True:
        ready, _, _ = select.select([control.fileno(), parent_fd], [], [])
        if parent_fd in ready:
            return
        request = receive(control)
        if request is None:
            return
        reply: dict[str, Any] = {"ok": True}
        try:
            if request["op"] == "close":
                reply["killed"] = kill_inside(network)
                emulator.kill()
                emulator.wait()
                control.send(json.dumps(reply).encode())
                return
            if request["op"] == "sysctl":
                for host in network.hosts:
                    with netns.inside(host):
                        netns.write_sysctl(request["name"], request["value"])
            elif request["op"] == "routes":
                for host, line in zip(network.hosts, request["lines"], strict=True):
                    with netns.inside(host):
                        netns.ip_batch([line])
            elif request["op"] == "link":
                emulator.stdin.write(json.dumps(request["change"]).encode() + b"\n")
                emulator.stdin.flush()
            elif request["op"] == "plug":
                state = "up" if request["plugged"] else "down"
                with netns.inside(network.routers[request["site"]]):
                    netns.ip_batch([f"link set h{request['number']} {state}"])
            elif request["op"] == "interfaces":
                for router in network.routers:
                    with netns.inside(router), open("/proc/thread-self/net/dev", encoding="ascii") as file:
                        reply.setdefault("routers", []).append(file.read())
        except (WanError, OSError) as error:
            reply = {"ok": False, "error": str(error)}
        control.send(json.dumps(reply).encode())


def probe() -> int:
    """Make one of everything and say on stdout why it can't be done; exit status 0 if it can."""
    try:
        enter_privileged()
        netns.new_network_namespace()
        os.close(open_tun("wan"))
        netns.write_sysctl("net.ipv4.tcp_slow_start_after_idle", "0")
        netns.write_sysctl("net.ipv4.ip_forward", "1")
        netns.ip_batch(
            [
                "link add lan type bridge",
                "link add eth0 type veth peer name h0",
                "link set h0 master lan",
                "link set lan up",
            ]
        )
    except WanError as error:
        sys.stdout.write(str(error))
        return 1
    except OSError as error:
        sys.stdout.write(f"cannot make network namespaces: {error.strerror}")
        return 1
    return 0


def main() -> int:
    """Entry point: ``--probe``, or the descriptor of the control socket and the parent's pid."""
    if sys.argv[1] == "--probe":
        return probe()
    control = socket.socket(fileno=int(sys.argv[1]))
    parent = int(sys.argv[2])
    try:
        parent_fd = os.pidfd_open(parent)
    except OSError as error:
        if error.errno == errno.ESRCH:
            return 1
        raise
    if os.getppid() != parent:
        return 1  # the pid is somebody else's by now
    config = receive(control)
    if config is None:
        return 1
    try:
        network = build(config)
        page_fd = os.memfd_create("proxyd-wan", os.MFD_CLOEXEC)
        os.ftruncate(page_fd, page_bytes(len(config["links"]) + len(config["shared"]), config["samples"]))
        emulator = start_emulator(config, network, page_fd)
    except (WanError, OSError) as error:
        control.send(json.dumps({"ok": False, "error": str(error)}).encode())
        return 1
    emulator_fd = os.pidfd_open(emulator.pid)
    fds = [page_fd, emulator_fd, *network.hosts]
    if network.user_fd is not None:
        fds.append(network.user_fd)
    control.send(
        json.dumps(
            {"ok": True, "emulator": emulator.pid, "fds": len(fds), "user": network.user_fd is not None}
        ).encode()
    )
    for start in range(0, len(fds), FDS_PER_MESSAGE):
        socket.send_fds(control, [b"f"], fds[start : start + FDS_PER_MESSAGE])
    serve(control, parent_fd, network, emulator)
    kill_inside(network)
    return 0


if __name__ == "__main__":
    sys.exit(main())
