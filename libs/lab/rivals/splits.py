"""Rivals that split workers once: static splits, aggregated serving, Niyama and TaiChi.

Aggregated serving is chunked prefill as in Sarathi-Serve (Agrawal et al., OSDI 2024, arXiv 2403.02310) and vLLM's
scheduler, whose `max_num_batched_tokens` is the budget.

Static splits are what deployments without a planner run, including vLLM's and Dynamo's own examples of disaggregated
serving. The best of all splits in hindsight is the one to beat.

Niyama (Goel et al., "Niyama: Breaking the Silos of LLM Inference Serving", 2025, arXiv 2503.22562v1): dynamic
chunking, hybrid prioritisation (deadline plus a multiple of the remaining work), and relegation of requests that can
no longer meet their deadline. Its scheduler works inside one replica; the paper leaves open how requests reach
replicas.

TaiChi (Wang et al., "Prefill-Decode Aggregation or Disaggregation? Unifying Both for Goodput-Optimized LLM Serving",
2025, arXiv 2508.01989v1): three sliders (the ratio of prefill-heavy and decode-heavy instances and the chunk size of
each), length-aware prefill scheduling and flowing decode scheduling.
"""

from collections.abc import Sequence
from typing import Final

from libs.contracts.errors import InvalidRequest
from libs.lab.rivals.pools import (
    decode_pool,
    emptiest,
    first_token_ns,
    fits,
    halves,
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
    RivalRouter,
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


def aggregated(budget_tokens: int = DEFAULT_BUDGET_TOKENS) -> Rival:
    """Return the rival whose workers are all mixed with a fixed budget."""
    if not LEAST_BUDGET_TOKENS <= budget_tokens <= MOST_BUDGET_TOKENS:
        raise InvalidRequest(f"a budget is {LEAST_BUDGET_TOKENS} to {MOST_BUDGET_TOKENS} tokens, not {budget_tokens}")

    def router(cluster: RivalSetting) -> RivalRouter:
        return AggregatedRouter()

    return Rival(
        name=f"aggregated:{budget_tokens}",
        source="Sarathi-Serve (arXiv 2403.02310) and vLLM's chunked prefill, one budget for all steps",
        simplified=(
            "The budget counts prompt tokens alone; vLLM's counts the decoding sequences of the step too.",
            "Its router predicts with the step-time model, which is more than such systems know.",
        ),
        first_roles=lambda cluster: all_mixed(cluster, budget_tokens),
        router=router,
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

    def router(cluster: RivalSetting) -> RivalRouter:
        return SplitRouter()

    return Rival(
        name=f"static:{prefill}:{decode}",
        source="disaggregated serving without a planner; the routing is least predicted backlog, least sequences",
        simplified=("Its router predicts with the step-time model, which is more than such systems know.",),
        first_roles=lambda cluster: split_roles(cluster, prefill, decode),
        router=router,
    )


MOST_CHUNK_TOKENS: Final = 8192


def niyama() -> Rival:
    """Return the rival whose workers are all mixed, with chunks as large as the tightest decode allows."""

    def router(cluster: RivalSetting) -> RivalRouter:
        return AggregatedRouter()

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
        router=router,
        prompt_order=by_deadline_and_work,
        guard=True,
    )


def by_deadline_and_work(prompts: Sequence[QueuedPrompt], turn: PromptTurn) -> list[tuple[float, ...]]:
    return [deadline_and_work(prompt, turn.now_ns) for prompt in prompts]


def deadline_and_work(prompt: QueuedPrompt, now_ns: int) -> tuple[float, ...]:
    """Return the deadline plus the remaining work as a sort key, with prompts that can no longer be in time last."""
    relegated = now_ns + prompt.left_ns > prompt.ttft_deadline_unix_ns
    return relegated, prompt.ttft_deadline_unix_ns + prompt.left_ns


DECODE_HEAVY_BUDGET_TOKENS: Final = 256


class TaiChiRouter:
    """A length-aware router: prompts that decode-heavy instances compute in time stay off the prefill-heavy ones."""

    def prompt(self, request: SeenRequest, workers: Sequence[SeenWorker], now_ns: int) -> int:
        """Return the earliest decode-heavy instance if it is in time, else the earliest prefill-heavy one."""
        able = [each for each in decode_pool(workers) if each.budget_tokens and fits(request, each)]
        in_time = [each for each in able if first_token_ns(request, each) <= request.slo.ttft_ns]
        return soonest(request, in_time or prefill_pool(workers)).index

    def decode(self, request: SeenRequest, source: int, workers: Sequence[SeenWorker], now_ns: int) -> int:
        """Return the source if it decodes, else the decode-heavy instance with the fewest sequences."""
        pool = decode_pool(workers)
        return source if any(each.index == source for each in pool) else emptiest(pool).index


def taichi(prefill: int = 0, decode: int = 0, budget_tokens: int = DECODE_HEAVY_BUDGET_TOKENS) -> Rival:
    """Return TaiChi with this split, or an even one. `budget_tokens` is that of decode-heavy instances."""
    if budget_tokens < 1:
        raise InvalidRequest(f"decode-heavy instances compute at least one prompt token a step, not {budget_tokens}")

    def router(cluster: RivalSetting) -> RivalRouter:
        return TaiChiRouter()

    def first_roles(cluster: RivalSetting) -> list[Move]:
        counts = (prefill, decode) if prefill or decode else halves(cluster)
        return split_roles(cluster, *counts, budget_tokens=budget_tokens)

    split = f":{prefill}:{decode}:{budget_tokens}" if prefill or decode else ""
    return Rival(
        name=f"taichi{split}",
        source="arXiv 2508.01989v1 (Wang et al., 2025): abstract, introduction and published summaries; no code read",
        simplified=(
            "Flowing decode scheduling is missing: running sequences do not move to prefill-heavy instances when "
            "memory runs short, nor back before they break their TPOT, because this port moves no running sequence.",
            "Prefill-heavy instances therefore decode nothing.",
            "The order of preference in length-aware scheduling (decode-heavy while in time) is rebuilt from the "
            "paper's description, not from its algorithm.",
            "Chunk sizes stay as set; the paper tunes its three sliders to the service level beforehand.",
        ),
        first_roles=first_roles,
        router=router,
    )
