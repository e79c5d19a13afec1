"""What ends a step."""

from __future__ import annotations

from proxyd_client.errors import ProxydError


class PipelineError(ProxydError, RuntimeError):
    """A step was given up, here or by another stage; the message says which, and why."""

    code = "pipeline"
