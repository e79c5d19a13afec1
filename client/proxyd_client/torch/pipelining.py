"""torch.distributed.pipelining over a proxyd group: a tag for each message, and word of it before it exists.

Nothing in a script changes for this. A stage of ``torch.distributed.pipelining`` gives all its messages tag 0, so they
are told apart by order alone, and a schedule whose two ends post in another order mixes them up, or hangs. A stage
whose group is proxyd's has

* *tags of their own*: one for each (forward or backward, sending stage, receiving stage, micro-batch);
* *announcements*: when it begins to compute what another site waits for, its agent hears how large that will be (from
  the stage's shapes) and when it will be there (from the last times), so that the slot on the WAN is asked for, and the
  receiver's prediction made, while it computes.

How. Importing :mod:`proxyd_client.torch` sees to it that the base class of stages, once torch loads it, calls
:func:`attach` for each new stage whose group is a proxyd group; it wraps methods of that one object. Stages of other
backends are never touched. ``PROXYD_PIPELINING=tags`` leaves out the announcements, ``off`` everything; so does
``Options(pipelining=...)``. Tags have to be the same at both ends, so they are used only where *all* members of the
group said, when they met, that they use them; else all keep tag 0.

Announcements are hints. Whatever is sent instead (another size or dtype, another order, fewer or more) arrives as it
is; :attr:`StageHints.resized` and the agent's ``proxyd_announcements_total`` count it.
"""

from __future__ import annotations

import enum
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import math
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

import torch.distributed as dist

from proxyd_client.errors import ArgumentError, ProxydError
from proxyd_client.torch.membership import Membership
from proxyd_client.torch.p2p import PointToPoint

_log = logging.getLogger(__name__)

_STAGE_MODULE = "torch.distributed.pipelining.stage"
_STAGE_CLASS = "_PipelineStageBase"
_WRAPPED = (
    "_resolve_peer_global_rank",
    "backward_one_chunk",
    "clear_runtime_states",
    "forward_one_chunk",
    "get_bwd_recv_ops",
    "get_bwd_send_ops",
    "get_fwd_recv_ops",
    "get_fwd_send_ops",
)
_HINTS = "_proxyd_hints"
_REMEMBERED = 5
"""So many last times count: their median forgets a compilation, and a checkpoint, after three."""

# A tag is an int of 32 bits where torch passes it through C++: a mark that keeps off the tags that people use, one bit
# of direction, the sending stage, how far behind it the receiving one is, and the micro-batch. What doesn't fit wraps
# around: messages that share a tag are in order still.
_MARK = 1 << 30
_BACKWARD = 1 << 29
_STAGE_BITS, _DISTANCE_BITS, _BATCH_BITS = 10, 5, 14


class Direction(enum.Enum):
    """What a message of a pipeline is."""

    FORWARD = "forward"
    """Activations, to a later stage."""
    BACKWARD = "backward"
    """Their gradients, to an earlier one."""


def tag_of(direction: Direction, sender: int, receiver: int, microbatch: int) -> int:
    """The tag of one message.

    :param sender: index of the stage that sends it.
    :param receiver: index of the stage that receives it.
    """
    distance = (abs(receiver - sender) - 1) % (1 << _DISTANCE_BITS)
    place = (sender % (1 << _STAGE_BITS)) << _DISTANCE_BITS | distance
    batch = microbatch % (1 << _BATCH_BITS)
    return _MARK | (_BACKWARD if direction is Direction.BACKWARD else 0) | place << _BATCH_BITS | batch


