"""Decodes that are submitted together with their prompts.

This module selects them and holds back their events that arrive too early. Pure.
"""

from collections.abc import Iterator

from libs.dispatch.generation import EarlyNews, Generation
from libs.dispatch.ports import Link
from libs.policy.gateway.placement import Blocks


def name_blocks(generation: Generation, prompt: Link | None, decode: Link) -> Blocks | None:
    """Return named blocks with which `decode` can start together with `prompt`, or None if it must start later.

    If blocks are returned, news of the decode worker is held back from then on. Choices with images, suspects and
    choices whose first token needs logprobs are excluded. Batch lines are too, because they would occupy blocks while
    later prompts pass.
    """
    generation.early = None
    partner = decode.partner()
    if prompt is None or prompt is decode or partner is None or not (partner.takes_decode and partner.named_kv):
        return None
    left = generation.max_output_tokens - len(generation.output)
    if left <= 1 or generation.batch or generation.pooled or generation.images:
        return None
    if generation.sampling.logprobs or generation.trial:
        return None
    blocks = prompt.named_blocks(generation.tokens)
    if blocks is None or blocks.kind != partner.kv_kind:
        return None
    generation.early = []
    return blocks


def keep_back(generation: Generation, news: EarlyNews) -> bool:
    """Hold back news of the decode worker until the prefill worker has reported. Return False if that is not necessary.

    Frames of the two workers may arrive in any order, but tokens must not. At most one item per output token and a few
    events are held back.
    """
    placement = generation.placement
    if generation.early is None or not placement.prefilling or news.attempt is not placement.decode_attempt:
        return False
    # A token shows that the decode worker has all blocks. After an event, the prefill worker may also have freed them.
    placement.note_blocks_read()
    generation.early.append(news)
    return True


def early_news(generation: Generation) -> Iterator[EarlyNews]:
    """Yield the held-back news until the choice leaves the worker that sent it."""
    early, generation.early = generation.early or (), None
    for news in early:
        if news.attempt is generation.placement.decode_attempt:
            yield news
