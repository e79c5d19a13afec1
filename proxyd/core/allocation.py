"""Which transfer is next, and which part of the link each sender gets.

Order: traffic class first (pipeline, sync, bulk); within it the jobs by weight (:mod:`proxyd.core.jobs`); within a job
the earliest deadline first, then what has no deadline, first come. A deadline says how urgent a transfer is beside
others of its own job and class; it can't take anything from another job. A transfer keeps the place of its first
request (or of its announcement) for life, so one that needs more bytes later (a chunk was lost, a grant expired) is
served before those that came after it.

Every operation is logarithmic in the number of waiting transfers; nothing scans them. The heaps are lazy: a transfer
that was cancelled or is fully granted stays in its heap until it reaches the top, and a job whose tag has grown is
moved when it gets there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from itertools import islice

from proxyd.core.ids import AgentName, LinkName, TransferId
from proxyd.core.jobs import JobAccount
from proxyd.core.policy import Policy
from proxyd.core.reasons import Waits
from proxyd.core.units import format_size
from proxyd.wire.envelope import TrafficClass

CLASSES = tuple(TrafficClass)
NO_DEADLINE_NS = 1 << 63
MAX_IDLE_JOBS = 256
"""Accounts of jobs that have nothing to send are forgotten beyond this number."""


@dataclasses.dataclass(slots=True, eq=False)
class Waiting:
    """A transfer that asks for grants, or has asked for them."""

    transfer: TransferId
    session: int
    link: LinkName
    destination: AgentName
    job: str
    traffic: TrafficClass
    order: int
    since_ns: int
    wanted_bytes: int = 0
    granted_bytes: int = 0
    chunk_bytes: int = 0
    """What its agent has cut it into: it can use nothing less, unless it is the rest. 0: as the link says now."""
    announcement: int = 0
    """Its agent hasn't asked for it yet: it is granted ahead to this announcement. ``transfer`` means nothing then."""
    ended: bool = False
    queued: bool = False
    """In its session's heap."""
    reason: str = "queued"
    """Why it stands where it stands: the latest decision on it, in words."""
    waits: Waits = dataclasses.field(default_factory=Waits)
    """How long it waited for what."""
    due_ns: int = NO_DEADLINE_NS
    """When it is wanted at the receiver."""
    home: JobQueue | None = None
    """The queue of its job and class, once it was queued."""

    @property
    def need_bytes(self) -> int:
        """Wanted and not granted yet."""
        return self.wanted_bytes - self.granted_bytes


class JobQueue:
    """Waiting transfers of one job in one class, in order, and in order within each session."""

    __slots__ = ("_by_session", "_heads", "account", "count", "deadlines", "in_heap", "need_bytes", "number", "tag")

    def __init__(self, account: JobAccount, number: int) -> None:
        self.account = account
        self.number = number
        """Breaks ties between equal tags: the job that was seen first."""
        self.tag = 0.0
        """Bytes charged per weight: the lowest is next."""
        self.in_heap = False
        self.count = 0
        self.need_bytes = 0
        self.deadlines = 0
        """How many of them have one."""
        self._by_session: dict[int, list[tuple[int, int, Waiting]]] = {}
        self._heads: list[tuple[int, int, int]] = []

    def add(self, waiting: Waiting) -> None:
        """Put a transfer with a need in its place."""
        heap = self._by_session.setdefault(waiting.session, [])
        heappush(heap, (waiting.due_ns, waiting.order, waiting))
        if heap[0][2] is waiting:
            heappush(self._heads, (waiting.due_ns, waiting.order, waiting.session))
        waiting.queued = True
        waiting.home = self
        self.count += 1
        self.need_bytes += waiting.need_bytes
        if waiting.due_ns != NO_DEADLINE_NS:
            self.deadlines += 1

    def left(self, waiting: Waiting, need_bytes: int) -> None:
        """A queued transfer ended or needs no more; ``need_bytes``: what it was still counted with."""
        waiting.queued = False
        self.count -= 1
        self.need_bytes -= need_bytes
        if waiting.due_ns != NO_DEADLINE_NS:
            self.deadlines -= 1
        if not self.count:
            self._by_session.clear()
            self._heads.clear()

    def head(self, session: int) -> Waiting | None:
        """First in line of one session."""
        heap = self._by_session.get(session)
        if heap is None:
            return None
        stale = False
        while heap:
            waiting = heap[0][2]
            if waiting.queued:
                if stale:
                    heappush(self._heads, (waiting.due_ns, waiting.order, session))
                return waiting
            heappop(heap)
            stale = True
        del self._by_session[session]
        return None

    def first(self) -> Waiting | None:
        """First in line of all."""
        heads = self._heads
        while heads:
            _, order, session = heads[0]
            waiting = self.head(session)
            if waiting is not None and waiting.order == order:
                return waiting
            heappop(heads)
        return None

    def in_order(self) -> Iterator[Waiting]:
        """The first in line of each session, in order. Stop early: the cost is per session looked at."""
        seen: list[tuple[int, int, int]] = []
        sessions: set[int] = set()
        try:
            while (waiting := self.first()) is not None:
                entry = heappop(self._heads)
                if waiting.session not in sessions:
                    seen.append(entry)
                    sessions.add(waiting.session)
                    yield waiting
        finally:
            for entry in seen:
                heappush(self._heads, entry)

    def sessions(self) -> list[int]:
        """Sessions with a waiting transfer, sorted."""
        return sorted(session for session in list(self._by_session) if self.head(session) is not None)

    def __iter__(self) -> Iterator[Waiting]:
        """Every waiting transfer, in order: for status, linear in their number."""
        live = {item[:2]: item[2] for heap in self._by_session.values() for item in heap if item[2].queued}
        return iter([live[place] for place in sorted(live)])


