"""Tests of Prometheus rules and Grafana dashboards: every query names an existing metric, and promtool agrees."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from libs.contracts import metric_names
from libs.policy.alerts.rules import Name
from services.metrics.http.login import RUNBOOK

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
METRICS = {value for name, value in vars(metric_names).items() if name.isupper() and isinstance(value, str)}
OUR_ALERTS = "FulcrumAlert"
"""The one rule over the gauge of the alerts that the metrics service decides."""
HISTOGRAM_PARTS = ("_bucket", "_sum", "_count")


def queries() -> Iterator[tuple[str, str]]:
    """Yield (place, PromQL) of every rule and panel."""
    rules = yaml.safe_load((DEPLOY / "prometheus" / "rules.yml").read_text())
    for group in rules["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]
    for file in sorted((DEPLOY / "grafana" / "dashboards").glob("*.json")):
        for panel in json.loads(file.read_text())["panels"]:
            for target in panel["targets"]:
                yield f"{file.name}: {panel['title']}", target["expr"]


@pytest.mark.parametrize(("where", "query"), list(queries()))
def test_a_query_names_existing_metrics(where: str, query: str) -> None:
    named = set(re.findall(r"\bfulcrum_\w+", query))
    known = METRICS | {name + part for name in METRICS for part in HISTOGRAM_PARTS}
    assert named <= known, where
    assert named or query == "up == 0"


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((DEPLOY / "prometheus" / "rules.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def test_every_alert_describes_the_problem_and_a_remedy() -> None:
    for rule in rules():
        assert set(rule["annotations"]) == {"summary", "action", "runbook_url"}
        page = "{{ $labels.alert }}" if rule["alert"] == OUR_ALERTS else rule["alert"]
        assert rule["annotations"]["runbook_url"].endswith(f"/runbook/{page}")
        assert rule["labels"]["severity"] in ("warning", "critical", "{{ $labels.severity }}")


def test_alerts_have_the_same_name_everywhere_and_a_page_in_the_runbook() -> None:
    in_prometheus = {rule["alert"] for rule in rules()}
    assert OUR_ALERTS in in_prometheus
    assert not in_prometheus & set(Name)
    assert {path.stem for path in RUNBOOK.glob("*.md")} == set(Name) | in_prometheus - {OUR_ALERTS}


@pytest.mark.parametrize("page", sorted(RUNBOOK.glob("*.md")), ids=lambda path: path.stem)
def test_a_runbook_page_explains_meaning_check_remedy_and_end(page: Path) -> None:
    text = page.read_text()
    assert text.startswith(f"# {page.stem}\n")
    for part in ("**What it means.**", "**How to see it.**", "**What to do.**", "**When it is over.**"):
        assert part in text
    for link in re.findall(r"\]\((Fulcrum\w+)\)", text):
        assert (RUNBOOK / f"{link}.md").exists()
    assert set(re.findall(r"\bfulcrum_\w+", text)) <= METRICS
    settings = (RUNBOOK.parent / "settings.md").read_text()
    for prefix, names in re.findall(r"`(FULCRUM_[A-Z]+_)(\w+)`", text):
        assert f"`{prefix}{names}`" in settings


@pytest.mark.system
@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool, of Debian's package prometheus, is not on PATH")
@pytest.mark.parametrize("command", [("check", "rules", "rules.yml"), ("test", "rules", "rules_test.yml")])
def test_promtool_accepts_the_rules_and_their_tests(command: tuple[str, ...]) -> None:
    done = subprocess.run(
        ("promtool", *command), cwd=DEPLOY / "prometheus", capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
