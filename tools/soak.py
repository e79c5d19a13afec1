#!/usr/bin/env python3
"""Real daemons under mixed load for as long as one likes, with processes killed at random; nothing may be wrong, lost
or repeated, and nothing may grow.

    tools/soak.py --seconds 180 --kill trainers,coordinator --pause 0.1    what CI runs
    tools/soak.py --seconds 3600 --kill trainers,coordinator        an hour
    tools/soak.py --seconds 3600 --pause 0.1 --largest 1048576      an hour that leaves room for other work
    tools/soak.py --kill trainers,coordinator,agents --seed 7 --out build/soak.json

Each message carries the SHA-256 of its body, the name of its stream and its number there; the receiver checks all
three, and what it counts outlives it. A stream ends when its sender hears of an error; a gap in one is a lost message
unless the receiver heard of an error too. Coordinator and agents are killed in the first third only, so that each of
them has a life of two thirds to be judged by.

Exit code 0: all bars hold. 1: the last lines say which do not. Two cores are enough: the links carry 160 Mbit/s.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import hashlib
import json
import os
import random
import re
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import proxyd_client
from proxyd.cli.cluster import Cluster, LinkFigures, Member
from proxyd.cli.scrape import scrape
from proxyd_client import ClosedError, Handle, PeerLost, ProxydError, TransferTimeout

MIB = 1 << 20
MAX_BODY_BYTES = 16 * MIB
HEAD = struct.Struct("<8sQ32s")
TAG = 1
IN_FLIGHT = 4
WARM_SHARE = 1 / 3
JUDGED_SHARE = (1 - WARM_SHARE) * 4 / 5
MAX_GROWTH_BYTES = 5 * MIB
MAX_GROWTH_BYTES_PER_H = 1 * MIB
"""Counts in runs of an hour and more: below that it is less than what a sample moves by."""
FDS_SLACK = 2
LINK = LinkFigures("160Mbit", "5ms", "1bdp", estimate="fixed")
WAIT_S = 60.0
KINDS = ("trainers", "coordinator", "agents")


# -- a trainer: a process of its own, so that it can be killed ---------------------------------------------------------


class Tally:
    """Counts in a file that both processes have mapped: whoever counts may be killed at any moment."""

    NAMES = ("messages", "bytes", "wrong", "lost", "repeated or out of order")

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(8 * len(self.NAMES)))
        self._counts = np.memmap(path, np.uint64, "r+")

    def add(self, name: str, count: int = 1) -> None:
        self._counts[self.NAMES.index(name)] += np.uint64(count)

    def counts(self) -> collections.Counter[str]:
        """All of them."""
        return collections.Counter({n: int(c) for n, c in zip(self.NAMES, self._counts, strict=True) if c})


class Trainer:
    """Sends to one other rank and receives from it, all the time."""

    def __init__(
        self, socket: str, job: str, rank: int, other: int, seed: int, pause_s: float, largest: int, tally: Tally
    ) -> None:
        self.endpoint = proxyd_client.connect(job, rank, socket=socket, timeout_s=WAIT_S)
        self.other, self.pause_s, self.largest_bytes, self.tally = other, pause_s, largest, tally
        self.random = random.Random(seed)
        self.bodies = memoryview(np.random.default_rng(seed).bytes(2 * MAX_BODY_BYTES))
        self.quiet = threading.Event()
        self.ended = threading.Event()
        self.counts: collections.Counter[str] = collections.Counter()
        self.stream = b""
        self.number = 0
        self.acknowledged: dict[str, int] = {}
        self.seen: dict[bytes, int] = {}
        self.heard_error = False

    def body_bytes(self) -> int:
        """Mostly small, sometimes none, sometimes many MiB."""
        draw = self.random.random()
        if draw < 0.02:
            return 0
        return int(self.largest_bytes ** self.random.random()) if draw < 0.9 else self.largest_bytes // 4

    def send(self) -> None:
        """Until it is to be quiet; then until everything is acknowledged."""
        under_way: collections.deque[Handle[None]] = collections.deque()
        while not self.quiet.is_set():
            try:
                if not self.stream:
                    self.stream, self.number = os.urandom(8), 0
                nbytes = self.body_bytes()
                start = self.random.randrange(MAX_BODY_BYTES)
                body = self.bodies[start : start + nbytes]
                head = HEAD.pack(self.stream, self.number, hashlib.sha256(body).digest())
                traffic = ("pipeline", "sync", "bulk")[self.number % 3]
                under_way.append(self.endpoint.isend(head + body, dst=self.other, tag=TAG, traffic=traffic))
                self.number += 1
                if len(under_way) >= IN_FLIGHT:
                    self.acknowledge(under_way.popleft())
                time.sleep(self.pause_s)
            except ProxydError as error:
                self.counts[f"send {type(error).__name__}"] += 1
                self.give_up(under_way, error)
        try:
            while under_way:
                self.acknowledge(under_way.popleft())
        except ProxydError as error:
            self.counts[f"send {type(error).__name__}"] += 1
            self.give_up(under_way, error)

    def acknowledge(self, handle: Handle[None]) -> None:
        handle.wait(WAIT_S)
        self.acknowledged[self.stream.hex()] = self.acknowledged.get(self.stream.hex(), 0) + 1

    def give_up(self, under_way: collections.deque[Handle[None]], error: ProxydError) -> None:
        """The rest of this stream may or may not arrive; the next one is another."""
        if isinstance(error, TransferTimeout):
            self.counts["stuck"] += 1
        for handle in under_way:
            with contextlib.suppress(ProxydError):
                handle.wait(WAIT_S)
        under_way.clear()
        self.acknowledged.pop(self.stream.hex(), None)
        self.stream = b""
        if isinstance(error, ClosedError | proxyd_client.AgentUnavailable):
            os._exit(3)  # its agent is gone; whoever started us starts us again
        time.sleep(0.05)

    def receive(self) -> None:
        """Until the end."""
        while not self.ended.is_set():
            try:
                message = self.endpoint.recv(src=self.other, tag=TAG, timeout_s=0.5)
            except TransferTimeout:
                continue
            except PeerLost as error:
                self.counts[f"receive PeerLost: {without_names(error.why)}"] += 1
                self.heard_error = True
                time.sleep(0.02)
                continue
            except ProxydError as error:
                self.counts[f"receive {type(error).__name__}"] += 1
                os._exit(3)
            self.check(memoryview(message.data))
            del message

    def check(self, data: memoryview) -> None:
        stream, number, digest = HEAD.unpack_from(data)
        body = data[HEAD.size :]
        self.tally.add("messages")
        self.tally.add("bytes", len(body))
        if hashlib.sha256(body).digest() != digest:
            self.tally.add("wrong")
        last = self.seen.get(stream)
        if last is not None and number <= last:
            self.tally.add("repeated or out of order")
        elif last is not None and number > last + 1 and not self.heard_error:
            self.tally.add("lost")
        self.seen[stream] = number
        self.heard_error = False


def trainer_main(arguments: list[str]) -> int:
    """Commands on stdin: ``quiet`` (send no more), ``end``. Each is answered by a line of JSON."""
    socket, job, rank, other, seed, pause_s, largest, tally = arguments
    kept = Tally(Path(tally))
    trainer = Trainer(socket, job, int(rank), int(other), int(seed), float(pause_s), int(largest), kept)
    sending = threading.Thread(target=trainer.send, daemon=True)
    receiving = threading.Thread(target=trainer.receive, daemon=True)
    print(json.dumps({"ready": True}), flush=True)
    sending.start()
    receiving.start()
    sys.stdin.readline()
    trainer.quiet.set()
    sending.join(2 * WAIT_S)
    print(json.dumps({"quiet": not sending.is_alive()}), flush=True)
    sys.stdin.readline()
    trainer.ended.set()
    receiving.join(WAIT_S)
    seen = {stream.hex(): number + 1 for stream, number in trainer.seen.items()}
    print(json.dumps({"counts": trainer.counts, "sent": trainer.acknowledged, "seen": seen}), flush=True)
    trainer.endpoint.close(0.0)
    return 0


def without_names(why: str) -> str:
    """An error's cause without what differs from time to time: the same ones are counted together."""
    return re.sub(r"[0-9a-f.]*[0-9][0-9a-f.]*", "#", why)[:160]


