"""Niyama: aggregated serving whose chunks follow the slack of running decodes.

Goel et al., "Niyama: Breaking the Silos of LLM Inference Serving", 2025, arXiv 2503.22562v1: dynamic chunking,
hybrid prioritisation (deadline plus a multiple of the remaining work), and relegation of requests that can no
longer meet their deadline. Its scheduler works inside one replica; the paper leaves open how requests reach
replicas.
"""

from collections.abc import Sequence
from typing import Final

from libs.lab.rivals.aggregated import AggregatedRouter, all_mixed
from libs.lab.rivals.port import PromptTurn, QueuedPrompt, Rival, RivalRouter, RivalSetting

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
