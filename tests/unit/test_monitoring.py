"""Alerts, dashboards and runbook belong together, and ask for what exists. What promtool says: tools/monitoring.py."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.unit.test_metrics_doc import documented

yaml = pytest.importorskip("yaml", reason="comes with the ha extra")

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
RULES = DEPLOY / "prometheus" / "proxyd.rules.yml"
BOARDS = sorted((DEPLOY / "grafana" / "dashboards").glob("*.json"))
RECORDED = re.compile(r"\w+:proxyd_\w+:\w+")
FOR_OTHERS = {"class:proxyd_grant_wait_seconds:p99_rate5m", "link:proxyd_transfer_seconds:p99_rate5m"}
"""Recorded for long ranges and other people's dashboards; ours ask for the span that they show."""
SUFFIXES = ("_bucket", "_count", "_sum")


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def alerts() -> dict[str, dict[str, Any]]:
    return {rule["alert"]: rule for rule in rules() if "alert" in rule}


def expressions() -> dict[str, str]:
    """Where -> what is asked for there."""
    found = {rule.get("alert") or rule["record"]: rule["expr"] for rule in rules()}
    for path in BOARDS:
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", ()):
                found[f"{path.stem}: {panel['title']} {target['refId']}"] = target["expr"]
    return found


def test_what_is_asked_for_exists() -> None:
    known = {name for section in documented().values() for name in section}
    histograms = {name for section in documented().values() for name, row in section.items() if row.type == "histogram"}
    known |= {name + suffix for name in histograms for suffix in SUFFIXES}
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    asked = set()
    for where, expr in expressions().items():
        assert set(RECORDED.findall(expr)) <= recorded, where
        asked |= set(RECORDED.findall(expr))
        plain = set(re.findall(r"\bproxyd_\w+", RECORDED.sub("", expr)))
        assert plain <= known, where
        assert plain or RECORDED.search(expr) or re.search("up{|process_|ALERTS", expr), where
    assert recorded - asked <= FOR_OTHERS, "a recorded figure that nothing shows"


def test_every_alert_has_its_section_and_every_section_its_alert() -> None:
    sections = re.findall(r"^## (\w+)$", (ROOT / "docs" / "runbook.md").read_text(), re.MULTILINE)
    assert len(sections) == len(set(sections))
    assert set(sections) == set(alerts())
    for name, rule in alerts().items():
        assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}, name
        assert rule["annotations"]["runbook_url"] == f"docs/runbook.md#{name.lower()}"
        assert rule["labels"]["severity"] in ("critical", "warning", "info"), name


def test_kubernetes_gets_the_same_rules() -> None:
    manifest = yaml.safe_load((DEPLOY / "kubernetes" / "alerts.yaml").read_text())
    assert manifest["spec"] == yaml.safe_load(RULES.read_text())


def test_every_section_says_what_it_means_what_it_costs_and_what_to_do() -> None:
    for section in (ROOT / "docs" / "runbook.md").read_text().split("\n## ")[1:]:
        said = re.findall(r"^\*\*(\w+)\*\*: ", section, re.MULTILINE)
        assert said in (["Means", "Costs", "Look", "Do"], ["Means", "Costs", "Do"]), section.split("\n")[0]


def test_every_alert_is_raised_once_and_kept_quiet_once() -> None:
    plays = yaml.safe_load((DEPLOY / "prometheus" / "proxyd.rules.test.yml").read_text())["tests"]
    tests = [test for play in plays for test in play.get("alert_rule_test", ())]
    assert {test["alertname"] for test in tests if "exp_alerts" in test} == set(alerts())
    assert {test["alertname"] for test in tests if "exp_alerts" not in test} == set(alerts())


def test_dashboards_are_what_grafana_takes_when_it_starts() -> None:
    """As far as it can be said without one: places, names and the source are all there, once."""
    [source] = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yml").read_text())["datasources"]
    [provider] = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/proxyd.yml").read_text())["providers"]
    assert (source["type"], provider["type"]) == ("prometheus", "file")
    uids = set()
    for path in BOARDS:
        board = json.loads(path.read_text())
        uids.add(board["uid"])
        assert board["title"].startswith("proxyd: "), path.name
        variables = {one["name"] for one in board["templating"]["list"]}
        assert "source" in variables, path.name
        ids = [panel["id"] for panel in board["panels"]]
        assert len(set(ids)) == len(ids), path.name
        cells: set[tuple[int, int]] = set()
        for panel in board["panels"]:
            grid = panel["gridPos"]
            assert grid["x"] + grid["w"] <= 24, panel["title"]
            mine = {(grid["x"] + x, grid["y"] + y) for x in range(grid["w"]) for y in range(grid["h"])}
            assert not mine & cells, f"{panel['title']} lies on another panel"
            cells |= mine
            if panel["type"] == "row":
                continue
            assert panel["description"], panel["title"]
            assert panel["datasource"]["uid"] == "${source}", panel["title"]
            refs = [target["refId"] for target in panel["targets"]]
            assert refs == [chr(ord("A") + number) for number in range(len(refs))], panel["title"]
            for target in panel["targets"]:
                assert set(re.findall(r"\$(\w+)", target["expr"])) <= variables | {"__rate_interval"}, panel["title"]
    assert len(uids) == len(BOARDS) == 4


@pytest.mark.parametrize("place", ["prometheus", "compose"])
def test_the_scrape_configurations_name_the_jobs_that_alerts_ask_for(place: str) -> None:
    config = yaml.safe_load((DEPLOY / place / "prometheus.yml").read_text())
    jobs = [job["job_name"] for job in config["scrape_configs"]]
    pattern = re.search(r'up{job=~"([^"]+)"}', alerts()["ProxydTargetDown"]["expr"])
    assert pattern is not None
    assert all(re.fullmatch(pattern[1], job) for job in jobs)
    assert [Path(name).name for name in config["rule_files"]] == [RULES.name]
