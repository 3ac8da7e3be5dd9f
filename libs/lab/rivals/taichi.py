"""TaiChi: instances biased to prefill or to decode, short prompts that yield, and decodes that flow between both.

Wang et al., "Prefill-Decode Aggregation or Disaggregation? Unifying Both for Goodput-Optimized LLM Serving", 2025,
arXiv 2508.01989v1: three sliders (the ratio of prefill-heavy and decode-heavy instances and the chunk size of each),
length-aware prefill scheduling and flowing decode scheduling. Abstract, introduction and published summaries of
sections 3.1 to 3.4 were read, which name a watermark of 95 % of memory, a TPOT factor of 0.96, chunks of 1,024 tokens
on prefill-heavy instances and of 128 to 512 on decode-heavy ones. The code is not published.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from libs.contracts.errors import InvalidRequest
from libs.lab.rivals.llm_d import kv_use
from libs.lab.rivals.pools import (
    decode_pool,
    emptiest,
    first_token_ns,
    fits,
    from_split,
    prefill_pool,
    soonest,
)
from libs.lab.rivals.pools import sequences as placed
from libs.lab.rivals.port import (
    Move,
    Rival,
    RivalSetting,
    SeenRequest,
    SeenSequence,
    SeenWorker,
    SequenceMove,
)
from libs.policy.roles import Role

DECODE_HEAVY_BUDGET_TOKENS: Final = 256
PREFILL_HEAVY_BUDGET_TOKENS: Final = 1024
WATERMARK: Final = 0.95
"""The share of a decode-heavy instance's KV memory from which its longest answers move away."""
TPOT_SHARE: Final = 0.96
"""The share of the TPOT limit from which a sequence moves back to a decode-heavy instance."""
FLOW_EVERY_NS: Final = 50_000_000


@dataclass(frozen=True, slots=True)
class TaiChiRouter:
    """A length-aware router: prompts that decode-heavy instances compute in time stay off the prefill-heavy ones."""

    budget_tokens: int = DECODE_HEAVY_BUDGET_TOKENS
    """The prompt budget of decode-heavy instances. Mixed instances with more are prefill-heavy."""

    def prompt(self, request: SeenRequest, workers: Sequence[SeenWorker], now_ns: int) -> int:
        """Return the earliest decode-heavy instance if it is in time, otherwise the earliest prefill-heavy one."""
        able = [each for each in self.light(workers) if each.budget_tokens and fits(request, each)]
        in_time = [each for each in able if first_token_ns(request, each) <= request.slo.ttft_ns]
        return soonest(request, in_time or [*prefill_pool(workers), *self.heavy(workers)]).index

    def decode(self, request: SeenRequest, source: int, workers: Sequence[SeenWorker], now_ns: int) -> int:
        """Return the source if it is decode-heavy, otherwise the decode-heavy instance with the fewest sequences."""
        pool = self.light(workers) or decode_pool(workers)
        return source if any(each.index == source for each in pool) else emptiest(pool).index

    def light(self, workers: Sequence[SeenWorker]) -> list[SeenWorker]:
        """Return the decode-heavy instances."""
        return [each for each in decode_pool(workers) if not self._is_heavy(each)]

    def heavy(self, workers: Sequence[SeenWorker]) -> list[SeenWorker]:
        """Return the prefill-heavy instances that may decode."""
        return [each for each in decode_pool(workers) if self._is_heavy(each)]

    def prompt_only(self, worker: SeenWorker) -> bool:
        """Return whether every answer leaves the worker after its prompt."""
        return worker.role == Role.PREFILL or self._is_heavy(worker)

    def _is_heavy(self, worker: SeenWorker) -> bool:
        return worker.budget_tokens > self.budget_tokens


@dataclass(frozen=True, slots=True)
class FlowingDecodes:
    """A mover of decodes. The longest ones leave full decode-heavy instances, and return before they miss their
    TPOT.
    """

    router: TaiChiRouter
    every_ns: int = FLOW_EVERY_NS

    def sequence_moves(self, workers: Sequence[SeenWorker], sequences: Sequence[SeenSequence]) -> list[SequenceMove]:
        """Return moves to the emptiest instances of the other kind, counting those already chosen."""
        light, heavy = self.router.light(workers), self.router.heavy(workers)
        if not light or not heavy:
            return []
        going: Counter[int] = Counter()
        moves: list[SequenceMove] = []

        def move(sequence: SeenSequence, pool: Sequence[SeenWorker]) -> None:
            to = min(pool, key=lambda each: (placed(each) + going[each.index], -each.free_blocks, each.index)).index
            going[to] += 1
            moves.append(SequenceMove(sequence.number, to))

        for worker in light:
            over_tokens = (kv_use(worker) - WATERMARK) * worker.kv_blocks * worker.block_tokens
            here = (each for each in sequences if each.worker == worker.index)
            for sequence in sorted(here, key=lambda each: (-each.output_tokens, each.number)):
                if over_tokens < 0:
                    break
                move(sequence, heavy)
                over_tokens -= sequence.kv_tokens
        back, there = [each for each in light if kv_use(each) < WATERMARK], {each.index for each in heavy}
        for sequence in sequences:
            if back and sequence.worker in there and sequence.tpot_ns >= TPOT_SHARE * sequence.tpot_limit_ns:
                move(sequence, back)
        return moves


def taichi(
    prefill: int = 0, decode: int = 0, budget_tokens: int = DECODE_HEAVY_BUDGET_TOKENS, *, flow: bool = False
) -> Rival:
    """Return TaiChi with this split, or an even one. `budget_tokens` is that of decode-heavy instances.

    With `flow`, prefill-heavy instances are mixed, and decoding sequences move.
    """
    if not 1 <= budget_tokens < PREFILL_HEAVY_BUDGET_TOKENS:
        raise InvalidRequest(
            f"decode-heavy instances compute 1 to {PREFILL_HEAVY_BUDGET_TOKENS - 1} prompt tokens a step,"
            f" not {budget_tokens}"
        )
    router = TaiChiRouter(budget_tokens)

    def first_roles(cluster: RivalSetting) -> list[Move]:
        moves = from_split(prefill, decode, budget_tokens)(cluster)
        if not flow:
            return moves
        return [
            Move(each.index, Role.MIXED, PREFILL_HEAVY_BUDGET_TOKENS) if each.role == Role.PREFILL else each
            for each in moves
        ]

    split = f":{prefill}:{decode}:{budget_tokens}" if prefill or decode else ""
    still = (
        "Flowing decode scheduling is missing: running sequences stay where they are.",
        "Prefill-heavy instances therefore decode nothing, and have whole chunks.",
    )
    flowing = (
        f"Sequences are looked at every {FLOW_EVERY_NS // 1_000_000} ms, not at every step, and their TPOT is the mean "
        "since the first token.",
    )
    return Rival(
        name=f"taichi{'-flow' if flow else ''}{split}",
        source="arXiv 2508.01989v1 (Wang et al., 2025): abstract, introduction and published summaries; no code read",
        simplified=(
            *(flowing if flow else still),
            "The order of preference in length-aware scheduling (decode-heavy while in time) is rebuilt from the "
            "paper's description, not from its algorithm.",
            "Chunk sizes stay as set; the paper tunes its three sliders to the service level beforehand.",
        ),
        first_roles=first_roles,
        router=lambda _: router,
        sequence_mover=lambda cluster: FlowingDecodes(router) if flow else None,
        prompt_only=router.prompt_only,
    )
