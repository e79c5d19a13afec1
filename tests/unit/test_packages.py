"""Units, image, manifests and the compose file, judged by the tools that their users would judge them with."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from proxyd.cli.main import main
from proxyd.core.errors import ConfigError
from proxyd.runtime.config import load_config
from proxyd.runtime.environment import check_environment

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
MANIFESTS = sorted(path for path in (DEPLOY / "kubernetes").glob("*.yaml") if path.name != "kustomization.yaml")
CUSTOM = {"PrometheusRule", "ServiceMonitor"}
"""Kinds that a cluster has only with an operator: no public schema set knows them."""
MAX_EXPOSURE = 2.0


def tool(name: str) -> str:
    """A program; where CI lacks it, that is CI's mistake."""
    found = shutil.which(name) or shutil.which(name, path=ROOT / ".venv" / "bin")
    if found is None:
        assert os.environ.get("CI") != "true", f"{name} is missing; tools/prepare.sh tests and the dev extra bring it"
        pytest.skip(f"{name} is not installed (tools/prepare.sh tests, or the dev extra)")
    return found


def documents(path: Path) -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml", reason="comes with the dev extra")
    return [one for one in yaml.safe_load_all(path.read_text()) if one]


def everything() -> list[dict[str, Any]]:
    return [one for path in MANIFESTS for one in documents(path)]


@pytest.mark.parametrize("unit", sorted((DEPLOY / "systemd").glob("*.service")), ids=lambda path: path.name)
def test_units_are_hardened(unit: Path) -> None:
    done = subprocess.run(
        [tool("systemd-analyze"), "security", "--offline=true", "--no-pager", str(unit)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    level = re.search(r"Overall exposure level for \S+: ([0-9.]+)", done.stdout)
    assert level is not None, done.stdout + done.stderr
    assert float(level[1]) <= MAX_EXPOSURE, done.stdout


def test_the_dockerfile_is_clean() -> None:
    done = subprocess.run(
        [tool("hadolint"), str(ROOT / "Dockerfile")], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.name)
def test_manifests_are_valid_to_the_letter(manifest: Path) -> None:
    done = subprocess.run(
        [tool("kubernetes-validate"), "--strict", str(manifest)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    said = (done.stdout + done.stderr).splitlines()
    custom = [line for line in said if any(f"schema for kind {kind} " in line for kind in CUSTOM)]
    bad = [line for line in said if line.startswith(("ERROR", "WARN", "FATAL")) and line not in custom]
    assert (done.returncode, bad) == (0, []), "\n".join(said)
    passed = sum("passed for resource" in line for line in said)
    assert passed + len(custom) == len(documents(manifest))


def test_the_kustomization_has_every_manifest() -> None:
    [listed] = documents(DEPLOY / "kubernetes" / "kustomization.yaml")
    assert sorted(listed["resources"]) == [path.name for path in MANIFESTS]


def test_configurations_in_the_manifests_are_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = {name: text for one in everything() if one["kind"] == "ConfigMap" for name, text in one["data"].items()}
    assert set(texts) == {"a.toml", "b.toml", "agent.toml"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
        assert main(["check", str(tmp_path / name)]) == 0, capsys.readouterr().err
    services = {f"{one['metadata']['name']}.proxyd.svc:7600" for one in everything() if one["kind"] == "Service"}
    agent = load_config(tmp_path / "agent.toml").require_agent()
    both = [load_config(tmp_path / f"{one}.toml").require_coordinator() for one in "ab"]
    assert len({one.name for one in both}) == len({one.lock for one in both}) == 1
    assert [one.address for one in both] == list(agent.coordinators)
    assert set(agent.coordinators) <= services


def test_pods_run_with_what_the_cluster_gives_them() -> None:
    """Kubernetes makes variables of a namespace's Services; named after proxyd they would be refused as misspelt."""
    services = [one["metadata"]["name"] for one in everything() if one["kind"] == "Service"]
    names = [name.upper().replace("-", "_") + "_SERVICE_HOST" for name in services]
    with pytest.raises(ConfigError):
        check_environment(dict.fromkeys(names, "10.0.0.1"))
    pods = [one["spec"]["template"]["spec"] for one in everything() if "template" in one.get("spec", {})]
    assert len(pods) == 3
    for pod in pods:
        assert pod["enableServiceLinks"] is False
        assert pod["securityContext"]["runAsUser"] == 7600  # the image's
        for container in pod["containers"]:
            assert {"livenessProbe", "readinessProbe", "startupProbe", "resources"} <= set(container)
            held = container["securityContext"]
            assert (held["readOnlyRootFilesystem"], held["allowPrivilegeEscalation"]) == (True, False)
            assert held["capabilities"] == {"drop": ["ALL"]}
    deployments = [one for one in everything() if one["kind"] == "Deployment"]
    [budget] = [one for one in everything() if one["kind"] == "PodDisruptionBudget"]
    for deployment in deployments:
        labels = deployment["spec"]["template"]["metadata"]["labels"]
        assert budget["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert budget["spec"]["minAvailable"] < sum(one["spec"]["replicas"] for one in deployments)


def test_the_compose_file_fits_the_image_and_the_configurations(capsys: pytest.CaptureFixture[str]) -> None:
    place = DEPLOY / "compose"
    [compose] = documents(place / "compose.yaml")
    services = compose["services"]
    assert set(services) == {"coordinator", "hami", "shenzhen", "prometheus", "grafana"}
    for name, service in services.items():
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            assert (place / source).exists() if source.startswith(".") else source in compose["volumes"], volume
        assert name in {"prometheus", "grafana"} or service["image"] == "proxyd"
    for name in ("agent", "coordinator"):
        assert main(["check", str(place / f"{name}.toml")]) == 0, capsys.readouterr().err
    agent = load_config(place / "agent.toml").require_agent()
    coordinator = load_config(place / "coordinator.toml")
    assert {address.host for address in agent.coordinator_addresses} == {"coordinator"}
    sites = {services[name]["environment"]["PROXYD_SITE"] for name in ("hami", "shenzhen")}
    assert {(one.from_site, one.to_site) for one in coordinator.links} == {(a, b) for a in sites for b in sites - {a}}
    [scrape] = documents(place / "prometheus.yml")
    targets = {one for job in scrape["scrape_configs"] for each in job["static_configs"] for one in each["targets"]}
    assert targets == {"coordinator:9600", "hami:9601", "shenzhen:9601"}
