"""`python -m load.verdict.sizing`: the split of eight workers that carries most, by step times, for docs/deploy.md."""

from typing import Final

from libs.perfmodel.profiles import profile
from libs.policy.step_time import StepTimeModel
from libs.policy.worker.slack import IN_HAND, largest_batch

WORKERS: Final = 8
CHUNK_TOKENS, MAX_SEQUENCES = 2048, 256
FULL: Final = 0.85
"""Of what either phase can do, what a split is to carry: pressure moves by as much as that from second to second."""
PROFILES: Final = (("llama-8b-h100", 30), ("llama-70b-tp4-h100", 50))
"""(name, TPOT target in ms)"""
LENGTHS: Final = ((500, 500), (1000, 200), (2000, 200), (2000, 1000), (8000, 200), (8000, 1000))
STEPS: Final = 40


def best_split(model: StepTimeModel, isl: int, osl: int, tpot_ms: float) -> tuple[int, float]:
    """(prefill workers, requests a second) of the split that carries most."""
    return max(
        ((prefill, _most(model, isl, osl, tpot_ms, prefill)) for prefill in range(1, WORKERS)), key=lambda e: e[1]
    )


def _most(model: StepTimeModel, isl: int, osl: int, tpot_ms: float, prefill: int) -> float:
    chunks, rest = divmod(isl, CHUNK_TOKENS)
    prompt_ns = sum(
        model.chunks_ns(CHUNK_TOKENS, CHUNK_TOKENS * (2 * number * CHUNK_TOKENS + CHUNK_TOKENS))
        for number in range(chunks)
    )
    prompt_ns += model.chunks_ns(rest, rest * (2 * chunks * CHUNK_TOKENS + rest)) if rest else 0.0
    context = isl + osl // 2
    batch = FULL * largest_batch(model, tpot_ms * 1e6 * (1 - IN_HAND), context, MAX_SEQUENCES)
    if batch < 1:
        return 0.0
    step_ns = model.reading_ns(batch) + batch * (model.decode_sequence_ns + context * model.decode_kv_token_ns)
    return min(FULL * prefill / prompt_ns, batch * (WORKERS - prefill) / (osl * step_ns)) * 1e9


def main() -> None:
    """A row for each length of prompt and answer."""
    for isl, osl in LENGTHS:
        cells = [best_split(profile(name).step_time, isl, osl, tpot_ms) for name, tpot_ms in PROFILES]
        shown = " | ".join(f"{prefill} : {WORKERS - prefill} ({rate:.0f}/s)" for prefill, rate in cells)
        print(f"| {isl:,} / {osl:,} | {shown} |")


if __name__ == "__main__":
    main()
