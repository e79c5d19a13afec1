"""Who is in a group: its name, the job and rank of each member, and its site, agreed through the group's store.

Theory. A group of torch is a store and a number of ranks in it. proxyd needs more: names that no earlier life of the
group has used (a store may be used again after ``destroy_process_group``), one endpoint per process and job, and the
site of each rank. So the members meet in the store:

1. Each counts its own lives in this store (an atomic ``add``). Members that come together have the same count, however
   often the group was made before; all further keys carry it.
2. The first rank draws a random name for this life and publishes it. The name is part of every channel's group, so a
   message of an earlier life matches nothing.
3. Each connects its endpoint and publishes (global rank, site, agent); each reads all.

The job is ``PROXYD_JOB`` where it is set (operators authorise jobs by name). Else it is made up for each default group.
Groups that are made from ranks of a proxyd default group use the endpoint of that one; where the default group has
another backend, the ranks of all its proxyd groups share a job that is drawn once per store.

An endpoint belongs to a (job, rank), and a process may hold several (a test that runs ranks as threads). It is counted
and closed with the last group that uses it.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

import proxyd_client
from proxyd_client.endpoint import Endpoint
from proxyd_client.errors import ArgumentError, ConfigError, ProxydError, TransferTimeout
from proxyd_client.torch.outbox import Outbox

JOB_VARIABLE = "PROXYD_JOB"
SITE_VARIABLE = "PROXYD_SITE"
PIPELINING_VARIABLE = "PROXYD_PIPELINING"
PIPELINING = ("off", "tags", "on")


@dataclasses.dataclass(frozen=True)
class Options:
    """``pg_options`` of a proxyd group; what is None comes from the environment or the agent."""

    job: str | None = None
    """Name of the job; the same on all ranks."""
    socket: str | None = None
    """This host's agent."""
    token: str | bytes | None = None
    """What the agent asks this job to prove."""
    sites: Mapping[int, str] | None = None
    """Site by global rank, for all of them; the same on all ranks."""
    pipelining: str | None = None
    """``on``: pipeline stages have tags of their own and announce what they send to other sites; ``tags``: without
    announcements; ``off``: neither. None: ``PROXYD_PIPELINING``, else on."""
    connect_timeout_s: float = 60.0
    """How long to wait for an agent that isn't there yet."""

    @property
    def _timeout(self) -> None:
        """torch's DeviceMesh asks all options for the group's timeout; None is torch's default."""
        return None


@dataclasses.dataclass(frozen=True)
class Member:
    """One rank of a group."""

    rank: int
    """Its rank in its job: the global rank."""
    site: str
    agent: str
    pipelining: str = "off"
    """See :attr:`Options.pipelining`."""


class Membership:
    """What one member knows of its group. Made by :func:`join`; :meth:`leave` gives the endpoint back."""

    def __init__(
        self, name: str, rank: int, members: Sequence[Member], outbox: Outbox, timeout: datetime.timedelta
    ) -> None:
        self.name = name
        """Unique among all lives of all groups of the job."""
        self.rank = rank
        """In the group."""
        self.members = tuple(members)
        self.outbox = outbox
        self.endpoint = outbox.endpoint
        self.timeout = timeout
        self.announces = members[rank].pipelining == "on"
        """This member's pipeline stages announce what they send to other sites."""
        self.pipeline_tags = all(member.pipelining != "off" for member in members)
        """All members' pipeline stages use tags of their own: one that didn't would wait for tag 0."""
        self.group_rank_of = {member.rank: index for index, member in enumerate(members)}
        """Group rank by rank in the job."""
        self.purposes: list[str] = []
        """Its members' messages are in the groups ``name/purpose``."""
        self._left = False

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.members)

    @property
    def sites(self) -> tuple[tuple[int, ...], ...]:
        """Group ranks per site, each ascending; sites in the order of their lowest rank."""
        by_site: dict[str, list[int]] = {}
        for index, member in enumerate(self.members):
            by_site.setdefault(member.site, []).append(index)
        return tuple(tuple(ranks) for ranks in by_site.values())

    def describe(self, group_rank: int | None) -> str:
        """A member, in both rank spaces, for people."""
        if group_rank is None:
            return "any rank"
        member = self.members[group_rank]
        return f"group rank {group_rank} (global rank {member.rank}, site {member.site})"

    def leave(self, linger_s: float | None = None) -> None:
        """Let go of the endpoint; it is closed when no other group uses it."""
        if not self._left:
            self._left = True
            for purpose in self.purposes:
                self.endpoint.close_group(f"{self.name}/{purpose}")
            _endpoints.release(self.outbox, linger_s)


