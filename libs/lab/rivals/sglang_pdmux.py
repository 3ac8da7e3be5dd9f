"""SGLang's multiplexing of prefill and decode inside one GPU (`--enable-pdmux`).

sgl-project/sglang, `python/sglang/srt/multiplex/multiplexing_mixin.py` (038fc19e) and `pdmux_context.py` (00d56e2c).
A GPU's SMs are divided between a stream that computes prompts and one that decodes. The more sequences decode, the
fewer SMs prompts get. One phase without work leaves all SMs to the other.
"""

from dataclasses import dataclass
from typing import Final

from libs.lab.rivals.pools import decode_pool
from libs.lab.rivals.port import Move, Rival, RivalSetting, SeenCluster, SeenWorker
from libs.lab.rivals.splits import AggregatedRouter, all_mixed
from libs.policy.roles import Role

SMS: Final = 132
"""The SMs of an H100 or H200."""
PREFILL_SMS: Final = (112, 104, 96, 88, 80, 72)
"""The divisions that `divide_sm` makes of them: at least half to prefill, at least 16 to decode, in steps of 8."""
DECODES_DIVISOR: Final = 36
"""`decode_bs_divisor`: the sequences from which prompts get the fewest SMs."""
LOOK_NS: Final = 50_000_000
# Prompt tokens at which the pace of a prompt is taken.
_WHOLE_TOKENS: Final = 4096
_LEAST_TOKENS: Final = 64
# The step grows with the budget, which grows with the step. Each round brings both closer, as shares are below 1.
_ROUNDS: Final = 8
# A budget that differs by less is left as it is.
_SAME_SHARE: Final = 0.1


def prefill_share(decodes: int) -> float:
    """Return the share of SMs that prompts get beside this many sequences, as `adjust_stream_groups` chooses it."""
    if not decodes:
        return 1.0
    group = max(1, min(len(PREFILL_SMS), decodes * len(PREFILL_SMS) // DECODES_DIVISOR))
    return PREFILL_SMS[group - 1] / SMS


def budget_tokens(worker: SeenWorker) -> int:
    """Return the prompt tokens that the prefill stream computes during one step of the lab with as many decodes."""
    decodes = worker.decodes - worker.prefills
    if decodes <= 0:
        return worker.speed.chunk_tokens
    model, decode_ns = worker.speed.step_time, worker.speed.decode_ns(decodes, worker.kv_tokens)
    hiding_ns = model.hiding_ns(decodes)
    # At the pace of whole prompts, which pay a step's fixed time once.
    whole_ns = worker.speed.prompt_ns(_WHOLE_TOKENS, _WHOLE_TOKENS**2)
    tokens_per_ns = prefill_share(decodes) * _WHOLE_TOKENS / whole_ns
    tokens, step_ns = _LEAST_TOKENS, decode_ns
    for _ in range(_ROUNDS):
        tokens = max(round(tokens_per_ns * step_ns), _LEAST_TOKENS)
        step_ns = model.mixed_ns(model.beside_ns(tokens, 0.0), decode_ns, hiding_ns)
    return min(tokens, worker.speed.chunk_tokens)


@dataclass(frozen=True, slots=True)
class SmDivider:
    """A mover of budgets alone. No worker changes its role."""

    every_ns: int = LOOK_NS
    wants_steps: bool = False

    def moves(self, seen: SeenCluster) -> list[Move]:
        wanted = ((each, budget_tokens(each)) for each in decode_pool(seen.workers))
        return [
            Move(each.index, Role.MIXED, tokens)
            for each, tokens in wanted
            if abs(tokens - each.budget_tokens) > _SAME_SHARE * each.budget_tokens
        ]


def sglang_pdmux() -> Rival:
    """Return SGLang whose workers all compute prompts and decode, on divided SMs."""

    def first_roles(cluster: RivalSetting) -> list[Move]:
        return all_mixed(cluster, cluster.speed.chunk_tokens)

    return Rival(
        name="sglang-pdmux",
        source="sgl-project/sglang 038fc19e and 00d56e2c: python/sglang/srt/multiplex",
        simplified=(
            "A worker of the lab runs one step at a time. Its prompt budget is therefore what the prefill stream would "
            "compute during the step, and the step takes as long as the profile says for both together.",
            "Decodes are not slowed by having fewer SMs, which favours this rival.",
            f"SMs are divided every {LOOK_NS // 1_000_000} ms rather than when a prefill batch begins or ends, and "
            "prompts join a step by the lab's rules rather than in one batch at a time.",
            "Its router predicts with the step-time model, which is more than such systems know.",
        ),
        first_roles=first_roles,
        router=lambda _: AggregatedRouter(),
        mover=lambda _: SmDivider(),
    )
