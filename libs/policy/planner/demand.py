"""Estimate a model's work, prompts and upcoming decodes, from the reports of its workers and gateways."""

from typing import Final

from libs.policy.pressure.splits import WorkerProfile, Workload

HORIZON_NS: Final = 1_000_000_000
"""The time within which the present queue should be computed."""


def prompts_wanted(served: float, waiting_ns: float) -> float:
    """Return the number of workers that prompts keep busy.

    `served` is that number for the prompts computed lately, `waiting_ns` the time one worker would take for the
    queue. While everything that arrives is served, `served` is the demand; a cluster that falls behind shows in the
    queue.
    """
    return served + waiting_ns / HORIZON_NS


def pressing_tokens(served: float, hopeful_tokens: int, waiting_tokens: int) -> int:
    """Return the prompt tokens at gateways that count as pressure.

    Late requests are served by whatever the others leave, so they count only where nothing is being served.
    """
    return hopeful_tokens if served else max(hopeful_tokens, waiting_tokens)


def decodes_to_come(running: int, waiting: int, prompt_tokens: int) -> tuple[int, float]:
    """Return the sequences of a prefill worker that will decode soon, and the KV tokens they bring.

    Only the prompts being computed count. A waiting one takes the place of an earlier sequence when that has ended.
    `prompt_tokens` is the number still to be computed, of running and waiting prompts together.
    """
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
    """Return the work of a model's workers.

    - served: the number of workers kept busy by the prompts computed lately
    - waiting_tokens: tokens of waiting prompts
    - decodes, kv_tokens: sequences that decode or soon will, and their KV
    - held, held_prompt_tokens: requests waiting for a place to decode

    Gateways do not report how much of the held requests is already computed, so each is assumed to hold as much KV
    as the other sequences.
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
