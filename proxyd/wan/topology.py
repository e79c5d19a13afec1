"""The emulated WAN as its users see it: sites, hosts, links.

    with Wan({"a": 2, "b": 1}, {("a", "b"): spec, ("b", "a"): spec}) as wan:
        wan.host("a", 0).run(["ping", "-c1", wan.host("b", 0).address])
        print(wan.counters()["a->b"].dropped_packets)

Every host is a network namespace of its own with a real kernel TCP stack; files, Unix sockets and pids are shared with
the rest of the machine. Hosts of one site share a bridge; between sites stands the emulator (docs/wan.md).
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal

from proxyd.wan.counters import GENERATION, READY, UNROUTABLE, CounterPage, Fidelity, LinkCounters
from proxyd.wan.errors import WanError
from proxyd.wan.faults import LinkFaults
from proxyd.wan.history import History
from proxyd.wan.netns import find_ip
from proxyd.wan.policer import PolicerSpec
from proxyd.wan.spec import (
    FDS_PER_MESSAGE,
    GATEWAY_OCTET,
    HOSTS_PER_SITE_MAX,
    MESSAGE_BYTES_MAX,
    SITES_MAX,
    LinkSpec,
    SharedSpec,
    address,
)
from proxyd.wan.trace import RateSteps, TraceLine, read_trace

_ENTER = str(Path(__file__).with_name("_enter.py"))
_REPLY_TIMEOUT_S = 30.0


def module_environment(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """An environment in which ``python -m proxyd...`` finds the very package that is running now."""
    result = dict(os.environ if env is None else env)
    root = str(Path(__file__).resolve().parents[2])
    result["PYTHONPATH"] = os.pathsep.join(filter(None, [root, result.get("PYTHONPATH", "")]))
    return result


def available() -> str | None:
    """None if the emulated WAN can run here; else the reason in words. Makes one of everything to find out (0.1 s)."""
    if sys.platform != "linux":
        return f"network namespaces need Linux, this is {sys.platform}"
    if find_ip() is None:
        return "the `ip` command is missing; install iproute2"
    done = subprocess.run(
        [sys.executable, "-m", "proxyd.wan.keeper", "--probe"],
        env=module_environment(),
        capture_output=True,
        text=True,
        timeout=_REPLY_TIMEOUT_S,
        check=False,
    )
    if done.returncode == 0:
        return None
    return done.stdout.strip() or f"the probe ended with status {done.returncode}: {done.stderr.strip()[-300:]}"


class _Spawner(threading.Thread):
    """Starts processes from one thread that lives as long as the WAN.

    Linux ties the parent-death signal to the parent *thread*: a host process started from a short-lived worker thread
    would be killed when that thread returns.
    """

    def __init__(self) -> None:
        super().__init__(name="proxyd-wan-spawner", daemon=True)
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self.start()

    def run(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, make = job
            try:
                future.set_result(make())
            except (OSError, ValueError, TypeError, subprocess.SubprocessError) as error:
                future.set_exception(error)

    def call(self, make: Callable[[], subprocess.Popen[Any]]) -> subprocess.Popen[Any]:
        """Run ``make`` on the thread and wait for its result."""
        future: Future[subprocess.Popen[Any]] = Future()
        self._jobs.put((future, make))
        return future.result()

    def stop(self) -> None:
        """End the thread; processes that it started and that still live are killed by the kernel."""
        self._jobs.put(None)
        self.join()


@dataclass(frozen=True)
class Host:
    """One machine of the emulated WAN."""

    site: str
    name: str
    address: str
    _wan: Wan
    _net_fd: int

    def command(self, argv: Sequence[str]) -> tuple[list[str], tuple[int, ...]]:
        """``(argv, pass_fds)`` that run a command on this host, for callers with their own way of starting processes.

        The kernel kills the process when the *thread* that started it ends; :meth:`popen` takes care of that.
        """
        user_fd = self._wan.user_fd
        fds = (self._net_fd,) if user_fd is None else (self._net_fd, user_fd)
        prefix = [sys.executable, "-I", "-S", _ENTER, str(-1 if user_fd is None else user_fd), str(self._net_fd)]
        return [*prefix, str(os.getpid()), "--", *argv], fds

    def popen(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
        **options: Any,
    ) -> subprocess.Popen[Any]:
        """Start a command on this host; ``options`` go to :class:`subprocess.Popen`.

        Sockets in ``pass_fds`` stay in the namespace that they were made in: that is how a port on this machine's own
        loopback can be served from a host. The process is killed when the WAN is closed or its maker dies.
        """
        self._wan.check()
        command, fds = self.command(argv)
        return self._wan.spawner.call(
            lambda: subprocess.Popen(
                command, env=None if env is None else dict(env), pass_fds=(*pass_fds, *fds), **options
            )
        )

    def run(
        self, argv: Sequence[str], *, timeout_s: float = 60.0, check: bool = True, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end and return its text output. Raises :class:`WanError` on failure if ``check``."""
        process = self.popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired as error:
            process.kill()
            process.communicate()
            raise WanError(f"{argv[0]} on host {self.name} did not end within {timeout_s} s") from error
        if check and process.returncode != 0:
            raise WanError(
                f"{argv[0]} on host {self.name} ended with status {process.returncode}: {err.strip()[-500:]}"
            )
        return subprocess.CompletedProcess(list(argv), process.returncode, out, err)


