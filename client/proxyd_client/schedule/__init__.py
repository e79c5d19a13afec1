"""The pipeline's next step, chosen at run time: pure policies, driven by the simulator and by real modules alike.

No clock, thread, socket or tensor is in here: a driver feeds events into a :class:`Worker`, asks a :class:`Policy` for
a :class:`Decision`, and does what it says. docs/scheduling.md tells how a step is chosen.
"""

from __future__ import annotations

from proxyd_client.schedule.offload import Move, Offload, Tier
from proxyd_client.schedule.policy import FixedOrder, Online, Policy, fixed
from proxyd_client.schedule.tasks import Decision, Kind, Order, Stage, Task
from proxyd_client.schedule.worker import Place, Worker

__all__ = [
    "Decision",
    "FixedOrder",
    "Kind",
    "Move",
    "Offload",
    "Online",
    "Order",
    "Place",
    "Policy",
    "Stage",
    "Task",
    "Tier",
    "Worker",
    "fixed",
]
