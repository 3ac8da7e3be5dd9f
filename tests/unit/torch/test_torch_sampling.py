"""Tests of sampling: what a token depends on, and that the requested distributions are drawn."""

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from libs.engine.port import SamplingParams  # noqa: E402
from libs.engine.runner import Chunk  # noqa: E402
from libs.engine.torch.sampling import sample, uniform  # noqa: E402

VOCAB = 50
SAMPLED = SamplingParams(seed=7)
GREEDY = SamplingParams(temperature=0.0)
PINNED = [0.587583, 0.798855]
"""Noise at position 5 for the seeds 0 and 1."""


def row(
    params: SamplingParams, history: list[int] | None = None, prompt_tokens: int = 1, sequence_id: int = 0
) -> Chunk:
    tokens = np.array([3] if history is None else history, np.int32)
    return Chunk(sequence_id, tokens[-1:], len(tokens) - 1, np.zeros(1, np.int32), True, params, tokens, prompt_tokens)


def logits(rows: int, seed: int = 0) -> "torch.Tensor":
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def draw(scores: "torch.Tensor", params: SamplingParams, times: int) -> np.ndarray:
    """Return the counts of tokens over `times` seeds."""
    chunks = [row(replace(params, seed=seed)) for seed in range(times)]
    tokens = [one.token_id for one in sample(scores.expand(times, -1), chunks)]
    return np.bincount(tokens, minlength=VOCAB)


def test_greedy_is_the_most_likely_token():
    scores = logits(5)
    assert [one.token_id for one in sample(scores, [row(GREEDY)] * 5)] == scores.argmax(-1).tolist()


def test_top_k_of_one_equals_greedy():
    scores = logits(5)
    assert sample(scores, [row(replace(SAMPLED, top_k=1))] * 5) == sample(scores, [row(GREEDY)] * 5)


def test_a_temperature_too_small_to_divide_by_is_greedy():
    scores = logits(3)
    assert sample(scores, [row(replace(SAMPLED, temperature=1e-40))] * 3) == sample(scores, [row(GREEDY)] * 3)


def test_a_token_depends_on_seed_and_position_and_not_on_its_batch():
    scores = logits(8)
    kinds = [SAMPLED, replace(SAMPLED, top_p=0.9), replace(SAMPLED, temperature=1.5), GREEDY]
    chunks = [row(kinds[i % 4], history=list(range(1, 2 + i))) for i in range(8)]
    together = sample(scores, chunks)
    assert [sample(scores[i : i + 1], chunks[i : i + 1])[0] for i in range(8)] == together
    assert list(reversed(sample(scores.flip(0), chunks[::-1]))) == together


def test_noise_is_determined_by_seed_and_position():
    assert uniform(7, 1) == uniform(7, 1)
    numbers = {uniform(seed, position) for seed in range(-10, 10) for position in range(50)}
    assert len(numbers) == 1000
    assert all(0.0 <= number < 1.0 for number in numbers)
    # The figures are a contract: a sequence that moves to another version of a worker goes on with the same noise.
    assert [uniform(seed, 5) for seed in (0, 1)] == pytest.approx(PINNED, abs=1e-6)


@pytest.mark.parametrize(
    "params",
    [
        SAMPLED,
        replace(SAMPLED, temperature=0.6),
        replace(SAMPLED, top_k=5),
        replace(SAMPLED, top_p=0.8),
        replace(SAMPLED, min_p=0.1),
        replace(SAMPLED, temperature=1.3, top_k=20, top_p=0.95, min_p=0.02),
    ],
)
def test_draws_follow_the_requested_distribution(params: SamplingParams):
    scores, times = logits(1), 20_000
    counts = draw(scores, params, times)
    expected = reference_distribution(scores[0].double().numpy(), params) * times
    assert counts[expected == 0].sum() == 0, "a token outside the support was drawn"
    common = expected >= 5
    chi_square = (((counts - expected) ** 2)[common] / expected[common]).sum()
    degrees = max(int(common.sum()) - 1, 1)
    assert chi_square < degrees + 5 * np.sqrt(2 * degrees)