class Wan:
    """Sites, their hosts, and the links between them, until :meth:`close` (or the end of the ``with`` block).

    ``sites`` maps a name to its number of hosts, ``links`` a ``(from, to)`` pair to its description; a pair without a
    link is cut. ``tcp_buffer_max_bytes`` raises the ceiling of TCP's automatic buffers (tcp_rmem, tcp_wmem) on every
    host; None keeps the kernel's. ``shared`` names lines that several links pass before each goes its own way. Raises
    :class:`WanError` if it can't be built here; ask :func:`available` first.
    """

    def __init__(
        self,
        sites: Mapping[str, int],
        links: Mapping[tuple[str, str], LinkSpec],
        *,
        mtu: int = 9000,
        slow_start_after_idle: bool = True,
        tcp_buffer_max_bytes: int | None = None,
        sample_interval_ns: int = 5_000_000,
        samples: int = 65_536,
        shared: Mapping[str, SharedSpec] | None = None,
    ) -> None:
        shared = dict(shared or {})
        _validate(sites, links, mtu)
        _validate_shared(links, shared)
        for spec in links.values():
            if spec.trace is not None:
                # Here, where the caller sees the error; the emulator reads it again.
                TraceLine(read_trace(spec.trace), 0)
        self.sites = dict(sites)
        self.links = dict(links)
        self.mtu = mtu
        self.user_fd: int | None = None
        self._link_index = {f"{src}->{dst}": index for index, (src, dst) in enumerate(links)}
        self._link_index |= {name: len(links) + index for index, name in enumerate(shared)}
        self._samples = samples
        self._generation = 0
        self._blocked: set[tuple[str, str]] = set()
        """Pairs of hosts that :meth:`cut` has parted."""
        self._closed = False
        self._lock = threading.Lock()
        self._fds: list[int] = []
        self._page: CounterPage | None = None
        sysctls = {
            # Cached metrics of one run (ssthresh, RTT) would shape the next.
            "net.ipv4.tcp_no_metrics_save": "1",
            "net.ipv4.tcp_slow_start_after_idle": str(int(slow_start_after_idle)),
        }
        if tcp_buffer_max_bytes is not None:
            sysctls["net.ipv4.tcp_rmem"] = f"4096 131072 {tcp_buffer_max_bytes}"
            sysctls["net.ipv4.tcp_wmem"] = f"4096 16384 {tcp_buffer_max_bytes}"
        names = list(sites)
        config = {
            "sites": list(sites.values()),
            "mtu": mtu,
            "host_sysctls": sysctls,
            "samples": samples,
            "sample_ns": sample_interval_ns,
            "links": [
                {"from": names.index(src), "to": names.index(dst), "spec": spec.to_json()}
                for (src, dst), spec in links.items()
            ],
            "shared": [
                {
                    "rate": spec.rate_bytes_per_s,
                    "buffer": spec.buffer_bytes,
                    "links": [self._link_index[f"{src}->{dst}"] for src, dst in spec.links],
                }
                for spec in shared.values()
            ],
        }
        self.spawner = _Spawner()
        self._control, child = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (self._control, child):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MESSAGE_BYTES_MAX)
        self._control.settimeout(_REPLY_TIMEOUT_S)
        with child:
            self._keeper = self.spawner.call(
                lambda: subprocess.Popen(
                    [sys.executable, "-m", "proxyd.wan.keeper", str(child.fileno()), str(os.getpid())],
                    env=module_environment(),
                    pass_fds=(child.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    # Out of reach of a terminal's Ctrl-C: the keeper must outlive everything that it cleans up.
                    start_new_session=True,
                )
            )
        try:
            self._receive_network(self._request(config))
        except BaseException:
            self.close()
            raise
        self.hosts = self._name_hosts()

    def _receive_network(self, reply: dict[str, Any]) -> None:
        while len(self._fds) < reply["fds"]:
            data, fds, _, _ = socket.recv_fds(self._control, 16, FDS_PER_MESSAGE)
            self._fds.extend(fds)
            if not data:
                raise WanError("the keeper of the emulated WAN ended while it was handing out its namespaces")
        if reply["user"]:
            self.user_fd = self._fds[-1]
        self.emulator_pid: int = reply["emulator"]
        page = self._page = CounterPage(self._fds[0], len(self._link_index), self._samples)
        # Packets sent before its loop runs would count as late.
        self._wait_for(lambda: page.words[READY] == 1, "the emulator did not start")

    def _name_hosts(self) -> list[Host]:
        hosts: list[Host] = []
        for index, (site, count) in enumerate(self.sites.items()):
            for number in range(count):
                net_fd = self._fds[2 + len(hosts)]
                hosts.append(Host(site, f"{site}-{number}", address(index, number + 1), self, net_fd))
        return hosts

    def __enter__(self) -> Wan:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def keeper_pid(self) -> int:
        """Process id of the keeper."""
        return self._keeper.pid

    def host(self, site: str, number: int) -> Host:
        """The host ``<site>-<number>``. Raises :class:`WanError` if there is none."""
        for host in self.hosts:
            if host.name == f"{site}-{number}":
                return host
        raise WanError(f"no host {site}-{number}; the sites and their hosts are {self.sites}")

    def check(self) -> None:
        """Raises :class:`WanError` if the WAN is closed or one of its processes has died."""
        if self._closed:
            raise WanError("the emulated WAN is closed")
        if self._keeper.poll() is not None:
            raise WanError(
                f"the keeper of the emulated WAN ended with status {self._keeper.returncode}; build a new Wan"
            )
        if select.select([self._fds[1]], [], [], 0)[0]:
            raise WanError("the emulator process ended (its last words are on stderr); build a new Wan")

    def _counter_page(self) -> CounterPage:
        self.check()
        assert self._page is not None, "set before the constructor returns"
        return self._page

    def _index(self, src: str, dst: str) -> int:
        try:
            return self._link_index[f"{src}->{dst}"]
        except KeyError:
            raise WanError(f"no link {src}->{dst}; the links are {', '.join(self._link_index)}") from None

    def counters(self) -> dict[str, LinkCounters]:
        """Counters of every link by its name, ``"a->b"``, and of every shared line by its own."""
        page = self._counter_page()
        return {name: page.read_link(index) for name, index in self._link_index.items()}

    def history(self, src: str, dst: str) -> History:
        """What the link did over time: the last ``samples`` intervals."""
        return self._counter_page().read_history(self._index(src, dst))

    def shared_history(self, name: str) -> History:
        """The same of a line that several links share."""
        if name not in self._link_index:
            raise WanError(f"no shared line {name!r}; there are {', '.join(self._link_index)}")
        return self._counter_page().read_history(self._link_index[name])

    def queue_samples(self, src: str, dst: str) -> tuple[array[int], array[int]]:
        """The queue over time: CLOCK_MONOTONIC times in ns and bytes, oldest first; each value is the longest queue
        since the sample before it."""
        history = self.history(src, dst)
        return history.times_ns, history.peak_bytes

    def line_origin_ns(self, src: str, dst: str) -> int:
        """CLOCK_MONOTONIC time at which the link's present rate, rates or trace began."""
        return self._counter_page().line_origin_ns(self._index(src, dst))

    def fidelity(self) -> Fidelity:
        """How late the emulator was against its own clock, since the WAN was built."""
        return self._counter_page().read_fidelity()

    def unroutable_packets(self) -> int:
        """Packets to addresses or pairs of sites that have no link."""
        return self._counter_page().words[UNROUTABLE]

    def set_link(
        self,
        src: str,
        dst: str,
        *,
        rate_bytes_per_s: int | None = None,
        rates: RateSteps | None = None,
        loss: float | None = None,
        down: bool | None = None,
        policer: PolicerSpec | Literal["keep"] | None = "keep",
    ) -> None:
        """Change a live link; None (``"keep"``) leaves a value as it is. In force when this returns.

        A new rate, or rates that begin now (also on a link with a trace, which they replace), apply to the queue too.
        ``down`` loses everything, what is in flight included. ``policer`` None takes a policer away.
        """
        if rate_bytes_per_s is not None and rates is not None:
            raise WanError("give rate_bytes_per_s or rates, not both")
        if rate_bytes_per_s is not None and rate_bytes_per_s <= 0:
            raise WanError(f"rate_bytes_per_s must be > 0, got {rate_bytes_per_s}; use down=True for a cut")
        if loss is not None and not 0.0 <= loss < 1.0:
            raise WanError(f"loss must be in [0, 1), got {loss}; use down=True for a cut")
        change: dict[str, Any] = {
            "link": self._index(src, dst),
            "rate_bytes_per_s": rate_bytes_per_s,
            "rates": None if rates is None else rates.to_json(),
            "loss": loss,
            "down": down,
        }
        if policer != "keep":
            change["policer"] = None if policer is None else policer.to_json()
        self._change(change, f"{src}->{dst}")

    def _change(self, change: dict[str, Any], what: str) -> None:
        """Have the emulator change something; in force when this returns."""
        page = self._counter_page()
        with self._lock:
            self._generation += 1
            generation = self._generation
        self._request({"op": "link", "change": {**change, "generation": generation}})
        self._wait_for(lambda: page.words[GENERATION] >= generation, f"the emulator did not change {what}")

    # -- faults (docs/wan.md) ----------------------------------------------------------------------------------------

    def _ways(self, direction: str) -> list[tuple[str, str]]:
        """``"a->b"``, ``"a<->b"`` (both ways) or ``"both"`` (every link) as pairs of sites or of hosts."""
        if direction == "both":
            return list(self.links)
        arrow = "<->" if "<->" in direction else "->"
        src, _, dst = direction.partition(arrow)
        ways = [(src, dst), (dst, src)] if arrow == "<->" else [(src, dst)]
        names = {host.name for host in self.hosts}
        for way in ways:
            if way not in self.links and not set(way) <= names:
                raise WanError(
                    f"{direction!r} is no direction; say 'both', a link ({', '.join(map('->'.join, self.links))}) or "
                    f"two hosts ({', '.join(sorted(names))}), with -> or <->"
                )
        return ways

    def cut(self, direction: str = "both") -> None:
        """Everything that goes this way vanishes without a word, what is in flight on a cut link included.

        ``direction``: links by their sites, ``"a->b"`` or ``"a<->b"``, or two hosts of different sites,
        ``"a-0<->b-1"``; ``"both"``: every link.
        """
        self._set_cut(direction, True)

    def heal(self, direction: str = "both") -> None:
        """End what :meth:`cut`, :meth:`tamper` and :meth:`reset` did this way; ``"both"``: everywhere."""
        for src, dst in self._ways(direction):
            if (src, dst) in self.links:
                self.tamper(f"{src}->{dst}", LinkFaults())
                self.reset(f"{src}->{dst}", on=False)
        self._set_cut(direction, False)

    def _set_cut(self, direction: str, cut: bool) -> None:
        blocked = set() if direction == "both" and not cut else set(self._blocked)
        for src, dst in self._ways(direction):
            if (src, dst) in self.links:
                self.set_link(src, dst, down=cut)
            else:
                (blocked.add if cut else blocked.discard)((src, dst))
        if blocked != self._blocked:
            self._blocked = blocked
            address_of = {host.name: socket.inet_aton(host.address) for host in self.hosts}
            pairs = [[*address_of[src], *address_of[dst]] for src, dst in sorted(blocked)]
            self._change({"blocked": pairs}, direction)

    def tamper(self, direction: str, faults: LinkFaults) -> None:
        """Corrupt, repeat, reorder or swallow what goes over links; ``LinkFaults()`` ends it."""
        for src, dst in self._links_of(direction):
            self._change({"link": self._index(src, dst), "faults": faults.to_json()}, f"{src}->{dst}")

    def reset(self, direction: str = "both", *, on: bool = True) -> None:
        """A box on the way resets each TCP connection once, at its next packet, new ones too, until switched off."""
        for src, dst in self._links_of(direction):
            self._change({"link": self._index(src, dst), "reset": on}, f"{src}->{dst}")

    def _links_of(self, direction: str) -> list[tuple[str, str]]:
        ways = self._ways(direction)
        for src, dst in ways:
            self._index(src, dst)  # hosts can be cut, not tampered with
        return ways

    def plug(self, host: Host, plugged: bool = True) -> None:
        """Put a host's cable in, or pull it out: its interface then has no carrier, as when a switch fails."""
        self.check()
        site = list(self.sites).index(host.site)
        number = int(host.name.removeprefix(f"{host.site}-"))
        self._request({"op": "plug", "site": site, "number": number, "plugged": plugged})

    def _wait_for(self, condition: Callable[[], bool], otherwise: str) -> None:
        deadline_s = time.monotonic() + _REPLY_TIMEOUT_S
        while not condition():
            self.check()
            if time.monotonic() > deadline_s:
                raise WanError(f"{otherwise} within {_REPLY_TIMEOUT_S} s; is this machine overloaded?")
            time.sleep(0.0005)

    def set_sysctl(self, name: str, value: str) -> None:
        """Set a ``net.…`` sysctl on every host, live."""
        self.check()
        self._request({"op": "sysctl", "name": name, "value": value})

    def set_slow_start_after_idle(self, on: bool) -> None:
        """Whether TCP forgets its congestion window when a connection was idle for an RTO (Linux: on)."""
        self.set_sysctl("net.ipv4.tcp_slow_start_after_idle", str(int(on)))

    def set_congestion_control(self, name: str | None) -> None:
        """What new connections between sites use if their owner doesn't choose; None: the kernel's default.

        An attribute of the route, not the sysctl: inside a namespace that one takes only what the machine's
        ``tcp_allowed_congestion_control`` lists.
        """
        self.check()
        sites = list(self.sites)
        attribute = "" if name is None else f" congctl {name}"
        gateways = [address(sites.index(host.site), GATEWAY_OCTET) for host in self.hosts]
        self._request({"op": "routes", "lines": [f"route change default via {one}{attribute}" for one in gateways]})

    def _request(self, request: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            try:
                self._control.send(json.dumps(request).encode())
                data = self._control.recv(MESSAGE_BYTES_MAX)
            except OSError as error:
                raise WanError(f"the keeper of the emulated WAN does not answer: {error}") from error
        if not data:
            raise WanError("the keeper of the emulated WAN ended (its last words are on stderr)")
        reply: dict[str, Any] = json.loads(data)
        if not reply["ok"]:
            raise WanError(f"the emulated WAN: {reply['error']}")
        return reply

    def close(self) -> None:
        """Kill every process on the hosts, the emulator and the keeper; free the namespaces. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._keeper.poll() is None:
                self._request({"op": "close"})
        except WanError:
            pass  # it is gone or stuck; the next lines end it either way
        finally:
            self._control.close()
            try:
                self._keeper.wait(timeout=10.0)
            except subprocess.TimeoutExpired:
                self._keeper.kill()
                self._keeper.wait()
            self.spawner.stop()
            if self._page is not None:
                self._page.close()
            for fd in self._fds:
                os.close(fd)


def _validate(sites: Mapping[str, int], links: Mapping[tuple[str, str], LinkSpec], mtu: int) -> None:
    if not 1 <= len(sites) <= SITES_MAX:
        raise WanError(f"a WAN has 1 to {SITES_MAX} sites, got {len(sites)}")
    for name, count in sites.items():
        if not 1 <= count <= HOSTS_PER_SITE_MAX:
            raise WanError(f"site {name!r} has {count} hosts; give 1 to {HOSTS_PER_SITE_MAX}")
    for src, dst in links:
        if src == dst or src not in sites or dst not in sites:
            raise WanError(f"link {src}->{dst} does not join two different sites of {', '.join(sites)}")
    if not 576 <= mtu <= 9000:
        raise WanError(f"mtu must be from 576 to 9000 bytes, got {mtu}")


def _validate_shared(links: Mapping[tuple[str, str], LinkSpec], shared: Mapping[str, SharedSpec]) -> None:
    seen: set[tuple[str, str]] = set()
    for name, spec in shared.items():
        for pair in spec.links:
            if pair not in links or pair in seen:
                why = "a link passes one shared line at most" if pair in seen else "there is no such link"
                raise WanError(f"shared line {name!r} cannot carry {pair[0]}->{pair[1]}: {why}")
            seen.add(pair)
