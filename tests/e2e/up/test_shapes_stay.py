"""Tests that the JSON shapes of the command line, the ready file and the REST APIs stay compatible."""

import asyncio
import json
import string
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from libs.testing import golden
from libs.testing.golden import Shape, shape
from libs.testing.suites.suite import RunningSuite, running_suite
from libs.testing.wait import until

pytestmark = pytest.mark.suite
QUESTION = {"model": "sim", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "logprobs": True}
LINE = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": QUESTION}
COUNTED = {"model": "sim", "messages": QUESTION["messages"]}
MESSAGE = {**COUNTED, "max_tokens": 4}
ANSWER_S = 30.0


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningSuite]:
    folder = tmp_path_factory.mktemp("shapes")
    with running_suite(folder, "--engine", "sim", env={"FULCRUM_CACHE": str(folder / "cache")}) as found:
        ask(found, "/v1/chat/completions", QUESTION)
        yield found


def ask(suite: RunningSuite, path: str, body: dict[str, Any]) -> Any:
    return httpx.post(suite.gateway + path, json=body, timeout=ANSWER_S).json()


def until_counted(suite: RunningSuite) -> None:
    """Make a request first, as an empty summary has another shape."""
    summary = f"{suite.ready['metrics']}/v1/requests/summary?window=1m"
    asyncio.run(until(lambda: "ok" in httpx.get(summary).json()["total"]["outcomes"], what="a counted request"))


def command(suite: RunningSuite, *arguments: str) -> Any:
    done = suite.fulcrum(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[0])


def ids(suite: RunningSuite) -> set[str]:
    """Return the names of workers, nodes and models, and the tokens of the sim engine."""
    return {
        "sim",
        *string.printable,
        *(worker[name] for worker in command(suite, "workers") for name in ("id", "node", "model")),
    }


def test_the_ready_file_has_a_stable_shape(suite: RunningSuite) -> None:
    golden.hold_shapes("ready", {"ready": shape(suite.ready)})


def test_the_json_of_commands_has_a_stable_shape(suite: RunningSuite, tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    file.write_text(json.dumps(LINE) + "\n")
    wanted = {
        "workers": ("workers",),
        "occupancy": ("occupancy", "--window", "1s"),
        "top": ("top", "--once"),
        "chat": ("chat", "hi", "--max-tokens", "4"),
        "role": ("role", "decode-1", "mixed:64", "--first-step-s", "0"),
        "role back": ("role", "decode-1", "decode", "--first-step-s", "0"),
        "planner mode": ("planner", "mode"),
        "planner limits": ("planner", "limits"),
        "tune prefill": ("tune", "prefill", "--limit", "40", "--most-tokens", "512", "--measure-only"),
        "tune decode": ("tune", "decode", "--tpot", "20"),
        "batch submit": ("batch", "submit", str(file), "--wait"),
        "batch list": ("batch", "list"),
    }
    until_counted(suite)
    found: dict[str, Shape] = {name: command(suite, *arguments) for name, arguments in wanted.items()}
    job = found["batch submit"]["id"]
    found["batch status"] = command(suite, "batch", "status", job)
    found["batch results"] = command(suite, "batch", "results", job, "--output", str(tmp_path / "answers"))
    golden.hold_shapes("cli", {name: shape(value, ids(suite)) for name, value in found.items()})


def test_the_gateways_answers_have_a_stable_shape(suite: RunningSuite) -> None:
    prompt = {"model": "sim", "prompt": "hi", "max_tokens": 4, "logprobs": 1}
    found = {
        "chat": ask(suite, "/v1/chat/completions", QUESTION),
        "chat stream": chunks(suite, "/v1/chat/completions", QUESTION),
        "completion": ask(suite, "/v1/completions", prompt),
        "completion stream": chunks(suite, "/v1/completions", prompt),
        "message": ask(suite, "/v1/messages", MESSAGE),
        "message stream": events(suite, "/v1/messages", MESSAGE),
        "message count": ask(suite, "/v1/messages/count_tokens", COUNTED),
        "message refused": ask(suite, "/v1/messages", {}),
        "embeddings": ask(suite, "/v1/embeddings", {"model": "sim", "input": "hi"}),
        "score": ask(suite, "/v1/score", {"model": "sim", "text_1": "hi", "text_2": "hi"}),
        "rerank": ask(suite, "/v1/rerank", {"model": "sim", "query": "hi", "documents": ["hi"]}),
        "refused": ask(suite, "/v1/chat/completions", {}),
        **{path: httpx.get(suite.gateway + path).json() for path in ("/v1/models", "/v1/models/sim", "/v1/batches")},
    }
    named = ids(suite)
    routes = paths(httpx.get(suite.gateway + "/openapi.json").json())
    golden.hold_shapes("gateway", {name: shape(value, named) for name, value in found.items()} | {"routes": routes})


@pytest.mark.parametrize("service", ["planner", "metrics"])
def test_answers_of_planner_and_metrics_have_a_stable_shape(suite: RunningSuite, service: str) -> None:
    url, named = suite.ready[service], ids(suite)
    if service == "metrics":
        ask(suite, "/v1/chat/completions", QUESTION)
        until_counted(suite)
    worker = command(suite, "workers")[0]["id"]
    wanted = {
        "planner": ("/v1/workers", "/v1/decisions?limit=1", "/v1/mode", "/v1/limits"),
        "metrics": (
            "/v1/occupancy?window=2s",
            "/v1/occupancy/efficiency?scope=cluster",
            "/v1/occupancy/history?window=1s&span=10s",
            f"/v1/requests?worker={worker}",
            "/v1/requests/summary?window=10s",
            f"/v1/steps?worker={worker}",
            "/v1/alerts",
        ),
    }[service]
    found = {path.partition("?")[0]: shape(httpx.get(url + path).json(), named) for path in wanted}
    if service == "metrics":
        found |= {f"stream: {event}": each for event, each in streamed(f"{url}/v1/occupancy/stream", named).items()}
    found["routes"] = paths(httpx.get(f"{url}/openapi.json").json())
    golden.hold_shapes(service, found)


def chunks(suite: RunningSuite, path: str, body: dict[str, Any]) -> list[Any]:
    """Return the JSON of each event of a streamed answer."""
    request_body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    lines = httpx.post(suite.gateway + path, json=request_body, timeout=ANSWER_S).text.splitlines()
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    return [json.loads(each) for each in data[:-1]]


def events(suite: RunningSuite, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON of the last event of each type in a streamed message."""
    lines = httpx.post(suite.gateway + path, json={**body, "stream": True}, timeout=ANSWER_S).text.splitlines()
    found = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    return {event["type"]: event for event in found}


def streamed(url: str, named: set[str]) -> dict[str, Shape]:
    """Return the shapes of the first event of each type in a stream."""
    found: dict[str, Shape] = {}
    deadline_s = time.monotonic() + ANSWER_S
    with suppress(httpx.ReadTimeout), httpx.stream("GET", url, timeout=ANSWER_S) as response:
        event = ""
        for line in response.iter_lines():
            field, _, value = line.partition(": ")
            if field == "event":
                event = value
            elif field == "data":
                found[event] = golden.join(found.get(event), shape(json.loads(value), named))
            if {"members", "tick"} <= found.keys() or time.monotonic() > deadline_s:
                break
    return found


def paths(openapi: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters of each method of each route."""
    return {
        f"{method.upper()} {path}": {each["name"]: each["in"] for each in requested.get("parameters", [])}
        for path, methods in openapi["paths"].items()
        for method, requested in methods.items()
    }
