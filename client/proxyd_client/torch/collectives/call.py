"""One collective while it runs: its label, its deadline, the inner group's work, and how it ends.

The inner group is asked to move bytes only. Its operations are matched by their order, which must therefore be the
same on all ranks of a site whatever arrives when: each algorithm starts them at fixed points, and what a single rank
finds out (a mismatch with another site) becomes everybody's at a fixed point too, :meth:`Call.verdict`.
"""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed.distributed_c10d as dist

from proxyd_client.errors import MismatchError, ProxydError, TransferFailed, TransferTimeout
from proxyd_client.torch.collectives import layout
from proxyd_client.torch.collectives.team import DATA, Received, Team, bytes_of

Tensor = Any
T = TypeVar("T")

RECORD_BYTES = 64
"""A label, or what a rank has to say of a mismatch, among the ranks of a site."""

_SLICE_S = 0.5
"""How soon a rank that waits for its site's ranks sees that the group was ended by another thread of its own."""


class Call:
    """One collective on one rank."""

    def __init__(self, team: Team, doing: str, timeout_s: float) -> None:
        team.number += 1
        self.team = team
        self.label = f"{team.number} {doing}".encode()[: RECORD_BYTES - 1].decode(errors="ignore")
        self.doing = f"{doing} (collective {team.number} of group {team.name})"
        self.timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s

    def remaining_s(self) -> float:
        """Until the deadline."""
        return max(0.0, self._deadline - time.monotonic())

    # -- across sites ------------------------------------------------------------------------------------------------

    def post(self, data: Tensor, dst: int, lane: int = DATA) -> None:
        """Send a contiguous tensor's bytes to a group rank at another site, as one message."""
        self.team.post(bytes_of(data), dst, self.label, self.remaining_s(), lane)

    def take(self, src: int, nbytes: int, lane: int = DATA) -> Received:
        """What group rank ``src`` sent in one piece; its size is checked."""
        received = self.team.take(src, self.label, self.remaining_s(), lane)
        if received.nbytes != nbytes:
            why = f"{self.team.describe(src)} sent {received.nbytes} bytes, and {nbytes} were expected"
            raise self.team.mismatch(self.label, why, src)
        return received

    def take_into(self, out: Tensor, src: int) -> None:
        """What group rank ``src`` sent in one piece, into a contiguous tensor."""
        flat = bytes_of(out)
        received = self.take(src, flat.numel())
        if flat.numel():
            flat.copy_(received.view(torch.uint8))

    def swap(self, sends: Sequence[tuple[int, Tensor]], takes: Sequence[tuple[int, Tensor]]) -> None:
        """Send and receive many contiguous tensors, ``(rank, tensor)`` each, at most one per rank and direction.

        In rounds: the next piece to everybody, then from everybody the piece of two rounds ago. Were all sent first,
        large ones would fill the shared memory of both sides. A rank that waits in one round waits for a rank that is
        in an earlier one, so somebody always goes on.
        """
        out = [(dst, flat, layout.pieces(flat.numel())) for dst, flat in ((dst, bytes_of(each)) for dst, each in sends)]
        into = [
            (src, flat, layout.pieces(flat.numel())) for src, flat in ((src, bytes_of(each)) for src, each in takes)
        ]
        rounds = max((len(spans) for _, _, spans in (*out, *into)), default=0)
        for at in range(rounds + layout.ROUNDS_AHEAD):
            for dst, flat, spans in out:
                if at < len(spans):
                    piece = flat[spans[at].start : spans[at].stop]
                    self.team.post(piece, dst, self.label, self.remaining_s())
            for src, flat, spans in into:
                if 0 <= at - layout.ROUNDS_AHEAD < len(spans):
                    span = spans[at - layout.ROUNDS_AHEAD]
                    received = self.take(src, span.length)
                    if span.length:
                        flat[span.start : span.stop].copy_(received.view(torch.uint8))

    # -- inside the site; all are no-ops for a rank that is alone there ------------------------------------------------

    def agree(self) -> None:
        """Compare labels with the ranks of my site.

        :raises MismatchError: on all of them, when they differ.
        """
        team = self.team
        if len(team.mates) == 1:
            return
        said = self._everybodys(self.label)
        for place, label in enumerate(said):
            if label != said[0]:
                doing = [text.partition(" ")[2] for text in (said[0], label)]
                raise team.mismatch(
                    self.label,
                    f"{team.describe(team.mates[0])} does {doing[0]}, {team.describe(team.mates[place])} {doing[1]}",
                )

    @contextlib.contextmanager
    def verdict(self) -> Iterator[None]:
        """Around the first receiving from other sites: a mismatch there on one rank is raised on all of the site."""
        team = self.team
        try:
            yield
        except MismatchError as error:
            if len(team.mates) > 1:
                team.warn(self.label, error)
                self._everybodys("refused")
            raise
        if len(team.mates) > 1:
            for place, text in enumerate(self._everybodys("")):
                if text:
                    raise self.refused_by(team.mates[place])

    def refused_by(self, mate: int, text: str = "") -> MismatchError:
        """The error of a rank whose site's other rank found the mismatch."""
        why = f"{self.team.describe(mate)} of this site found that it does not fit; its own error says more"
        return self.team.mismatch(self.label, f"{why}: {text}..." if text else why)

    def _everybodys(self, text: str) -> list[str]:
        mates = len(self.team.mates)
        own = record_of(text)
        said = torch.empty(mates * RECORD_BYTES, dtype=torch.uint8)
        self.shuffle(said, own.repeat(mates), None, None)()
        return [text_of(row) for row in said.view(mates, RECORD_BYTES)]

    def shuffle(
        self, out: Tensor, data: Tensor, out_sizes: Sequence[int] | None, sizes: Sequence[int] | None
    ) -> Callable[[], None]:
        """All to all: bytes for each rank of the site, bytes from each. The result waits for the end."""
        if len(self.team.mates) == 1:
            out.copy_(data)
            return _done
        options = dist.AllToAllOptions()
        options.timeout = self._limit()
        return self._waiter(
            self._inner().alltoall_base(out, data, list(out_sizes or ()), list(sizes or ()), options), (out, data)
        )

    def spread(self, out: Tensor, data: Tensor) -> Callable[[], None]:
        """All-gather of equally many bytes of each rank of the site. The result waits for the end."""
        if len(self.team.mates) == 1:
            out.copy_(data)
            return _done
        options = dist.AllgatherOptions()
        options.timeout = self._limit()
        return self._waiter(self._inner()._allgather_base(out, data, options), (out, data))

    def tell(self, data: Tensor, place: int = 0) -> Callable[[], None]:
        """Broadcast of the bytes that the rank in this place has. The result waits for the end."""
        if len(self.team.mates) == 1 or not data.numel():
            return _done
        options = dist.BroadcastOptions()
        options.rootRank = place
        options.rootTensor = 0
        options.timeout = self._limit()
        return self._waiter(self._inner().broadcast([data], options), (data,))

    def collect(self, out: Tensor | None, data: Tensor, place: int = 0) -> Callable[[], None]:
        """Gather of equally many bytes at the rank in this place, the only one that has an ``out``."""
        mates = len(self.team.mates)
        if mates == 1 or not data.numel():
            if out is not None:
                out.copy_(data)
            return _done
        options = dist.GatherOptions()
        options.rootRank = place
        options.timeout = self._limit()
        rows = [] if out is None else [list(out.view(mates, -1).unbind(0))]
        return self._waiter(self._inner().gather(rows, [data], options), (out, data))

    def deal(self, out: Tensor, data: Tensor | None, place: int = 0) -> Callable[[], None]:
        """Scatter of equally many bytes from the rank in this place, the only one that has ``data``."""
        mates = len(self.team.mates)
        if mates == 1 or not out.numel():
            if data is not None:
                out.copy_(data)
            return _done
        options = dist.ScatterOptions()
        options.rootRank = place
        options.timeout = self._limit()
        rows = [] if data is None else [list(data.view(mates, -1).unbind(0))]
        return self._waiter(self._inner().scatter([out], rows, options), (out, data))

    def _inner(self) -> Any:
        self.team.check()
        return self.team.inner

    def _limit(self) -> timedelta:
        return timedelta(seconds=max(0.001, self.remaining_s()))

    def _waiter(self, work: Any, buffers: tuple[Tensor | None, ...]) -> Callable[[], None]:
        """``buffers`` stay alive until then, so that nothing else is allocated where the inner group writes."""
        kept = list(buffers)

        def wait() -> None:
            while not work.is_completed():
                self.team.check()
                # Raises when the time is over as well as when it fails: is_completed tells the two apart.
                with contextlib.suppress(RuntimeError):
                    work.wait(timedelta(seconds=min(_SLICE_S, max(0.001, self.remaining_s()))))
                if not self.remaining_s():
                    break
            if not work.is_completed():
                raise TransferTimeout(
                    f"{self.doing} timed out after {self.timeout_s:g} s",
                    why=f"a rank of this site (group ranks {self.team.mates}) has not come to it, here "
                    f"{self.team.describe(self.team.rank)}",
                    next_step="Look at the logs of those ranks",
                    group=self.team.name,
                    phase="inside the site",
                )
            work.wait()
            kept.clear()

        return wait


