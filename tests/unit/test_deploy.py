"""What stands in deploy/ is used as it is, so it is checked as it is."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from proxyd.cli.main import main
from proxyd.runtime.config import AgentConfig, CoordinatorConfig, LinkConfig, LogConfig, load_config
from proxyd.runtime.config_forward import ForwardConfig
from proxyd.runtime.config_links import ClassConfig, JobConfig
from proxyd.runtime.environment import KNOWN

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
EXAMPLES = sorted((DEPLOY / "examples").glob("*.toml"))
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_examples_pass_the_check(example: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(example)]) == 0
    assert ": ok (" in capsys.readouterr().out


def test_the_examples_fit_each_other() -> None:
    coordinator = load_config(DEPLOY / "examples" / "coordinator.toml", "coordinator")
    agents = [load_config(DEPLOY / "examples" / f"site-{x}.toml", "agent").require_agent() for x in "ab"]
    ports = {address.port for address in coordinator.require_coordinator().listen_addresses}
    assert {address.port for agent in agents for address in agent.coordinator_addresses} <= ports
    sites = {agent.site for agent in agents}
    assert len(sites) == 2
    assert {link.from_site for link in coordinator.links} == {link.to_site for link in coordinator.links} == sites


@pytest.mark.skipif(
    shutil.which("systemd-analyze") is None and os.environ.get("CI") != "true",
    reason="systemd-analyze is not installed",
)
@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_units_are_clean(unit: Path, tmp_path: Path) -> None:
    # systemd-analyze exits 0 on an unknown key: its stderr is the verdict. The program must exist, so ours stands in.
    copy = tmp_path / unit.name
    text = unit.read_text()
    assert "/opt/proxyd/bin/proxyd" in text
    copy.write_text(text.replace("/opt/proxyd/bin/proxyd", sys.executable))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, check=False, timeout=60
    )
    ours = [line for line in done.stderr.splitlines() if unit.name in line]
    assert (done.returncode, ours) == (0, [])


def test_units_run_commands_that_exist() -> None:
    assert {unit.stem for unit in UNITS} == {"proxyd-agent", "proxyd-coordinator", "proxyd-forward"}
    for unit in UNITS:
        command = re.search(r"^ExecStart=/opt/proxyd/bin/proxyd (\w+) --config (\S+)$", unit.read_text(), re.MULTILINE)
        assert command is not None
        assert command[1] == unit.stem.removeprefix("proxyd-")


def test_the_account_of_a_coordinator_may_hold_one_lease_and_do_nothing_else() -> None:
    """That this is enough is shown by the lock's tests: their API server goes by this Role."""
    yaml = pytest.importorskip("yaml", reason="comes with the ha extra")
    account, role, binding = yaml.safe_load_all((DEPLOY / "kubernetes" / "coordinator-lock.yaml").read_text())
    assert (account["kind"], role["kind"], binding["kind"]) == ("ServiceAccount", "Role", "RoleBinding")
    namespaces = {one["metadata"]["namespace"] for one in (account, role, binding)}
    assert len(namespaces) == 1
    assert binding["roleRef"] == {
        "apiGroup": "rbac.authorization.k8s.io",
        "kind": "Role",
        "name": role["metadata"]["name"],
    }
    [subject] = binding["subjects"]
    assert subject == {"kind": "ServiceAccount"} | {key: account["metadata"][key] for key in ("name", "namespace")}
    may = {(verb, *rule.get("resourceNames", ["any"])) for rule in role["rules"] for verb in rule["verbs"]}
    assert may == {("create", "any"), ("get", "proxyd-hami"), ("update", "proxyd-hami")}
    assert all(
        (rule["apiGroups"], rule["resources"]) == (["coordination.k8s.io"], ["leases"]) for rule in role["rules"]
    )
    # The example coordinator is the one that the manifest is written for.
    assert load_config(DEPLOY / "examples" / "coordinator.toml").require_coordinator().name == "hami"


@pytest.mark.skipif(not Path("/proc/sys/net/ipv4").is_dir(), reason="not Linux")
def test_sysctl_keys_exist() -> None:
    text = (DEPLOY / "sysctl" / "90-proxyd.conf").read_text()
    keys = re.findall(r"^-?(net\.[a-z0-9_.]+) = .+$", text, re.MULTILINE)
    assert "net.ipv4.tcp_slow_start_after_idle" in keys
    for key in keys:
        assert (Path("/proc/sys") / key.replace(".", "/")).exists(), key


def test_every_key_and_variable_is_documented() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text()
    for model in (AgentConfig, CoordinatorConfig, LinkConfig, JobConfig, ClassConfig, ForwardConfig, LogConfig):
        for name, field in model.model_fields.items():
            assert f"| `{field.alias or name}` |" in text, f"{model.__name__}.{name}"
    for variable in KNOWN:
        assert f"| `{variable}` |" in text, variable


@pytest.mark.parametrize(("title", "model"), [("agent", AgentConfig), ("coordinator", CoordinatorConfig)])
def test_documented_defaults_are_the_real_ones(title: str, model: type[AgentConfig | CoordinatorConfig]) -> None:
    text = (ROOT / "docs" / "configuration.md").read_text()
    section = text.partition(f"## [{title}]\n")[2].partition("\n## ")[0]
    for name, field in model.model_fields.items():
        row = re.search(rf"^\| `{name}` \| (.*?) \|", section, re.MULTILINE)
        assert row is not None, name
        if isinstance(field.default, str):
            assert row[1] == f'`"{field.default}"`', name


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "docs/configuration.md", "docs/deploy.md"])
def test_links_between_documents_lead_somewhere(document: str) -> None:
    path = ROOT / document
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text()):
        assert (path.parent / target).exists(), f"{document} links to {target}"
