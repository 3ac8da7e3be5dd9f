"""The tokens that the sim engine generates, as a function of prompt, position, seed and guide."""

import itertools
import struct
from collections.abc import Iterable
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from libs.engine.port import SamplingParams
from libs.engine.reports import Logprob
from libs.engine.runner import Chunk, Sampled

VOWELS = b"aeiou"
CONSONANTS = b"bcdfghklmnprstvwy"
LETTERS = frozenset(VOWELS + CONSONANTS)
SPACE = 0x20
CLOSING = b'"}]'
CLOSE_EVERY = 4
# An answer depends on this number of tokens at each end of its prompt, so that a long prompt costs no more than a short
# one.
PROMPT_EDGE_TOKENS = 32


class TokenSource:
    """A source of readable words for the built-in byte vocabulary, and of arbitrary ordinary tokens for others."""

    def __init__(self, token_ids: Iterable[int], *, words: bool = False) -> None:
        self._token_ids: NDArray[np.int32] = np.fromiter(token_ids, dtype=np.int32)
        self._words = words

    @classmethod
    def builtin(cls) -> "TokenSource":
        """Return a source of lowercase words in the built-in model's bytes."""
        return cls(sorted({*LETTERS, SPACE}), words=True)

    @classmethod
    def ordinary(cls, vocab_size: int, special_token_ids: frozenset[int]) -> "TokenSource":
        """Return a source of all tokens that are not special."""
        return cls(token for token in range(vocab_size) if token not in special_token_ids)

    def sample(self, chunk: Chunk, allowed: NDArray[np.bool_] | None = None) -> Sampled:
        """Return the token after a chunk's last position. Greedy requests ignore the seed.

        `allowed` is [vocab] 1D bool: the tokens that a guide allows; None for all.
        """
        seed = chunk.sampling.seed if chunk.sampling.temperature > 0 else 0
        if chunk.adapter:
            seed ^= crc32(chunk.adapter.encode())
        position, previous = len(chunk.history), int(chunk.history[-1])
        noise = crc32(struct.pack("<QQQQ", seed, position, previous, _prompt_digest(chunk)))
        token = _next_letter(previous, noise) if self._words else self._pick(noise)
        if allowed is not None:
            token = self._among(allowed, token, noise, closes=bool(chunk.sampling.guide))
        return Sampled(token, self._logprob(token, noise, chunk.sampling) if chunk.sampling.logprobs else None)

    def score(self, chunk: Chunk, tokens: NDArray[np.int32]) -> tuple[Logprob, ...]:
        """Return made-up logprobs of `tokens`, each a function of its token, position and previous token."""
        found = []
        most = min(chunk.sampling.prompt_top_logprobs, len(self._token_ids))
        for position, token in enumerate(tokens.tolist(), chunk.start + 1):
            noise = crc32(struct.pack("<QQQ", position, int(chunk.history[position - 1]), token))
            best = -(noise % 1000) / 1000
            others = (self._pick(noise + rank) for rank in range(len(self._token_ids)))
            rest = [other for other in itertools.islice(others, most) if other != token]
            top = [(token, best), *((other, best - rank) for rank, other in enumerate(rest, 1))]
            found.append(Logprob(best, tuple(top[:most])))
        return tuple(found)

    def _pick(self, noise: int) -> int:
        return int(self._token_ids[noise % len(self._token_ids)])

    def _among(self, allowed: NDArray[np.bool_], token: int, noise: int, *, closes: bool) -> int:
        """Return the token if it is allowed, otherwise another.

        Sometimes close an open bracket, so that answers end.
        """
        if closes and self._words and noise % CLOSE_EVERY == 0:
            token = next((closing for closing in CLOSING if allowed[closing]), token)
        if allowed[token]:
            return token
        choice = np.flatnonzero(allowed)
        return int(choice[noise // CLOSE_EVERY % len(choice)])

    def _logprob(self, token: int, noise: int, sampling: SamplingParams) -> Logprob:
        best = -(noise % 1000) / 1000
        top = {token: best}
        for rank in range(1, min(sampling.top_logprobs, len(self._token_ids))):
            other = next(place for place in range(noise + rank, noise + 2 * rank + 2) if self._pick(place) not in top)
            top[self._pick(other)] = best - rank
        return Logprob(best, tuple(top.items())[: sampling.top_logprobs])


def _prompt_digest(chunk: Chunk) -> int:
    prompt = chunk.history.data[: chunk.prompt_tokens]
    return crc32(prompt[-PROMPT_EDGE_TOKENS:], crc32(prompt[:PROMPT_EDGE_TOKENS], chunk.prompt_tokens))


def _next_letter(previous: int, noise: int) -> int:
    """Return the next letter of a word. Vowels and consonants alternate, and a space follows three or four letters."""
    choice, rest = noise % 100, noise // 100
    if previous not in LETTERS:
        return CONSONANTS[rest % len(CONSONANTS)] if choice < 75 else VOWELS[rest % len(VOWELS)]
    if previous in VOWELS:
        return SPACE if choice < 35 else CONSONANTS[rest % len(CONSONANTS)]
    return SPACE if choice < 20 else VOWELS[rest % len(VOWELS)]
