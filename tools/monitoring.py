"""Check what operators get for Prometheus and Grafana: configuration, rules, what raises them, what is made from them.

Needs promtool, which ``tools/prepare.sh monitoring`` brings (as root on Debian or Ubuntu); a check that can't run
fails. That every expression finds something in a real scrape is tests/e2e/test_prometheus.py. ``--write`` makes
deploy/kubernetes/alerts.yaml from the rules; the dashboards are made by tools/dashboards.py.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROMETHEUS = ROOT / "deploy" / "prometheus"
RULES = PROMETHEUS / "proxyd.rules.yml"
DASHBOARDS = ROOT / "deploy" / "grafana" / "dashboards"
KUBERNETES = ROOT / "deploy" / "kubernetes" / "alerts.yaml"
HEAD = """\
# GENERATED from deploy/prometheus/proxyd.rules.yml by tools/monitoring.py --write. For the Prometheus operator.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: proxyd
  namespace: proxyd
  labels: {app.kubernetes.io/name: proxyd}
spec:
"""


def tool(name: str) -> str:
    """Where promtool or prometheus is. Raises SystemExit with what to install."""
    found = shutil.which(name, path=ROOT / "build" / "tools") or shutil.which(name)
    if found is None:
        raise SystemExit(
            f"{name} is missing. As root on Debian or Ubuntu: tools/prepare.sh monitoring (it unpacks the package"
            f" 'prometheus' into build/tools); elsewhere put {name} of Prometheus 2.42 or later on PATH."
        )
    return found


def for_kubernetes() -> str:
    """The rules as the operator takes them."""
    text = RULES.read_text()
    return HEAD + textwrap.indent(text[text.index("groups:") :], "  ")


def expressions_as_rules() -> str:
    """What the dashboards ask for, as rules that promtool can judge. Variables stand in strings, but for one."""
    boards = [json.loads(path.read_text()) for path in sorted(DASHBOARDS.glob("*.json"))]
    targets = [target for board in boards for panel in board["panels"] for target in panel.get("targets", ())]
    rules = [
        {"record": f"dashboards:expression_{number}", "expr": target["expr"].replace("$__rate_interval", "1m")}
        for number, target in enumerate(targets)
    ]
    return json.dumps({"groups": [{"name": "dashboards", "rules": rules}]})  # JSON is YAML


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="make the Kubernetes manifest, and check nothing")
    if parser.parse_args().write:
        KUBERNETES.write_text(for_kubernetes())
        return 0
    with tempfile.NamedTemporaryFile("w", prefix="dashboards-", suffix=".rules.yml") as scratch:
        scratch.write(expressions_as_rules())
        scratch.flush()
        return check(scratch.name)


def check(expressions: str) -> int:
    """The verdict on everything: 1 when something is wrong. ``expressions``: a file with those of the dashboards."""
    commands = [
        [tool("promtool"), "check", "config", str(PROMETHEUS / "prometheus.yml")],
        # Its rules are where they are in the container.
        [tool("promtool"), "check", "config", "--syntax-only", str(ROOT / "deploy" / "compose" / "prometheus.yml")],
        [tool("promtool"), "check", "rules", "--lint=all", "--lint-fatal", str(RULES)],
        [tool("promtool"), "check", "rules", expressions],
        [tool("promtool"), "test", "rules", str(PROMETHEUS / "proxyd.rules.test.yml")],
        [sys.executable, str(ROOT / "tools" / "dashboards.py"), "--check"],
    ]
    failed = int(KUBERNETES.read_text() != for_kubernetes())
    if failed:
        print(f"FAILED {KUBERNETES.relative_to(ROOT)} is out of step: run `make dashboards`", file=sys.stderr)
    for command in commands:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
        words = " ".join([Path(command[0]).name, *command[1:]]).replace(f"{ROOT}/", "")
        print(f"{'ok    ' if done.returncode == 0 else 'FAILED'} {words}")
        if done.returncode != 0:
            print(done.stdout + done.stderr, file=sys.stderr)
            failed = 1
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
