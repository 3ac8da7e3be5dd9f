"""Rivals that split workers once: static splits, aggregated serving and Niyama.

Aggregated serving is chunked prefill as in Sarathi-Serve (Agrawal et al., OSDI 2024, arXiv 2403.02310) and vLLM's
scheduler, whose `max_num_batched_tokens` is the budget.

Static splits are what deployments without a planner run, including vLLM's and Dynamo's own examples of disaggregated
serving. The best of all splits in hindsight is the one to beat.

Niyama (Goel et al., "Niyama: Breaking the Silos of LLM Inference Serving", 2025, arXiv 2503.22562v1): dynamic
chunking, hybrid prioritisation (deadline plus a multiple of the remaining work), and relegation of requests that can
no longer meet their deadline. Its scheduler works inside one replica; the paper leaves open how requests reach
replicas.
"""

from collections.abc import Sequence
from typing import Final

from libs.contracts.errors import InvalidRequest
from libs.lab.rivals.pools import (
    decode_pool,
    emptiest,
    first_token_ns,
    fits,
    prefill_pool,
    sequences,
    soonest,
    split_roles,
)
from libs.lab.rivals.port import (
    Move,
    PromptTurn,
    QueuedPrompt,
    Rival,
    RivalSetting,
    SeenRequest,
    SeenWorker,
)
from libs.policy.roles import Role

DEFAULT_BUDGET_TOKENS: Final = 512
LEAST_BUDGET_TOKENS: Final = 256
MOST_BUDGET_TOKENS: Final = 8192


class AggregatedRouter:
    """A router to the worker with the lowest predicted load among those with room."""

    def prompt(self, request: SeenRequest, workers: Sequence[SeenWorker], now_ns: int) -> int:
        """Return the worker with the earliest first token; workers without a slot or KV memory for it come last."""

        def load(worker: SeenWorker) -> tuple[bool, float, int, int]:
            placed = worker.prompts + sequences(worker)
            return not fits(request, worker), first_token_ns(request, worker), placed, worker.index

        return min((each for each in decode_pool(workers) if each.budget_tokens), key=load).index

    def decode(self, request: SeenRequest, source: int, workers: Sequence[SeenWorker], now_ns: int) -> int:
        """Return the worker that computed the prompt."""
        return source


def all_mixed(cluster: RivalSetting, budget_tokens: int) -> list[Move]:
    """Return first roles that make every worker mixed with this budget."""
    return [Move(index, Role.MIXED, budget_tokens) for index in range(cluster.workers)]


def check_budget(budget_tokens: int) -> None:
    """Raise InvalidRequest if aggregated workers cannot have this budget."""
    if not LEAST_BUDGET_TOKENS <= budget_tokens <= MOST_BUDGET_TOKENS:
        raise InvalidRequest(f"a budget is {LEAST_BUDGET_TOKENS} to {MOST_BUDGET_TOKENS} tokens, not {budget_tokens}")


def aggregated(budget_tokens: int = DEFAULT_BUDGET_TOKENS) -> Rival:
    """Return the rival whose workers are all mixed with a fixed budget."""
    check_budget(budget_tokens)

    return Rival(
        name=f"aggregated:{budget_tokens}",
        source="Sarathi-Serve (arXiv 2403.02310) and vLLM's chunked prefill, one budget for all steps",
        simplified=(
            "The budget counts prompt tokens alone; vLLM's counts the decoding sequences of the step too.",
            "Its router predicts with the step-time model, which is more than such systems know.",
        ),
        first_roles=lambda cluster: all_mixed(cluster, budget_tokens),
        router=lambda _: AggregatedRouter(),
    )


class SplitRouter:
    """A router of prompts by least predicted backlog and of decodes by fewest sequences."""

    def prompt(self, request: SeenRequest, workers: Sequence[SeenWorker], now_ns: int) -> int:
        """Return the prefill worker with the earliest first token."""
        return soonest(request, prefill_pool(workers)).index

    def decode(self, request: SeenRequest, source: int, workers: Sequence[SeenWorker], now_ns: int) -> int:
        """Return the decode worker with the fewest sequences, then the most free KV."""
        return emptiest(decode_pool(workers)).index


def static_split(prefill: int, decode: int) -> Rival:
    """Return the rival with `prefill` workers in role prefill and `decode` workers that only decode."""
    return Rival(
        name=f"static:{prefill}:{decode}",
        source="disaggregated serving without a planner; the routing is least predicted backlog, least sequences",
        simplified=("Its router predicts with the step-time model, which is more than such systems know.",),
        first_roles=lambda cluster: split_roles(cluster, prefill, decode),
        router=lambda _: SplitRouter(),
    )


MOST_CHUNK_TOKENS: Final = 8192


def niyama() -> Rival:
    """Return the rival whose workers are all mixed, with chunks as large as the tightest decode allows."""
    return Rival(
        name="niyama",
        source="arXiv 2503.22562v1 (Goel et al., 2025): abstract and introduction; no code of theirs was read",
        simplified=(
            "Hybrid prioritisation weighs deadline and work left alike, in seconds; the paper leaves its factor to be "
            "tuned. Relegated are prompts that could not be in time even if they were alone.",
            "Chunks follow this project's own rule for slack in place of their trained predictor of step times, and "
            "newcomers are held to it too, which theirs are not.",
            "Requests reach workers by least predicted load, which the paper leaves open.",
        ),
        first_roles=lambda cluster: all_mixed(cluster, min(MOST_CHUNK_TOKENS, cluster.speed.chunk_tokens)),
        router=lambda _: AggregatedRouter(),
        prompt_order=by_deadline_and_work,
        guard=True,
    )


def by_deadline_and_work(prompts: Sequence[QueuedPrompt], turn: PromptTurn) -> list[tuple[float, ...]]:
    return [deadline_and_work(prompt, turn.now_ns) for prompt in prompts]


def deadline_and_work(prompt: QueuedPrompt, now_ns: int) -> tuple[float, ...]:
    """Return the deadline plus the remaining work as a sort key, with prompts that can no longer be in time last."""
    relegated = now_ns + prompt.left_ns > prompt.ttft_deadline_unix_ns
    return relegated, prompt.ttft_deadline_unix_ns + prompt.left_ns
