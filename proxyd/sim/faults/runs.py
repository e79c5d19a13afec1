"""Runs of many seeds; what a failure says, and how few of its faults it needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from proxyd.sim.faults.plan import Plan, draw
from proxyd.sim.faults.world import World, told

MODULE_DEFECTS = (AssertionError, LookupError, TypeError, ValueError, ArithmeticError, AttributeError)
"""What a mistake in a machine raises; a Broken invariant is an AssertionError."""


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """One run; ``problem`` "" when all held."""

    plan: Plan
    problem: str
    last: tuple[str, ...]
    messages: int
    done: int
    events: int

    def text(self) -> str:
        """All that a reader of a failure needs."""
        lines = ["", *self.last, "", self.plan.text(), "", self.problem, replay(self.plan)]
        return "\n".join(lines)


def replay(plan: Plan) -> str:
    """The command that plays it again."""
    every = draw(plan.seed)
    faults = "" if plan == every else f" --faults {','.join(name for name, _ in plan.faults) or 'none'}"
    return f"replay: proxyd simulate faults --seed {plan.seed}{faults} --trace"


def play(plan: Plan, trace: Callable[[str], None] | None = None) -> Outcome:
    """One run."""
    world = World(plan, trace)
    problem = ""
    try:
        world.run()
    except MODULE_DEFECTS as error:
        problem = f"at {world.clock.now_ns / 1e9:.6f} s: {type(error).__name__}: {error}"
        if trace is not None:
            import traceback

            trace(traceback.format_exc())
    done = sum(message.outcome == "done" for message in world.messages.values())
    last = tuple(told(*one) for one in world.last) if problem else ()
    return Outcome(plan, problem, last, len(world.messages), done, world.clock.events)


def shrink(plan: Plan, attempts: int = 60) -> Outcome:
    """The failure of a plan with as few of its faults as it takes: one after the other is left out while it still
    fails, not necessarily in the same way (what is left is easier to understand either way)."""
    best = play(plan)
    names = [name for name, _ in plan.faults]
    for name in list(names):
        if attempts <= 0:
            break
        attempts -= 1
        fewer = [one for one in names if one != name]
        again = play(plan.only(fewer))
        if again.problem:
            best, names = again, fewer
    return best
