"""Every collective by every name that torch calls it, for a group whose ranks are at one site or at several.

torch has old and new names (``_allgather_base``, ``all_gather_single``) and several forms of each (options, or
arguments one by one), and calls them from Python and from C++ (DDP, functional collectives). One that isn't
overridden would run the base class's with the interpreter's lock held. A group of one site hands them to its inner
plain group, as they come; of several sites: normalised here, run in order by :mod:`.in_order`, done by
:mod:`.collectives`.
"""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from proxyd_client.errors import ArgumentError, ClosedError, ProxydError
from proxyd_client.torch import collectives
from proxyd_client.torch.collectives import Team
from proxyd_client.torch.collectives.arithmetic import Reduction
from proxyd_client.torch.errors import for_torch
from proxyd_client.torch.host_tensors import HostTensor
from proxyd_client.torch.in_order import CollectiveWork, InOrder, Together
from proxyd_client.torch.membership import Membership

Tensor = Any
Tensors = Sequence[Any]

_SUM = dist.ReduceOp.SUM


_AS_ONE_RUN = ("reduce_scatter_single", "reduce_scatter_single_coalesced")
"""What gloo does by the number of rows, although only the number of elements matters."""


def _one_run(argument: Any) -> Any:
    """Contiguous tensors, one or a list, without their shapes; anything else as it is."""
    if isinstance(argument, torch.Tensor):
        return argument.view(-1) if argument.is_contiguous() else argument
    return [_one_run(one) for one in argument] if isinstance(argument, list | tuple) else argument


def _delegated(method: Callable[..., Any]) -> Callable[..., Any]:
    """To the inner group where that has all ranks."""
    name = method.__name__

    @functools.wraps(method)
    def collective(self: Collectives, *args: Any, **kwargs: Any) -> Any:
        if self.team is None:
            if name in _AS_ONE_RUN:
                args = tuple(_one_run(argument) for argument in args)
            work = getattr(self.inner, name)(*args, **kwargs)
        else:
            work = method(self, *args, **kwargs)
        if self._coalescing is not None and work is not None:
            self._coalescing.append(work)
        return work

    return collective


