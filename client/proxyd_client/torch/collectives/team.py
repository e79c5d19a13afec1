"""The members of a group, and what they say to each other across sites.

**Messages.** Every collective of a group has a number, counted by each rank, and a label: number, name, op, dtype and
size. A message carries the label of its collective as its dtype name, so a receiver sees what the sender was doing: the
same (it is data), an earlier one (left over from a collective that was refused: dropped), or something else.

**Refusals.** Ranks of one site compare their labels before any data moves; ranks of different sites do it with the
first message. Where they differ every rank that notices raises MismatchError, leaves its buffers alone, and tells the
ranks of all other sites, one of which may wait for it. The collective's number is used up, so the next one matches
again.

**Failures** (a rank died, an agent is gone, a time is over) end the group: whoever notices keeps the error as the
reason why nothing more is done, tells all other ranks, and closes the inner group, which ends what its site's ranks
wait for in there. They do the same. A rank that waits for something waits for a rank that answers, has told it, or is
dead.
"""

from __future__ import annotations

import ctypes
import json
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from proxyd_client import errors
from proxyd_client.buffers import Payload
from proxyd_client.endpoint import Endpoint
from proxyd_client.errors import MismatchError, PeerLost, ProxydError, TransferFailed, TransferTimeout
from proxyd_client.handle import Handle
from proxyd_client.message import Message
from proxyd_client.torch.collectives.scratch import Scratch

Tensor = Any

DATA, RESULTS, NOTICES = 0, 1, 2
"""Lanes, each in order: what ranks contribute, what owners of a sum send back, and failures inside a site."""

_REFUSED = "refused"
_FAILED = "failed"

_SLICE_S = 0.25
"""How soon a rank that waits for another site hears what a rank of its own has to say."""

TRAFFIC = "sync"


class Received:
    """A message's bytes in shared memory, without a copy; they stay as long as this does."""

    def __init__(self, message: Message) -> None:
        self._message = message
        self.nbytes = message.nbytes

    def view(self, dtype: Any) -> Tensor:
        """All of it as a flat tensor. Only to be read, and not to outlive this object."""
        if not self.nbytes:
            return torch.empty(0, dtype=dtype)
        # torch warns of read-only memory, once, in the middle of a stranger's training.
        address = np.frombuffer(self._message.data, np.uint8).ctypes.data
        return torch.frombuffer((ctypes.c_char * self.nbytes).from_address(address), dtype=dtype)


def bytes_of(tensor: Tensor) -> Tensor:
    """A contiguous tensor's memory, flat."""
    flat = tensor.detach().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)


