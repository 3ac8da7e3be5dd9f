"""Measured steps: made-up prompts on spare blocks, which show how long a step of a given size takes. Pure."""

from typing import Final

import numpy as np

from libs.engine.port import Capabilities, SamplingParams
from libs.engine.runner import Batch, Chunk
from libs.policy.worker.saturation import trial_prompts

_GREEDY: Final = SamplingParams(temperature=0.0)


def blocks_for(tokens: int, block_size_tokens: int) -> int:
    """Return the number of blocks that a measured step of `tokens` tokens writes."""
    return sum(-(-length // block_size_tokens) for length in trial_prompts(tokens))


def trial_batch(tokens: int, blocks: list[int], capabilities: Capabilities) -> Batch:
    """Return whole prompts of random tokens that add up to `tokens`. Ids are negative, so they match no sequence."""
    random = np.random.default_rng(tokens)
    table = np.array(blocks, dtype=np.int32)
    chunks = []
    for number, length in enumerate(trial_prompts(tokens), start=1):
        ids = random.integers(0, capabilities.vocab_size or 2, length, dtype=np.int32)
        held = -(-length // capabilities.block_size_tokens)
        chunks.append(
            Chunk(
                sequence_id=-number,
                token_ids=ids,
                start=0,
                block_table=table[:held],
                sample=True,
                sampling=_GREEDY,
                history=ids,
                prompt_tokens=length,
            )
        )
        table = table[held:]
    return Batch(tuple(chunks))
