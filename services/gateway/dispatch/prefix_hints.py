"""Which worker holds how much of a prompt already, asked of the KV index once for all prompts of a loop turn."""

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import NamedTuple

from libs.contracts.hashing import block_hashes, chain_root
from libs.contracts.pb.fulcrum.common.v1.common_pb2 import WORKER_STATE_READY
from libs.contracts.pb.fulcrum.worker.v1.worker_pb2 import PHASE_BOTH, PHASE_DECODE, PHASE_PREFILL
from libs.policy.roles import serves
from libs.runtime.tasks import TaskOwner
from libs.stores.kvindex.entries import probes
from libs.stores.kvindex.port import KvIndex, PrefixQuery
from services.gateway.workers.fleet import WorkerLinks

MAX_PROBES = 64
"""Blocks of one prompt that are looked up. Those of a longer prompt lie evenly over it, so that a prefix is found to
within this share of the prompt, whatever its length."""
INLINE_TOKENS = 8192
"""Longer prompts are hashed off the event loop's thread (8,192 tokens take about half a millisecond)."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """What makes two workers' block hashes equal."""

    model_revision: str
    kv_layout: str
    block_size_tokens: int


class _Asked(NamedTuple):
    """What is looked up."""

    model: str
    prompt: Sequence[int]
    salt: str
    adapter: str


@dataclass(frozen=True, slots=True)
class _Prompt:
    """One prompt on one kind of worker."""

    kind: _Kind
    model: str
    workers: Sequence[str]
    depths: Sequence[int]
    """Blocks up to and including each probe."""
    hashes: Sequence[bytes]
    """Block hashes of the probes."""
    found: dict[str, int]
    """Filled in: tokens by worker id."""

    def fill(self, held: Mapping[str, int]) -> None:
        """Take how many leading probes each worker holds."""
        for worker, count in held.items():
            self.found[worker] = self.depths[count - 1] * self.kind.block_size_tokens


class PrefixHints:
    """Look-ups for prompts; a store that is away looks like one that holds nothing."""

    def __init__(
        self, index: KvIndex, fleet: WorkerLinks, tasks: TaskOwner, threads: Executor, *, max_hold_ms: float
    ) -> None:
        """A request waits no longer than `max_hold_ms`; what comes later is seen by rounds that it still waits for."""
        self._max_hold_s = max_hold_ms / 1000
        self._index = index
        self._fleet = fleet
        self._tasks = tasks
        self._threads = threads
        self._pending: list[_Prompt] = []
        self._look_up: asyncio.Task[None] | None = None
        self.late = 0
        """Requests that went on before their look-up was answered."""

    async def cached_tokens(self, model: str, prompt: Sequence[int], salt: str, adapter: str = "") -> dict[str, int]:
        """Tokens of the prompt's start by worker id; what comes after `max_hold_ms` is filled in. salt: of the tenant.

        Empty, and at once, where there is no choice of worker.
        """
        found: dict[str, int] = {}
        kinds = self._kinds(model)
        if not kinds:
            return found
        asked = _Asked(model, prompt, salt, adapter)
        if len(prompt) <= INLINE_TOKENS:
            task = self._join(_prompts(kinds, asked, found))
        else:
            task = self._tasks.spawn("hash prompt", self._hash_and_join(kinds, asked, found))
        # A client that leaves must not take the others' look-up with it: `wait` cancels nothing.
        _, late = await asyncio.wait({task}, timeout=self._max_hold_s)
        self.late += len(late)
        return found

    async def _hash_and_join(self, kinds: Mapping[_Kind, list[str]], asked: _Asked, found: dict[str, int]) -> None:
        loop = asyncio.get_running_loop()
        await self._join(await loop.run_in_executor(self._threads, _prompts, kinds, asked, found))

    def _join(self, prompts: list[_Prompt]) -> "asyncio.Task[None]":
        self._pending += prompts
        if self._look_up is None:
            self._look_up = self._tasks.spawn("prefix look-up", self._ask())
        return self._look_up

    async def _ask(self) -> None:
        """One round trip for all prompts of this loop turn."""
        await asyncio.sleep(0)
        prompts, self._pending, self._look_up = self._pending, [], None
        groups: dict[tuple[str, _Kind], list[_Prompt]] = {}
        for prompt in prompts:
            groups.setdefault((prompt.model, prompt.kind), []).append(prompt)
        queries = [
            PrefixQuery(model, [prompt.hashes for prompt in group], group[0].workers)
            for (model, _), group in groups.items()
        ]
        answers = await self._index.longest_prefix(queries)
        for group, answer in zip(groups.values(), answers, strict=True):
            for prompt, held in zip(group, answer, strict=True):
                prompt.fill(held)

    def _kinds(self, model: str) -> dict[_Kind, list[str]]:
        """Ids of workers that have the model; empty where neither phase has a choice of them."""
        kinds: dict[_Kind, list[str]] = {}
        prompts = decodes = 0
        for link in self._fleet.links:
            worker = link.worker
            if worker is None or worker.assignment.model != model or worker.state != WORKER_STATE_READY:
                continue
            prompts += serves(worker.assignment, PHASE_PREFILL) or serves(worker.assignment, PHASE_BOTH)
            decodes += serves(worker.assignment, PHASE_DECODE)
            capabilities = worker.capabilities
            kind = _Kind(worker.model_revision, capabilities.kv_layout, capabilities.block_size_tokens)
            kinds.setdefault(kind, []).append(worker.id)
        return kinds if prompts > 1 or decodes > 1 else {}


def _prompts(kinds: Mapping[_Kind, list[str]], asked: _Asked, found: dict[str, int]) -> list[_Prompt]:
    """The same prompt as each kind of worker would hash it."""
    prompts: list[_Prompt] = []
    for kind, workers in kinds.items():
        root = chain_root(
            model_revision=kind.model_revision,
            kv_layout=kind.kv_layout,
            adapter=asked.adapter,
            tenant_salt=asked.salt,
        )
        hashes = block_hashes(root, asked.prompt, kind.block_size_tokens)
        depths = probes(len(hashes), MAX_PROBES)
        prompts.append(_Prompt(kind, asked.model, workers, depths, [hashes[depth - 1] for depth in depths], found))
    return prompts
