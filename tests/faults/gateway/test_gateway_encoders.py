"""Tests of a gateway over workers with an encoder and a cross-encoder: answers equal those that transformers
computes."""

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from libs.testing.wait import until
from libs.testing.workers.hosts import local_worker

pytest.importorskip("torch")

from libs.testing.engines.encoder_model import (
    POSITIONS,
    plain_tokenizer,
    scores,
    vectors,
    write_random_encoder,
)

pytestmark = [pytest.mark.alone, pytest.mark.torch]

TEXTS = ["a red fox runs", "the slow dog", "dogs over the hill " * 10, "fox"]
QUERY = "the red dog"
TIMEOUT_S = 300
CHATS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "fox"}]}),
    ("/v1/completions", {"prompt": "fox"}),
    ("/v1/responses", {"input": "fox"}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "fox"}], "max_tokens": 4}),
]


async def serve(stack: AsyncExitStack, open_gateway_over: Any, model: Path, *roles: str) -> Any:
    """Return a gateway over one worker for each role."""
    own: dict[str, Any] = {"engine": "torch", "model_path": str(model), "device": "cpu", "threads": 1}
    found = []
    for place, role in enumerate(roles):
        # Fewer tokens than the longest prompt, which is nevertheless computed whole.
        budget: dict[str, Any] = {"budget_tokens": POSITIONS // 2} if role == "mixed" else {}
        found.append(await stack.enter_async_context(local_worker(f"w{place}", role, **own, **budget)))
    gateway = await stack.enter_async_context(
        open_gateway_over(*(each.host.worker() for each in found), models={model.name: str(model)})
    )
    gateway.http.timeout = TIMEOUT_S
    return gateway


@pytest.mark.parametrize("roles", [("prefill", "mixed"), ("mixed",)])
async def test_an_encoder_answers_embeddings_and_scores_but_no_chats(
    open_gateway_over: Any, tmp_path: Path, roles: tuple[str, ...]
) -> None:
    model = write_random_encoder(tmp_path / "tiny-bert", pooling="cls_token", normalizes=True)
    most = "fox " * (POSITIONS - 2)
    texts = [*TEXTS, most]
    async with AsyncExitStack() as stack:
        gateway = await serve(stack, open_gateway_over, model, *roles)

        async def post(path: str, **body: Any) -> Any:
            return await gateway.http.post(path, json={"model": model.name, **body})

        answer = await post("/v1/embeddings", input=texts)
        assert answer.status_code == 200, answer.text
        tokenizer = plain_tokenizer(model)
        assert answer.json()["usage"]["prompt_tokens"] == sum(len(tokenizer.encode(text).ids) for text in texts)
        for item, expected in zip(answer.json()["data"], vectors(model, texts), strict=True):
            assert item["embedding"] == pytest.approx(expected, abs=1e-5)
        refused = await post("/v1/embeddings", input=most + "fox")
        assert refused.status_code == 400 and f"context of {POSITIONS}" in refused.json()["error"]["message"]
        answer = await post("/v1/score", text_1=QUERY, text_2=TEXTS)
        first, *others = vectors(model, [QUERY, *TEXTS])
        expected = [sum(a * b for a, b in zip(first, other, strict=True)) for other in others]
        assert [item["score"] for item in answer.json()["data"]] == pytest.approx(expected, abs=1e-5)
        for path, body in CHATS:
            refused = await post(path, **body)
            assert refused.status_code == 400 and "is an encoder" in refused.text, (path, refused.text)
            assert "/v1/embeddings" in refused.text
        await until(gateway.idle)


async def test_a_cross_encoder_answers_scores_of_text_pairs_and_nothing_else(
    open_gateway_over: Any, tmp_path: Path
) -> None:
    model = write_random_encoder(tmp_path / "tiny-cross", labels=1)
    async with AsyncExitStack() as stack:
        gateway = await serve(stack, open_gateway_over, model, "prefill")

        async def post(path: str, **body: Any) -> Any:
            return await gateway.http.post(path, json={"model": model.name, **body})

        expected = scores(model, [(QUERY, text) for text in TEXTS])
        answer = await post("/v1/score", text_1=QUERY, text_2=TEXTS)
        assert answer.status_code == 200, answer.text
        assert [item["score"] for item in answer.json()["data"]] == pytest.approx(expected, abs=1e-5)
        assert max(expected) - min(expected) > 1e-3
        pairs = await post("/v1/score", text_1=TEXTS, text_2=TEXTS[::-1])
        turned = scores(model, list(zip(TEXTS, TEXTS[::-1], strict=True)))
        assert [item["score"] for item in pairs.json()["data"]] == pytest.approx(turned, abs=1e-5)
        ranked = (await post("/v1/rerank", query=QUERY, documents=TEXTS, top_n=3)).json()["results"]
        order = sorted(range(len(TEXTS)), key=lambda place: -expected[place])[:3]
        assert [item["index"] for item in ranked] == order
        assert [item["relevance_score"] for item in ranked] == pytest.approx([expected[at] for at in order], abs=1e-5)
        half = "fox " * (POSITIONS // 2)
        refusals: list[tuple[str, dict[str, Any], str]] = [
            ("/v1/embeddings", {"input": "fox"}, "/v1/rerank"),
            ("/v1/completions", {"prompt": "fox"}, "/v1/rerank"),
            ("/v1/score", {"text_1": half, "text_2": half}, f"context of {POSITIONS}"),
            ("/v1/score", {"text_1": "fox", "text_2": []}, "text_2 is empty"),
        ]
        for path, body, named in refusals:
            refused = await post(path, **body)
            assert refused.status_code == 400 and named in refused.json()["error"]["message"], refused.text
        await until(gateway.idle)
