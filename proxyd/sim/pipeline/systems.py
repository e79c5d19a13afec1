"""The systems that are compared: a schedule, a way of sharing the wire, and memory.

=============== ======================================================= ============== =====================
system          schedule                                                wire           memory
=============== ======================================================= ============== =====================
1f1b            1F1B, backward in one piece                             shared fairly  p activations
interleaved     the same with two stages per worker                     shared fairly  what it needs
zb_h1           ZB-H1                                                   shared fairly  p activations
zb_h2           ZB-H2                                                   shared fairly  2p-1 activations
zb_v            ZB-V: two stages per worker in a V, crosses the WAN     shared fairly  p activations
                four times
crosspipe       planned for the mean rate and delay by list scheduling  shared fairly  given
pipemorph       warm-up as the mean delay asks for                      shared fairly  given
offline         the faster of the two                                   shared fairly  given
1f1b_paced      1F1B                                                    one at a time  p activations
offline_paced   the better plan                                         one at a time  given
online_fair     chosen at run time                                      shared fairly  given
online          chosen at run time                                      one at a time  given
offload_fair    chosen at run time, with offload                        shared fairly  given, and outside
proxyd          chosen at run time, with offload                        one at a time  given, and outside
proxyd_core     the same                                                granted        given, and outside
=============== ======================================================= ============== =====================

A plan knows the mean rate over the whole trace, not its course: that is what a planner can measure beforehand. What is
chosen at run time has W in the model's pieces (:data:`proxyd.sim.pipeline.model.WEIGHT_PARTS`), all others in one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from proxyd.core.errors import ConfigError
from proxyd.sim.pipeline.bounds import bounds
from proxyd.sim.pipeline.engine import Engine, Plant, StepResult
from proxyd.sim.pipeline.granted import GrantedWan
from proxyd.sim.pipeline.model import NANOS, PipelineModel
from proxyd.sim.pipeline.wan import FairWan, SerialWan, Wan
from proxyd_client.schedule import orders
from proxyd_client.schedule.offload import Tier
from proxyd_client.schedule.planner import Hop, plan
from proxyd_client.schedule.policy import Online, Policy, fixed
from proxyd_client.schedule.tasks import Order, Stage
from proxyd_client.schedule.worker import Worker

WanMaker = Callable[[PipelineModel], Wan]


@dataclasses.dataclass(slots=True)
class SystemResult:
    """One system's step."""

    system: str
    result: StepResult
    bound_ns: int
    """Its own: with its memory."""
    assumptions: str


@dataclasses.dataclass(frozen=True, slots=True)
class Recipe:
    """How a system is built."""

    plant: Plant
    wan: WanMaker
    stages: tuple[Stage, ...]
    """Where they aren't the model's."""
    assumptions: str
    room: int
    """Activations per worker, on the device and outside."""
    two_each: bool = False
    """Two stages per worker, so the bounds of a row don't hold."""


def _row(model: PipelineModel) -> tuple[tuple[int, ...], ...]:
    return tuple((stage.index,) for stage in model.stages)


def _fixed_plant(
    model: PipelineModel,
    each: Callable[[int], Order],
    *,
    stages: tuple[Stage, ...] = (),
    row: tuple[tuple[int, ...], ...] = (),
    fused: bool = False,
) -> Plant:
    row = row or _row(model)
    made = [each(place) for place in range(len(row))]
    table = stages or model.stages
    memory = tuple(
        order.peak_activations * max(table[index].activation_bytes for index in placed)
        for order, placed in zip(made, row, strict=True)
    )
    return Plant(row, lambda place, worker: fixed(made[place], worker), memory, fused=fused)


