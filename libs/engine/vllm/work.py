"""What a step of vLLM's computes, in the figures of the step-time model. Pure, without vLLM."""

from collections.abc import Iterable

from libs.policy.step_time import StepWork, chunks_work


def scheduled_work(parts: Iterable[tuple[int, int, int]]) -> StepWork:
    """Of requests that compute their tokens [start, end) of `known` ones, prompt and output, in one step.

    A single last token costs what a decode costs and counts as one: also the last prompt token, which a request whose
    KV came from elsewhere computes again to sample from it.
    """
    prompts: list[tuple[int, int]] = []
    decodes = kv_tokens = 0
    for start, end, known in parts:
        if start and start >= known - 1:
            decodes += 1
            kv_tokens += end
        else:
            prompts.append((start, end))
    return chunks_work(prompts, StepWork(decode_sequences=decodes, decode_kv_tokens=kv_tokens))
