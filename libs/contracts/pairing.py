"""Which workers can hand KV to one another, and which find nobody to hand it to or to take it from. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest

from libs.contracts.pb.fulcrum.common.v1.common_pb2 import ROLE_MIXED, ROLE_PREFILL, Worker


@dataclass(frozen=True, slots=True)
class Unpaired:
    """A worker that gets no work: of its model, nobody in the other phase has KV like its own, though some have other.

    Also what people read of it, as `str`.
    """

    worker_id: str
    phase: str
    model: str
    like: str
    """Somebody in the other phase."""
    difference: str

    def __str__(self) -> str:
        other = "prefill" if self.phase == "decode" else "decode"
        return (
            f"gets no work: no {other} worker of model {self.model!r} has KV like its own; {self.like} differs in"
            f" {self.difference}"
        )


def kv_kind(worker: Worker) -> str:
    """Equal for workers that can exchange blocks: same weights, same layout."""
    return f"{worker.model_revision}/{worker.capabilities.kv_layout}"


def unpaired(workers: Iterable[Worker]) -> dict[str, Unpaired]:
    """Those without a partner, by id. A phase that has no workers at all is no fault of the other's."""
    prompts: dict[str, dict[str, Worker]] = {}
    tokens: dict[str, dict[str, Worker]] = {}
    ours = list(workers)
    for worker in ours:
        for role, side in ((ROLE_PREFILL, prompts), (ROLE_MIXED, tokens)):
            if worker.assignment.role == role:
                side.setdefault(worker.assignment.model, {})[kv_kind(worker)] = worker
    found: dict[str, Unpaired] = {}
    for worker in ours:
        assignment = worker.assignment
        if assignment.role not in (ROLE_PREFILL, ROLE_MIXED) or assignment.budget_tokens:
            continue
        prompt = assignment.role == ROLE_PREFILL
        others = (tokens if prompt else prompts).get(assignment.model, {})
        if others and kv_kind(worker) not in others:
            other = min(others.values(), key=lambda each: (len(_differences(worker, each)), each.id))
            phase, difference = "prefill" if prompt else "decode", "; ".join(_differences(worker, other))
            found[worker.id] = Unpaired(worker.id, phase, assignment.model, other.id, difference)
    return found


def _differences(one: Worker, other: Worker) -> list[str]:
    """Part by part: `here, not there`."""
    parts = [
        f"{mine or 'nothing'} here, {theirs or 'nothing'} there"
        for mine, theirs in zip_longest(
            one.capabilities.kv_layout.split("/"), other.capabilities.kv_layout.split("/"), fillvalue=""
        )
        if mine != theirs
    ]
    weights = one.model_revision != other.model_revision
    return ([f"weights {one.model_revision[:12]} here, {other.model_revision[:12]} there"] if weights else []) + parts
