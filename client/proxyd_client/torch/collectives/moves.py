"""Data that moves as it is: broadcast, allgather, gather, scatter, alltoall, barrier. The dtype doesn't matter here.

What goes to all ranks of a site crosses to it once and is spread inside: a broadcast's tensor in shards, one to each of
its ranks; an allgather's block of a rank to its counterpart there (same place, modulo the site's size). What is for one
rank only (gather, scatter, alltoall) goes to that rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from proxyd_client.errors import MismatchError, TransferTimeout
from proxyd_client.torch.collectives import layout
from proxyd_client.torch.collectives.call import RECORD_BYTES, Call, record_of, run, text_of
from proxyd_client.torch.collectives.layout import Span
from proxyd_client.torch.collectives.team import Team, bytes_of

Tensor = Any


def broadcast(team: Team, tensor: Tensor, root: int, timeout_s: float | None = None) -> None:
    """``tensor`` (contiguous) becomes group rank ``root``'s."""
    data = bytes_of(tensor)
    source = _site_of(team, root)

    def body(call: Call) -> None:
        small = data.numel() <= layout.SMALL_BYTES
        if team.rank == root:
            if small:
                for at in team.others:
                    call.post(data, team.sites[at][0])
            else:
                _shards_out(call, data)
        if team.site == source:
            call.tell(data, team.mates.index(root))()
        elif small:
            _told(call, data, root)
        else:
            _shards_in(call, data, root)

    run(team, f"broadcast from {root} {_kind(tensor)}", body, timeout_s)


def _told(call: Call, data: Tensor, root: int) -> None:
    """A small tensor comes to the site's first rank, which tells the others, or why not."""
    team = call.team
    told = torch.zeros(RECORD_BYTES + data.numel(), dtype=torch.uint8)
    refused: MismatchError | None = None
    if team.place == 0:
        try:
            call.take_into(told[RECORD_BYTES:], root)
        except MismatchError as error:
            refused = error
            told[:RECORD_BYTES] = record_of(error.why)
    call.tell(told)()
    if refused is not None:
        raise refused
    if text := text_of(told[:RECORD_BYTES]):
        raise call.refused_by(team.mates[0], text)
    data.copy_(told[RECORD_BYTES:])


def _chunks(nbytes: int, mates: int) -> list[Span]:
    return layout.chunks(nbytes, 1, [mates])


def _shards_out(call: Call, data: Tensor) -> None:
    team = call.team
    # Round robin over the sites, so that no site waits for another one's last byte.
    queues = [
        [
            (dst, layout.shard(span, len(team.sites[at]), place))
            for span in _chunks(data.numel(), len(team.sites[at]))
            for place, dst in enumerate(team.sites[at])
        ]
        for at in team.others
    ]
    for step in range(max(len(queue) for queue in queues)):
        for queue in queues:
            if step < len(queue):
                dst, span = queue[step]
                call.post(data[span.start : span.stop], dst)


