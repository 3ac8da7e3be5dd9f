"""Tests of the REST API as clients see it: errors in one shape, and streams that the official client reads."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from libs.contracts.errors import StartupError
from libs.testing.workers.scripted import Plan, ScriptedWorker, expected_text
from services.gateway.request.prompt import Catalog, load_catalog
from tests.e2e.gateway.gateway_rig import CHAT, TOOL

JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing/here", 404, "not_found"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/v1/models/nope", 404, "model_not_found"),
        ("POST", "/v1/chat/completions", 415, "unsupported_media_type"),
        ("POST", "/v1/completions", 415, "unsupported_media_type"),
    ],
)
async def test_every_error_has_openais_shape(
    http: httpx.AsyncClient, method: str, path: str, status: int, code: str
) -> None:
    answer = await http.request(method, path)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert error["type"] == "invalid_request_error"


async def test_a_huge_body_is_refused_without_being_buffered(http: httpx.AsyncClient) -> None:
    huge = b"x" * (50 * 1024 * 1024)
    answer = await http.post("/v1/chat/completions", content=huge, headers=JSON)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
    assert answer.json()["error"]["param"] == "body"

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b"x" * 65536

    answer = await http.post("/v1/chat/completions", content=chunks(), headers=JSON)
    assert answer.status_code == 413
    assert (await http.post("/v1/completions", json={"model": "sim", "prompt": "x"})).status_code == 200


@pytest.mark.parametrize("route", ["chat/completions", "completions"])
@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("content-type", "text/plain"),
        ("content-encoding", "gzip"),
        ("content-type", "application/x-www-form-urlencoded"),
    ],
)
async def test_only_plain_json_reaches_a_worker(
    http: httpx.AsyncClient, worker: ScriptedWorker, route: str, header: str, value: str
) -> None:
    content = json.dumps({"model": "sim", "prompt": "x"}).encode()
    answer = await http.post(f"/v1/{route}", content=content, headers={**JSON, header: value})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (415, "unsupported_media_type", header)
    assert value in error["message"] and not worker.submits
    kind = {"content-type": "Application/Json; Charset=UTF-8", "content-encoding": "identity"}
    assert (await http.post("/v1/completions", content=content, headers=kind)).status_code == 200


async def test_an_unknown_model_is_named(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/chat/completions", json={**CHAT, "model": "nope"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")


async def test_an_error_is_short_however_long_the_name_in_it(http: httpx.AsyncClient) -> None:
    long = "x" * 10_000
    answers = [
        await http.post("/v1/chat/completions", json={**CHAT, "model": long}),
        await http.get(f"/v1/models/{long}"),
        await http.get(f"/{long}"),
        await http.request("DELETE", f"/v1/models/{long}"),
        await http.post("/v1/completions", content=b"{}", headers={"content-type": long}),
        await http.post("/v1/completions", json={**CHAT, long: 1}),
    ]
    for answer in answers:
        assert 400 <= answer.status_code < 500
        assert len(answer.content) < 1000


@pytest.mark.parametrize("route", ["chat/completions", "completions"])
async def test_docs_declare_the_hot_routes_with_schemas(http: httpx.AsyncClient, route: str) -> None:
    document = (await http.get("/openapi.json")).json()
    operation = document["paths"][f"/v1/{route}"]["post"]
    name = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].rsplit("/", 1)[1]
    schema = document["components"]["schemas"][name]
    assert {"model", "temperature", "stream"} <= set(schema["properties"])
    assert operation["responses"]["200"]["content"]["application/json"]["schema"]["$ref"]
    assert (await http.get("/docs")).status_code == 200


async def test_docs_declare_the_answers_of_small_routes(http: httpx.AsyncClient) -> None:
    paths = (await http.get("/openapi.json")).json()["paths"]
    assert "404" in paths["/v1/models/{name}"]["get"]["responses"]
    assert list(paths["/metrics"]["get"]["responses"]["200"]["content"]) == ["text/plain"]


async def test_health_readiness_and_metrics_are_served(http: httpx.AsyncClient) -> None:
    for path in ("/healthz", "/health"):
        answer = await http.get(path)
        assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
    ready = await http.get("/readyz")
    assert (ready.status_code, ready.json()) == (200, {"ready": True, "models": {"sim": True}})
    await http.post("/v1/completions", json={"model": "sim", "prompt": "x", "max_tokens": 4})
    text = (await http.get("/metrics")).text
    assert 'fulcrum_gateway_output_tokens_total{model="sim"} 4.0' in text
    assert 'fulcrum_gateway_choices_total{model="sim",outcome="ok",reason="length"} 1.0' in text
    assert "fulcrum_gateway_live 0.0" in text


async def test_the_bytes_of_a_stream_are_exact(http: httpx.AsyncClient) -> None:
    body = {**CHAT, "max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}}
    headers = {"x-request-id": "r1", "x-fulcrum-details": "1"}
    answer = await http.post("/v1/chat/completions", json=body, headers=headers)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["x-request-id"] == "r1"
    *events, done, end = answer.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert {chunk["id"] for chunk in chunks} == {"chatcmpl-r1"}
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert all(chunk["usage"] is None and "fulcrum" not in chunk for chunk in chunks[:-1])
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 3
    assert chunks[-1]["fulcrum"]["decode_worker"] == "m0"


@pytest.mark.parametrize("requested", [True, False])
async def test_chunks_include_the_tokens_so_far_on_request(http: httpx.AsyncClient, requested: bool) -> None:
    options = {"include_usage": True, "continuous_usage_stats": requested}
    body = {"model": "sim", "prompt": ["xx", "yyy"], "max_tokens": 5, "stream": True, "stream_options": options}
    answer = await http.post("/v1/completions", json=body)
    *events, _, _ = answer.text.split("\n\n")
    *chunks, closing = [json.loads(event.removeprefix("data: ")) for event in events]
    assert closing["usage"]["prompt_tokens"] == 5 and closing["usage"]["completion_tokens"] == 10
    if not requested:
        assert all(chunk["usage"] is None for chunk in chunks)
        return
    sent = [0, 0]
    for chunk in chunks:
        (choice,) = chunk["choices"]
        sent[choice["index"]] += len(choice["text"])
        usage = chunk["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (2 + choice["index"], sent[choice["index"]])
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert sent == [5, 5]


async def test_the_tokens_so_far_come_only_with_usage(http: httpx.AsyncClient) -> None:
    body = {**CHAT, "max_tokens": 2, "stream": True, "stream_options": {"continuous_usage_stats": True}}
    assert '"usage"' not in (await http.post("/v1/chat/completions", json=body)).text


async def test_a_request_may_have_as_many_choices_as_openai_allows(http: httpx.AsyncClient) -> None:
    body = {"model": "sim", "prompt": "x", "max_tokens": 1}
    assert len((await http.post("/v1/completions", json={**body, "n": 128})).json()["choices"]) == 128
    answer = await http.post("/v1/completions", json={**body, "n": 129})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")
    assert "128" in answer.json()["error"]["message"]
    schemas = (await http.get("/openapi.json")).json()["components"]["schemas"]
    for name in ("ChatRequest", "CompletionRequest"):
        (bounds, _) = schemas[name]["properties"]["n"]["anyOf"]
        assert (bounds["minimum"], bounds["maximum"]) == (1, 128)


async def test_the_official_client_reads_streams_of_several_choices(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(**CHAT, max_tokens=9, n=3, stream=True)
    texts, reasons = ["", "", ""], []
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
    assert texts == [expected_text(9)] * 3
    assert reasons == ["length"] * 3


async def test_seeds_of_choices_follow_the_requests(client: openai.AsyncOpenAI, worker: ScriptedWorker) -> None:
    await client.completions.create(model="sim", prompt=["x", "y"], n=2, seed=41, max_tokens=2)
    assert [submit.sampling.seed for submit in worker.submits] == [41, 42, 41, 42]
    await client.completions.create(model="sim", prompt="x", max_tokens=2)
    await client.completions.create(model="sim", prompt="x", max_tokens=2)
    assert worker.submits[-1].sampling.seed != worker.submits[-2].sampling.seed


async def test_an_error_after_the_stream_began_reaches_the_client(
    client: openai.AsyncOpenAI, worker: ScriptedWorker
) -> None:
    worker.plans.extend([Plan(tokens=1, abort=True)] * 20)
    stream = await client.completions.create(model="sim", prompt="x", max_tokens=50, stream=True)
    text = ""
    with pytest.raises(openai.APIError) as caught:
        async for chunk in stream:
            text += chunk.choices[0].text
    assert text == expected_text(9)  # one token per attempt: the first one here, and eight elsewhere
    assert caught.value.code == "sequence_failed"


async def test_each_of_many_concurrent_requests_gets_its_own_answer(http: httpx.AsyncClient) -> None:
    bodies = [{"model": "sim", "prompt": "x" * (i + 1), "max_tokens": i + 1} for i in range(40)]
    answers = await asyncio.gather(*(http.post("/v1/completions", json=body) for body in bodies))
    for i, answer in enumerate(answers):
        assert answer.json()["choices"][0]["text"] == expected_text(i + 1)
        assert answer.json()["usage"]["prompt_tokens"] == i + 1


async def test_tokenize_returns_the_tokens_that_are_computed(http: httpx.AsyncClient, worker: ScriptedWorker) -> None:
    found = (await http.post("/tokenize", json={"model": "sim", "prompt": "h\u00e9", "return_token_strs": True})).json()
    assert found == {
        "count": 3,
        "max_model_len": 8192,
        "tokens": [104, 195, 169],
        "token_strs": ["h", "\ufffd", "\ufffd"],
    }
    plain = (await http.post("/tokenize", json={"model": "sim", "prompt": "x"})).json()
    assert plain["token_strs"] is None
    assert (await http.post("/detokenize", json={"model": "sim", "tokens": [104, 195, 169, 257]})).json() == {
        "prompt": "h\u00e9"
    }
    chat = {key: value for key, value in CHAT.items() if key in ("model", "messages")}
    shown = (await http.post("/tokenize", json={**chat, "tools": [TOOL]})).json()
    answer = (await http.post("/v1/chat/completions", json={**CHAT, "max_tokens": 1, "tools": [TOOL]})).json()
    assert shown["count"] == len(shown["tokens"]) == answer["usage"]["prompt_tokens"]
    ended = (await http.post("/tokenize", json={**chat, "add_generation_prompt": False})).json()["tokens"]
    opened = (await http.post("/tokenize", json={**chat, "add_generation_prompt": True})).json()["tokens"]
    assert opened[: len(ended)] == ended and len(opened) > len(ended)
    continued = (await http.post("/tokenize", json={**chat, "continue_final_message": True})).json()["tokens"]
    assert ended[: len(continued)] == continued and len(continued) < len(ended)


TALK = {"model": "sim", "messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"model": "sim"}, "prompt"),
        ("/tokenize", {"model": "sim", "prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "prompt"),
        ("/tokenize", {"model": "no", "prompt": "x"}, "model"),
        ("/tokenize", {"model": "sim", "prompt": "x", "sense": 1}, "sense"),
        (
            "/tokenize",
            {**TALK, "continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
        ("/tokenize", {**TALK, "add_special_tokens": True}, "add_special_tokens"),
        ("/detokenize", {"model": "sim", "tokens": [260]}, "tokens"),
        ("/detokenize", {"model": "sim", "tokens": [-1]}, "tokens[0]"),
    ],
)
async def test_other_bodies_of_the_token_routes_are_refused(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], param: str
) -> None:
    answer = await http.post(path, json=body)
    assert answer.status_code in (400, 404)
    assert answer.json()["error"]["param"] == param


def adapter_catalog(models: dict[str, str]) -> Catalog:
    """The built-in model, and an adapter of it."""
    return load_catalog(models, adapters={"sql": "sim"})


@pytest.mark.parametrize("url", [adapter_catalog], indirect=True)
async def test_a_request_for_an_adapter_goes_to_the_workers_of_its_model(
    http: httpx.AsyncClient, worker: ScriptedWorker
) -> None:
    for name, adapter in (("sim", ""), ("sql", "sql")):
        answer = await http.post("/v1/completions", json={"model": name, "prompt": "hi", "max_tokens": 2})
        assert answer.status_code == 200 and answer.json()["model"] == name
        assert (worker.submits[-1].model, worker.submits[-1].adapter) == ("sim", adapter)
    listed = (await http.get("/v1/models")).json()["data"]
    assert {model["id"]: model.get("parent") for model in listed} == {"sim": None, "sql": "sim"}
    assert (await http.get("/readyz")).json() == {"ready": True, "models": {"sim": True, "sql": True}}


def test_an_adapter_without_its_model_fails_the_start() -> None:
    with pytest.raises(StartupError, match="FULCRUM_GATEWAY_ADAPTERS"):
        load_catalog({"sim": "builtin:sim"}, adapters={"sql": "other"})
