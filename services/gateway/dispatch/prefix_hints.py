"""Look-ups of which worker holds how much of a prompt, in one request to the KV index per turn of the event loop."""

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
from libs.stores.kvindex import KvIndex, PrefixQuery, probes
from services.gateway.workers.fleet import WorkerLinks

MAX_PROBES = 64
"""The blocks of one prompt that are looked up. They lie evenly over a longer prompt, so a prefix is found to within
this share of the prompt's length.
"""
# Longer prompts are hashed in a thread (8,192 tokens take about half a millisecond).
INLINE_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class _Kind:
    """The properties that make two workers' block hashes equal."""

    model_revision: str
    kv_layout: str
    block_size_tokens: int


class _Asked(NamedTuple):
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
    """The number of blocks up to and including each probe."""
    hashes: Sequence[bytes]
    found: dict[str, int]
    """The result, filled in by `fill`: tokens by worker id."""

    def fill(self, held: Mapping[str, int]) -> None:
        """Record how many leading probes each worker holds."""
        for worker, count in held.items():
            self.found[worker] = self.depths[count - 1] * self.kind.block_size_tokens


class PrefixHints:
    """The look-ups of prompts' prefixes. A store that is away looks like an empty one."""

    def __init__(
        self, index: KvIndex, fleet: WorkerLinks, tasks: TaskOwner, threads: Executor, *, max_hold_ms: float
    ) -> None:
        """A request waits at most `max_hold_ms`. Later answers still serve the binding rounds for which it waits."""
        self._max_hold_s = max_hold_ms / 1000
        self._index = index
        self._fleet = fleet
        self._tasks = tasks
        self._threads = threads
        self._pending: list[_Prompt] = []
        self._look_up: asyncio.Task[None] | None = None
        self.late = 0
        """The number of requests that went on before their look-up was answered."""

    async def cached_tokens(self, model: str, prompt: Sequence[int], salt: str, adapter: str = "") -> dict[str, int]:
        """Return the tokens of the prompt's start that each worker holds, by worker id.

        Answers after `max_hold_ms` are filled into the same dict. `salt` is the tenant's. The result is empty, and
        immediate, if there is no choice of worker.
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
        """Look up all prompts of this loop turn in one round trip."""
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
        """Return the ids of workers that serve the model, by kind; empty if neither phase has a choice of worker."""
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
    """Return the prompt as each kind of worker hashes it."""
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
