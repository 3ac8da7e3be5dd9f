"""Niyama: aggregated serving whose chunks follow the slack of what decodes.

Goel et al., "Niyama: Breaking the Silos of LLM Inference Serving", 2025, arXiv 2503.22562v1: dynamic chunking, hybrid
prioritisation (deadline plus a multiple of the work left), and relegation of requests that can no longer keep theirs.
Its scheduler works inside one replica; how requests reach replicas is left open there.
"""

from typing import Final

from libs.lab.rivals.aggregated import AggregatedRouter, all_mixed
from libs.lab.rivals.port import Cluster, Rival, Router

MOST_CHUNK_TOKENS: Final = 8192


def niyama() -> Rival:
    """Every worker mixed, with chunks as large as the tightest decode allows."""

    def router(cluster: Cluster) -> Router:
        return AggregatedRouter()

    return Rival(
        name="niyama",
        source="arXiv 2503.22562v1 (Goel et al., 2025): abstract and introduction; no code of theirs was read",
        simplified=(
            "Prompts are served in order of arrival: hybrid prioritisation and relegation order the queue inside a "
            "worker, which this port does not reach.",
            "Chunks follow this project's own rule for slack in place of their trained predictor of step times, and "
            "newcomers are held to it too, which theirs are not.",
            "Requests reach workers by least predicted load, which the paper leaves open.",
        ),
        first_roles=lambda cluster: all_mixed(cluster, min(MOST_CHUNK_TOKENS, cluster.speed.chunk_tokens)),
        router=router,
        guard=True,
    )
