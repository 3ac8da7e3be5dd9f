"""Which worker holds how much of a prompt already, asked of the KV index once for all prompts of a loop turn."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from libs.contracts.hashing import block_hashes, chain_root
from libs.kvindex.port import KvIndex
from libs.runtime.tasks import TaskOwner
from services.gateway.fleet import Fleet

MAX_HASHED_BLOCKS = 1024
"""Blocks of a prompt's start that are looked up; what matches beyond them changes no choice."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """What makes two workers' block hashes equal."""

    model_revision: str
    kv_layout: str
    block_size_tokens: int


class PrefixHints:
    """Look-ups for prompts; a store that is away looks like one that holds nothing."""

    def __init__(self, index: KvIndex, fleet: Fleet, tasks: TaskOwner) -> None:
        self._index = index
        self._fleet = fleet
        self._tasks = tasks
        self._pending: dict[str, list[tuple[Sequence[int], str]]] = {}
        self._look_ups: dict[str, asyncio.Task[list[dict[str, int]]]] = {}

    async def cached_tokens(self, model: str, prompt: Sequence[int], tenant: str) -> dict[str, int]:
        """Tokens of the prompt's start by worker id. Empty at once where there is no choice of worker."""
        if sum(map(len, self._workers(model).values())) < 2:
            return {}
        pending = self._pending.setdefault(model, [])
        place = len(pending)
        pending.append((prompt, tenant))
        if model not in self._look_ups:
            self._look_ups[model] = self._tasks.spawn(f"prefix look-up {model}", self._look_up(model))
        # A client that leaves must not take the others' look-up with it.
        return (await asyncio.shield(self._look_ups[model]))[place]

    async def _look_up(self, model: str) -> list[dict[str, int]]:
        await asyncio.sleep(0)  # all prompts of this loop turn join
        pending = self._pending.pop(model)
        del self._look_ups[model]
        found: list[dict[str, int]] = [{} for _ in pending]
        for kind, worker_ids in self._workers(model).items():
            hashes = [_hashes(kind, prompt, tenant) for prompt, tenant in pending]
            held = await self._index.longest_prefix(model, hashes, worker_ids)
            for hints, blocks in zip(found, held, strict=True):
                hints.update({worker: count * kind.block_size_tokens for worker, count in blocks.items()})
        return found

    def _workers(self, model: str) -> dict[_Kind, list[str]]:
        """Ids of workers that compute prompts."""
        kinds: dict[_Kind, list[str]] = {}
        for link in self._fleet.links:
            view, worker = link.view(), link.worker
            if view and worker and view.model == model and (view.takes_prefill or view.takes_both):
                capabilities = worker.capabilities
                kind = _Kind(worker.model_revision, capabilities.kv_layout, capabilities.block_size_tokens)
                kinds.setdefault(kind, []).append(worker.id)
        return kinds


def _hashes(kind: _Kind, prompt: Sequence[int], tenant: str) -> list[bytes]:
    root = chain_root(model_revision=kind.model_revision, kv_layout=kind.kv_layout, tenant_salt=tenant)
    return block_hashes(root, prompt[: MAX_HASHED_BLOCKS * kind.block_size_tokens], kind.block_size_tokens)