class ClassQueue:
    """The jobs of one traffic class that have something to send."""

    __slots__ = (
        "_heap",
        "_served",
        "count",
        "current",
        "jobs",
        "need_bytes",
        "reason",
        "turn_left_bytes",
        "virtual",
        "weight",
    )

    def __init__(self) -> None:
        self.count = 0
        self.need_bytes = 0
        self.jobs = 0
        """How many have something to send."""
        self.weight = 0.0
        """Sum of their weights."""
        self.current: JobQueue | None = None
        """Whose turn it is."""
        self.turn_left_bytes = 0
        self.reason = ""
        """Why it is its turn; "" while there is only one."""
        self._heap: list[tuple[float, int, JobQueue]] = []
        """Jobs by their tag when they were put in. Each job with a transfer that isn't throttled is here once."""
        self.virtual = 0.0
        """The tag at which newcomers start: that of the latest turn's job when it began."""
        self._served = 0.0
        """Sum of weight x tag over the jobs with something to send: divided by the weights it is where each would be
        if all had got exactly their share."""

    def activate(self, job: JobQueue) -> None:
        """A job has something to send again."""
        self.jobs += 1
        self.weight += job.account.weight
        if job.tag < self.virtual:
            job.tag = self.virtual
        self._served += job.account.weight * job.tag
        self.enter(job)

    def enter(self, job: JobQueue) -> None:
        """Put a job in the order, unless it is there (or its cap is used up)."""
        if not job.in_heap and not job.account.throttled:
            job.in_heap = True
            heappush(self._heap, (job.tag, job.number, job))

    def deactivate(self, job: JobQueue) -> None:
        """A job has nothing to send any more."""
        self.jobs -= 1
        if self.jobs:
            self.weight -= job.account.weight
            self._served -= job.account.weight * job.tag
        else:
            self.weight = self._served = 0.0  # no rounding is carried on
            self.virtual = max(self.virtual, job.tag)

    def reweigh(self, jobs: Iterable[JobQueue]) -> None:
        """Weights have changed; ``jobs``: those with something to send."""
        self.weight = self._served = 0.0
        for job in jobs:
            self.weight += job.account.weight
            self._served += job.account.weight * job.tag
        self.current = None

    def charge(self, job: JobQueue, nbytes: int) -> None:
        """``nbytes`` of the class were granted to a job."""
        job.tag += nbytes / job.account.weight
        if job.count:
            self._served += nbytes
        if job is self.current:
            self.turn_left_bytes -= nbytes

    def lift(self, job: JobQueue, tag: float) -> None:
        """A job can't use what it is offered, and the next one is at ``tag``: it is owed nothing."""
        if job.tag < tag:
            if job.count:
                self._served += job.account.weight * (tag - job.tag)
            job.tag = tag

    def choose(self, quantum: Callable[[JobQueue], int]) -> JobQueue | None:
        """Whose turn it is: the same job's until its turn is used up, then that of the lowest tag.

        :param quantum: bytes of a job's turn: long enough that the hand-overs around it cost little.
        """
        current = self.current
        if current is not None and self.turn_left_bytes > 0 and current.count and not current.account.throttled:
            return current
        self.current = current = self._lowest()
        if current is not None:
            self.turn_left_bytes = quantum(current)
            self.virtual = max(self.virtual, current.tag)
            self.reason = self._why(current) if self.jobs > 1 else ""
        return current

    def _lowest(self) -> JobQueue | None:
        heap = self._heap
        while heap:
            tag, number, job = heap[0]
            if not job.count or job.account.throttled:
                heappop(heap)
                job.in_heap = False
            elif job.tag != tag:
                heapreplace(heap, (job.tag, number, job))
            else:
                return job
        return None

    def _why(self, job: JobQueue) -> str:
        weight = job.account.weight
        behind = round(self._served * weight / self.weight - weight * job.tag)
        place = f"{format_size(behind)} behind its share" if behind >= 0 else f"{format_size(-behind)} ahead of it"
        return f"job {job.account.name}: weight {weight:g} of {self.weight:g}, {place}"

    def by_tag(self, most: int = 1 << 30) -> list[JobQueue]:
        """The jobs that may send, lowest tag first, at most so many: for a class that serves them side by side."""
        self.current = None
        jobs = list(islice(self.others(), most))
        if jobs:
            self.virtual = max(self.virtual, jobs[0].tag)
        return jobs

    def others(self) -> Iterator[JobQueue]:
        """All jobs but the current one, lowest tag first. Stop early: the cost is per job looked at."""
        seen: list[JobQueue] = []
        try:
            while (job := self._lowest()) is not None:
                heappop(self._heap)
                job.in_heap = False
                seen.append(job)
                if job is not self.current:
                    yield job
        finally:
            for job in seen:
                if job.count:
                    self.enter(job)


