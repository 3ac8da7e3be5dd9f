"""Tests of the whole suite on the real model against the `generate` of transformers."""

import asyncio
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from libs.runtime.paths import cache_dir
from libs.testing.suites.suite import RunningSuite, kv_transfers, running_suite

pytestmark = [pytest.mark.alone, pytest.mark.suite, pytest.mark.torch, pytest.mark.timeout(600)]

MODEL = "SmolLM2-135M-Instruct"
LONG_LENGTHS = (420, 451, 477, 489)
"""Of prompts that are asked twice; none is a length in `LENGTHS`, so telemetry tells them apart by it."""
LENGTHS = (1, 2, 3, 5, 8, 13, 15, 16, 17, 31, 32, 33, 47, 64, 100, 128, 200, 255, 384, 500)
OUTPUT_TOKENS = 16
BLOCK_SIZE_TOKENS = 16


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningSuite]:
    with running_suite(tmp_path_factory.mktemp("suite"), "--engine", "torch", "--prefill", "2") as found:
        yield found


def _prompts(lengths: Sequence[int] = LENGTHS, seed: int = 11) -> list[list[int]]:
    """Random token ids, one prompt per length, none a prefix of another."""
    rng = np.random.default_rng(seed)
    return [[int(token) for token in rng.integers(200, 40_000, length)] for length in lengths]


def _reference(model_path: Path, prompts: list[list[int]]) -> list[list[int]]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=OUTPUT_TOKENS)
        answers.append(out[0, len(prompt) :].tolist())
    return answers


def _vectors(model_path: Path, prompts: list[list[int]]) -> list[list[float]]:
    """Return the last token's normalised states."""
    import torch
    from transformers import AutoModel

    model = AutoModel.from_pretrained(model_path, dtype=torch.float32)
    with torch.inference_mode():
        states = [model(torch.tensor([prompt])).last_hidden_state[0, -1] for prompt in prompts]
    return [(state / state.norm()).tolist() for state in states]


