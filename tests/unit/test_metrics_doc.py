"""docs/metrics.md lists what the daemons export, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

from proxyd.coordinator.coordinator_metrics import coordinator_families, session_families
from proxyd.coordinator.observer import Observer
from proxyd.coordinator.servicer import SessionServicer
from proxyd.core.coordinator import CoordinatorConfig, CoordinatorMachine

ROOT = Path(__file__).resolve().parents[2]
NAME = re.compile(r"proxyd_[a-z_]+")
TLS = (ROOT / "proxyd/runtime/tls.py").read_text()
SECURITY = {"proxyd_failed_proofs_total", *re.findall(r'"(proxyd_[a-z_]+)"', TLS)}
"""What both daemons export beside their own, in proxyd/runtime."""


def documented() -> dict[str, set[str]]:
    """Section -> names in its table."""
    sections: dict[str, set[str]] = {}
    title = ""
    for line in (ROOT / "docs" / "metrics.md").read_text().splitlines():
        if line.startswith("## "):
            title = line[3:]
        elif line.startswith("| `proxyd_"):
            sections.setdefault(title, set()).update(NAME.findall(line.split("|")[1]))
    return sections


def test_every_coordinator_metric_is_documented() -> None:
    machine = CoordinatorMachine(CoordinatorConfig(), epoch=1)
    servicer = SessionServicer(b"", lambda event: None)
    families = [*coordinator_families(machine.status(0), Observer()), *session_families(servicer)]
    exported = {family.name for family in families}
    sections = documented()
    assert exported | SECURITY == sections["Both"] | sections["Coordinator"]


def test_every_agent_metric_is_documented() -> None:
    source = (ROOT / "proxyd" / "agent" / "agent_metrics.py").read_text()
    exported = set(re.findall(r'"(proxyd_[a-z_]+)"', source)) | {"proxyd_build_info"}
    sections = documented()
    assert exported | SECURITY == sections["Both"] | sections["Agent"]