class LinkQueue:
    """Waiting transfers of one link."""

    __slots__ = (
        "_ages",
        "_jobs",
        "_most_idle",
        "_numbers",
        "_queues",
        "classes",
        "floor_news",
        "floors",
        "heaviest",
        "policy",
        "throttled",
        "version",
    )

    def __init__(self) -> None:
        self.classes = (ClassQueue(), ClassQueue(), ClassQueue())
        """By :class:`TrafficClass`."""
        self.version = 0
        """Another one whenever somebody came, left, or may send again or no longer."""
        self.policy = Policy()
        self.heaviest = 1.0
        """The highest weight of a job that was seen."""
        self.floors: dict[str, JobAccount] = {}
        """Jobs with a floor, of those that were seen."""
        self.floor_news = False
        """One of them has something to send again."""
        self._jobs: dict[str, JobAccount] = {}
        self._queues: dict[str, tuple[JobQueue, ...]] = {}
        """By job, then by class."""
        self._most_idle = MAX_IDLE_JOBS
        self._numbers = 0
        self.throttled: list[tuple[int, int, str]] = []
        """(when its cap leaves enough again, number of the queue, job)."""
        self._ages: list[tuple[int, Waiting]] = []
        """Every waiting transfer by order."""

    @property
    def count(self) -> int:
        """Waiting transfers."""
        pipeline, sync, bulk = self.classes
        return pipeline.count + sync.count + bulk.count

    def waits_below(self, traffic: TrafficClass) -> bool:
        """Someone of a less urgent class waits."""
        _, sync, bulk = self.classes
        return (sync.count > 0 and traffic < TrafficClass.SYNC) or (bulk.count > 0 and traffic < TrafficClass.BULK)

    @property
    def need_bytes(self) -> int:
        """Bytes that wait for a grant."""
        return sum(queue.need_bytes for queue in self.classes)

    def ahead_of(self, traffic: TrafficClass, job: str) -> tuple[int, int]:
        """(transfers, bytes) that a newcomer of ``traffic`` and ``job`` will have waited for when its turn comes."""
        queues = self.classes[: traffic + 1]
        transfers = sum(queue.count for queue in queues)
        nbytes = sum(queue.need_bytes for queue in queues)
        own = self._queues.get(job)
        queue = self.classes[traffic]
        mine = 0 if own is None else own[traffic].need_bytes
        if mine < queue.need_bytes:
            # Other jobs wait as well. While its own bytes are sent, they get the rest of the weights, and no more.
            account = self._jobs.get(job)
            weight = self.policy.job(job).weight if account is None else account.weight
            others = queue.weight - (weight if mine else 0.0)
            nbytes -= max(0, queue.need_bytes - mine - int(mine * others / weight))
        return transfers, nbytes

    def want(self, waiting: Waiting, wanted_bytes: int) -> bool:
        """Raise a transfer's need to a total of ``wanted_bytes``; False when that is no news (a repeated request)."""
        more = wanted_bytes - waiting.wanted_bytes
        if waiting.ended or more <= 0:
            return False
        waiting.wanted_bytes = wanted_bytes
        queue = self.classes[waiting.traffic]
        if waiting.queued and waiting.home is not None:
            queue.need_bytes += more
            waiting.home.need_bytes += more
        elif waiting.need_bytes > 0:
            self._add(queue, waiting)
        return True

    def _add(self, queue: ClassQueue, waiting: Waiting) -> None:
        self.version += 1
        job = self._queue_of(waiting.job, waiting.traffic)
        account = job.account
        if not job.count:
            queue.activate(job)
        job.add(waiting)
        account.count += 1
        if account.floor_bytes_per_s and account.count == 1:
            self.floor_news = True
        queue.count += 1
        queue.need_bytes += waiting.need_bytes
        ages = self._ages
        heappush(ages, (waiting.order, waiting))
        if len(ages) > 4 * self.count + 64:
            # Whoever is at the top may be kept waiting for long; what ended behind it must not pile up.
            self._ages = [(item.order, item) for one in self.classes for item in self._of(one)]
            heapify(self._ages)

    def granted(self, waiting: Waiting, nbytes: int) -> None:
        """Take ``nbytes`` off a transfer's need; at 0 it leaves the queue."""
        waiting.granted_bytes += nbytes
        self.classes[waiting.traffic].need_bytes -= nbytes
        if waiting.home is not None:
            waiting.home.need_bytes -= nbytes
        if waiting.need_bytes <= 0:
            self._left(waiting)

    def end(self, waiting: Waiting, reason: str) -> None:
        """The transfer is done, cancelled or its agent is gone."""
        if waiting.queued:
            self._left(waiting)
        waiting.ended = True
        waiting.reason = reason

    def _left(self, waiting: Waiting) -> None:
        self.version += 1
        queue, job = self.classes[waiting.traffic], waiting.home
        if job is None:
            return
        job.left(waiting, waiting.need_bytes)
        queue.count -= 1
        queue.need_bytes -= waiting.need_bytes
        job.account.count -= 1
        if not job.count:
            queue.deactivate(job)
            if not job.account.count:
                job.account.idle()

    def charge(self, waiting: Waiting, nbytes: int) -> None:
        """Bytes were granted to a transfer: they count against its job's share of the class."""
        if waiting.home is not None:
            self.classes[waiting.traffic].charge(waiting.home, nbytes)

    def oldest(self, eligible: Callable[[Waiting], bool]) -> Waiting | None:
        """Who has waited longest, whatever its class and job, among those that are ``eligible``."""
        ages = self._ages
        passed: list[tuple[int, Waiting]] = []
        found: Waiting | None = None
        while ages and found is None:
            waiting = ages[0][1]
            if waiting.queued and eligible(waiting):
                found = waiting
                break
            entry = heappop(ages)
            if waiting.queued:
                passed.append(entry)
        for entry in passed:
            heappush(ages, entry)
        return found

    # ------------------------------------------------------------------------------------------------------------ jobs

    def account(self, job: str) -> JobAccount | None:
        """What is kept of a job; None when it never sent anything here (or long ago)."""
        return self._jobs.get(job)

    def accounts(self) -> list[JobAccount]:
        """Of all jobs that are known here, by name."""
        return [self._jobs[name] for name in sorted(self._jobs)]

    def queues_of(self, account: JobAccount) -> Sequence[JobQueue]:
        """A job's queues, by class."""
        return self._queues[account.name]

    def set_policy(self, policy: Policy) -> None:
        """Other weights, floors and caps hold from now on."""
        self.version += 1
        self.policy = policy
        self.heaviest = 1.0
        self.floors.clear()
        for name in sorted(self._jobs):
            account = self._jobs[name]
            account.set_policy(policy.job(name))
            self._note(account)
            if account.throttled:
                self._release(account)
        self.throttled.clear()
        self.floor_news = True
        for traffic, queue in zip(CLASSES, self.classes, strict=True):
            queue.reweigh(queues[traffic] for queues in self._queues.values() if queues[traffic].count)

    def throttle(self, account: JobAccount, ready_ns: int) -> None:
        """A job's cap is used up until then."""
        self.version += 1
        account.throttled = True
        heappush(self.throttled, (ready_ns, self._queues[account.name][0].number, account.name))

    def release(self, now_ns: int) -> None:
        """Put jobs back in the order whose caps leave enough again."""
        throttled = self.throttled
        while throttled and throttled[0][0] <= now_ns:
            account = self._jobs.get(heappop(throttled)[2])
            if account is not None:
                self._release(account)

    def _release(self, account: JobAccount) -> None:
        self.version += 1
        account.throttled = False
        for queue, job in zip(self.classes, self._queues[account.name], strict=True):
            if job.count:
                queue.lift(job, queue.virtual)
                queue.enter(job)

    @property
    def release_ns(self) -> int | None:
        """When the next job's cap leaves enough again."""
        return self.throttled[0][0] if self.throttled else None

    def _queue_of(self, name: str, traffic: TrafficClass) -> JobQueue:
        queues = self._queues.get(name)
        if queues is None:
            if len(self._jobs) >= self._most_idle:
                self._forget_idle()
            account = JobAccount(name, self.policy.job(name))
            self._numbers += 1
            queues = tuple(JobQueue(account, self._numbers) for _ in CLASSES)
            self._jobs[name] = account
            self._queues[name] = queues
            self._note(account)
        return queues[traffic]

    def _note(self, account: JobAccount) -> None:
        self.heaviest = max(self.heaviest, account.weight)
        if account.floor_bytes_per_s:
            self.floors[account.name] = account

    def _forget_idle(self) -> None:
        """Names come from agents: accounts of jobs that are over must not pile up. What they had is in their tags,
        and newcomers start at the virtual time anyway."""
        for name in [name for name, one in self._jobs.items() if not one.count and not one.throttled]:
            del self._jobs[name], self._queues[name]
            self.floors.pop(name, None)
        self._most_idle = max(MAX_IDLE_JOBS, 2 * len(self._jobs))

    # --------------------------------------------------------------------------------------------------------- looking

    def _of(self, queue: ClassQueue) -> Iterator[Waiting]:
        traffic = self.classes.index(queue)
        jobs = [queues[traffic] for queues in self._queues.values() if queues[traffic].count]
        for job in sorted(jobs, key=lambda job: (job.tag, job.number)):
            yield from job

    def __iter__(self) -> Iterator[Waiting]:
        """Every waiting transfer, about in the order of their turns: for status, linear in their number."""
        for queue in self.classes:
            yield from self._of(queue)


def fair_shares(total: int, ceilings: Iterable[int]) -> list[int]:
    """Split ``total`` equally among members, none above its ceiling; what one can't use goes to the others.

    The sum never exceeds ``total`` (integer division only rounds down).
    """
    limits = list(ceilings)
    shares = [0] * len(limits)
    left = total
    for place, index in enumerate(sorted(range(len(limits)), key=lambda i: limits[i])):
        shares[index] = min(limits[index], left // (len(limits) - place))
        left -= shares[index]
    return shares


def weighted_shares(total: int, weights: Sequence[float], ceilings: Sequence[int]) -> list[int]:
    """Split ``total`` in proportion to ``weights``, none above its ceiling; what one can't use goes to the others.

    The sum never exceeds ``total``.
    """
    shares = [0] * len(weights)
    left, weight = total, sum(weights)
    # Whoever reaches its ceiling first (at the lowest rate per weight) is settled first.
    for index in sorted(range(len(weights)), key=lambda i: ceilings[i] / weights[i]):
        shares[index] = min(ceilings[index], left, int(left * weights[index] / weight) if weight > 0 else left)
        left -= shares[index]
        weight -= weights[index]
    return shares
