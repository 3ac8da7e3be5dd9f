"""Queues by model and phase, summed over workers and gateways, which hold most of a long queue. Pure."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from libs.contracts.protocol import FRESH_NS
from libs.telemetry.columns import Ints
from libs.telemetry.gateways import GatewayReports, ModelBacklog
from libs.telemetry.nodes import Clocks
from libs.telemetry.workers import Listing, Loads

PHASE_ROLES: Final = {"prefill": ("prefill",), "decode": ("decode", "mixed")}
"""Roles of the workers whose time and queue count for a phase."""
FRESH_SHARE: Final = 0.5
"""The share of a pool's GPUs that must report for its queue to be known."""
MAX_COUNT: Final = 2**53
"""Largest integer that JSON readers hold exactly; counts are clipped to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseQueue:
    """The queue of one model and phase; numbers are null while telemetry is missing."""

    model: str
    phase: str
    """The phase: prefill, or decode (roles decode and mixed)."""
    requests: int | None
    """Requests that wait at workers and at gateways."""
    prompt_tokens: int | None
    """Prompt tokens still to be computed, those of running requests included."""
    gateway_requests: int | None
    """The part of `requests` that waits at gateways."""
    gateway_prompt_tokens: int | None
    """The part of `prompt_tokens` whose requests wait at gateways."""


def phase_queues(loads: Loads, clocks: Clocks, gateways: GatewayReports, now_ns: int) -> list[PhaseQueue]:
    """Return the queues of every model that has workers or waiting requests."""
    waiting = gateways.waiting(now_ns)
    pools = {
        (model, phase) for phase, roles in PHASE_ROLES.items() for model, role in loads.listing.pools if role in roles
    }
    for model, each in (waiting or {}).items():
        pools.update((model, phase) for phase in PHASE_ROLES if at_gateways(each, phase)[0])
    return list(_queues(sorted(pools), loads, waiting, clocks.offsets_ns(now_ns), now_ns))


def pool_indices(listing: Listing, model: str, phase: str) -> Ints:
    """Return the indices of a model's workers that serve a phase."""
    pools = [listing.pools[model, role] for role in PHASE_ROLES[phase] if (model, role) in listing.pools]
    return np.concatenate([*pools, np.zeros(0, np.int64)])


def _queues(
    pools: Iterable[tuple[str, str]],
    loads: Loads,
    waiting: dict[str, ModelBacklog] | None,
    offsets_ns: dict[str, int],
    now_ns: int,
) -> Iterator[PhaseQueue]:
    for model, phase in pools:
        indices = pool_indices(loads.listing, model, phase)
        if waiting is None or not are_fresh(loads, indices, offsets_ns, now_ns):
            yield PhaseQueue(
                model=model,
                phase=phase,
                requests=None,
                prompt_tokens=None,
                gateway_requests=None,
                gateway_prompt_tokens=None,
            )
            continue
        requests, tokens = at_gateways(waiting.get(model, ModelBacklog()), phase)
        yield PhaseQueue(
            model=model,
            phase=phase,
            requests=requests + int(loads.waiting[indices].sum()),
            prompt_tokens=min(tokens + int(loads.waiting_prefill_tokens[indices].sum()), MAX_COUNT),
            gateway_requests=requests,
            gateway_prompt_tokens=tokens,
        )


def at_gateways(waiting: ModelBacklog, phase: str) -> tuple[int, int]:
    """Return a phase's requests that wait at gateways, and their prompt tokens that are still to be computed."""
    if phase == "prefill":
        return waiting.prefill_requests, waiting.prefill_tokens
    return waiting.decode_requests, waiting.decode_prompt_tokens


def are_fresh(loads: Loads, indices: Ints, offsets_ns: dict[str, int], now_ns: int) -> bool:
    """Check that the reports of the workers at `indices` are recent; `offsets_ns` are clock offsets by node."""
    covered_to_ns, gpus = loads.covered_to_ns[indices], loads.listing.gpus[indices]
    surely_ns = now_ns - FRESH_NS + max(offsets_ns.values(), default=0)
    if (covered_to_ns > surely_ns).all():  # true in nearly all cases
        return True
    nodes = [loads.listing.workers[index].node for index in indices.tolist()]
    to_ns = covered_to_ns - np.array([offsets_ns.get(node, 0) for node in nodes], np.int64)
    return bool(gpus[to_ns > now_ns - FRESH_NS].sum() >= FRESH_SHARE * gpus.sum())
