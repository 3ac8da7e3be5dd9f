"""Pools of workers from a rival's point of view, and the moves between the prefill and the decode pool. Pure."""

from collections.abc import Callable, Sequence

from libs.contracts.errors import InvalidRequest
from libs.lab.rivals.port import Move, RivalSetting, SeenRequest, SeenWorker
from libs.policy.roles import Role


def prefill_pool(workers: Sequence[SeenWorker]) -> list[SeenWorker]:
    """Return the ready workers in role prefill, by index."""
    return [worker for worker in workers if worker.ready and worker.role == Role.PREFILL]


def decode_pool(workers: Sequence[SeenWorker]) -> list[SeenWorker]:
    """Return the ready workers that decode, by index."""
    return [worker for worker in workers if worker.ready and worker.role == Role.MIXED]


def halves(cluster: RivalSetting) -> tuple[int, int]:
    """Return (prefill, decode) workers of an even split; decode has the odd one."""
    return cluster.workers // 2, cluster.workers - cluster.workers // 2


def split_roles(cluster: RivalSetting, prefill: int, decode: int, budget_tokens: int = 0) -> list[Move]:
    """Return the first roles of a split cluster, prefill workers first. `budget_tokens` is that of decode workers."""
    if prefill < 1 or decode < 1 or prefill + decode != cluster.workers:
        raise InvalidRequest(
            f"a split of {cluster.workers} workers has at least one on each side and uses all: not {prefill}:{decode}"
        )
    roles = [(Role.PREFILL, 0)] * prefill + [(Role.MIXED, budget_tokens)] * decode
    return [Move(index, role, budget) for index, (role, budget) in enumerate(roles)]


def from_split(prefill: int, decode: int, budget_tokens: int | None = 0) -> Callable[[RivalSetting], list[Move]]:
    """Return a rival's first roles: those of a split, or of an even one if both numbers are 0.

    `budget_tokens` is that of decode workers; None gives them whole chunks.
    """

    def first_roles(cluster: RivalSetting) -> list[Move]:
        budget = cluster.speed.chunk_tokens if budget_tokens is None else budget_tokens
        return split_roles(cluster, *((prefill, decode) if prefill or decode else halves(cluster)), budget)

    return first_roles


def sequences(worker: SeenWorker) -> int:
    """Return the number of sequences that decode there now or later."""
    return worker.decodes + worker.queued_decodes


def own_prompt_ns(request: SeenRequest, worker: SeenWorker) -> float:
    """Return the time of computing the request's uncached prompt there alone."""
    cached = min(request.cached_tokens[worker.index], request.input_tokens - 1)
    return worker.speed.prompt_ns(request.input_tokens - cached, request.input_tokens**2 - cached**2)


def first_token_ns(request: SeenRequest, worker: SeenWorker) -> float:
    """Return the time until the request's first token on a worker: the queue, its prompt, and the decodes beside both.

    In role mixed each step computes at most the budget and decodes too. The time saved by overlapping them is not
    counted.
    """
    ns = worker.backlog_ns + own_prompt_ns(request, worker)
    if worker.role != Role.MIXED:
        return ns
    tokens = worker.prompt_tokens + request.input_tokens - request.cached_tokens[worker.index]
    return ns + -(-max(tokens, 1) // worker.budget_tokens) * worker.decode_step_ns


def soonest(request: SeenRequest, workers: Sequence[SeenWorker]) -> SeenWorker:
    """Return the worker with the earliest predicted first token, then the fewest sequences, then the lowest index."""
    return min(workers, key=lambda each: (first_token_ns(request, each), each.prompts + sequences(each), each.index))


def emptiest(workers: Sequence[SeenWorker]) -> SeenWorker:
    """Return the worker with the fewest sequences, then the most free KV, then the lowest index."""
    return min(workers, key=lambda each: (sequences(each), -each.free_blocks, each.index))


def fits(request: SeenRequest, worker: SeenWorker) -> bool:
    """Return whether a slot and KV for the prompt are free there now."""
    placed = worker.prompts + sequences(worker)
    return placed < worker.max_sequences and worker.free_blocks * worker.block_tokens >= request.input_tokens


def paired_moves(
    workers: Sequence[SeenWorker], *, more_prefill: int, more_decode: int, budget_tokens: int = 0
) -> list[Move]:
    """Return moves that give one pool what the other can spare, under a fixed number of workers.

    `more_prefill` and `more_decode` are the requested changes; below 0 they are workers that the pool can spare.
    Workers move only if the requests are opposite, up to the smaller of the two, and each pool keeps one ready worker.
    The highest indices go first, as with numbered replicas.
    """
    if more_prefill > 0 > more_decode:
        donors, count, role, budget = decode_pool(workers), min(more_prefill, -more_decode), Role.PREFILL, 0
    elif more_decode > 0 > more_prefill:
        donors, count, role, budget = (
            prefill_pool(workers),
            min(more_decode, -more_prefill),
            Role.MIXED,
            budget_tokens,
        )
    else:
        return []
    count = min(count, len(donors) - 1)
    return [Move(each.index, role, budget, "rebalance") for each in donors[len(donors) - count :]] if count > 0 else []
