"""Point-to-point between the members of a group, all of it through this host's agent.

Same host and same site included: so tags, any-source, order and the meaning of a mismatch are the same everywhere, and
are torch's own words made true. A message is matched by (source, group, tag), in the order of the calls. A receive
takes the next message of its channel; when sizes or dtypes differ the receive fails, its tensor is untouched, the
message is dropped, and the next pair matches again. Shapes may differ, as with gloo.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from typing import Any, Protocol

import torch

from proxyd_client.errors import ArgumentError, ProxydError
from proxyd_client.handle import Handle
from proxyd_client.torch.errors import for_torch
from proxyd_client.torch.membership import Membership
from proxyd_client.torch.tensors import describe, payload_of_tensor, tensor_of
from proxyd_client.torch.works import Fate, SendWork, TensorWork


class Pending(Protocol):
    """An operation under way."""

    def wait(self, timeout_s: float | None) -> Any:
        """Until it is done."""


class PointToPoint:
    """Sends and receives of one group.

    :param purpose: told apart from other traffic of the same members: what torch's users send, what a collective does.
    :param traffic: the class of its messages.
    """

    def __init__(self, membership: Membership, purpose: str = "p2p", traffic: str = "pipeline") -> None:
        self.membership = membership
        self._endpoint = membership.endpoint
        self._outbox = membership.outbox
        self._group = f"{membership.name}/{purpose}"
        membership.purposes.append(purpose)
        self._traffic = traffic
        self._lock = threading.Lock()
        self._under_way: dict[int, deque[Fate]] = {}
        """Sends whose works may be done and that have not been delivered, by destination."""

    def send(self, tensor: torch.Tensor, dst: int, tag: int = 0) -> TensorWork:
        """Start sending to a group rank; the tensor is left alone until the work is done. It may arrive later."""
        what = functools.partial(self._what, "send", tensor, "to", dst, tag)
        self._hear_of_earlier(dst)
        fate = Fate(self._start(what, lambda: self._isend(tensor, dst, tag)))
        with self._lock:
            self._under_way.setdefault(dst, deque()).append(fate)
        return SendWork(fate, [tensor], what, self._timeout_s(), lambda _: self.membership.rank)

    def _hear_of_earlier(self, dst: int) -> None:
        """Raise what has kept an earlier message to a group rank from arriving, once."""
        with self._lock:
            fates = self._under_way.get(dst)
            while fates and fates[0].handle.done():
                error = fates.popleft().error()
                if error is not None:
                    raise for_torch(error, f"an earlier send to {self.membership.describe(dst)}")

    def receive(self, tensor: torch.Tensor, src: int | None, tag: int = 0) -> TensorWork:
        """Start receiving from a group rank, or from any (None)."""
        what = functools.partial(self._what, "recv", tensor, "from", src, tag)
        handle = self._start(what, lambda: self._irecv(tensor, src, tag))
        return TensorWork(handle, [tensor], what, self._timeout_s(), self._group_rank)

    def take(self, src: int | None, tag: int, timeout_s: float | None) -> tuple[torch.Tensor, int]:
        """Receive without a copy: a tensor over the agent's shared memory, and the group rank that it is from."""
        source = None if src is None else self._job_rank(src)
        message = self._endpoint.recv(
            source,
            tag,
            group=self._group,
            writable=True,
            timeout_s=self._timeout_s() if timeout_s is None else timeout_s,
        )
        return tensor_of(message), self._group_rank(message.src)

    def isend(self, tensor: torch.Tensor, dst: int, tag: int = 0) -> Pending:
        """For collectives: the bare operation."""
        return self._isend(tensor, dst, tag)

    def irecv(self, tensor: torch.Tensor, src: int, tag: int = 0) -> Pending:
        """For collectives: the bare operation."""
        return self._irecv(tensor, src, tag)

    def eta_s(self, src: int | None, tag: int = 0) -> float | None:
        """Predicted seconds until the next message from ``src`` is all here; 0.0 when it is, None: nothing is known."""
        return self._endpoint.eta(None if src is None else self._job_rank(src), tag, group=self._group)

    def announce(self, dst: int, tag: int, nbytes: int, ready_in_s: float) -> None:
        """Say that a message will be sent; a hint."""
        self._endpoint.announce(
            self._job_rank(dst), tag, nbytes=nbytes, ready_in_s=ready_in_s, group=self._group, traffic=self._traffic
        )

    def _isend(self, tensor: torch.Tensor, dst: int, tag: int) -> Handle[None]:
        payload = payload_of_tensor(tensor)
        return self._outbox.send(payload, self._job_rank(dst), tag=tag, group=self._group, traffic=self._traffic)

    def _irecv(self, tensor: torch.Tensor, src: int | None, tag: int) -> Handle[int]:
        into = payload_of_tensor(tensor, writable=True)
        source = None if src is None else self._job_rank(src)
        return self._endpoint.irecv_into(into, source, tag, group=self._group, strict=True)

    def _timeout_s(self) -> float:
        return self.membership.timeout.total_seconds()

    def _job_rank(self, group_rank: int) -> int:
        members = self.membership.members
        if not 0 <= group_rank < len(members):
            raise ArgumentError(
                f"rank {group_rank} is not in group {self.membership.name} of {len(members)} ranks",
                next_step="Ranks here are the group's own, from 0; torch.distributed.get_group_rank translates",
            )
        return members[group_rank].rank

    def _group_rank(self, job_rank: int | None) -> int:
        if job_rank is None:
            raise ArgumentError("the source of a receive from any rank is known once it is done")
        return self.membership.group_rank_of[job_rank]

    def _what(self, op: str, tensor: torch.Tensor, direction: str, peer: int | None, tag: int) -> str:
        here = self.membership.describe(self.membership.rank)
        there = self.membership.describe(peer) if peer is None or 0 <= peer < self.membership.size else f"rank {peer}"
        return f"{op} of {describe(tensor)} {direction} {there}, tag {tag}, at {here}"

    @staticmethod
    def _start(what: Any, start: Any) -> Any:
        try:
            return start()
        except ProxydError as error:
            if isinstance(error, (TypeError, ValueError)):
                raise  # the call is wrong: torch raises these as they are
            raise for_torch(error, what()) from None
