"""Columns of the registered workers, rebuilt when the registry's list changes. Pure."""

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from libs.contracts.pairing import Unpaired, unpaired
from libs.contracts.pb.fulcrum.common.v1.common_pb2 import WORKER_STATE_READY, Worker
from libs.policy.roles import MAX_BUDGET_TOKENS, Role

Ints = NDArray[np.int64]
Uints = NDArray[np.uint64]
Bools = NDArray[np.bool_]

ROLES: Final[frozenset[int]] = frozenset(Role)
# Default names of planners begin with it, by which a new leader recognizes its predecessor's changes.
PLANNERS: Final = "planner"
# How long a worker keeps a role that a person gave it; longer if it is pinned.
HAND_NS: Final = 60_000_000_000


MAX_TOKEN_BYTES: Final = 2**32
# Larger values are nonsense. Within them, sums of KV tokens over all workers fit 64 bits.
MAX_BLOCK_TOKENS: Final = 2**16


class WorkerColumns:
    """[workers] arrays in the registry's order."""

    def __init__(self, workers: Sequence[Worker], planner_id: str) -> None:
        self.workers = workers
        self.ids = [each.id for each in workers]
        self.places = {name: place for place, name in enumerate(self.ids)}
        self.incarnation: Uints = _uints(each.incarnation for each in workers)
        self.epoch: Uints = _uints(each.assignment.epoch for each in workers)
        self.role: Ints = _ints(each.assignment.role for each in workers)
        self.budget_tokens: Ints = _ints(each.assignment.budget_tokens for each in workers)
        self.gpus: Ints = _ints(gpus_of(each) for each in workers)
        self.ready: Bools = _bools(each.state == WORKER_STATE_READY for each in workers)
        self.kv_blocks: Ints = _ints(each.capabilities.kv_blocks for each in workers)
        self.block_tokens: Ints = _ints(min(each.capabilities.block_size_tokens, MAX_BLOCK_TOKENS) for each in workers)
        self.kv_token_bytes: Ints = _ints(
            min(each.capabilities.kv_block_bytes // max(each.capabilities.block_size_tokens, 1), MAX_TOKEN_BYTES)
            for each in workers
        )
        self.chunk_tokens: Ints = _ints(each.capabilities.chunk_tokens for each in workers)
        self.max_sequences: Ints = _ints(each.capabilities.max_sequences for each in workers)
        self.alone: dict[str, Unpaired] = unpaired(workers)
        """Workers that get no work in any role, with the reason."""
        self.paired: Bools = _bools(name not in self.alone for name in self.ids)
        by_planners = [by_planner(each, planner_id) for each in workers]
        self.keeps_budget: Bools = ~_bools(by_planners)
        """Whether the budget was set by a person or at the worker's start, not by a planner."""
        self.own_budgets: dict[str, int] = {
            each.id: min(each.role_change.own_budget_tokens, MAX_BUDGET_TOKENS)
            for each, ours in zip(workers, by_planners, strict=True)
            if ours and each.role_change.own_budget_tokens
        }
        """By worker, the budget it had before planners changed it, as it reports itself."""
        self._hand_until_ns: Uints = _uints(
            0 if ours or not each.role_change.actor else min(each.role_change.unix_ns, 2**62) + HAND_NS
            for each, ours in zip(workers, by_planners, strict=True)
        )
        self.groups: dict[str, str] = {each.id: each.group for each in workers if each.group}
        """By rank, the name of its data-parallel group. Two models may use the same name."""
        together: dict[tuple[str, str], list[str]] = {}
        for each in sorted(workers, key=lambda worker: worker.id):
            if each.group:
                together.setdefault((each.assignment.model, each.group), []).append(each.id)
        self.ranks: dict[str, list[str]] = {names[0]: names for names in together.values()}
        """All ranks of each group, by its first rank."""
        self.counts: Bools = _bools(name not in self.groups or name in self.ranks for name in self.ids)
        """Whether the worker counts as one: of a group only the first rank does."""
        models: dict[str, list[int]] = {}
        for place, each in enumerate(workers):
            models.setdefault(each.assignment.model, []).append(place)
        self.models: dict[str, Ints] = {name: np.array(places, np.int64) for name, places in sorted(models.items())}
        """Places of each model's workers."""

    def __len__(self) -> int:
        return len(self.ids)

    def pinned(self, named: Iterable[str], now_ns: int) -> Bools:
        """Return which workers keep their role: the named ones and those that a person moved recently."""
        kept: Bools = self._hand_until_ns > np.uint64(max(now_ns, 0))
        for name in named:
            if (place := self.places.get(name)) is not None:
                kept[place] = True
        return kept


def by_planner(worker: Worker, planner_id: str) -> bool:
    """Return whether this planner, or one with a planner's default name, set the worker's assignment."""
    actor = worker.role_change.actor
    return actor == planner_id or actor.startswith(PLANNERS)


def gpus_of(worker: Worker) -> int:
    """Return the worker's weight in GPUs; a CPU worker counts as one."""
    return max(worker.gpus, 1)


def _ints(values: Iterable[int]) -> Ints:
    return np.array(list(values), np.int64)


def _uints(values: Iterable[int]) -> Uints:
    return np.array(list(values), np.uint64)


def _bools(values: Iterable[bool]) -> Bools:
    return np.array(list(values), np.bool_)