def halves(model: PipelineModel) -> tuple[Stage, ...]:
    """Every stage cut in two, as systems with two stages per worker have it: twice as many, each half as long."""
    count = 2 * len(model.stages)
    half = []
    for index in range(count):
        whole = model.stages[index // 2]
        half.append(
            dataclasses.replace(
                whole,
                index=index,
                first=index == 0,
                last=index == count - 1,
                forward_ns=whole.forward_ns // 2,
                backward_ns=whole.backward_ns // 2,
                weight_ns=whole.weight_ns // 2,
                weight_parts=1,
                activation_bytes=max(1, whole.activation_bytes // 2),
            )
        )
    return tuple(half)


def hops(model: PipelineModel) -> list[Hop]:
    """Between stages, for a plan: the mean rate, shared by the pipelines, and the delay, of the slower direction."""
    said = []
    for a, b in zip(model.sites, model.sites[1:], strict=False):
        if a == b:
            said.append(Hop(0, model.local_ns))
        else:
            busy_ns = model.pipelines * max(model.mean_message_ns(a, b), model.mean_message_ns(b, a))
            said.append(Hop(busy_ns, max(model.wires[a, b].one_way_ns, model.wires[b, a].one_way_ns)))
    return said


def _online_plant(model: PipelineModel, offload: bool, quotas: Mapping[int, int] | None) -> Plant:
    memory = tuple(model.activations * stage.activation_bytes for stage in model.stages)
    host = model.offload * model.stages[0].activation_bytes if offload else 0

    def policy(place: int, worker: Worker) -> Policy:
        return Online(quotas)

    nbytes = model.stages[0].activation_bytes
    way_ns = nbytes * NANOS // model.ssd_bytes_per_s
    ssd = Tier(model.ssd * nbytes, way_ns, way_ns) if offload and model.ssd else None
    return Plant(_row(model), policy, memory, host_bytes=host, ssd=ssd)


def _crosspipe(model: PipelineModel, stages: tuple[Stage, ...]) -> Plant:
    made = plan(
        [[stage] for stage in stages],
        model.micro_batches,
        [model.activations * stage.activation_bytes for stage in model.stages],
        hops(model),
    )
    return _fixed_plant(model, lambda place: made.orders[place])


def _pipemorph(model: PipelineModel) -> Plant:
    ways = [hop.busy_ns + hop.delay_ns for hop in hops(model)]
    period_ns = max(stage.period_ns for stage in model.stages)
    return _fixed_plant(
        model,
        lambda place: orders.delay_aware(period_ns, ways, place, model.micro_batches, model.activations),
    )


def recipe(name: str, model: PipelineModel, quotas: Mapping[int, int] | None = None) -> Recipe:
    """How to build a system. Raises ConfigError for an unknown name."""
    count, batches = len(model.stages), model.micro_batches
    fair = f"fair sharing, loss penalty {model.loss_penalty:g}"
    serial = "one message at a time"

    # A static order has W in one piece: within it nothing is decided that a shorter piece would help.
    whole = tuple(dataclasses.replace(stage, weight_parts=1) for stage in model.stages)

    def row(each: Callable[[int, int, int], Order], *, fused: bool = False) -> Plant:
        return _fixed_plant(model, lambda place: each(count, place, batches), fused=fused)

    match name:
        case "1f1b":
            return Recipe(row(orders.one_f_one_b, fused=True), FairWan, whole, fair, count)
        case "1f1b_paced":
            return Recipe(row(orders.one_f_one_b, fused=True), SerialWan, whole, serial, count)
        case "zb_h1":
            return Recipe(row(orders.zb_h1), FairWan, whole, fair, count)
        case "zb_h2":
            return Recipe(row(orders.zb_h2), FairWan, whole, fair, 2 * count - 1)
        case "interleaved":
            cut = halves(model)
            placed = tuple((place, place + count) for place in range(count))
            plant = _fixed_plant(
                model,
                lambda place: orders.interleaved(count, place, 2, batches),
                stages=cut,
                row=placed,
                fused=True,
            )
            return Recipe(plant, FairWan, cut, f"{fair}; crosses the WAN three times each way", 4 * count, True)
        case "zb_v":
            cut = halves(model)
            shape = tuple((place, 2 * count - 1 - place) for place in range(count))
            plant = _fixed_plant(model, lambda place: orders.zb_v(count, place, batches), stages=cut, row=shape)
            return Recipe(plant, FairWan, cut, f"{fair}; crosses the WAN twice each way", 2 * count, True)
        case "crosspipe":
            return Recipe(
                _crosspipe(model, whole), FairWan, whole, f"{fair}; planned for the mean rate", model.activations
            )
        case "crosspipe_paced":
            return Recipe(
                _crosspipe(model, whole), SerialWan, whole, f"{serial}; planned for the mean rate", model.activations
            )
        case "pipemorph":
            return Recipe(_pipemorph(model), FairWan, whole, f"{fair}; planned for the mean rate", model.activations)
        case "pipemorph_paced":
            return Recipe(
                _pipemorph(model), SerialWan, whole, f"{serial}; planned for the mean rate", model.activations
            )
        case "online_fair":
            return Recipe(_online_plant(model, False, quotas), FairWan, (), fair, model.activations)
        case "online":
            return Recipe(_online_plant(model, False, quotas), SerialWan, (), serial, model.activations)
        case "offload_fair":
            room = model.activations + model.outside
            return Recipe(_online_plant(model, True, quotas), FairWan, (), fair, room)
        case "proxyd" | "proxyd_core":
            room = model.activations + model.outside
            plant = _online_plant(model, True, quotas)
            if name == "proxyd_core":
                return Recipe(plant, GrantedWan, (), "granted by proxyd's core, which is told nothing", room)
            return Recipe(plant, SerialWan, (), serial, room)
    raise ConfigError(f"there is no system {name!r}")


def run_system(
    name: str, model: PipelineModel, *, wan: WanMaker | None = None, quotas: Mapping[int, int] | None = None
) -> SystemResult:
    """One step of one system. ``wan``: in place of its own. Raises PipelineStalledError when the step can't end."""
    if name in ("offline", "offline_paced"):
        ending = "_paced" if name == "offline_paced" else ""
        found = [run_system(each + ending, model, wan=wan) for each in ("crosspipe", "pipemorph")]
        best = min(found, key=lambda one: one.result.iteration_ns)
        return dataclasses.replace(best, system=name, assumptions=f"{best.system}: {best.assumptions}")
    built = recipe(name, model, quotas)
    engine = Engine(model, built.plant, (wan or built.wan)(model), built.stages)
    result = engine.run()
    own = bounds(model, None if built.two_each else built.room)
    # Two stages on one worker are no row: only what any schedule has to compute bounds them.
    bound_ns = own.compute_ns if built.two_each else own.bound_ns
    return SystemResult(name, result, bound_ns, built.assumptions)