class _Endpoints:
    """This process's endpoints by (job, rank, process), with their number of users."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[tuple[str, int, int], tuple[Outbox, int]] = {}
        self._worlds: dict[tuple[int, int], str] = {}

    def acquire(self, job: str, rank: int, options: Options) -> Outbox:
        """The endpoint of ``job/rank``, with what posts its sends; connected by its first user."""
        key = job, rank, os.getpid()
        with self._lock:
            outbox, users = self._held.get(key, (None, 0))
            if outbox is None or outbox.endpoint.closed:
                endpoint = proxyd_client.connect(
                    job, rank, socket=options.socket, token=options.token, timeout_s=options.connect_timeout_s
                )
                outbox, users = Outbox(endpoint), 0
            self._held[key] = outbox, users + 1
            return outbox

    def release(self, outbox: Outbox, linger_s: float | None) -> None:
        """One user less; the last one closes it."""
        endpoint = outbox.endpoint
        key = endpoint.job, endpoint.rank, os.getpid()
        with self._lock:
            held, users = self._held.get(key, (None, 0))
            if held is outbox and users > 1:
                self._held[key] = outbox, users - 1
                return
            if held is outbox:
                del self._held[key]
                self._worlds = {world: job for world, job in self._worlds.items() if (job, *world) != key}
        endpoint.close(linger_s)
        outbox.finish()

    def note_world(self, rank: int, job: str) -> None:
        """The default group of this rank is a proxyd group of this job."""
        with self._lock:
            self._worlds[rank, os.getpid()] = job

    def world_job(self, rank: int) -> str | None:
        """The job of this rank's default group, where that is a proxyd group."""
        with self._lock:
            return self._worlds.get((rank, os.getpid()))


_endpoints = _Endpoints()


def join(
    store: Any,
    rank: int,
    size: int,
    timeout: datetime.timedelta,
    global_ranks: Sequence[int] = (),
    options: Options | None = None,
) -> Membership:
    """Meet the other members; returns when all of them are there.

    :param store: shared by the members, and by nobody else (torch hands over a prefix of its own for each group).
    :param rank: in the group.
    :param global_ranks: of the members in order; empty for a default group, whose ranks are the global ones.
    :raises TransferTimeout: not all came within ``timeout``; the text names those who are missing.
    :raises ConfigError, AgentUnavailable: from connecting.
    """
    options = options or Options()
    my_rank = global_ranks[rank] if global_ranks else rank
    life = store.add(f"proxyd/lives/{rank}", 1)
    base = f"proxyd/life/{life}"
    meeting = _Meeting(store, base, rank, size, timeout)
    try:
        name, outbox = _register(meeting, rank, my_rank, global_ranks, options)
    except ProxydError as error:
        meeting.publish(f"member/{rank}", {"failed": f"{type(error).__name__}: {error}"})
        raise
    try:
        members = [_member(meeting, other) for other in range(size)]
        if len({member.rank for member in members}) != size:
            raise ArgumentError(f"members of a group have the same rank: {[member.rank for member in members]}")
    except BaseException:
        _endpoints.release(outbox, 0.0)
        raise
    if not global_ranks:
        _endpoints.note_world(my_rank, outbox.endpoint.job)
    return Membership(name, rank, members, outbox, timeout)


