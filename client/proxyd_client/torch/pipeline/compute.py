"""F, B and W on a real stage, and whether its backward can be had in two pieces.

torch's stages can (ZeroBubble is built on it): B asks autograd for the gradients of the inputs alone and keeps what it
meets on the way, W goes on from there to the parameters. That gives the same bits as one backward, where it can be had
at all. Where it can't, or where hooks would not be called, the backward runs in one piece:

* an output (or the loss) is a view, which torch's split can't detach;
* an output doesn't depend on the stage's input: the split would leave out parameters that only it uses;
* a node of the graph runs once or not at all (compiled code, a reentrant checkpoint);
* the module is wrapped for data parallelism (DDP, FSDP), or has hooks on parameters or on gradients: those are called
  by a whole backward only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining._backward import stage_backward_weight
from torch.nn.parallel import DistributedDataParallel

from proxyd_client.schedule.tasks import Kind, Task
from proxyd_client.torch.offload import ActivationStore

_IN_ONE_PIECE = ("CheckpointFunctionBackward", "CompiledFunctionBackward")


class Computation:
    """One stage in one step.

    :param forward: runs the forward of a micro-batch (and its loss).
    :param loss: that of a micro-batch, for the last stage; None for others.
    :param send: sends what these operations say.
    :param store: has what autograd saves; None: autograd itself.
    """

    def __init__(
        self,
        stage: Any,
        micro_batches: int,
        weight_parts: int,
        forward: Callable[[int], None],
        loss: Callable[[int], Any],
        send: Callable[[list[Any]], None],
        store: ActivationStore | None = None,
    ) -> None:
        self._stage = stage
        self._micro_batches = micro_batches
        self._weight_parts = weight_parts
        self._forward = forward
        self._loss = loss
        self._send = send
        self._store = store
        self._groups: dict[int, tuple[bool, list[list[dict[str, Any]]]]] = {}
        """By micro-batch whose W has begun: whether its groups share nodes, and what each part has to do."""
        self._module_reason = module_reason(stage.submod) if stage.dw_builder is None else ""
        self.whole_because = self._module_reason
        """Why a backward could not be split; empty: nothing speaks against it."""

    def run(self, task: Task, whole: bool) -> None:
        """Compute, and send the result."""
        stage, number = self._stage, task.micro_batch
        last = number == self._micro_batches - 1
        if task.kind == Kind.F:
            with self._store.saving(number) if self._store is not None else contextlib.nullcontext():
                self._forward(number)
            self._send(stage.get_fwd_send_ops(number))
        elif task.kind == Kind.B:
            stage.backward_one_chunk(number, loss=self._loss(number), full_backward=whole, last_backward=whole and last)
            self._send(stage.get_bwd_send_ops(number))
        elif stage.is_first or stage.dw_builder is not None:
            stage.backward_weight_one_chunk(number, last_backward=last)
        else:
            self._weight(number, task.part)
        if self._store is not None and (whole or (task.kind == Kind.W and task.part == self._weight_parts - 1)):
            self._store.drop(number)

    def _weight(self, number: int, part: int) -> None:
        """A W, or one part of it. torch's own goes from group to group, each by itself; here others may come between.

        A parameter that is used in several places is reached from several nodes, and its group's way leads through
        nodes of other groups, which must keep what they have saved until all groups are done.
        """
        stage = self._stage
        if part == 0:
            groups = stage.backward_state.pop(number)[1]
            stage.dw_runner.pop(number)
            size = max(1, -(-len(groups) // self._weight_parts))
            shared = any(len(group["intermediates"]) > 1 for group in groups)
            parts = [groups[at * size : (at + 1) * size] for at in range(self._weight_parts)]
            self._groups[number] = shared, parts
        shared, parts = self._groups[number]
        stage_backward_weight(stage.submod.parameters(), parts[part], retain_graph=shared)
        if part == self._weight_parts - 1:
            del self._groups[number]

    def can_split(self, number: int) -> bool:
        """Whether this micro-batch's backward can be had in two pieces."""
        stage = self._stage
        if stage.dw_builder is not None:
            return True  # the module does it itself
        outputs, inputs = stage.fwd_cache[number]
        if stage.is_last:
            outputs = (self._loss(number),)
        why = self._module_reason or graph_reason(outputs, inputs)
        self.whole_because = why or self.whole_because
        return not why


def module_reason(module: torch.nn.Module) -> str:
    """Why no backward of a module can be split; empty: it can."""
    if isinstance(module, (DistributedDataParallel, FSDPModule)):
        return f"the module is wrapped by {type(module).__name__}, which has to see whole backwards"
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            return f"parameter {name} has hooks, which only a whole backward calls"
    for name, child in module.named_modules():
        if child._backward_hooks or child._backward_pre_hooks:
            return f"module {name or 'itself'} has backward hooks, which a split backward would call twice"
    return ""


def graph_reason(outputs: Sequence[Any], inputs: Iterable[Any]) -> str:
    """Why the backward of these outputs can't be split; empty: it can."""
    roots = [out for out in outputs if isinstance(out, torch.Tensor) and out.requires_grad]
    wanted = {
        get_gradient_edge(value).node for value in inputs if isinstance(value, torch.Tensor) and value.requires_grad
    }
    if not roots or not wanted:
        return "no gradient is asked for, of its inputs or by its outputs"
    if any(out._is_view() for out in roots):
        return "an output is a view, which can't be detached"
    for root in roots:
        reached = False
        seen = set()
        waiting = [root.grad_fn]
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            reached = reached or node in wanted
            if node.name() in _IN_ONE_PIECE:
                return f"{node.name()} is part of it, which runs in one piece"
            waiting += [following for following, _ in node.next_functions]
        if not reached:
            return "an output does not depend on the stage's input"
    return ""


class Gauge:
    """Counts what autograd keeps of one forward: bytes of storage that no parameter and no buffer owns."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._known = {tensor.untyped_storage().data_ptr() for tensor in (*module.parameters(), *module.buffers())}
        self.nbytes = 0

    def __enter__(self) -> Gauge:
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._saw, lambda tensor: tensor)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)

    def _saw(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._known:
                self._known.add(storage.data_ptr())
                self.nbytes += storage.nbytes()
        return tensor