def _ask(suite: RunningSuite, prompt: list[int]) -> tuple[str, dict[str, Any]]:
    """Return (text, usage) of a greedy answer."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "temperature": 0}
    answer = httpx.post(f"{suite.gateway}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"], answer.json()["usage"]


def test_embeddings_are_the_models_last_hidden_states(suite: RunningSuite) -> None:
    prompts = _prompts(seed=12)
    answer = httpx.post(f"{suite.gateway}/v1/embeddings", json={"model": MODEL, "input": prompts}, timeout=120)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens"] == sum(LENGTHS)
    for item, expected in zip(answer.json()["data"], _vectors(cache_dir() / "models" / MODEL, prompts), strict=True):
        assert item["embedding"] == pytest.approx(expected, abs=1e-4)


def test_greedy_tokens_equal_generate_and_kv_moves_between_workers(suite: RunningSuite) -> None:
    from tokenizers import Tokenizer

    model_path = cache_dir() / "models" / MODEL
    prompts = _prompts()
    tokenizer = Tokenizer.from_file(str(model_path / "tokenizer.json"))
    expected = _reference(model_path, prompts)
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda prompt: _ask(suite, prompt), prompts))
    for prompt, (text, usage), reference in zip(prompts, answers, expected, strict=True):
        assert text == tokenizer.decode(reference, skip_special_tokens=True), f"ISL {len(prompt)}"
        assert usage["completion_tokens"] == len(reference)
    moved = [len(prompt) for prompt, reference in zip(prompts, expected, strict=True) if len(reference) > 1]
    transfers = asyncio.run(kv_transfers(suite, Counter(moved)))
    block_bytes = _block_bytes(model_path)
    # At least once each: a prompt that went elsewhere, on a machine too busy for its worker, has moved again.
    assert Counter(transfer.prompt_tokens for transfer in transfers) >= Counter(moved)
    for transfer in transfers:
        assert transfer.prompt_tokens_computed <= 1
        assert transfer.bytes == transfer.blocks * block_bytes
    for length in set(moved):  # again, a worker may find what it has had
        blocks = max(transfer.blocks for transfer in transfers if transfer.prompt_tokens == length)
        assert blocks == -(-length // BLOCK_SIZE_TOKENS)


def _block_bytes(model_path: Path) -> int:
    import json

    config = json.loads((model_path / "config.json").read_text())
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    float32_bytes = 4
    per_token = config["num_hidden_layers"] * 2 * config["num_key_value_heads"] * head_dim * float32_bytes
    return int(per_token * BLOCK_SIZE_TOKENS)


def test_repeated_long_prompts_are_served_from_cached_blocks_by_the_worker_that_has_them(
    suite: RunningSuite,
) -> None:
    prompts = _prompts(LONG_LENGTHS, seed=12)
    with ThreadPoolExecutor(len(prompts)) as pool:  # one after another they might all go to the faster worker
        first = list(pool.map(lambda prompt: _ask(suite, prompt), prompts))
    again = [_ask_cached(suite, prompt) for prompt in prompts]
    assert [text for text, _ in again] == [text for text, _ in first]
    assert all(usage["prompt_tokens_details"]["cached_tokens"] == 0 for _, usage in first)
    for prompt, (_, usage) in zip(prompts, again, strict=True):
        whole_blocks = (len(prompt) - 1) // BLOCK_SIZE_TOKENS * BLOCK_SIZE_TOKENS
        assert usage["prompt_tokens_details"]["cached_tokens"] == whole_blocks
    # If a busy machine kept a worker silent, two workers have the blocks of its prompt, and either may serve it.
    sources = _sources(suite, dict.fromkeys(LONG_LENGTHS, 2))
    assert len({workers[0] for workers in sources.values()}) == 2, "they were spread over both workers the first time"


def _ask_cached(suite: RunningSuite, prompt: list[int]) -> tuple[str, dict[str, Any]]:
    # A worker that a busy machine made look slow is passed over once. After that both have the blocks.
    answer = _ask(suite, prompt)
    return answer if answer[1]["prompt_tokens_details"]["cached_tokens"] else _ask(suite, prompt)


def _sources(suite: RunningSuite, wanted: dict[int, int]) -> dict[int, list[str]]:
    """Return the workers that KV came from, by the length of their prompt."""
    found: dict[int, list[str]] = {}
    for transfer in asyncio.run(kv_transfers(suite, wanted)):
        found.setdefault(transfer.prompt_tokens, []).append(transfer.from_worker_id)
    return found


def test_the_answer_for_the_capital_of_france_is_paris(suite: RunningSuite) -> None:
    done = suite.fulcrum("chat", "What is the capital of France?", "--max-tokens", "30", "--temperature", "0")
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


def test_a_seed_repeats_its_text_and_another_seed_does_not(suite: RunningSuite) -> None:
    def ask(seed: int) -> str:
        body = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 24, "temperature": 0.8, "seed": seed}
        text: str = httpx.post(f"{suite.gateway}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"]
        return text

    assert ask(5) == ask(5)
    assert ask(5) != ask(6)


def test_tuning_prefill_on_the_real_model_reports_curve_knee_budget_and_gain(suite: RunningSuite) -> None:
    arguments = ("tune", "prefill", "prefill-1", "--most-tokens", "256", "--limit", "50", "--measure-only")
    done = suite.fulcrum(*arguments, "--tpot", "100000", "--json")
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)
    assert found["worker"] == "prefill-1" and not found["applied"] and found["chunk_tokens_default"] == 512
    curve = found["curve"]
    assert len(curve) >= 6 and curve[-1]["tokens"] == 256
    # On a CPU a step's fixed part weighs on small ones: the knee is not at the smallest size.
    assert curve[0]["fitted_tokens_per_s"] < 0.97 * found["plateau_tokens_per_s"]
    assert 16 < found["chunk_tokens"] <= 256
    # A chunk of half the default or less: whoever comes to a busy worker waits less for the step that runs, and its own
    # prompt takes a little longer. How much of either, cores that others use too say differently each time.
    assert 0 < found["ttft_ms"] < 1.25 * found["ttft_ms_default"]
    # Within 100 s a token one sequence fits whatever was learned; how many more depends on how steps were disturbed.
    assert 1 <= found["decode_batch"] <= 64
