"""Tests of embeddings, scores and rerank with the official `openai` client and plain HTTP, on the sim engine."""

import base64
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from libs.model.info import SIM_MAX_CONTEXT_TOKENS, SIM_VECTOR_SIZE
from libs.testing.suites.suite import RunningSuite, running_suite
from services.gateway.embeddings.schema import RERANK_PATHS, SCORE_PATHS

pytestmark = pytest.mark.suite

MODEL = "sim"
TEXTS = ["a red fox", "a slow dog", "a red fox"]


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningSuite]:
    folder = tmp_path_factory.mktemp("suite")
    with running_suite(folder, "--engine", "sim", "--prefill", "2", "--decode", "1") as found:
        yield found


def test_a_list_of_texts_becomes_one_unit_vector_each(client: openai.OpenAI) -> None:
    found = client.embeddings.create(model=MODEL, input=TEXTS)
    vectors = np.array([item.embedding for item in found.data])
    assert vectors.shape == (3, SIM_VECTOR_SIZE)
    assert [item.index for item in found.data] == [0, 1, 2]
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(1, abs=1e-5)
    assert (vectors[0] == vectors[2]).all() and vectors[0] @ vectors[1] < 0.9
    assert found.usage.prompt_tokens == found.usage.total_tokens == sum(map(len, TEXTS))
    assert (found.model, found.object) == (MODEL, "list")


def test_text_and_its_tokens_have_the_same_vector_in_both_encodings(client: openai.OpenAI) -> None:
    ids = list(TEXTS[0].encode())
    inputs: list[Any] = [TEXTS[0], [TEXTS[0]], ids, [ids]]
    found = [client.embeddings.create(model=MODEL, input=each, encoding_format="float").data for each in inputs]
    assert {len(data) for data in found} == {1}
    assert all(data[0].embedding == found[0][0].embedding for data in found)
    packed = client.embeddings.create(model=MODEL, input=TEXTS[0], encoding_format="base64").data[0].embedding
    assert isinstance(packed, str)
    assert np.frombuffer(base64.b64decode(packed), "<f4") == pytest.approx(found[0][0].embedding)


def test_many_texts_are_embedded_side_by_side(client: openai.OpenAI) -> None:
    found = client.embeddings.create(model=MODEL, input=[f"text {place}" for place in range(300)])
    alone = client.embeddings.create(model=MODEL, input="text 271")
    assert found.data[271].embedding == alone.data[0].embedding


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": [1, "a"]}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": [100_000]}, "input"),
        ({"input": "x" * SIM_MAX_CONTEXT_TOKENS}, "input"),
        ({"input": ["x"] * 2049}, "input"),
        ({"input": "a", "dimensions": 8}, "dimensions"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "stream": True}, "stream"),
        ({}, "input"),
    ],
)
def test_an_invalid_field_is_refused_by_name(client: openai.OpenAI, body: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.post("/embeddings", body={"model": MODEL, **body}, cast_to=object)
    assert refused.value.param == param


def test_equal_texts_score_one(suite: RunningSuite) -> None:
    body = {"model": MODEL, "text_1": TEXTS[0], "text_2": TEXTS[1:]}
    found = httpx.post(f"{suite.gateway}/v1/score", json=body).json()
    assert [item["index"] for item in found["data"]] == [0, 1]
    assert found["data"][1]["score"] == pytest.approx(1)
    assert found["data"][0]["score"] < 0.9
    pairs = httpx.post(f"{suite.gateway}/v1/score", json={**body, "text_1": TEXTS[1:]}).json()
    assert [item["score"] for item in pairs["data"]] == pytest.approx([1, 1])
    wrong = httpx.post(f"{suite.gateway}/v1/score", json={**body, "text_1": TEXTS})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "text_1")


@pytest.mark.parametrize("path", [*SCORE_PATHS, *RERANK_PATHS])
def test_each_path_of_score_and_rerank_is_declared_and_answers(suite: RunningSuite, path: str) -> None:
    scores = path in SCORE_PATHS
    body = {"text_1": TEXTS[0], "text_2": TEXTS} if scores else {"query": TEXTS[0], "documents": TEXTS}
    answer = httpx.post(suite.gateway + path, json={"model": MODEL, **body})
    assert (answer.status_code, len(answer.json()["data" if scores else "results"])) == (200, 3)
    paths = httpx.get(f"{suite.gateway}/openapi.json").json()["paths"]
    schema = paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert schema == {"$ref": f"#/components/schemas/{'ScoreRequest' if scores else 'RerankRequest'}"}
    operations = [operation["operationId"] for methods in paths.values() for operation in methods.values()]
    assert len(set(operations)) == len(operations)


def test_rerank_puts_the_most_similar_document_first(suite: RunningSuite) -> None:
    body: dict[str, Any] = {"model": MODEL, "query": TEXTS[0], "documents": ["a", {"text": TEXTS[0]}, "b"]}
    found = httpx.post(f"{suite.gateway}/v1/rerank", json=body).json()
    scores = [item["relevance_score"] for item in found["results"]]
    assert scores == sorted(scores, reverse=True) and len(scores) == 3
    assert found["results"][0]["index"] == 1
    assert found["results"][0]["document"] == {"text": TEXTS[0]}
    brief = {**body, "top_n": 1, "return_documents": False}
    (only,) = httpx.post(f"{suite.gateway}/v1/rerank", json=brief).json()["results"]
    assert (only["index"], "document" in only) == (1, False)
