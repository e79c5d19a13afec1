"""A pipeline schedule whose next task is chosen at run time, for real stages of torch.distributed.pipelining::

    from proxyd_client.torch.pipeline import ScheduleRunTime
    schedule = ScheduleRunTime(stage, n_microbatches=16, loss_fn=loss_of, activations=8)
    schedule.step(inputs)                            # on the first stage
    schedule.step(target=targets, losses=losses)     # on the last
    schedule.report                                  # what the last step did, and why

The policies are those of :mod:`proxyd_client.schedule`, the ones that the simulator runs. How a step is chosen:
docs/scheduling.md; what goes with torch: docs/pytorch.md.
"""

from __future__ import annotations

from proxyd_client.torch.pipeline.errors import PipelineError
from proxyd_client.torch.pipeline.report import StepReport
from proxyd_client.torch.pipeline.schedule import ScheduleRunTime

__all__ = ["PipelineError", "ScheduleRunTime", "StepReport"]
