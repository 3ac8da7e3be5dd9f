"""Tests of spare workers in a suite's plan."""

from pathlib import Path

import pytest

from libs.contracts.errors import StartupError
from libs.launch.options import SuiteOptions
from libs.launch.plan import SuiteLocation, make_plan
from libs.model.fetch import Model

PLACE = SuiteLocation(
    folder=Path("/suite"), broker=("kafka",), kafka="127.0.0.1:9", redis_server="redis-server", planner_port=0,
    metrics_port=0, worker_threads=1, worker_drain_s=1.0, gateway_drain_s=1, token="t", cluster="c",
    spares_url="http://127.0.0.1:5",
)  # fmt: skip


def test_spare_workers_are_planned_and_the_planner_knows_their_actuator() -> None:
    plan = make_plan(SuiteOptions(engine="sim", spare=2), Model("m", "/m"), PLACE)
    assert [each.name for each in plan.spares] == ["gpu-2", "gpu-3"]
    assert {each.env["FULCRUM_WORKER_ROLE"] for each in plan.spares} == {"standby"}
    assert [each.name for each in plan.workers] == ["gpu-0", "gpu-1"]
    planner = next(each for each in plan.observers if each.name == "planner")
    assert planner.env["FULCRUM_PLANNER_ACTUATOR"] == "process"
    assert planner.env["FULCRUM_PLANNER_ACTUATOR_URL"] == "http://127.0.0.1:5"


def test_without_spare_workers_the_planner_has_no_actuator() -> None:
    plan = make_plan(SuiteOptions(engine="sim"), Model("m", "/m"), PLACE)
    planner = next(each for each in plan.observers if each.name == "planner")
    assert plan.spares == () and "FULCRUM_PLANNER_ACTUATOR" not in planner.env


def test_a_deployment_profile_defines_its_own_workers() -> None:
    with pytest.raises(StartupError, match="--spare"):
        SuiteOptions(engine="vllm", profile="gpt-oss-120b-8xh100", spare=1).check()
