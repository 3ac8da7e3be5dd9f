"""Tests of a suite whose models share a pool of workers, as an operator and a client see it."""

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.async_api import Route, expect

from libs.runtime.tasks import end
from libs.testing.suites.browser import browser, listen_for_errors
from libs.testing.suites.suite import RunningSuite, running_suite

pytestmark = pytest.mark.suite

FAST = {
    "FULCRUM_PLANNER_MODE": "auto",
    "FULCRUM_WORKER_SIM_SPEEDUP": "10",
    "FULCRUM_PLANNER_MODELS_TURN_S": "1",
    "FULCRUM_METRICS_SLO_OBJECTIVE": "0.9999",
    "FULCRUM_METRICS_DAY_S": "600",
}
"""Models of 16 GB load in less than half a second. The error budget is used up after a few seconds of bad requests
alone; before that a new service does not judge. Demand is shown in finished bins, which last less than a second here
instead of a minute."""
WAIT_S = 30.0


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningSuite]:
    folder = tmp_path_factory.mktemp("pool")
    models = [word for name in ("alpha", "org/beta", "gamma") for word in ("--model", name)]
    shape = ("--engine", "sim", "--pool", "2", "--workers-per-process", "2", *models)
    with running_suite(folder, *shape, env={"FULCRUM_CACHE": str(folder / "cache"), **FAST}) as found:
        yield found


async def ask(http: httpx.AsyncClient, suite: RunningSuite, model: str, **more: Any) -> httpx.Response:
    body = {"model": model, "prompt": "a b c", "max_tokens": 4, "temperature": 0, **more}
    return await http.post(f"{suite.gateway}/v1/completions", json=body)


async def listed(http: httpx.AsyncClient, suite: RunningSuite) -> dict[str, Any]:
    found = (await http.get(f"{suite.ready['planner']}/v1/models")).json()
    return {each["name"]: each for each in found["models"]}


async def held(http: httpx.AsyncClient, suite: RunningSuite) -> set[str]:
    """Return the models that workers hold."""
    return {each["model"] for each in (await http.get(f"{suite.ready['planner']}/v1/workers")).json()}