# -- who starts, kills and watches them --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Load:
    """How much is sent. The link is full by itself; a long run beside other work pauses, and sends small ones."""

    pause_s: float = 0.0
    """Between two messages of a trainer."""
    largest_bytes: int = MAX_BODY_BYTES


@dataclass
class Place:
    """Where a trainer lives, over all its lives."""

    site: str
    rank: int
    other: int
    pause_s: float
    process: subprocess.Popen[str] | None = None
    lives: int = 0

    @property
    def running(self) -> subprocess.Popen[str]:
        assert self.process is not None, "started before it is asked for"
        return self.process


@dataclass
class Life:
    """One daemon's life, sampled every second: how much of its own memory it uses, and how many descriptors."""

    label: str
    first_s: float = field(default_factory=time.monotonic)
    last_s: float = 0.0
    rss_bytes: list[int] = field(default_factory=list)
    fds: list[int] = field(default_factory=list)

    def growth_bytes(self) -> int:
        """Of the last fifth over the first fifth after warm-up, by medians: so over JUDGED_SHARE of its life."""
        rest = self.rss_bytes[int(len(self.rss_bytes) * WARM_SHARE) :]
        part = max(1, len(rest) // 5)
        return int(statistics.median(rest[-part:]) - statistics.median(rest[:part]))


def memory_of(pid: int) -> int:
    """Anonymous memory: what a daemon itself holds. Arenas are shared memory, bounded and counted elsewhere."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise ProxydError(f"process {pid} has no memory to look at")


class Soak:
    """One run."""

    def __init__(self, cluster: Cluster, seed: int, kinds: list[str], load: Load) -> None:
        self.cluster = cluster
        self.load = load
        self.random = random.Random(seed)
        self.seed = seed
        # Daemons first: they have but the first third, and a busy machine takes some of that.
        self.kinds = sorted(kinds, key=lambda kind: kind == "trainers")
        self.kills: collections.Counter[str] = collections.Counter()
        self.counts: collections.Counter[str] = collections.Counter()
        self.lives: dict[int, Life] = {}
        self.tallies: list[Tally] = []
        self._directory = tempfile.TemporaryDirectory(prefix="proxyd-soak-")
        # Three pairs over the link, one inside a site, which would be as fast as the machine.
        self.places = [
            Place(site, 2 * pair + end, 2 * pair + 1 - end, load.pause_s + (0.02 if sites == ("a", "a") else 0.0))
            for pair, sites in enumerate([("a", "b"), ("a", "b"), ("b", "a"), ("a", "a")])
            for end, site in enumerate(sites)
        ]

    def start(self, place: Place) -> None:
        """A new life of a trainer."""
        place.lives += 1
        arguments = [self.cluster.agent(place.site).socket, "soak", str(place.rank), str(place.other)]
        arguments += [str(self.seed * 1000 + place.rank * 100 + place.lives), str(place.pause_s)]
        tally = Path(self._directory.name) / f"{place.rank}-{place.lives}"
        self.tallies.append(Tally(tally))
        arguments += [str(self.load.largest_bytes), str(tally)]
        place.process = subprocess.Popen(
            [sys.executable, __file__, "trainer", *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.answer(place)

    def answer(self, place: Place) -> dict[str, Any]:
        """Its next line."""
        assert place.running.stdout is not None
        line = place.running.stdout.readline()
        if not line:
            raise ProxydError(f"trainer {place.rank} ended by itself with exit code {place.running.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def say(self, place: Place, word: str) -> None:
        assert place.running.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            place.running.stdin.write(word + "\n")
            place.running.stdin.flush()

    def run(self, seconds: float) -> None:
        """The load, the kills, the samples."""
        for place in self.places:
            self.start(place)
        begun_s = time.monotonic()
        next_kill_s = begun_s + 3.0
        next_sample_s = begun_s
        while (now_s := time.monotonic()) < begun_s + seconds:
            if now_s >= next_sample_s:
                self.sample()
                next_sample_s = now_s + 1.0
            for place in self.places:
                if place.running.poll() is not None:  # its agent went; it goes on with the next one
                    self.counts["trainers that lost their agent"] += 1
                    self.start(place)
            # The last seconds are without, so that what is under way at the end can be told apart from what was lost.
            if self.kinds and next_kill_s <= now_s < begun_s + seconds - 5.0:
                self.kill_one(early=now_s - begun_s < seconds * WARM_SHARE)
                next_kill_s = now_s + self.random.uniform(2.0, 8.0)
            time.sleep(0.05)

    def kill_one(self, early: bool) -> None:
        """SIGKILL somebody, and start it again."""
        kinds = [kind for kind in self.kinds if early or kind == "trainers"]
        if not kinds:
            return
        # In turn: all kinds have to come up in the short time that is left to some of them.
        kind = kinds[self.kills.total() % len(kinds)]
        self.kills[kind] += 1
        if kind == "trainers":
            place = self.random.choice(self.places)
            place.running.kill()
            place.running.wait()
            time.sleep(self.random.uniform(0.0, 0.5))
            self.start(place)
        elif kind == "coordinator":
            self.cluster.kill(self.cluster.coordinator)
            time.sleep(self.random.uniform(0.0, 2.0))
            self.cluster.start_coordinator()
        elif kind == "agents":
            agent = self.random.choice(self.cluster.agents)
            number = int(agent.name.rpartition("-")[2])
            self.cluster.kill(agent)
            time.sleep(self.random.uniform(0.0, 1.0))
            self.cluster.restart_agent(agent.site, number)

    def sample(self) -> None:
        for member in self.cluster.members:
            if member.process.poll() is None:
                life = self.lives.setdefault(member.pid, Life(member.label))
                life.last_s = time.monotonic()
                life.rss_bytes.append(memory_of(member.pid))
                life.fds.append(fds_of(member))

    def end(self) -> list[str]:
        """Stop the load in order; answers what is wrong with what arrived."""
        problems: list[str] = []
        for place in self.places:
            self.say(place, "quiet")
        for place in self.places:
            if not self.answer(place)["quiet"]:
                problems.append(f"trainer {place.rank} waits for an acknowledgement for more than {WAIT_S:g} s")
        time.sleep(1.0)
        answers = {}
        for place in self.places:
            self.say(place, "end")
            answers[place.rank] = self.answer(place)
            place.running.wait(10)
        for place in self.places:
            self.counts.update(answers[place.rank]["counts"])
            for stream, sent in answers[place.rank]["sent"].items():
                seen = answers[place.other]["seen"].get(stream, 0)
                if seen != sent:
                    problems.append(f"rank {place.rank} heard of {sent} deliveries, {place.other} has had {seen}")
        return problems

    def close(self) -> None:
        """Whoever is left goes."""
        for place in self.places:
            if place.process is not None:
                place.process.kill()
                place.process.wait()
        for tally in self.tallies:
            self.counts.update(tally.counts())
        self._directory.cleanup()


def fds_of(member: Member) -> int:
    """Open descriptors of a daemon."""
    return len(os.listdir(f"/proc/{member.pid}/fd"))


def idle_fds(cluster: Cluster) -> dict[int, int]:
    """Descriptors of each daemon when no trainer is there; the last one's go a moment after it."""
    deadline_s = time.monotonic() + 10.0
    while any(scrape(agent.metrics).total("proxyd_clients") for agent in cluster.agents):
        if time.monotonic() > deadline_s:
            raise ProxydError("an agent holds trainers that have ended for more than 10 s")
        time.sleep(0.1)
    time.sleep(1.0)
    return {member.pid: fds_of(member) for member in cluster.members}


def soak(seconds: float, seed: int, kinds: list[str], load: Load) -> tuple[dict[str, Any], list[str]]:
    """Run it; answers the figures and, in words, which bars don't hold."""
    links = {("a", "b"): LINK, ("b", "a"): LINK}
    agent = {"memory": "1GiB", "arena": "64MiB", "eager": "32MiB"}
    with Cluster({"a": 1, "b": 1}, links=links, agent=agent) as cluster:
        warm = Soak(cluster, seed + 1, [], load)
        try:
            warm.run(3.0)
            problems = warm.end()
        finally:
            warm.close()
        fds_before = idle_fds(cluster)
        run = Soak(cluster, seed, kinds, load)
        try:
            run.run(seconds)
            problems += run.end()
        finally:
            run.close()
        fds_after = idle_fds(cluster)
        coordinator = scrape(cluster.coordinator.metrics)
        outstanding = coordinator.total("proxyd_link_outstanding_bytes")
        violations = coordinator.total("proxyd_window_violations_total")
        corrupt = sum(scrape(one.metrics).total("proxyd_corrupt_chunks_total") for one in cluster.agents)
        died = [f"{member.label}: exit code {code}, {member.last_words()}" for member, code in cluster.deaths()]
    daemons = {}
    for pid, life in run.lives.items():
        judged = pid in fds_after and life.last_s - life.first_s >= seconds / 3
        growth = life.growth_bytes()
        daemons[f"{life.label} ({pid})"] = {
            "judged": judged,
            "growth_bytes": growth,
            "rss_anon_bytes": life.rss_bytes,
            "fds": life.fds,
        }
        limit = MAX_GROWTH_BYTES if seconds < 3600 else MAX_GROWTH_BYTES_PER_H * seconds * JUDGED_SHARE / 3600
        if judged and growth > limit:
            problems.append(f"{life.label} grew by {growth / MIB:.1f} MiB after warm-up; at most {limit / MIB:.1f}")
    for pid, before in fds_before.items():
        if (after := fds_after.get(pid, 0)) > before + FDS_SLACK:
            problems.append(f"process {pid} has {after} descriptors, it had {before}")
    for name in ("wrong", "lost", "repeated or out of order", "stuck"):
        if run.counts[name]:
            problems.append(f"{run.counts[name]} messages were {name}")
    if "trainers" not in kinds:
        # No sender's life has ended, but in order, when all was over.
        for name, count in run.counts.items():
            if name.startswith("receive PeerLost") and not name.endswith(": closed by its owner"):
                problems.append(f"{count} times: {name}, and no trainer was killed")
    for value, what in (
        (outstanding, "bytes are granted and never delivered"),
        (violations, "windows were exceeded"),
        (corrupt, "chunks failed their checksum, and nobody corrupted any"),
    ):
        if value:
            problems.append(f"{value:g} {what}")
    problems += died
    if not run.counts["messages"]:
        problems.append("nothing arrived")
    figures = {
        "seconds": seconds,
        "seed": seed,
        "messages": run.counts["messages"],
        "bytes": run.counts["bytes"],
        "counts": dict(sorted(run.counts.items())),
        "kills": dict(run.kills),
        "daemons": daemons,
        "problems": problems,
    }
    return figures, problems


def main() -> int:
    """See the module's text."""
    if sys.argv[1:2] == ["trainer"]:
        return trainer_main(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kill", default="", metavar="KINDS", help=f"any of {', '.join(KINDS)}")
    parser.add_argument("--pause", type=float, default=0.0, metavar="SECONDS", help="between two messages of a trainer")
    parser.add_argument("--largest", type=int, default=MAX_BODY_BYTES, metavar="BYTES", help="largest message")
    parser.add_argument("--out", type=Path, help="write figures and series as JSON")
    args = parser.parse_args()
    kinds = [kind for kind in args.kill.split(",") if kind]
    if unknown := set(kinds) - set(KINDS):
        parser.error(f"--kill knows {', '.join(KINDS)}, not {', '.join(sorted(unknown))}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    figures, problems = soak(args.seconds, args.seed, kinds, Load(args.pause, args.largest))
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(figures, indent=1) + "\n")
    print(f"{figures['messages']} messages, {figures['bytes'] / 1e9:.2f} GB, kills: {figures['kills']}")
    for name, count in figures["counts"].items():
        print(f"  {count} {name}")
    for name, daemon in figures["daemons"].items():
        rss, fds = daemon["rss_anon_bytes"], daemon["fds"]
        step = max(1, len(rss) // 6)
        series = ", ".join(f"{value / MIB:.1f}" for value in rss[::step])
        print(f"{name}: {series} MiB; {min(fds)} to {max(fds)} descriptors")
    for problem in problems:
        print(f"NOT SO: {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