class Team:
    """A group that spans sites, as one of its ranks sees it."""

    def __init__(
        self,
        *,
        endpoint: Endpoint,
        name: str,
        rank: int,
        ranks: Sequence[int],
        sites: Sequence[Sequence[int]],
        inner: Any,
        timeout_s: float,
    ) -> None:
        """
        :param endpoint: this process's.
        :param name: the group's, the same on all its ranks and of no other group of the job.
        :param rank: mine, in the group.
        :param ranks: global rank of each group rank.
        :param sites: group ranks per site, each ascending; sites ordered by their lowest rank.
        :param inner: a plain group of my site's ranks in ascending order, referred to by nobody else: dropping it
            closes it. None when I am alone at my site.
        :param timeout_s: for a collective that names none.
        """
        self.waiting = endpoint.waiting
        """Entered by whoever stands still for a collective."""
        self.name = name
        self.rank = rank
        self.size = len(ranks)
        self.sites = [list(site) for site in sites]
        self.site = next(at for at, site in enumerate(self.sites) if rank in site)
        self.mates = self.sites[self.site]
        self.place = self.mates.index(rank)
        self.others = [at for at in range(len(self.sites)) if at != self.site]
        self.inner = inner
        self.timeout_s = timeout_s
        self.failure: ProxydError | None = None
        self.number = 0
        self.scratch = Scratch()
        self._endpoint = endpoint
        self._ranks = list(ranks)
        self._lock = threading.Lock()
        self._waiting: Handle[Message] | None = None
        self._notices: Handle[Message] | None = None
        self._unacknowledged: list[Handle[None]] = []

    # -- messages ----------------------------------------------------------------------------------------------------

    def post(self, data: Tensor, dst: int, label: str, timeout_s: float, lane: int = DATA) -> None:
        """Send flat bytes to group rank ``dst``; they may change as soon as this returns."""
        payload = Payload(data.numpy(), label, (data.numel(),))
        handle = self._endpoint.isend(
            payload, self._ranks[dst], lane, group=self.name, traffic=TRAFFIC, timeout_s=timeout_s
        )
        self._unacknowledged.append(handle)

    def take(self, src: int, label: str, timeout_s: float, lane: int = DATA) -> Received:
        """The next message from group rank ``src`` for this collective.

        :raises MismatchError: it does something else, or has refused.
        :raises ProxydError: it, or the whole group, has failed.
        """
        deadline = time.monotonic() + timeout_s
        number, doing = _parts(label)
        while True:
            handle = self._endpoint.irecv(self._ranks[src], lane, group=self.name)
            with self._lock:
                self._waiting = handle
            try:
                self.check()  # after it can be found by whoever ends the group: one of the two sees the other
                message = self._wait(handle, number, deadline)
            except TransferTimeout:
                raise TransferTimeout(
                    f"{doing} (collective {number} of group {self.name}) timed out after {timeout_s:.3g} s",
                    why=f"nothing came from {self.describe(src)}, here {self.describe(self.rank)}",
                    next_step="Look at the log of that rank: it has not come to this call, or waits for another one",
                    peer=self._ranks[src],
                    group=self.name,
                    phase="waiting for another site",
                ) from None
            finally:
                self._waiting = None
                handle.cancel()  # too late where it has ended well
            theirs, text = _parts(message.dtype)
            if text == _FAILED:
                raise _error_of(bytes(message.data))
            if theirs < number:
                continue
            if theirs == number and text == doing:
                return Received(message)
            if theirs != number:
                why = f"that one is at collective {theirs} already: {text}"
            elif text == _REFUSED:
                why = bytes(message.data).decode(errors="replace")
            else:
                why = f"that one does {text}"
            raise self.mismatch(label, f"it does not fit {self.describe(src)}: {why}", src)

    def _wait(self, handle: Handle[Message], number: int, deadline: float) -> Message:
        while True:
            left = max(0.0, deadline - time.monotonic())
            try:
                return handle.wait(min(left, _SLICE_S))
            except TransferTimeout:
                if left <= _SLICE_S:
                    raise
                self._read_notices(number, 0.0)

    def _read_notices(self, number: int, timeout_s: float) -> None:
        """Raises what a rank of my site has to say of this collective, or of the whole group."""
        while len(self.mates) > 1:
            if self._notices is None:
                self._notices = self._endpoint.irecv(None, NOTICES, group=self.name)
            try:
                message = self._notices.wait(timeout_s)
            except TransferTimeout:
                return
            self._notices = None
            theirs, text = _parts(message.dtype)
            if text == _FAILED:
                raise _error_of(bytes(message.data))
            if theirs == number:
                raise MismatchError(bytes(message.data).decode(errors="replace"), group=self.name)

    def mismatch(self, label: str, why: str, peer: int | None = None) -> MismatchError:
        """The error for ranks that don't do the same."""
        number, doing = _parts(label)
        return MismatchError(
            f"{doing} (collective {number} of group {self.name}, here {self.describe(self.rank)}) was refused",
            why=why,
            next_step="All ranks of a group must make the same calls in the same order, with the same sizes and dtypes",
            peer=None if peer is None else self._ranks[peer],
            group=self.name,
        )

    def describe(self, rank: int) -> str:
        """A member in both rank spaces."""
        return f"group rank {rank} (global rank {self._ranks[rank]})"

    def reap(self) -> None:
        """Forget what was delivered. Raises what became of what could not be."""
        pending = []
        for handle in self._unacknowledged:
            if handle.done():
                handle.wait(0.0)
            else:
                pending.append(handle)
        self._unacknowledged = pending

    def refuse(self, label: str, error: MismatchError) -> None:
        """Tell all other sites' ranks that this collective won't happen: one of them may wait for me in it."""
        number, _ = _parts(label)
        reason = _as_tensor(f"{self.describe(self.rank)} refused ({error.why or error.what})")
        for site in self.others:
            for dst in self.sites[site]:
                for lane in (DATA, RESULTS):
                    self.post(reason, dst, f"{number} {_REFUSED}", self.timeout_s, lane)

    def warn(self, label: str, error: MismatchError) -> None:
        """Tell my site's ranks that I won't go on with this collective: one may wait for another site's rank in it."""
        number, _ = _parts(label)
        for mate in self.mates:
            if mate != self.rank:
                self.post(_as_tensor(str(error)), mate, f"{number} {_REFUSED}", self.timeout_s, NOTICES)

    # -- the end -----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises why the group has ended, if it has."""
        if self.failure is not None:
            raise self.failure.again()

    def fail(self, error: ProxydError) -> None:
        """End the group: nothing more is done in it. Only the first call counts. From any thread."""
        with self._lock:
            if self.failure is not None:
                return
            self.failure = _again_in(error, self.name)
            waiting = self._waiting
        for handle in (waiting, self._notices):
            if handle is not None:
                handle.cancel()
        notice = _as_tensor(json.dumps([type(error).__name__, error.what, error.why, error.peer, error.next_step]))
        for site, members in enumerate(self.sites):
            for dst in members:
                for lane in (NOTICES,) if site == self.site else (DATA, RESULTS):
                    if dst != self.rank:
                        try:
                            self.post(notice, dst, f"{self.number} {_FAILED}", 0.0, lane)
                        except ProxydError:
                            continue  # it is gone, or we are: there is nobody to tell
        self.inner = None

    def close(self) -> None:
        """Let go of the inner group, and of what waits for notices. Nobody is told."""
        if self._notices is not None:
            self._notices.cancel()
        self.inner = None

    def reason_inside(self, what: str, timeout_s: float = 1.0) -> ProxydError:
        """Why the inner group broke: what one of my site's ranks said, or which of them is gone."""
        try:
            self._read_notices(0, timeout_s)
        except ProxydError as error:
            return error
        gone = [mate for mate in self.mates if mate != self.rank and self._is_gone(mate)]
        if not gone:
            return TransferFailed(f"{what} failed inside the site", group=self.name)
        return PeerLost(
            f"{what} failed",
            why=f"the process of {self.describe(gone[0])} has ended, here {self.describe(self.rank)}",
            next_step="Start the job again from its last checkpoint, or go on without that rank",
            peer=self._ranks[gone[0]],
            group=self.name,
        )

    def _is_gone(self, mate: int) -> bool:
        try:
            self._endpoint.link_state(self._ranks[mate], timeout_s=1.0)
        except PeerLost:
            return True
        except ProxydError:
            return False
        return False


def _parts(label: str) -> tuple[int, str]:
    number, _, text = label.partition(" ")
    return (int(number) if number.isdecimal() else 0), text


def _as_tensor(text: str) -> Tensor:
    return torch.frombuffer(bytearray(text.encode()[:4096]), dtype=torch.uint8)


def _again_in(error: ProxydError, group: str) -> ProxydError:
    copy = error.again()
    ended = f"group {group} has ended: "
    copy.what = ended + error.what.removeprefix(ended)
    return copy


def _error_of(notice: bytes) -> ProxydError:
    """What another rank said has happened, as an error of the same class."""
    try:
        kind, what, why, peer, next_step = json.loads(notice)
    except ValueError:
        kind, what, why, peer, next_step = "", notice.decode(errors="replace"), "", None, ""
    found = getattr(errors, str(kind), None)
    usable = found if isinstance(found, type) and issubclass(found, ProxydError) else TransferFailed
    peer = peer if isinstance(peer, int) else None
    return usable(str(what), why=str(why), peer=peer, next_step=str(next_step))