def output_of(suite: RunningSuite, *arguments: str) -> Any:
    done = suite.fulcrum("models", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


async def test_a_request_waits_for_a_model_without_a_worker_and_an_unknown_model_is_404(
    suite: RunningSuite,
) -> None:
    async with httpx.AsyncClient(timeout=WAIT_S) as http:
        assert (await http.get(f"{suite.gateway}/readyz")).status_code == 200
        names = [each["id"] for each in (await http.get(f"{suite.gateway}/v1/models")).json()["data"]]
        assert {"alpha", "org/beta", "gamma"} <= set(names)
        model_names = ("alpha", "org/beta", "gamma") * 2
        answers = await asyncio.gather(*(ask(http, suite, name) for name in model_names))
        assert [each.status_code for each in answers] == [200] * 6
        waits_ms = [int(each.headers.get("x-fulcrum-expected-wait-ms", 0)) for each in answers]
        assert max(waits_ms) > 0 and all(wait_ms < 20_000 for wait_ms in waits_ms)  # three models on two workers
        assert (await ask(http, suite, "delta")).status_code == 404
        shown = (await http.get(f"{suite.gateway}/v1/models/org/beta")).json()
        assert shown["state"] in ("serving", "loading", "asleep", "disk") and shown["expected_wait_ms"] >= 0


async def test_a_model_gives_the_same_answer_after_sleep(suite: RunningSuite) -> None:
    async with httpx.AsyncClient(timeout=WAIT_S) as http:
        first = (await ask(http, suite, "alpha", seed=3, temperature=1)).json()["choices"]
        for name in ("org/beta", "gamma", "org/beta", "gamma"):
            assert (await ask(http, suite, name)).status_code == 200
        again = (await ask(http, suite, "alpha", seed=3, temperature=1)).json()["choices"]
        assert again == first


async def test_models_are_added_requested_and_removed_while_the_suite_runs(suite: RunningSuite) -> None:
    added = output_of(suite, "add", "org/new-8b", "--size", "8GB", "--priority", "2", "--tpot-ms", "40")
    assert (added["size_bytes"], added["priority"], added["tpot_ms"]) == (8_000_000_000, 2, 40.0)
    async with httpx.AsyncClient(timeout=WAIT_S) as http:
        async with asyncio.timeout(WAIT_S):
            while (await ask(http, suite, "org/new-8b")).status_code == 404:  # until the gateway knows it
                await asyncio.sleep(0.05)
        assert (await ask(http, suite, "org/new-8b")).status_code == 200
        used = next(each for each in output_of(suite, "list") if each["name"] == "org/new-8b")
        assert used["load_measured"] and used["last_use"] and used["load_s"] > 0
        assert output_of(suite, "remove", "org/new-8b") == {"removed": "org/new-8b"}
        async with asyncio.timeout(WAIT_S):
            while (await ask(http, suite, "org/new-8b")).status_code != 404:
                await asyncio.sleep(0.05)
            while "org/new-8b" in await held(http, suite):
                await asyncio.sleep(0.05)


async def test_a_reservation_is_accepted_or_refused_with_what_would_be_evicted(suite: RunningSuite) -> None:
    kept = output_of(suite, "reserve", "alpha", "--gpus", "2", "--from", "09:00", "--to", "18:00")
    assert kept["reservations"] == [{"gpus": 2, "from_time": "09:00", "to_time": "18:00"}]
    refused = suite.fulcrum("models", "reserve", "gamma", "--gpus", "1", "--from", "17:00", "--to", "19:00")
    assert refused.returncode == 1
    assert "it needs the GPUs of: reservation of 2 for alpha from 09:00 to 18:00" in refused.stderr
    output_of(suite, "reserve", "gamma", "--gpus", "1", "--from", "18:00", "--to", "19:00")
    for name in ("alpha", "gamma"):
        assert output_of(suite, "reserve", name, "--gpus", "0")["reservations"] == []


async def test_a_minimum_is_loaded_without_a_request_and_a_pinned_model_stays(suite: RunningSuite) -> None:
    output_of(suite, "add", "gamma", "--floor", "1")
    async with httpx.AsyncClient(timeout=WAIT_S) as http:
        async with asyncio.timeout(WAIT_S):
            while (await listed(http, suite))["gamma"]["state"] != "serving":
                await asyncio.sleep(0.05)
        for name in ("alpha", "org/beta", "alpha", "org/beta"):
            assert (await ask(http, suite, name)).status_code == 200
            assert (await listed(http, suite))["gamma"]["state"] == "serving"
        assert output_of(suite, "pin", "gamma")["pinned"]
        refused = suite.fulcrum("models", "add", "alpha", "--floor", "2")
        assert refused.returncode == 1 and "floor of 2 for alpha cannot be kept" in refused.stderr
        assert not output_of(suite, "pin", "gamma", "--off")["pinned"]
        output_of(suite, "add", "gamma", "--floor", "0")


async def test_two_models_with_their_own_targets_are_separate_in_occupancy_and_planner(suite: RunningSuite) -> None:
    output_of(suite, "add", "alpha", "--tpot-ms", "25", "--ttft-ms", "400")
    output_of(suite, "add", "gamma", "--tpot-ms", "250")
    both = {"alpha", "gamma"}
    async with httpx.AsyncClient(timeout=WAIT_S) as http, asyncio.timeout(2 * WAIT_S):
        while True:
            await asyncio.gather(*(ask(http, suite, name, max_tokens=200) for name in both))
            planned = (await http.get(f"{suite.ready['planner']}/v1/planner")).json()["models"]
            occupancy = (await http.get(f"{suite.ready['metrics']}/v1/occupancy?window=10s")).json()
            in_planner = {each["model"] for each in planned if each["now"]}
            if both <= in_planner and both <= {each["model"] for each in occupancy["models"]}:
                break


async def test_lines_of_two_models_in_one_job_are_answered_and_counted_by_model(suite: RunningSuite) -> None:
    lengths = {"alpha": 4, "gamma": 12}
    lines = [
        {"custom_id": f"{name}-{number}", "method": "POST", "url": "/v1/completions",
         "body": {"model": name, "prompt": "a b c", "max_tokens": lengths[name]}}
        for name, count in (("alpha", 6), ("gamma", 3)) for number in range(count)
    ]  # fmt: skip
    async with httpx.AsyncClient(base_url=suite.gateway, timeout=WAIT_S) as http, asyncio.timeout(2 * WAIT_S):
        sent = {"file": ("lines.jsonl", "\n".join(map(json.dumps, lines)))}
        file = (await http.post("/v1/files", files=sent, data={"purpose": "batch"})).json()["id"]
        request_body = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
        job = (await http.post("/v1/batches", json=request_body)).json()
        while job["status"] not in ("completed", "failed"):
            job = (await http.get(f"/v1/batches/{job['id']}")).json()
            await asyncio.sleep(0.05)
        answers = (await http.get(f"/v1/files/{job['output_file_id']}/content")).text.splitlines()
        bodies = {each["custom_id"]: each["response"]["body"] for each in map(json.loads, answers)}
        assert bodies.keys() == {each["custom_id"] for each in lines}
        for custom_id, body in bodies.items():
            assert custom_id.startswith(body["model"])
            assert body["usage"]["completion_tokens"] == lengths[body["model"]]
        while (came := await batch_demand(http, suite)) != {"alpha": 6, "gamma": 3}:
            assert came["alpha"] <= 6 and came["gamma"] <= 3, came
            await asyncio.sleep(0.1)


async def batch_demand(http: httpx.AsyncClient, suite: RunningSuite) -> Counter[str]:
    """Return the number of lines of batch jobs so far, by model."""
    params = {"span": "1h", "window": "1m"}
    found = (await http.get(f"{suite.ready['metrics']}/v1/demand", params=params)).json()
    counts = Counter[str]()
    for each in found["series"]:
        if each["service_class"] == "batch":
            counts[each["model"]] += sum(count or 0 for count in each["requests"])
    return counts


async def test_each_model_has_a_forecast_and_a_verdict_by_its_own_targets(suite: RunningSuite) -> None:
    targets, metrics = {"alpha": 25.0, "gamma": 250.0}, suite.ready["metrics"]
    for name, target_ms in targets.items():
        output_of(suite, "add", name, "--tpot-ms", str(target_ms))
    judged = dict[str, float]()
    async with httpx.AsyncClient(timeout=WAIT_S) as http, asyncio.timeout(2 * WAIT_S):
        while judged != targets:
            asking = [asyncio.create_task(ask(http, suite, name, max_tokens=400)) for name in targets]
            while not all(task.done() for task in asking):
                models = (await http.get(f"{metrics}/v1/status")).json()["models"]
                judged |= {
                    each["model"]: each["decode"]["tpot_target_ms"] for each in models if each["model"] in targets
                }
                await asyncio.sleep(0.05)
        for name in targets:
            forecast = (await http.get(f"{metrics}/v1/forecast", params={"model": name, "horizon": "1h"})).json()
            assert forecast["model"] == name and forecast["little_history"]


async def test_an_alert_names_the_model_that_misses_its_targets_and_no_other(
    suite: RunningSuite,
) -> None:
    targets = {"strict": ("0.1", "60000"), "lax": ("60000", "60000")}
    for name, (tpot_ms, ttft_ms) in targets.items():
        output_of(suite, "add", name, "--tpot-ms", tpot_ms, "--ttft-ms", ttft_ms)
    async with httpx.AsyncClient(timeout=2 * WAIT_S) as http, asyncio.timeout(3 * WAIT_S):
        for name in targets:
            while (await ask(http, suite, name)).status_code == 404:  # until the gateway knows it
                await asyncio.sleep(0.05)
        while True:
            answers = await asyncio.gather(*(ask(http, suite, name) for name in targets for _ in range(12)))
            assert {each.status_code for each in answers} == {200}
            firing = (await http.get(f"{suite.ready['metrics']}/v1/alerts")).json()["firing"]
            missed = [each for each in firing if each["name"] == "FulcrumSloBurn"]
            if any(each["labels"]["model"] == "strict" for each in missed):
                break
    found = next(each for each in missed if each["labels"]["model"] == "strict")
    assert found["labels"]["slo"] == "tpot" and "missed TPOT" in found["reason"]
    assert not [each for each in firing if each["labels"].get("model") == "lax"]
    shown = suite.fulcrum("alerts")
    assert "strict" in shown.stdout and "lax" not in shown.stdout
    for name in targets:
        output_of(suite, "remove", name)


@pytest.mark.usefixtures("chromium")
async def test_the_page_shows_each_model_by_its_own_target(suite: RunningSuite) -> None:
    targets = {"alpha": "25 ms", "gamma": "250 ms"}
    for name, target in targets.items():
        output_of(suite, "add", name, "--tpot-ms", target.removesuffix(" ms"))
    async with httpx.AsyncClient(timeout=2 * WAIT_S) as http, browser() as running:
        page = await running.new_page()
        errors = listen_for_errors(page)

        async def planner(route: Route) -> None:  # the metrics service does not know the port that the gateway picked
            await route.fulfill(body=(await http.get(f"{suite.ready['planner']}/v1/models")).text)

        await page.route("**/v1/models", planner)
        await page.goto(suite.ready["metrics"])

        async def keep_asking(name: str) -> None:
            while True:
                await ask(http, suite, name, max_tokens=400)

        asking = [asyncio.create_task(keep_asking(name)) for name in targets]
        try:
            for name, target in targets.items():
                card = page.locator("#pressures .gauges").filter(has=page.get_by_role("button", name=name, exact=True))
                await expect(card.locator(".gauge.decode .facts")).to_contain_text(
                    f" of {target}", timeout=WAIT_S * 1e3
                )
        finally:
            await end(*asking)
        await page.get_by_role("button", name="Models").click()
        for name, target in targets.items():
            row = page.locator("#models-table tbody tr").filter(has_text=name)
            await expect(row).to_contain_text(target, timeout=WAIT_S * 1e3)
        assert errors == []


async def test_an_adapter_added_while_workers_run_is_served_and_counted_separately(suite: RunningSuite) -> None:
    added = output_of(suite, "add", "sql", "--adapter-of", "alpha", "--source", "/adapters/sql")
    assert (added["parent"], added["load_s"]) == ("alpha", 0.0)
    async with httpx.AsyncClient(timeout=WAIT_S) as http:
        async with asyncio.timeout(WAIT_S):
            while (await ask(http, suite, "sql")).status_code == 404:  # until the gateway knows it
                await asyncio.sleep(0.05)
        own, adapted = await ask(http, suite, "alpha"), await ask(http, suite, "sql")
        assert adapted.json()["choices"] != own.json()["choices"]
        shown = (await http.get(f"{suite.gateway}/v1/models/sql")).json()
        assert shown["parent"] == "alpha" and shown["state"] == "serving"
        async with asyncio.timeout(WAIT_S):
            while not (await listed(http, suite))["sql"]["last_use"]:
                await asyncio.sleep(0.05)
        found = await listed(http, suite)
        assert found["sql"]["workers"] == found["alpha"]["workers"] and "sql" not in await held(http, suite)
        refused = suite.fulcrum("models", "reserve", "sql", "--gpus", "1")
        assert refused.returncode == 1 and "reserve GPUs for alpha" in refused.stderr
        refused = suite.fulcrum("models", "add", "deeper", "--adapter-of", "sql", "--source", "/adapters/deeper")
        assert refused.returncode == 1 and "is an adapter itself" in refused.stderr
        assert output_of(suite, "remove", "sql") == {"removed": "sql"}
        async with asyncio.timeout(WAIT_S):
            while (await ask(http, suite, "sql")).status_code != 404:
                await asyncio.sleep(0.05)


def test_the_forecast_lists_active_models_and_those_to_be_evicted(suite: RunningSuite) -> None:
    found = output_of(suite, "forecast")
    assert found["gpus"] == 2 and found["needed_gpus"] <= 2
    assert set(found["next_uses"]) == {"alpha", "org/beta", "gamma"}
    assert all({"worker", "model", "why"} == set(each) for each in found["next_evicted"])
    shown = suite.fulcrum("models", "forecast")
    assert shown.returncode == 0 and "of 3 models are active" in shown.stdout
    assert "gamma" in suite.fulcrum("models", "list").stdout


def test_a_pool_of_models_refuses_role_options(tmp_path: Path) -> None:
    refused = pytest.raises(AssertionError, match="models that share a pool have no --prefill")
    with refused, running_suite(tmp_path, "--engine", "sim", "--model", "a", "--model", "b", "--prefill", "2"):
        raise RuntimeError("it started")
