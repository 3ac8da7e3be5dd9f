"""Aggregated serving: every worker computes prompts beside its decodes, in chunks of a fixed budget.

Chunked prefill as in Sarathi-Serve (Agrawal et al., OSDI 2024, arXiv 2403.02310) and vLLM's scheduler, whose
`max_num_batched_tokens` is the budget.
"""

from collections.abc import Sequence
from typing import Final

from libs.contracts.errors import InvalidRequest
from libs.lab.rivals.pools import decode_pool, first_token_ns, fits, sequences
from libs.lab.rivals.port import Move, Rival, RivalRouter, RivalSetting, SeenRequest, SeenWorker
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