class StageHints:
    """What was made of one stage. Its counts are since :func:`attach`.

    :param stage: of ``torch.distributed.pipelining``.
    :param announces: announce what it will send to other sites.
    """

    def __init__(self, stage: Any, membership: Membership, p2p: PointToPoint, *, announces: bool) -> None:
        self._stage = stage
        self._membership = membership
        self._p2p = p2p
        self._announces = announces
        self.tags = membership.pipeline_tags
        """Its messages have tags of their own: all members of its group agreed."""
        self.announced = self.fulfilled = self.resized = self.unsent = 0
        """Messages announced to other sites; of these, sent as announced, sent with another size, not sent in their
        step."""
        self._peers: list[int] | None = None
        """Stages that the ops are for that are being made, in their order."""
        self._begun_s: dict[tuple[Direction, int], tuple[float, bool]] = {}
        self._took_s: dict[tuple[Direction, bool], deque[float]] = {}
        self._open: dict[tuple[Direction, int, int], list[int]] = {}
        """Announced and not sent: sizes by (direction, micro-batch, stage)."""

    def eta_s(self, direction: Direction | str, microbatch: int, sender: int | None = None) -> float | None:
        """Predicted seconds until what this stage receives for a micro-batch is all here; 0.0: it is; None: nothing is
        known, or it comes from a stage of this rank.

        :param sender: the stage that sends it; default: the neighbour.
        """
        direction = Direction(direction)
        index = self._stage.stage_index
        if sender is None:
            sender = index - 1 if direction is Direction.FORWARD else index + 1
        rank = self._stage.stage_index_to_group_rank.get(sender)
        if rank is None or rank == self._membership.rank:
            return None
        return self._p2p.eta_s(rank, self._tag(direction, sender, index, microbatch))

    # -- what the stage calls ----------------------------------------------------------------------------------------

    def ops(self, make: Callable[..., list[Any]], direction: Direction, sends: bool, microbatch: int) -> list[Any]:
        """The stage's ops, tagged."""
        peers: list[int] = []
        self._peers = peers
        try:
            ops = make(microbatch)
        finally:
            self._peers = None
        if len(ops) != len(peers):  # torch makes them in another way than it did: let them be
            return ops
        index = self._stage.stage_index
        for op, peer in zip(ops, peers, strict=True):
            op.tag = self._tag(direction, index if sends else peer, peer if sends else index, microbatch)
        if sends:
            self._sent(direction, microbatch, ops, peers)
        return ops

    def resolve(self, resolve: Callable[[int], int], stage_index: int) -> int:
        """Which stage the next op is for."""
        if self._peers is not None:
            self._peers.append(stage_index)
        return resolve(stage_index)

    def computes(self, direction: Direction, microbatch: int, full: bool) -> None:
        """It begins to compute what it will send: say so, if it is known when that will be."""
        self._begun_s[direction, microbatch] = time.perf_counter(), full
        took = self._took_s.get((direction, full))
        if not self._announces or not took:
            return
        ready_in_s = statistics.median(took)
        for peer, nbytes in self._will_send(direction):
            rank = self._stage.stage_index_to_group_rank[peer]
            members = self._membership.members
            if members[rank].site == members[self._membership.rank].site:
                continue  # no grant, and no wait that is worth a prediction
            tag = self._tag(direction, self._stage.stage_index, peer, microbatch)
            try:
                self._p2p.announce(rank, tag, nbytes, ready_in_s)
            except ProxydError as error:
                _log.debug("not announced: %s", error)  # the send will say it
                return
            self.announced += 1
            self._open.setdefault((direction, microbatch, peer), []).append(nbytes)

    def step_begins(self) -> None:
        """What an earlier step announced and did not send will not come."""
        self.unsent += sum(map(len, self._open.values()))
        self._open.clear()
        self._begun_s.clear()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _tag(self, direction: Direction, sender: int, receiver: int, microbatch: int) -> int:
        return tag_of(direction, sender, receiver, microbatch) if self.tags else 0

    def _sent(self, direction: Direction, microbatch: int, ops: Sequence[Any], peers: Sequence[int]) -> None:
        begun = self._begun_s.pop((direction, microbatch), None)
        if begun is not None:
            since_s, full = begun
            took = self._took_s.setdefault((direction, full), deque(maxlen=_REMEMBERED))
            took.append(time.perf_counter() - since_s)
        for op, peer in zip(ops, peers, strict=True):
            said = self._open.get((direction, microbatch, peer))
            if said:
                if said.pop(0) == op.tensor.numel() * op.tensor.element_size():
                    self.fulfilled += 1
                else:
                    self.resized += 1

    def _will_send(self, direction: Direction) -> Iterable[tuple[int, int]]:
        """(stage, bytes) of each tensor that a micro-batch sends, as far as the shapes are known."""
        stage = self._stage
        if direction is Direction.FORWARD:
            metas, targets = stage._stage_meta.outputs, stage.act_send_info
            pairs = [(peer, index) for index, peers in targets.items() for peer in peers if peer is not None]
        else:
            metas = stage._stage_meta.input_grads
            inputs = [] if stage.is_first else stage.args_recv_info.get(0, ())
            pairs = [(info.source, index) for index, info in enumerate(inputs) if not info.is_root_arg]
        mine = stage.stage_index_to_group_rank[stage.stage_index]
        for peer, index in pairs:
            meta = metas[index] if metas is not None and index < len(metas) else None
            if meta is not None and stage.stage_index_to_group_rank[peer] != mine:
                yield peer, math.prod(meta.shape) * meta.dtype.itemsize


