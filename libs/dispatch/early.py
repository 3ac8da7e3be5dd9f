"""Decodes that are submitted together with their prompts: their choice, and the events that then arrive too early.
Pure.
"""

from collections.abc import Iterator

from libs.dispatch.generation import EarlyNews, Generation
from libs.dispatch.ports import Link
from libs.policy.gateway.placement import Blocks


def name_blocks(generation: Generation, prompt: Link | None, decode: Link) -> Blocks | None:
    """Return named blocks by which `decode` can start together with `prompt`, or None if it must start later.

    From then on the decode worker's news is held back. Choices are excluded if the first token needs logprobs, an
    image is encoded in a separate step, or a batch line would hold blocks while later prompts pass.
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
    """Hold back news of the decode worker until the prompt's worker has reported; return False if it need not wait.

    The frames of the two workers are not ordered, but tokens must be. At most one item is held per output token, and
    a few events.
    """
    placement = generation.placement
    if generation.early is None or not placement.prefilling or news.attempt is not placement.decode_attempt:
        return False
    # A token shows that the decode worker has all blocks. After an event the sender may have freed them too.
    placement.note_blocks_read()
    generation.early.append(news)
    return True


def early_news(generation: Generation) -> Iterator[EarlyNews]:
    """Iterate over the held-back news until the choice leaves the worker that sent it."""
    early, generation.early = generation.early or (), None
    for news in early:
        if news.attempt is generation.placement.decode_attempt:
            yield news
