"""What waits for each phase of each model: at its workers, and at gateways, where most of a long queue is. Pure."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from libs.contracts.roles import role_name
from libs.telemetry.clocks import Clocks
from libs.telemetry.facts import WorkerFacts
from libs.telemetry.fleet import Fleet
from libs.telemetry.gateways import Gateways, Waiting

PHASE_ROLES: Final = {"prefill": ("prefill",), "decode": ("decode", "mixed")}
"""Whose time and queue stand for a phase."""
FRESH_NS: Final = 2_000_000_000
"""Workers tell ten times a second: what one said longer ago is not what it has now."""
FRESH_SHARE: Final = 0.5
"""Of a pool's GPUs: with fewer that are heard its queue is not known."""
MAX_COUNT: Final = 2**53
"""What JSON's readers can hold; more is nonsense."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseQueue:
    """Of one model and phase; numbers are null while telemetry is away."""

    model: str
    phase: str
    """prefill, or decode: of roles decode and mixed."""
    requests: int | None
    """That wait, at workers and at gateways."""
    prompt_tokens: int | None
    """Of prompts to compute: of those that run too."""
    gateway_requests: int | None
    """Of `requests`, those that wait at gateways."""
    gateway_prompt_tokens: int | None
    """Of `prompt_tokens`, those of requests that wait at gateways."""


def phase_queues(fleet: Fleet, listed: Iterable[WorkerFacts], gateways: Gateways, now_ns: int) -> list[PhaseQueue]:
    """Of every model that has workers among `listed`, or for which anything waits."""
    pools: dict[tuple[str, str], list[WorkerFacts]] = {}
    phase_of = {role: phase for phase, roles in PHASE_ROLES.items() for role in roles}
    for facts in listed:
        phase = phase_of.get(role_name(facts.assignment))
        if phase is not None and not facts.left:
            pools.setdefault((facts.assignment.model, phase), []).append(facts)
    waiting = gateways.waiting(now_ns)
    for model, each in (waiting or {}).items():
        for phase in PHASE_ROLES:
            if at_gateways(each, phase)[0]:
                pools.setdefault((model, phase), [])
    return list(_queues(pools, waiting, fleet.clocks, now_ns))


def _queues(
    pools: dict[tuple[str, str], list[WorkerFacts]], waiting: dict[str, Waiting] | None, clocks: Clocks, now_ns: int
) -> Iterator[PhaseQueue]:
    offsets_ns = clocks.offsets_ns(now_ns)
    for (model, phase), members in sorted(pools.items()):
        if waiting is None or not are_heard(members, offsets_ns, now_ns):
            yield PhaseQueue(
                model=model,
                phase=phase,
                requests=None,
                prompt_tokens=None,
                gateway_requests=None,
                gateway_prompt_tokens=None,
            )
            continue
        requests, tokens = at_gateways(waiting.get(model, Waiting()), phase)
        yield PhaseQueue(
            model=model,
            phase=phase,
            requests=requests + sum(facts.load.waiting for facts in members),
            prompt_tokens=min(tokens + sum(facts.load.waiting_prefill_tokens for facts in members), MAX_COUNT),
            gateway_requests=requests,
            gateway_prompt_tokens=tokens,
        )


def at_gateways(waiting: Waiting, phase: str) -> tuple[int, int]:
    """Requests that wait there for a phase, and tokens of their prompts that are still to be computed."""
    if phase == "prefill":
        return waiting.prefill_requests, waiting.prefill_tokens
    return waiting.decode_requests, waiting.decode_prompt_tokens


def are_heard(members: Sequence[WorkerFacts], offsets_ns: dict[str, int], now_ns: int) -> bool:
    """Whether what the workers of a pool said of themselves is of now; `offsets_ns` of clocks are by node."""
    surely_ns = now_ns - FRESH_NS + max(offsets_ns.values(), default=0)
    if all(facts.covered_to_unix_ns > surely_ns for facts in members):  # nearly always
        return True
    gpus = heard = 0
    for facts in members:
        gpus += facts.gpus
        to_ns = facts.covered_to_unix_ns - offsets_ns.get(facts.node, 0)
        heard += facts.gpus * (to_ns > now_ns - FRESH_NS)
    return heard >= FRESH_SHARE * gpus
