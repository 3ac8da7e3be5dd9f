"""The agreement of gateways and workers: protocol versions, the least rate of frames, and KV compatibility. Pure.

Each side states the protocol it speaks and the oldest that it still understands. A release that changes the meaning of
a frame increments PROTOCOL; one that drops an older meaning increments OLDEST. A peer that states no version predates
the handshake, which is protocol 1.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest
from typing import Final

from libs.contracts.errors import VersionMismatch
from libs.contracts.pb.fulcrum.common.v1.common_pb2 import ROLE_MIXED, ROLE_PREFILL, Worker

PROTOCOL: Final = 2
OLDEST: Final = 1


def check_protocol(peer: str, protocol: int, oldest: int) -> None:
    """Raise VersionMismatch if `peer`, which stated these versions, and this process are not compatible."""
    protocol, oldest = protocol or 1, oldest or 1
    if protocol < OLDEST:
        raise VersionMismatch(
            f"{peer} speaks protocol {protocol}, and this release understands {OLDEST} to {PROTOCOL}: upgrade it first"
        )
    if oldest > PROTOCOL:
        raise VersionMismatch(
            f"{peer} understands protocols from {oldest} on, and this release speaks {PROTOCOL}: upgrade this first"
        )


# Longest pause between two frames to a gateway whose work a worker has, even if nothing changed. An idle worker also
# answers a first submit within it.
SIGN_OF_LIFE_MS = 100
# The same for a gateway without work here, for which nothing depends on it.
RESTING_SIGN_OF_LIFE_MS = 500

# Workers report at least three times a second; an older report does not describe the present.
FRESH_NS = 2_000_000_000


@dataclass(frozen=True, slots=True)
class Unpaired:
    """A worker without work because no worker of its model in the other phase has compatible KV, though some exist.

    `str` returns the explanation for people.
    """

    worker_id: str
    phase: str
    model: str
    like: str
    """The id of a worker in the other phase."""
    difference: str

    def __str__(self) -> str:
        other = "prefill" if self.phase == "decode" else "decode"
        return (
            f"gets no work: no {other} worker of model {self.model!r} has KV like its own; {self.like} differs in"
            f" {self.difference}"
        )


def kv_kind(worker: Worker) -> str:
    """Return a text that is equal for workers that can exchange blocks: same weights, same layout."""
    return f"{worker.model_revision}/{worker.capabilities.kv_layout}"


def unpaired(workers: Iterable[Worker]) -> dict[str, Unpaired]:
    """Return workers without a partner, by id. If a phase has no workers at all, no worker is unpaired."""
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
    """Describe each differing part as `here, not there`."""
    parts = [
        f"{mine or 'nothing'} here, {theirs or 'nothing'} there"
        for mine, theirs in zip_longest(
            one.capabilities.kv_layout.split("/"), other.capabilities.kv_layout.split("/"), fillvalue=""
        )
        if mine != theirs
    ]
    weights = one.model_revision != other.model_revision
    return ([f"weights {one.model_revision[:12]} here, {other.model_revision[:12]} there"] if weights else []) + parts
