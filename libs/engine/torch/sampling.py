"""The sampling of tokens from logits. A token depends only on its own logits, parameters, seed and position.

The order is vLLM's: logit bias, repetition, frequency and presence penalties, masks, temperature, min-p, top-k, top-p.
Log-probabilities are those of the model, before any of these.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from libs.engine.port import SamplingParams
from libs.engine.reports import Logprob
from libs.engine.runner import Chunk, Sampled

# A lower temperature means greedy decoding, because logits divided by it would overflow float32.
GREEDY_BELOW_TEMPERATURE = 1e-5

Masks = Mapping[int, NDArray[np.bool_]]
_NO_MASKS: Final[Masks] = MappingProxyType({})
_Shaping = tuple[float, float, int, float]
"""(temperature, min_p, top_k, top_p). Rows with equal values are processed together."""


def sample(logits: torch.Tensor, chunks: Sequence[Chunk], masks: Masks = _NO_MASKS) -> list[Sampled]:
    """Sample one token for each row of `logits` [rows, vocab] float32.

    Row i follows the last token of `chunks[i].history`. `masks` has [vocab] 1D bool, the allowed tokens, for each
    constrained row.
    """
    adjusted = _adjust(logits, chunks, masks)
    # [rows] int64. argmax returns the same, but takes three times as long on a CPU.
    token_ids = adjusted.max(dim=-1).indices
    groups: dict[_Shaping, list[int]] = {}
    for row, chunk in enumerate(chunks):
        params = chunk.sampling
        if params.temperature >= GREEDY_BELOW_TEMPERATURE:
            shaping = (params.temperature, params.min_p, params.top_k, params.top_p)
            groups.setdefault(shaping, []).append(row)
    for shaping, rows in groups.items():
        draws = [uniform(chunks[row].sampling.seed, len(chunks[row].history)) for row in rows]
        token_ids[rows] = _draw(adjusted[rows], shaping, draws)
    logprobs = _logprobs(logits, token_ids, chunks)
    return [Sampled(token, logprob) for token, logprob in zip(token_ids.tolist(), logprobs, strict=True)]


def uniform(seed: int, position: int) -> float:
    """Return a number in [0, 1) that depends only on the arguments. Philox reaches every position in the same time."""
    bits = np.random.Philox(key=np.array([seed % 2**64, position], np.uint64)).random_raw()
    return float(int(bits) >> 11) * 2.0**-53


def _adjust(logits: torch.Tensor, chunks: Sequence[Chunk], masks: Masks) -> torch.Tensor:
    """Return the scores after bias, penalties and masks. The result is `logits` itself if there are none."""
    rows = [row for row, chunk in enumerate(chunks) if row in masks or _adjusts(chunk.sampling)]
    if not rows:
        return logits
    adjusted = logits.clone()
    for row in rows:
        chunk, params = chunks[row], chunks[row].sampling
        scores = adjusted[row]  # a view
        if params.logit_bias:
            scores[_ids(params.logit_bias, logits)] += scores.new_tensor(list(params.logit_bias.values()))
        if params.repetition_penalty != 1.0:
            penalise = RepetitionPenaltyLogitsProcessor(float(params.repetition_penalty))
            scores.copy_(penalise(_ids(chunk.history, logits)[None], scores[None])[0])
        if params.frequency_penalty or params.presence_penalty:
            seen, counts = np.unique(chunk.history[chunk.prompt_tokens :], return_counts=True)
            penalty = counts * params.frequency_penalty + params.presence_penalty
            scores[_ids(seen, logits)] -= scores.new_tensor(penalty)
        if row in masks:  # last, so that no penalty can allow a forbidden token
            scores.masked_fill_(torch.from_numpy(~masks[row][: len(scores)]).to(scores.device), -torch.inf)
    return adjusted


def _adjusts(params: SamplingParams) -> bool:
    return bool(
        params.logit_bias or params.repetition_penalty != 1.0 or params.frequency_penalty or params.presence_penalty
    )


def _ids(token_ids: object, like: torch.Tensor) -> torch.Tensor:
    values = np.fromiter(token_ids, np.int64) if isinstance(token_ids, dict) else np.asarray(token_ids, np.int64)
    return torch.from_numpy(values).to(like.device)


def _draw(scores: torch.Tensor, shaping: _Shaping, draws: Sequence[float]) -> torch.Tensor:
    """Sample by inverse transform from `scores` [rows, vocab] and one uniform number a row. Returns [rows] int64.

    Cumulative sums are float64. Over a large vocabulary, float32 would lose the shares of rare tokens.
    """
    temperature, min_p, top_k, top_p = shaping
    warpers = LogitsProcessorList([TemperatureLogitsWarper(float(temperature))])
    if min_p > 0.0:
        warpers.append(MinPLogitsWarper(float(min_p)))
    if top_k > 0:
        warpers.append(TopKLogitsWarper(int(top_k)))
    if top_p < 1.0:
        warpers.append(TopPLogitsWarper(float(top_p)))
    no_tokens = torch.empty(len(draws), 0, dtype=torch.int64, device=scores.device)  # warpers only read scores
    cumulative = warpers(no_tokens, scores).softmax(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    points = torch.tensor(draws, dtype=torch.float64, device=scores.device)[:, None] * cumulative[:, -1:]
    # The first token whose cumulative share exceeds the point. A token without a share is never chosen.
    chosen = torch.searchsorted(cumulative, points, right=True)[:, 0]
    return chosen.clamp_(max=scores.shape[1] - 1)  # out of range only if the model returned NaN


def score(logits: torch.Tensor, tokens: NDArray[np.int32], most: int) -> tuple[Logprob, ...]:
    """Return the logprob of each of `tokens` [rows] 1D int32 in its row of `logits` [rows, vocab] float32.

    Each logprob includes those of the `most` most likely tokens of its row.
    """
    if not len(tokens):
        return ()
    logprobs = logits.log_softmax(dim=-1)
    own = logprobs.gather(1, _ids(tokens, logits)[:, None])[:, 0].tolist()
    top = logprobs.topk(min(most, logits.shape[1]), dim=-1)
    pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return tuple(Logprob(one, tuple(zip(*each, strict=True))) for one, each in zip(own, pairs, strict=True))


def _logprobs(logits: torch.Tensor, token_ids: torch.Tensor, chunks: Sequence[Chunk]) -> list[Logprob | None]:
    rows = [row for row, chunk in enumerate(chunks) if chunk.sampling.logprobs]
    results: list[Logprob | None] = [None] * len(chunks)
    if not rows:
        return results
    logprobs = logits[rows].log_softmax(dim=-1)
    sampled = logprobs.gather(1, token_ids[rows][:, None])[:, 0].tolist()
    most = max(chunks[row].sampling.top_logprobs for row in rows)
    top = logprobs.topk(min(most, logits.shape[1]), dim=-1)
    values, ids = top.values.tolist(), top.indices.tolist()
    for index, row in enumerate(rows):
        wanted = chunks[row].sampling.top_logprobs
        pairs = tuple(zip(ids[index][:wanted], values[index][:wanted], strict=True))
        results[row] = Logprob(sampled[index], pairs)
    return results
