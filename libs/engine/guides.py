"""Grammars that constrain answers, evaluated as masks of the tokens allowed next.

A guide is a grammar in llguidance's Lark dialect (https://github.com/guidance-ai/llguidance), in which `%json` embeds a
JSON schema. The mask depends only on the guide and the generated tokens, so a sequence that moves or is recomputed
continues exactly. Matchers are cached between steps only to save the engine from reading those tokens again.
"""

from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from numpy.typing import NDArray

from libs.engine.runner import Chunk
from libs.model.info import ModelInfo, sim_tokenizer
from libs.policy.newest import put_newest

MAX_COMPILED = 64
"""The upper bound of compiled guides in the cache."""
MAX_FOLLOWED = 1024
"""The upper bound of sequences whose position in their guide is cached."""


class GuideFailed(Exception):
    """The tokens of a sequence do not fit its guide, or the guide is too complex."""


@dataclass(slots=True)
class _GuidePosition:
    guide: str
    matcher: LLMatcher
    tokens: NDArray[np.int32]
    """[n] 1D int32: the generated tokens that the matcher has consumed."""


class Guides:
    """Matchers for guides over one vocabulary. Not thread-safe."""

    def __init__(self, vocabulary: LLTokenizer) -> None:
        self._vocabulary = vocabulary
        self._mask = allocate_token_bitmask(1, vocabulary.vocab_size)
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._positions: OrderedDict[int, _GuidePosition] = OrderedDict()

    def allowed(self, chunk: Chunk) -> NDArray[np.bool_]:
        """Return [vocab] 1D bool: the tokens that may follow the chunk's last. Raise GuideFailed."""
        matcher = self._matcher(chunk)
        if not matcher.is_error():
            fill_next_token_bitmask(matcher, self._mask)
        if matcher.is_error():
            self._positions.pop(chunk.sequence_id, None)
            raise GuideFailed(f"the answer cannot continue under its guide: {_first_line(matcher.get_error())}")
        bits = np.unpackbits(self._mask[0].view(np.uint8), count=self._vocabulary.vocab_size, bitorder="little")
        return bits.view(np.bool_)

    def _matcher(self, chunk: Chunk) -> LLMatcher:
        """Return a matcher that has consumed all generated tokens."""
        generated, guide = chunk.history[chunk.prompt_tokens :], chunk.sampling.guide
        found = self._positions.get(chunk.sequence_id)
        if found is None or found.guide != guide or not _begins(generated, found.tokens):
            found = _GuidePosition(guide, self._fresh(guide), generated[:0])
        put_newest(self._positions, chunk.sequence_id, found, MAX_FOLLOWED)
        found.matcher.consume_tokens(generated[len(found.tokens) :].tolist())
        found.tokens = generated
        return found.matcher

    def _fresh(self, guide: str) -> LLMatcher:
        compiled = self._compiled.get(guide)
        if compiled is None:
            compiled = LLMatcher(self._vocabulary, guide, log_level=0)
        put_newest(self._compiled, guide, compiled, MAX_COMPILED)
        return compiled.deep_copy()


def load_guides(info: ModelInfo) -> Guides:
    """Return guides over a model's vocabulary. Raise GuideFailed as `load_vocabulary` does."""
    return Guides(load_vocabulary(info))


def load_vocabulary(info: ModelInfo) -> LLTokenizer:
    """Read a model's vocabulary from its tokenizer.json, which takes tenths of a second. Raise GuideFailed."""
    try:
        text = sim_tokenizer().to_str() if info.path is None else _tokenizer_json(info.path)
        return LLTokenizer(text, n_vocab=info.vocab_size, eos_token=sorted(info.eos_token_ids))
    except Exception as error:  # the library documents no exception types, and only guided answers need it
        raise GuideFailed(f"the model's vocabulary cannot be read for guides: {_first_line(str(error))}") from error


def _tokenizer_json(folder: Path) -> str:
    return (folder / "tokenizer.json").read_text(encoding="utf-8")


def _begins(tokens: NDArray[np.int32], start: NDArray[np.int32]) -> bool:
    return len(start) <= len(tokens) and bool(np.array_equal(tokens[: len(start)], start))


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else "no reason given"