def _register(
    meeting: _Meeting, rank: int, my_rank: int, global_ranks: Sequence[int], options: Options
) -> tuple[str, Outbox]:
    """Name the group (its first rank) or hear its name, connect, and say who one is."""
    pipelining = _pipelining(options)
    named = options.job or os.environ.get(JOB_VARIABLE, "")
    if rank == 0:
        nonce = os.urandom(6).hex()
        shared = None if named or not global_ranks else _endpoints.world_job(my_rank) or _job_of_store(meeting.store)
        meeting.publish("name", {"name": nonce, "job": named or shared or f"torch-{nonce}"})
    agreed = meeting.read("name", "the first rank to name the group")
    name, job = str(agreed["name"]), str(agreed["job"])
    if named and named != job:
        raise ConfigError(
            f"rank {my_rank} belongs to job {named!r}, and rank {global_ranks[0] if global_ranks else 0} to {job!r}",
            next_step=f"Set {JOB_VARIABLE} to the same name for all ranks",
        )
    outbox = _endpoints.acquire(job, my_rank, options)
    try:
        site = _site_of(my_rank, outbox.endpoint, options)
        mine = Member(my_rank, site, outbox.endpoint.agent_name, pipelining)
        meeting.publish(f"member/{rank}", dataclasses.asdict(mine))
    except BaseException:
        _endpoints.release(outbox, 0.0)
        raise
    return name, outbox


def _member(meeting: _Meeting, group_rank: int) -> Member:
    said = meeting.read(f"member/{group_rank}", f"group rank {group_rank}")
    if "failed" in said:
        raise ConfigError(f"group rank {group_rank} could not join the group", why=str(said["failed"]))
    return Member(int(said["rank"]), str(said["site"]), str(said["agent"]), str(said.get("pipelining", "off")))


class _Meeting:
    """Keys of one life of a group in its store."""

    def __init__(self, store: Any, base: str, rank: int, size: int, timeout: datetime.timedelta) -> None:
        self.store = store
        self._base = base
        self._rank = rank
        self._size = size
        self._timeout = timeout

    def publish(self, key: str, value: dict[str, Any]) -> None:
        self.store.set(f"{self._base}/{key}", json.dumps(value))

    def read(self, key: str, who: str) -> dict[str, Any]:
        full = f"{self._base}/{key}"
        try:
            self.store.wait([full], self._timeout)
        except (RuntimeError, dist.DistStoreError) as error:
            raise TransferTimeout(
                f"group rank {self._rank} of {self._size} waited {self._timeout.total_seconds():g} s for {who}",
                why=str(error).splitlines()[0],
                next_step="Look at the log of that rank: it has ended, or can't reach its agent or the store",
                phase="meeting the other members",
            ) from error
        value = json.loads(self.store.get(full))
        if not isinstance(value, dict):
            raise ProxydError(f"key {full} of the store holds {value!r}, and not what a member publishes")
        return value


def _job_of_store(store: Any) -> str:
    """One job for all groups whose stores are prefixes of one store, whoever asks first."""
    root = store
    while isinstance(root, dist.PrefixStore):
        root = root.underlying_store
    drawn = f"torch-{os.urandom(6).hex()}"
    return bytes(root.compare_set("proxyd/job", "", drawn)).decode()


def _pipelining(options: Options) -> str:
    mode = options.pipelining or os.environ.get(PIPELINING_VARIABLE, "") or "on"
    if mode not in PIPELINING:
        raise ConfigError(f"pipelining is {mode!r}", next_step=f"Set {PIPELINING_VARIABLE} to one of {PIPELINING}")
    return mode


def _site_of(rank: int, endpoint: Endpoint, options: Options) -> str:
    if options.sites is not None:
        if rank not in options.sites:
            raise ArgumentError(f"Options.sites says no site for rank {rank}", next_step="Name one for each rank")
        return options.sites[rank]
    return os.environ.get(SITE_VARIABLE, "") or endpoint.site