def attach(stage: Any, *, announces: bool | None = None) -> StageHints:
    """Give a stage's messages tags of their own, and announce them; again is fine. Done by itself for each stage that
    is made after :mod:`proxyd_client.torch` was imported.

    :param announces: default: as the group says (``PROXYD_PIPELINING``, ``Options.pipelining``).
    :raises ArgumentError: not a stage, or not one whose group is a proxyd group.
    """
    from proxyd_client.torch.group import ProcessGroupProxyd

    present = hints_of(stage)
    if present is not None:
        return present
    group = stage.group if stage.group is not None else dist.group.WORLD
    if not isinstance(group, ProcessGroupProxyd):
        raise ArgumentError(f"the group of stage {stage.stage_index} is {type(group).__name__}, and not a proxyd group")
    missing = [name for name in _WRAPPED if not callable(getattr(stage, name, None))]
    if missing:
        raise ArgumentError(
            f"{type(stage).__name__} is no stage of torch.distributed.pipelining as we know it: it lacks {missing}"
        )
    membership = group.membership
    if announces is None:
        announces = membership.announces
    hints = StageHints(stage, membership, group.p2p, announces=announces)
    _wrap(stage, hints)
    setattr(stage, _HINTS, hints)
    return hints


def detach(stage: Any) -> None:
    """Make a stage what torch made it; both ends of each message have to, between the same steps."""
    if hints_of(stage) is not None:
        for name in (*_WRAPPED, _HINTS):
            delattr(stage, name)


def hints_of(stage: Any) -> StageHints | None:
    """What was attached to a stage."""
    hints = getattr(stage, _HINTS, None)
    return hints if isinstance(hints, StageHints) else None


def _wrap(stage: Any, hints: StageHints) -> None:
    forward, backward, clear = stage.forward_one_chunk, stage.backward_one_chunk, stage.clear_runtime_states

    @functools.wraps(forward)
    def forward_one_chunk(fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        hints.computes(Direction.FORWARD, fwd_chunk_id, True)
        return forward(fwd_chunk_id, *args, **kwargs)

    @functools.wraps(backward)
    def backward_one_chunk(bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, **kwargs: Any) -> Any:
        hints.computes(Direction.BACKWARD, bwd_chunk_id, full_backward)
        return backward(bwd_chunk_id, loss, full_backward, **kwargs)

    @functools.wraps(clear)
    def clear_runtime_states() -> None:
        hints.step_begins()
        clear()

    stage.forward_one_chunk = forward_one_chunk
    stage.backward_one_chunk = backward_one_chunk
    stage.clear_runtime_states = clear_runtime_states
    stage._resolve_peer_global_rank = functools.partial(hints.resolve, stage._resolve_peer_global_rank)
    for name, direction, sends in (
        ("get_fwd_recv_ops", Direction.FORWARD, False),
        ("get_fwd_send_ops", Direction.FORWARD, True),
        ("get_bwd_recv_ops", Direction.BACKWARD, False),
        ("get_bwd_send_ops", Direction.BACKWARD, True),
    ):
        setattr(stage, name, functools.partial(hints.ops, getattr(stage, name), direction, sends))


# -- for scripts that don't know of it ---------------------------------------------------------------------------------


def install() -> None:
    """Have :func:`attach` called for each new stage of a proxyd group, now or as soon as torch loads its pipelining."""
    module = sys.modules.get(_STAGE_MODULE)
    if module is not None:
        _patch(module)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def uninstall() -> None:
    """No new stage is touched from here on; those that are keep what they have."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
    base = getattr(sys.modules.get(_STAGE_MODULE), _STAGE_CLASS, None)
    original = getattr(getattr(base, "__init__", None), "_proxyd_original", None)
    if base is not None and original is not None:
        base.__init__ = original


def _patch(module: ModuleType) -> None:
    base: Any = getattr(module, _STAGE_CLASS, None)
    if base is None or hasattr(base.__init__, "_proxyd_original"):
        return
    original = base.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _attach_if_ours(self)

    __init__._proxyd_original = original  # type: ignore[attr-defined]
    base.__init__ = __init__


def _attach_if_ours(stage: Any) -> None:
    from proxyd_client.torch.group import ProcessGroupProxyd

    group = stage.group if stage.group is not None else dist.group.WORLD
    if isinstance(group, ProcessGroupProxyd) and (group.membership.pipeline_tags or group.membership.announces):
        try:
            attach(stage)
        except ArgumentError as error:
            _log.warning("stage %s goes without tags of its own: %s", stage.stage_index, error)


class _Finder(importlib.abc.MetaPathFinder):
    """Waits for torch's module of stages. Importing it ourselves would cost everybody seconds who has no pipeline."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _STAGE_MODULE:
            return None
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    """Loads as the real one, then patches."""

    def __init__(self, real: importlib.abc.Loader) -> None:
        self._real = real

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._real
        module.__loader__ = self._real
        self._real.exec_module(module)
        _patch(module)