def _shards_in(call: Call, data: Tensor, root: int) -> None:
    team = call.team
    mates = len(team.mates)
    waits: list[tuple[Callable[[], None], Tensor, Span]] = []
    for number, span in enumerate(_chunks(data.numel(), mates)):
        mine = layout.shard(span, mates, team.place)
        size = -(-span.length // mates)
        block = torch.zeros(size, dtype=torch.uint8)
        with call.verdict() if number == 0 else contextlib.nullcontext():
            call.take_into(block[: mine.length], root)
        there = data[span.start : span.stop]
        out = there if size * mates == span.length else torch.empty(size * mates, dtype=torch.uint8)
        waits.append((call.spread(out, block), out, span))
    for wait, out, span in waits:
        wait()
        there = data[span.start : span.stop]
        if out.data_ptr() != there.data_ptr():
            there.copy_(out[: span.length])


def allgather(team: Team, rows: Sequence[Tensor], tensor: Tensor, timeout_s: float | None = None) -> None:
    """``rows[r]`` becomes group rank r's ``tensor``; all contiguous and of one size."""
    data = bytes_of(tensor)
    outs = [bytes_of(row) for row in rows]

    def body(call: Call) -> None:
        place, mates = team.place, len(team.mates)
        local = torch.empty(mates * data.numel(), dtype=torch.uint8)
        spreading = call.spread(local, data)
        blocks: list[tuple[int, int]] = [
            (at, first) for at in team.others for first in range(0, len(team.sites[at]), mates)
        ]
        sends = [(team.sites[at][place % len(team.sites[at])], data) for at in team.others]
        takes: list[tuple[int, Tensor]] = []
        for at, first in blocks:
            block = torch.zeros(data.numel(), dtype=torch.uint8)
            if first + place < len(team.sites[at]):
                takes.append((team.sites[at][first + place], block))
        with call.verdict():
            call.swap(sends, takes)
        came = dict(takes)
        remote = []
        for at, first in blocks:
            members = team.sites[at][first : first + mates]
            block = came.get(members[place]) if place < len(members) else None
            out = torch.empty(mates * data.numel(), dtype=torch.uint8)
            given = torch.zeros(data.numel(), dtype=torch.uint8) if block is None else block
            remote.append((members, out, call.spread(out, given)))
        for members, out, wait in [(team.mates, local, spreading), *remote]:
            wait()
            for rank, row in zip(members, out.view(mates, data.numel()), strict=False):
                outs[rank].copy_(row)

    run(team, f"allgather {_kind(tensor)}", body, timeout_s)


def gather(
    team: Team, rows: Sequence[Tensor] | None, tensor: Tensor, root: int, timeout_s: float | None = None
) -> None:
    """``rows[r]`` of group rank ``root`` becomes group rank r's ``tensor``; nobody else has rows."""
    data = bytes_of(tensor)
    target = _site_of(team, root)

    def body(call: Call) -> None:
        if team.site != target:
            call.swap([(root, data)], [])
            return
        mates = len(team.mates)
        local = torch.empty(mates * data.numel(), dtype=torch.uint8) if rows is not None else None
        call.collect(local, data, team.mates.index(root))()
        if rows is None or local is None:
            return
        outs = [bytes_of(row) for row in rows]
        call.swap([], [(src, outs[src]) for at in team.others for src in team.sites[at]])
        for rank, row in zip(team.mates, local.view(mates, data.numel()), strict=True):
            outs[rank].copy_(row)

    run(team, f"gather to {root} {_kind(tensor)}", body, timeout_s)


def scatter(
    team: Team, tensor: Tensor, rows: Sequence[Tensor] | None, root: int, timeout_s: float | None = None
) -> None:
    """``tensor`` becomes group rank ``root``'s ``rows[rank]``; nobody else has rows."""
    data = bytes_of(tensor)
    source = _site_of(team, root)

    def body(call: Call) -> None:
        if team.site != source:
            call.swap([], [(root, data)])
            return
        given = None
        if rows is not None:
            sent = [bytes_of(row) for row in rows]
            call.swap([(dst, sent[dst]) for at in team.others for dst in team.sites[at]], [])
            given = torch.cat([sent[mate] for mate in team.mates])
        call.deal(data, given, team.mates.index(root))()

    run(team, f"scatter from {root} {_kind(tensor)}", body, timeout_s)


def alltoall(team: Team, outs: Sequence[Tensor], ins: Sequence[Tensor], timeout_s: float | None = None) -> None:
    """``outs[r]`` becomes group rank r's ``ins[mine]``; all contiguous, of any sizes that agree in pairs."""
    into = [bytes_of(tensor) for tensor in outs]
    data = [bytes_of(tensor) for tensor in ins]

    def body(call: Call) -> None:
        given = torch.cat([data[mate] for mate in team.mates])
        got = torch.empty(sum(into[mate].numel() for mate in team.mates), dtype=torch.uint8)
        out_sizes = [into[mate].numel() for mate in team.mates]
        sizes = [data[mate].numel() for mate in team.mates]
        _compare_sizes(call, out_sizes, sizes)
        wait = call.shuffle(got, given, out_sizes, sizes)
        # Each rank begins with another one: all to one would make that one's host a bottleneck.
        order = [
            members[(team.place + step) % len(members)]
            for at in team.others
            for members in (team.sites[at],)
            for step in range(len(members))
        ]
        back = [
            members[(team.place - step) % len(members)]
            for at in team.others
            for members in (team.sites[at],)
            for step in range(len(members))
        ]
        call.swap([(dst, data[dst]) for dst in order], [(src, into[src]) for src in back])
        wait()
        for mate, part in zip(team.mates, got.split(out_sizes), strict=True):
            into[mate].copy_(part)

    dtype = str(ins[0].dtype).removeprefix("torch.")
    run(team, f"alltoall {dtype}", body, timeout_s)


def _compare_sizes(call: Call, out_sizes: Sequence[int], sizes: Sequence[int]) -> None:
    """Sizes differ from pair to pair, so labels don't have them; gloo would crash, or read what is not there."""
    mates = len(sizes)
    theirs = torch.empty(mates, dtype=torch.int64)
    call.shuffle(bytes_of(theirs), bytes_of(torch.tensor(sizes, dtype=torch.int64)), None, None)()
    wrong = [place for place in range(mates) if int(theirs[place]) != out_sizes[place]]
    with call.verdict():
        if wrong:
            place = wrong[0]
            raise call.team.mismatch(
                call.label,
                f"{call.team.describe(call.team.mates[place])} sends {int(theirs[place])} bytes, and "
                f"{out_sizes[place]} are expected",
                call.team.mates[place],
            )


def barrier(team: Team, timeout_s: float | None = None) -> None:
    """Returns when all ranks have called it."""

    def body(call: Call) -> None:
        empty = torch.empty(0, dtype=torch.uint8)
        nothing = torch.zeros(1, dtype=torch.uint8)
        leads = team.place == 0
        mates = len(team.mates)
        call.collect(torch.empty(mates, dtype=torch.uint8) if leads else None, nothing)()
        if leads:
            for at in team.others:
                call.post(empty, team.sites[at][0])
        told = torch.zeros(RECORD_BYTES, dtype=torch.uint8)
        refused: MismatchError | None = None
        if leads:
            try:
                for at in team.others:
                    call.take(team.sites[at][0], 0)
            except MismatchError as error:
                refused = error
                told = record_of(error.why)
        call.tell(told)()
        if refused is not None:
            raise refused
        if text := text_of(told):
            raise call.refused_by(team.mates[0], text)

    run(team, "barrier", body, timeout_s)


def monitored_barrier(team: Team, timeout_s: float, *, wait_all_ranks: bool = False) -> None:
    """A barrier that says who didn't come. Group rank 0 hears of all others, then tells them; messages only, so that a
    rank which is late holds up nobody but rank 0.

    :param wait_all_ranks: name all who are missing, not the first one.
    :raises TransferTimeout: on rank 0, with who is missing; on the others, that rank 0 did not answer.
    """

    def body(call: Call) -> None:
        empty = torch.empty(0, dtype=torch.uint8)
        if team.rank:
            call.post(empty, 0)
            call.take(0, 0)
            return
        missing = []
        for src in range(1, team.size):
            try:
                call.take(src, 0)
            except TransferTimeout:
                missing.append(src)
                if not wait_all_ranks:
                    break
        if missing:
            who = f"Rank {missing[0]}" if len(missing) == 1 else f"Ranks {', '.join(map(str, missing))}"
            raise TransferTimeout(
                f"[Rank 0]: {who} failed to pass monitoredBarrier in {timeout_s * 1e3:.0f} ms",
                next_step="Look at the log of that rank",
                peer=missing[0],
                group=team.name,
            )
        for dst in range(1, team.size):
            call.post(empty, dst)

    run(team, "monitored_barrier", body, timeout_s, agreed=False)


def _site_of(team: Team, rank: int) -> int:
    return next(at for at, site in enumerate(team.sites) if rank in site)


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} x{tensor.numel()}"
