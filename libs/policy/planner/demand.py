"""What a model's workers have to do, from what they say: prompts, and decodes to come. Pure."""

from typing import Final

from libs.policy.pressure.splits import WorkerProfile, Workload

HORIZON_NS: Final = 1_000_000_000
"""Within which what waits is to be computed."""


def prompts_wanted(served: float, waiting_ns: float) -> float:
    """Workers' worth of prompts; `served`: computed of late, `waiting_ns`: what one worker would take for what waits.

    While all that comes is served, that is what is wanted. What a cluster falls behind shows in what waits.
    """
    return served + waiting_ns / HORIZON_NS


def pressing_tokens(served: float, hopeful_tokens: int, waiting_tokens: int) -> int:
    """Prompt tokens at gateways that press. Those that can no longer be in time are served by what others leave; where
    nothing is served, nothing leaves them anything, and they press as well."""
    return hopeful_tokens if served else max(hopeful_tokens, waiting_tokens)


def decodes_to_come(running: int, waiting: int, prompt_tokens: int) -> tuple[int, float]:
    """Sequences that decode soon, of a prefill worker's prompts, and the KV tokens that they bring: those that it
    computes. One that waits decodes no sooner than one before it has ended, and takes its place.

    prompt_tokens: of all of them, still to be computed."""
    if not running:
        return 0, 0.0
    return running, prompt_tokens * running / (running + waiting)


def workload(
    engine: WorkerProfile,
    *,
    served: float,
    waiting_tokens: int,
    decodes: int,
    kv_tokens: int,
    held: int,
    held_prompt_tokens: int,
    tpot_ns: int,
) -> Workload:
    """What a model's workers have to do.

    served: workers' worth of prompts computed of late. waiting_tokens: of prompts that wait. decodes, kv_tokens: of
    sequences that decode or soon will. held, held_prompt_tokens: of requests that wait for a place to decode; what is
    computed of them already gateways do not say, so they are taken to hold as much as others.
    """
    waiting_ns = waiting_tokens / engine.chunk_speed
    alike = kv_tokens // decodes if decodes else 0
    return Workload(
        prompts_wanted(served, waiting_ns),
        decodes,
        kv_tokens,
        tpot_ns,
        waiting_ns,
        held=held,
        held_kv_tokens=max(held_prompt_tokens, held * alike),
        held_prompts=prompts_wanted(0.0, held_prompt_tokens / engine.chunk_speed),
    )
