"""Tests of bodies of embeddings, scores and rerank, and of the arithmetic on vectors."""

import asyncio
import json
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from libs.contracts.errors import InvalidRequest
from libs.contracts.packing import pack_f32
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.model.info import Embedding, load_model_info, sim_tokenizer
from libs.model.tokenizer import Tokenizer
from services.gateway.embeddings.exchange import cosines, pooled_readers, shaped
from services.gateway.embeddings.schema import EMBEDDINGS_PATH, RERANK_PATH, SCORE_PATH
from services.gateway.request.intake import Arrival, as_served
from services.gateway.request.parse import ParsedRequest
from services.gateway.request.prompt import ServedModel

ARRIVAL = cast(Arrival, None)
"""No code under test reads it."""


def read(path: str, **body: Any) -> ParsedRequest:
    reader = pooled_readers()[path]
    requested, _ = asyncio.run(reader.read(json.dumps({"model": "m", **body}).encode(), ARRIVAL))
    return requested


def test_each_text_or_list_of_tokens_is_a_prompt() -> None:
    cases: list[tuple[Any, tuple[Any, ...]]] = [
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ([1, 2],)),
        ([[1], [2, 3]], ([1], [2, 3])),
    ]
    for given, prompts in cases:
        parsed = read(EMBEDDINGS_PATH, input=given, user="u", dimensions=None)
        assert (parsed.prompts, parsed.choices, parsed.pooled, parsed.stream) == (prompts, len(prompts), True, False)
    assert read(EMBEDDINGS_PATH, input="a", add_special_tokens=False).raw
    assert read(SCORE_PATH, text_1="a", text_2=["b", "c"]).prompts == ("a", "b", "c")
    assert read(RERANK_PATH, query="q", documents=["a", {"text": "b"}]).prompts == ("q", "a", "b")


def test_the_prompt_in_a_models_files_precedes_each_text_but_no_tokens() -> None:
    embedding = Embedding("mean", prompt="query: ")
    model = ServedModel(
        replace(load_model_info("builtin:sim"), embedding=embedding), Tokenizer(sim_tokenizer(), template=None)
    )
    cases: list[tuple[Any, tuple[Any, ...]]] = [
        (["a", "b"], ("query: a", "query: b")),
        ([1, 2], ([1, 2],)),
    ]
    for given, prompts in cases:
        served, pooling = as_served(read(EMBEDDINGS_PATH, input=given), model)
        assert (served.prompts, pooling) == (prompts, pb.POOLING_MEAN)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (EMBEDDINGS_PATH, {"input": ["a", [1]], "dimensions": -1}, "dimensions"),
        (EMBEDDINGS_PATH, {"input": {"text": "a"}}, "input"),
        (EMBEDDINGS_PATH, {"input": ["a", ""]}, "input"),
        (SCORE_PATH, {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
        (SCORE_PATH, {"text_1": [], "text_2": []}, "text_2"),
        (SCORE_PATH, {"text_1": "a"}, "text_2"),
        (RERANK_PATH, {"query": "q", "documents": []}, "documents"),
        (RERANK_PATH, {"query": "", "documents": ["a"]}, "query or documents"),
        (RERANK_PATH, {"query": "q", "documents": ["a"], "top_n": -1}, "top_n"),
        (RERANK_PATH, {"query": "q", "documents": ["a"], "rank_fields": ["x"]}, "rank_fields"),
    ],
)
def test_an_invalid_body_names_its_field(path: str, body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read(path, **body)
    assert refused.value.param == param


def test_vectors_are_shortened_before_they_are_normalised() -> None:
    packed = [pack_f32([3.0, 4.0, 12.0]), pack_f32([0.0, 0.0, 0.0])]
    found = shaped(packed, Embedding(size=3), 2)
    assert found.dtype == np.float32
    assert found.tolist() == [pytest.approx([0.6, 0.8]), [0.0, 0.0]]
    assert shaped(packed, Embedding(size=3)).tolist()[0] == pytest.approx([3 / 13, 4 / 13, 12 / 13])
    assert shaped(packed, Embedding(size=3, normalizes=False)).tolist()[0] == [3.0, 4.0, 12.0]


def test_cosines_pair_one_with_all_or_each_with_each() -> None:
    first, second = np.array([[2, 0]], np.float32), np.array([[5, 0], [0, 3], [-1, 0]], np.float32)
    assert cosines(first, second) == [1.0, 0.0, -1.0]
    assert cosines(second, second) == pytest.approx([1.0, 1.0, 1.0])