def record_of(text: str) -> Tensor:
    """A short text, padded, among the ranks of a site."""
    raw = text.encode()[: RECORD_BYTES - 1].ljust(RECORD_BYTES, b"\0")
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def text_of(record: Tensor) -> str:
    """What a record says."""
    return bytes(record.numpy()).rstrip(b"\0").decode(errors="replace")


def _done() -> None:
    """Nothing to wait for."""


def run(team: Team, doing: str, body: Callable[[Call], T], timeout_s: float | None = None, *, agreed: bool = True) -> T:
    """One collective from its start to its end, whatever that is.

    :param doing: what must be the same on all ranks.
    :param agreed: compare it inside the site first.
    :raises MismatchError: the ranks don't do the same; the group goes on.
    :raises ProxydError: it failed, and the group with it.
    """
    team.check()
    call = Call(team, doing, team.timeout_s if timeout_s is None else timeout_s)
    try:
        team.reap()
        if agreed:
            call.agree()
        return body(call)
    except MismatchError as error:
        team.refuse(call.label, error)
        raise
    except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks wait and must hear of it
        failure = _failure(call, error)
        # Frames of the failed algorithm hold operations, which hold the inner group's connections: they must close.
        _let_go(error)
    team.fail(failure)
    raise failure


def _failure(call: Call, error: Exception) -> ProxydError:
    if isinstance(error, ProxydError):
        if call.team.failure is not None:
            return call.team.failure.again()
        copy = error.again()
        if "(collective " not in copy.what and not copy.what.startswith("group "):
            copy.what = f"{call.doing} failed: {copy.what}"
        return copy
    if isinstance(error, RuntimeError) and len(call.team.mates) > 1 and _is_of_gloo(str(error)):
        found = call.team.reason_inside(call.doing)
        if not found.why:
            found.why = str(error).splitlines()[0][:300]
        return found
    return TransferFailed(
        f"{call.doing} failed",
        why=f"{type(error).__name__}: {error} (at {call.team.describe(call.team.rank)})",
        group=call.team.name,
    )


def _is_of_gloo(text: str) -> bool:
    return "gloo" in text or "timed out" in text.lower() or "closed" in text.lower()


def _let_go(error: BaseException | None) -> None:
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