def reference_distribution(scores: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Slow and obvious: temperature, min-p, top-k, top-p, each renormalised."""
    shares = softmax(scores / params.temperature)
    shares = np.where(shares >= params.min_p * shares.max(), shares, 0.0)
    if params.top_k:
        shares = np.where(shares >= np.sort(shares)[-params.top_k], shares, 0.0)
    shares /= shares.sum()
    if params.top_p < 1.0:
        order = np.argsort(-shares)
        before = np.cumsum(shares[order]) - shares[order]
        shares[order[before >= params.top_p]] = 0.0
    return shares / shares.sum()


def softmax(scores: np.ndarray) -> np.ndarray:
    powers = np.exp(scores - scores.max())
    return powers / powers.sum()


def test_top_p_of_zero_keeps_the_most_likely_token():
    scores = logits(1)
    assert draw(scores, replace(SAMPLED, top_p=0.0), 50).argmax() == int(scores.argmax())


def test_presence_and_frequency_penalties_count_generated_tokens_only():
    """OpenAI's formula: logit - count * frequency - (count > 0) * presence."""
    scores = torch.zeros(1, VOCAB)
    scores[0, [4, 5, 6]] = torch.tensor([3.0, 2.5, 1.9])
    history = [4, 5, 5, 4, 4, 5]  # prompt [4, 5, 5], generated [4, 4, 5]
    frequency = replace(GREEDY, frequency_penalty=0.5)  # 4: 3 - 1 = 2.0; 5: 2.5 - 0.5 = 2.0; 6: 1.9
    assert sample(scores, [row(replace(frequency, logit_bias={5: 0.01}), history, 3)])[0].token_id == 5
    assert sample(scores, [row(replace(frequency, logit_bias={4: 0.01}), history, 3)])[0].token_id == 4
    presence = replace(GREEDY, presence_penalty=1.15)  # 4: 1.85; 5: 1.35; 6: 1.9
    assert sample(scores, [row(presence, history, 3)])[0].token_id == 6
    assert sample(scores, [row(presence, history, 6)])[0].token_id == 4, "nothing was generated"


def test_negative_penalties_reward_repetition():
    scores = torch.zeros(1, VOCAB)
    assert sample(scores, [row(replace(GREEDY, presence_penalty=-1.0), [3, 9], 1)])[0].token_id == 9


def test_repetition_penalty_counts_prompt_and_generated_tokens():
    scores = torch.full((1, VOCAB), -5.0)
    scores[0, [4, 5, 6]] = torch.tensor([3.0, 2.9, 2.0])
    params = replace(GREEDY, repetition_penalty=1.4)  # 4: 2.14; 5: 2.07; 6: 2.0
    assert sample(scores, [row(params, [4, 4, 5], 1)])[0].token_id == 4, "once, however often it came"
    assert sample(scores, [row(params, [4], 1)])[0].token_id == 5
    assert sample(scores, [row(replace(params, repetition_penalty=2.0), [4, 5], 2)])[0].token_id == 6


def test_logit_bias_forces_and_bans_tokens():
    scores = logits(1)
    best = int(scores.argmax())
    assert sample(scores, [row(replace(GREEDY, logit_bias={11: 100.0}))])[0].token_id == 11
    assert draw(scores, replace(SAMPLED, logit_bias={best: -100.0}), 500)[best] == 0


def test_penalties_of_one_row_change_neither_other_rows_nor_the_logits():
    scores = logits(2)
    before = scores.clone()
    penalised = replace(GREEDY, logit_bias={0: 100.0}, frequency_penalty=1.0, repetition_penalty=1.2)
    tokens = sample(scores, [row(penalised), row(GREEDY)])
    assert [one.token_id for one in tokens] == [0, int(scores[1].argmax())]
    assert torch.equal(scores, before)


def test_logprobs_are_the_models_own():
    """They precede bias, penalties and temperature, come only on request, and are sorted by likelihood."""
    scores = logits(3)
    raw = scores.log_softmax(-1)
    odd = replace(GREEDY, logit_bias={11: 100.0}, logprobs=True, top_logprobs=3)
    none, some, bare = sample(scores, [row(GREEDY), row(odd), row(replace(SAMPLED, temperature=0.5, logprobs=True))])
    assert none.logprob is None
    assert some.token_id == 11
    assert some.logprob is not None
    assert some.logprob.logprob == pytest.approx(float(raw[1, 11]))
    best = raw[1].topk(3)
    assert [token for token, _ in some.logprob.top] == best.indices.tolist()
    assert [value for _, value in some.logprob.top] == pytest.approx(best.values.tolist())
    assert bare.logprob is not None
    assert bare.logprob.top == ()
    assert bare.logprob.logprob == pytest.approx(float(raw[2, bare.token_id]))
