"""Prometheus rules and Grafana dashboards: every query names a metric that exists, and promtool agrees."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from libs.contracts import metric_names

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
METRICS = {value for name, value in vars(metric_names).items() if name.isupper() and isinstance(value, str)}
HISTOGRAM_PARTS = ("_bucket", "_sum", "_count")


def queries() -> Iterator[tuple[str, str]]:
    """(where it stands, PromQL) of every rule and panel."""
    rules = yaml.safe_load((DEPLOY / "prometheus" / "rules.yml").read_text())
    for group in rules["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]
    for file in sorted((DEPLOY / "grafana" / "dashboards").glob("*.json")):
        for panel in json.loads(file.read_text())["panels"]:
            for target in panel["targets"]:
                yield f"{file.name}: {panel['title']}", target["expr"]


@pytest.mark.parametrize(("where", "query"), list(queries()))
def test_a_query_names_metrics_that_exist(where: str, query: str) -> None:
    named = set(re.findall(r"\bfulcrum_\w+", query))
    known = METRICS | {name + part for name in METRICS for part in HISTOGRAM_PARTS}
    assert named <= known, where
    assert named or query == "up == 0"


def test_every_alert_says_what_happened_and_what_to_do() -> None:
    rules = yaml.safe_load((DEPLOY / "prometheus" / "rules.yml").read_text())
    for rule in rules["groups"][0]["rules"]:
        assert set(rule["annotations"]) == {"summary", "action"}
        assert rule["labels"]["severity"] in ("warning", "critical")


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool, of Debian's package prometheus, is not on PATH")
@pytest.mark.parametrize("command", [("check", "rules", "rules.yml"), ("test", "rules", "rules_test.yml")])
def test_promtool_accepts_the_rules_and_their_tests(command: tuple[str, ...]) -> None:
    done = subprocess.run(
        ("promtool", *command), cwd=DEPLOY / "prometheus", capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