class Collectives:
    """Mixed into the process group.

    :ivar inner: a plain group of the ranks of my site.
    :ivar team: of a group that spans sites; None of any other.
    """

    inner: dist.ProcessGroup
    team: Team | None = None
    _order: InOrder
    membership: Membership
    _coalescing: list[Any] | None = None

    def begin_collectives(self, team: Team | None) -> None:
        """Once, from the constructor."""
        self.team = team
        if team is not None:
            self._order = InOrder(f"proxyd-collectives {team.name}", team.waiting)

    def end_collectives(self, why: str) -> None:
        """What is under way or comes later raises ClosedError; the other ranks are told if something is under way."""
        if self.team is None:
            return
        error = ClosedError(f"group {self.team.name} has ended", why=why, group=self.team.name)
        if self._order.busy:
            self.team.fail(error)
        self._order.close(error)
        self.team.close()

    def _submit(
        self,
        what: str,
        run: Callable[[Team, float], None],
        results: Tensors,
        opts: Any,
        timeout: datetime.timedelta | None = None,
    ) -> CollectiveWork:
        team = self.team
        assert team is not None, "only for groups that span sites"
        limit = timeout or getattr(opts, "timeout", None)
        # Options hold -1 ms where nobody has said anything.
        if limit is None or limit <= datetime.timedelta(0):
            limit = self.membership.timeout
        return self._order.submit(functools.partial(run, team, limit.total_seconds()), results, what)

    # -- reductions ----------------------------------------------------------------------------------------------------

    @_delegated
    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None, *, op: Any = None) -> CollectiveWork:
        """In place, everywhere. Of several tensors: as one."""
        return self._allreduce(_several(tensors), _op(opts, op), opts, timeout)

    @_delegated
    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> CollectiveWork:
        """As one, per dtype."""
        return self._allreduce(list(tensors), _op(opts, None), opts, None)

    def _allreduce(self, tensors: list[Tensor], op: Any, opts: Any, timeout: Any) -> CollectiveWork:
        hosts = [HostTensor(tensor) for tensor in tensors]
        self._check_op(op, hosts)

        def run(team: Team, timeout_s: float) -> None:
            for same in _by_dtype(hosts):
                flat, split = _as_one(same)
                collectives.allreduce(team, flat, op, timeout_s)
                split(flat)

        return self._submit("allreduce", run, tensors, opts, timeout)

    @_delegated
    def reduce(
        self, tensors: Any, opts: Any = None, op: Any = None, timeout: Any = None, *, root: int | None = None
    ) -> CollectiveWork:
        """In place, at the root."""
        tensor = _one(tensors, "reduce")
        at = self._root(opts, root)
        host, reduce_op = HostTensor(tensor), _op(opts, op)
        self._check_op(reduce_op, [host])

        def run(team: Team, timeout_s: float) -> None:
            values = host.values()
            collectives.reduce(team, values, at, reduce_op, timeout_s)
            if team.rank == at:
                host.give_back()

        return self._submit("reduce", run, [tensor], opts, timeout)

    @_delegated
    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None, *, op: Any = None
    ) -> CollectiveWork:
        """One input for each rank, in a list."""
        output = _one(outputs, "reduce_scatter")
        rows = _list_of(inputs, outputs)
        self._check_rows("reduce_scatter", output, rows)
        return self._reduce_scatter([output], [rows], opts, timeout, _op(opts, op))

    @_delegated
    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> CollectiveWork:
        """One input, cut into as many parts as there are ranks."""
        return self._reduce_scatter(
            [output], [self._rows("reduce_scatter", input, output)], opts, None, _op(opts, None)
        )

    @_delegated
    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> CollectiveWork:
        """As one, per dtype."""
        rows = [self._rows("reduce_scatter", part, output) for output, part in zip(outputs, inputs, strict=True)]
        return self._reduce_scatter(list(outputs), rows, opts, None, _op(opts, None))

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any, timeout: Any, op: Any
    ) -> CollectiveWork:
        outs = [HostTensor(output) for output in outputs]
        ins = [[HostTensor(row) for row in rows] for rows in inputs]
        self._check_op(op, outs)

        def run(team: Team, timeout_s: float) -> None:
            for same in _by_dtype(outs):
                chosen = [rows for out, rows in zip(outs, ins, strict=True) if out in same]
                rows = [_joined([part[rank].values() for part in chosen]) for rank in range(team.size)]
                flat = _joined([out.room() for out in same])
                collectives.reduce_scatter(team, flat, rows, op, timeout_s)
                _split(flat, same)

        return self._submit("reduce_scatter", run, outputs, opts, timeout)

    # -- to all ------------------------------------------------------------------------------------------------------

    @_delegated
    def broadcast(
        self, tensors: Any, opts: Any = None, timeout: Any = None, *, root: int | None = None
    ) -> CollectiveWork:
        """The root's, everywhere."""
        tensor = _one(tensors, "broadcast")
        at = self._root(opts, root)
        host = HostTensor(tensor)

        def run(team: Team, timeout_s: float) -> None:
            flat = host.values() if team.rank == at else host.room()
            collectives.broadcast(team, flat, at, timeout_s)
            if team.rank != at:
                host.give_back()

        return self._submit("broadcast", run, [tensor], opts, timeout)

    @_delegated
    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> CollectiveWork:
        """Everybody's, in a list."""
        tensor = _one(inputs, "allgather")
        rows = _list_of(outputs, inputs)
        self._check_rows("allgather", tensor, rows)
        return self._allgather([rows], [tensor], rows, opts, timeout)

    @_delegated
    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> CollectiveWork:
        """Everybody's, one after another in one tensor."""
        return self._allgather_into([output], [input], opts)

    @_delegated
    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> CollectiveWork:
        """As one."""
        return self._allgather_into(list(outputs), list(inputs), opts)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    @_delegated
    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> CollectiveWork:
        """Lists of everybody's lists."""
        rows = [[outputs[rank][at] for rank in range(len(outputs))] for at in range(len(inputs))]
        for tensor, mine in zip(inputs, rows, strict=True):
            self._check_rows("allgather", tensor, mine)
        results = [tensor for each in outputs for tensor in each]
        return self._allgather(rows, list(inputs), results, opts, None)

    def _allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], results: Tensors, opts: Any, timeout: Any
    ) -> CollectiveWork:
        outs = [[HostTensor(row) for row in rows] for rows in outputs]
        ins = [HostTensor(tensor) for tensor in inputs]

        def run(team: Team, timeout_s: float) -> None:
            if len(ins) == 1:
                collectives.allgather(team, [row.room() for row in outs[0]], ins[0].values(), timeout_s)
            else:
                data = _joined([collectives.bytes_of(tensor.values()) for tensor in ins])
                rows = [torch.empty_like(data) for _ in range(team.size)]
                collectives.allgather(team, rows, data, timeout_s)
                for rank, row in enumerate(rows):
                    rooms = [collectives.bytes_of(each[rank].room()) for each in outs]
                    for room, part in zip(rooms, row.split([room.numel() for room in rooms]), strict=True):
                        room.copy_(part)
            for each in outs:
                for row in each:
                    row.give_back()

        return self._submit("allgather", run, results, opts, timeout)

    def _allgather_into(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> CollectiveWork:
        for output, part in zip(outputs, inputs, strict=True):
            self._check_whole("all_gather", output, part)
        outs, ins = [HostTensor(output) for output in outputs], [HostTensor(part) for part in inputs]

        def run(team: Team, timeout_s: float) -> None:
            rooms = [collectives.bytes_of(out.room()).view(team.size, -1) for out in outs if out.numel]
            data = [collectives.bytes_of(part.values()) for part in ins if part.numel]
            if len(data) == 1:
                collectives.allgather(team, list(rooms[0]), data[0], timeout_s)
            else:
                whole = _joined(data)
                rows = torch.empty(team.size, whole.numel(), dtype=torch.uint8)
                collectives.allgather(team, list(rows), whole, timeout_s)
                for room, part in zip(rooms, rows.split([each.numel() for each in data], 1), strict=True):
                    room.copy_(part)
            for out in outs:
                out.give_back()

        return self._submit("all_gather", run, outputs, opts)

    # -- to and from one -----------------------------------------------------------------------------------------------

    @_delegated
    def gather(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None, *, root: int | None = None
    ) -> CollectiveWork:
        """Everybody's, in a list, at the root."""
        tensor = _one(inputs, "gather")
        at = self._root(opts, root)
        rows = _list_of(outputs, inputs) if self._rank() == at else []
        if rows or self._rank() == at:
            self._check_rows("gather", tensor, rows)
        host, outs = HostTensor(tensor), [HostTensor(row) for row in rows]

        def run(team: Team, timeout_s: float) -> None:
            rooms = [row.room() for row in outs] if team.rank == at else None
            collectives.gather(team, rooms, host.values(), at, timeout_s)
            for row in outs:
                row.give_back()

        return self._submit("gather", run, rows, opts, timeout)

    @_delegated
    def scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None, *, root: int | None = None
    ) -> CollectiveWork:
        """One of the root's to each rank."""
        tensor = _one(outputs, "scatter")
        at = self._root(opts, root)
        rows = _list_of(inputs, outputs) if self._rank() == at else []
        if self._rank() == at:
            self._check_rows("scatter", tensor, rows)
        host, ins = HostTensor(tensor), [HostTensor(row) for row in rows]

        def run(team: Team, timeout_s: float) -> None:
            given = [row.values() for row in ins] if team.rank == at else None
            collectives.scatter(team, host.room(), given, at, timeout_s)
            host.give_back()

        return self._submit("scatter", run, [tensor], opts, timeout)

    # -- each to each --------------------------------------------------------------------------------------------------

    @_delegated
    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None, timeout: Any = None) -> CollectiveWork:
        """A list for each rank, a list from each."""
        size = self._size()
        if len(outputs) != size or len(inputs) != size:
            raise _wrong(f"alltoall needs {size} tensors each way, got {len(inputs)} in and {len(outputs)} out")
        if len({tensor.dtype for tensor in (*outputs, *inputs)}) != 1:
            raise _wrong("alltoall's tensors must be of one dtype")
        outs, ins = [HostTensor(out) for out in outputs], [HostTensor(part) for part in inputs]

        def run(team: Team, timeout_s: float) -> None:
            collectives.alltoall(team, [out.room() for out in outs], [part.values() for part in ins], timeout_s)
            for out in outs:
                out.give_back()

        return self._submit("alltoall", run, outputs, opts, timeout)

    @_delegated
    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        opts: Any = None,
        timeout: Any = None,
    ) -> CollectiveWork:
        """Parts of one tensor for each rank, in parts of one from each; sizes along the first dimension."""
        if output.dtype != input.dtype:
            raise _wrong(f"all_to_all_single from {input.dtype} into {output.dtype}: dtypes must agree")
        out, source = HostTensor(output), HostTensor(input)
        out_sizes, sizes = self._parts(output, output_split_sizes), self._parts(input, input_split_sizes)

        def run(team: Team, timeout_s: float) -> None:
            collectives.alltoall(team, out.room().split(out_sizes), source.values().split(sizes), timeout_s)
            out.give_back()

        return self._submit("all_to_all_single", run, [output], opts, timeout)

    alltoall_base = all_to_all_single

    # -- nothing but time ----------------------------------------------------------------------------------------------

    @_delegated
    def barrier(self, opts: Any = None, timeout: Any = None) -> CollectiveWork:
        """Done when all ranks have called it."""
        if isinstance(opts, datetime.timedelta):
            opts, timeout = None, opts

        def run(team: Team, timeout_s: float) -> None:
            collectives.barrier(team, timeout_s)

        return self._submit("barrier", run, [], opts, timeout)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Waits itself; rank 0 raises with who is missing."""
        # No time at all is a time: rank 0 then says at once that it has run out.
        limit = self.membership.timeout if timeout is None else timeout
        if self.team is None:
            self.inner._get_backend(torch.device("cpu")).monitored_barrier(limit, wait_all_ranks)
            return

        def run(team: Team, timeout_s: float) -> None:
            collectives.monitored_barrier(team, timeout_s, wait_all_ranks=wait_all_ranks)

        least = datetime.timedelta(milliseconds=1)
        self._submit("monitored_barrier", run, [], None, max(limit, least)).wait()

    def _start_coalescing(self, device: Any) -> None:
        """What follows, up to the end, is waited for as one."""
        self._coalescing = []

    def _end_coalescing(self, device: Any) -> Together:
        """All since :meth:`_start_coalescing`."""
        works, self._coalescing = self._coalescing or [], None
        return Together(works)

    # -- arguments -----------------------------------------------------------------------------------------------------

    def _rank(self) -> int:
        assert self.team is not None, "only for groups that span sites"
        return self.team.rank

    def _size(self) -> int:
        assert self.team is not None, "only for groups that span sites"
        return self.team.size

    def _root(self, opts: Any, root: int | None) -> int:
        """``opts`` is options, or the root itself."""
        at = root if root is not None else opts if isinstance(opts, int) else getattr(opts, "rootRank", 0)
        if not 0 <= at < self._size():
            raise _wrong(f"root {at} is no rank of a group of {self._size()}", next_step="Group ranks count here")
        return int(at)

    def _check_op(self, op: Any, hosts: Sequence[HostTensor]) -> None:
        for dtype in {host.dtype for host in hosts}:
            Reduction(op, dtype, self._size())

    def _check_rows(self, name: str, tensor: Tensor, rows: Tensors) -> None:
        if len(rows) != self._size():
            raise _wrong(f"{name} in a group of {self._size()} ranks needs a list of as many, got {len(rows)}")
        for row in rows:
            if row.numel() != tensor.numel() or row.dtype != tensor.dtype:
                raise _wrong(
                    f"{name}: a tensor of {row.numel()} {row.dtype} in the list, and one of {tensor.numel()} "
                    f"{tensor.dtype} beside it: invalid tensor size or type"
                )

    def _check_whole(self, name: str, whole: Tensor, part: Tensor) -> None:
        if whole.dtype != part.dtype or whole.numel() != part.numel() * self._size():
            raise _wrong(
                f"{name} in a group of {self._size()} ranks: {whole.numel()} {whole.dtype} on one side, "
                f"{part.numel()} {part.dtype} on the other"
            )

    def _rows(self, name: str, whole: Tensor, part: Tensor) -> list[Tensor]:
        self._check_whole(name, whole, part)
        return list(whole.reshape(self._size(), -1)) if whole.numel() else [whole.reshape(-1)] * self._size()

    def _parts(self, tensor: Tensor, sizes: Sequence[int]) -> list[int]:
        """Elements per rank."""
        size = self._size()
        length = tensor.shape[0] if tensor.dim() else 1
        if not len(sizes):
            if length % size:
                raise _wrong(f"a first dimension of {length} can't be split evenly among {size} ranks")
            return [tensor.numel() // size] * size
        if len(sizes) != size or sum(sizes) != length:
            raise _wrong(f"split sizes {list(sizes)} don't add up to {length} for {size} ranks")
        width = tensor.numel() // length if length else 0
        return [width * part for part in sizes]


def _wrong(what: str, next_step: str = "") -> ProxydError:
    return for_torch(ArgumentError(what, next_step=next_step), "")


def _op(opts: Any, op: Any) -> Any:
    """The reduce op of options, or of a call that passes it itself."""
    if op is not None:
        return op
    if opts is None:
        return _SUM
    return getattr(opts, "reduceOp", opts) if not isinstance(opts, int) else _SUM


def _several(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _one(tensors: Any, name: str) -> Tensor:
    each = _several(tensors)
    if len(each) != 1:
        raise _wrong(f"{name} takes one tensor at a time, got {len(each)}")
    return each[0]


def _list_of(lists: Any, beside: Any) -> list[Tensor]:
    """``[[...]]``, or ``[...]`` in the form in which the tensor beside it comes alone."""
    return list(lists) if isinstance(beside, torch.Tensor) else list(lists[0]) if len(lists) == 1 else []


def _by_dtype(hosts: Sequence[HostTensor]) -> list[list[HostTensor]]:
    groups: dict[Any, list[HostTensor]] = {}
    for host in hosts:
        groups.setdefault(host.dtype, []).append(host)
    return list(groups.values())


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts)) if parts else torch.empty(0, dtype=torch.uint8)


def _as_one(hosts: Sequence[HostTensor]) -> tuple[Tensor, Callable[[Tensor], None]]:
    return _joined([host.values() for host in hosts]), functools.partial(_split, hosts=hosts)


def _split(flat: Tensor, hosts: Sequence[HostTensor]) -> None:
    for host, part in zip(hosts, flat.split([host.numel for host in hosts]), strict=True):
        room = host.room()
        if room.data_ptr() != part.data_ptr():
            room.copy_(part)
        host.give_back()
