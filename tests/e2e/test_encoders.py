"""A suite over an encoder and one over a cross-encoder: what they answer is what transformers computes by hand."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from libs.testing.engines.encoder_model import POSITIONS, write_random_encoder
from libs.testing.suites.suite import RunningSuite, running_suite

pytestmark = [pytest.mark.alone, pytest.mark.suite, pytest.mark.torch, pytest.mark.timeout(600)]

TEXTS = ["a red fox runs", "the slow dog", "dogs over the hill " * 10, "fox"]
QUERY = "the red dog"


def start(folder: Path, model: Path) -> Any:
    return running_suite(folder, "--engine", "torch", "--model", str(model), "--prefill", "2", "--decode", "0")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningSuite, Path]]:
    folder = tmp_path_factory.mktemp("encoder")
    model = write_random_encoder(folder / "tiny-bert", pooling="cls_token", normalizes=True)
    with start(folder, model) as suite:
        yield suite, model


@pytest.fixture(scope="module")
def cross_encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningSuite, Path]]:
    folder = tmp_path_factory.mktemp("cross")
    model = write_random_encoder(folder / "tiny-cross", labels=1)
    with start(folder, model) as suite:
        yield suite, model


def post(suite: RunningSuite, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{suite.gateway}{path}", json=body, timeout=120)


def plain_tokenizer(model: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def vectors(model: Path, texts: list[str]) -> list[list[float]]:
    import torch
    from transformers import AutoModel

    network, tokenizer = AutoModel.from_pretrained(model, dtype=torch.float32).eval(), plain_tokenizer(model)
    with torch.inference_mode():
        states = [network(torch.tensor([tokenizer.encode(text).ids])).last_hidden_state[0, 0] for text in texts]
    return [(state / state.norm()).tolist() for state in states]


def scores(model: Path, pairs: list[tuple[str, str]]) -> list[float]:
    import torch
    from transformers import AutoModelForSequenceClassification

    network = AutoModelForSequenceClassification.from_pretrained(model, dtype=torch.float32).eval()
    found, tokenizer = [], plain_tokenizer(model)
    for pair in pairs:
        encoded = tokenizer.encode(*pair)
        assert 1 in encoded.type_ids
        with torch.inference_mode():
            output = network(
                input_ids=torch.tensor([encoded.ids]), token_type_ids=torch.tensor([encoded.type_ids])
            ).logits
        found.append(float(output.sigmoid()[0, 0]))
    return found


def test_embeddings_are_the_first_tokens_states(encoder: tuple[RunningSuite, Path]) -> None:
    suite, model = encoder
    answer = post(suite, "/v1/embeddings", model=model.name, input=TEXTS)
    assert answer.status_code == 200, answer.text
    tokenizer = plain_tokenizer(model)
    assert answer.json()["usage"]["prompt_tokens"] == sum(len(tokenizer.encode(text).ids) for text in TEXTS)
    for item, expected in zip(answer.json()["data"], vectors(model, TEXTS), strict=True):
        assert item["embedding"] == pytest.approx(expected, abs=1e-5)


def test_a_prompt_may_fill_all_positions_and_no_more(encoder: tuple[RunningSuite, Path]) -> None:
    suite, model = encoder
    most = "fox " * (POSITIONS - 2)
    answer = post(suite, "/v1/embeddings", model=model.name, input=most)
    assert answer.status_code == 200, answer.text
    assert answer.json()["data"][0]["embedding"] == pytest.approx(vectors(model, [most])[0], abs=1e-5)
    refused = post(suite, "/v1/embeddings", model=model.name, input=most + "fox")
    assert refused.status_code == 400 and f"context of {POSITIONS}" in refused.json()["error"]["message"]


def test_an_encoder_without_a_head_ranks_by_cosine(encoder: tuple[RunningSuite, Path]) -> None:
    suite, model = encoder
    answer = post(suite, "/v1/score", model=model.name, text_1=QUERY, text_2=TEXTS)
    first, *others = vectors(model, [QUERY, *TEXTS])
    expected = [sum(a * b for a, b in zip(first, other, strict=True)) for other in others]
    assert [item["score"] for item in answer.json()["data"]] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "fox"}]}),
        ("/v1/completions", {"prompt": "fox"}),
        ("/v1/responses", {"input": "fox"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "fox"}], "max_tokens": 4}),
    ],
)
def test_an_encoder_refuses_to_write_by_name(
    encoder: tuple[RunningSuite, Path], path: str, body: dict[str, Any]
) -> None:
    suite, model = encoder
    refused = post(suite, path, model=model.name, **body)
    assert refused.status_code == 400, refused.text
    assert "is an encoder" in refused.text and "/v1/embeddings" in refused.text


def test_scores_are_those_of_the_head_over_both_texts(cross_encoder: tuple[RunningSuite, Path]) -> None:
    suite, model = cross_encoder
    expected = scores(model, [(QUERY, text) for text in TEXTS])
    answer = post(suite, "/v1/score", model=model.name, text_1=QUERY, text_2=TEXTS)
    assert answer.status_code == 200, answer.text
    assert [item["score"] for item in answer.json()["data"]] == pytest.approx(expected, abs=1e-5)
    pairs = post(suite, "/v1/score", model=model.name, text_1=TEXTS, text_2=TEXTS[::-1])
    turned = scores(model, list(zip(TEXTS, TEXTS[::-1], strict=True)))
    assert [item["score"] for item in pairs.json()["data"]] == pytest.approx(turned, abs=1e-5)
    ranked = post(suite, "/v1/rerank", model=model.name, query=QUERY, documents=TEXTS, top_n=3).json()["results"]
    order = sorted(range(len(TEXTS)), key=lambda place: -expected[place])[:3]
    assert [item["index"] for item in ranked] == order
    assert [item["relevance_score"] for item in ranked] == pytest.approx([expected[place] for place in order], abs=1e-5)


def test_a_cross_encoder_refuses_embeddings_chats_and_pairs_too_long(cross_encoder: tuple[RunningSuite, Path]) -> None:
    suite, model = cross_encoder
    refused = post(suite, "/v1/embeddings", model=model.name, input="fox")
    assert refused.status_code == 400 and "/v1/rerank" in refused.json()["error"]["message"]
    refused = post(suite, "/v1/completions", model=model.name, prompt="fox")
    assert refused.status_code == 400 and "/v1/rerank" in refused.json()["error"]["message"]
    half = "fox " * (POSITIONS // 2)
    refused = post(suite, "/v1/score", model=model.name, text_1=half, text_2=half)
    assert refused.status_code == 400 and "context" in refused.json()["error"]["message"]
