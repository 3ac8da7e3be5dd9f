"""A worker's entries in Redis under a lease: its registration, and the KV blocks that it can reuse."""

import asyncio
from itertools import islice

import structlog

from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Worker
from libs.contracts.protocol import unpaired
from libs.contracts.roles import is_by_hand, role_name
from libs.engine.reports import EngineEvent
from libs.policy.worker.assignment import AssignmentRefusal, first_assignment
from libs.stores.kvindex import KvIndex
from libs.stores.registry import Registry, RegistryDown
from libs.worker.host import WorkerHost

log = structlog.get_logger()

RENEWALS_PER_LEASE = 3
WITHDRAW_TIMEOUT_S = 2.0
# A role given by a person outlives the worker for this long, so that a restart does not undo it.
KEPT_ROLE_MS = 600_000


class Registration:
    """A worker's entry in the registry. During an outage it retries, and gateways keep their links."""

    def __init__(self, registry: Registry, host: WorkerHost, *, lease_ms: int) -> None:
        self._registry = registry
        self._host = host
        self._lease_ms = lease_ms
        self._changed = asyncio.Event()
        host.on_change(self._changed.set)

    async def run(self) -> None:
        away, announced_epoch = False, -1
        while True:
            self._changed.clear()
            try:
                worker = self._host.worker()
                await self._registry.announce(worker, lease_ms=self._lease_ms)
                away = False
                await self._keep_role(worker, changed=announced_epoch != worker.assignment.epoch)
                if announced_epoch != worker.assignment.epoch:
                    await self._look_for_partners(worker.id)
                    announced_epoch = worker.assignment.epoch
            except RegistryDown as error:
                if not away:
                    log.warning("registry is away", error=str(error))
                away = True
            try:
                async with asyncio.timeout(self._lease_ms / 1000 / RENEWALS_PER_LEASE):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def _keep_role(self, worker: Worker, *, changed: bool) -> None:
        """Keep the role that a person gave, and forget it once a planner has given another."""
        if is_by_hand(worker.role_change):
            await self._registry.keep_role(worker, keep_ms=KEPT_ROLE_MS)
        elif changed and worker.role_change.actor:
            await self._registry.keep_role(worker, keep_ms=0)

    async def _look_for_partners(self, worker_id: str) -> None:
        """Log why this worker will get no work, once in each role."""
        alone = unpaired(await self._registry.workers()).get(worker_id)
        if alone is not None:
            log.warning("worker has no partner", worker=worker_id, why=str(alone))

    async def withdraw(self) -> None:
        """Leave the registry. If it is away, the lease expires by itself."""
        worker = self._host.worker()
        try:
            async with asyncio.timeout(WITHDRAW_TIMEOUT_S):
                await self._registry.withdraw(worker.id, worker.incarnation)
        except (RegistryDown, TimeoutError) as error:
            log.warning("could not withdraw the registration", error=repr(error))


async def kept_role(registry: Registry, worker_id: str, model: str) -> Worker | None:
    """Return the role that a person gave this worker before it was restarted; None if there is none for its model."""
    try:
        kept = await registry.kept_role(worker_id)
    except RegistryDown as error:
        log.warning("registry is away: a role set by hand before the restart is unknown", error=str(error))
        return None
    if kept is None or kept.assignment.model != model:
        return None
    if isinstance(first_assignment(model, kept.assignment.role, kept.assignment.budget_tokens), AssignmentRefusal):
        log.warning("stored role of this worker is invalid", role=kept.assignment.role)
        return None
    role, actor = role_name(kept.assignment), kept.role_change.actor
    log.info("restored the role set by hand", worker=worker_id, role=role, actor=actor)
    return kept


# Pending changes; beyond it they are dropped and the worker publishes its whole list of blocks.
MAX_PENDING_BLOCKS = 65_536
# Changes in one call.
MAX_PUBLISHED_BLOCKS = 4096
# Pause between calls, so that a busy worker's changes share one; no one waits for them.
BEHIND_S = 0.05
FORGET_TIMEOUT_S = 2.0


class BlockPublisher:
    """Publishes which blocks of a model one worker holds."""

    def __init__(self, index: KvIndex, model: str, worker_id: str, *, lease_ms: int) -> None:
        self._index = index
        self._model = model
        self._worker_id = worker_id
        self._lease_ms = lease_ms
        # Bounded by the number of blocks in the engine's pool.
        self._held: set[bytes] = set()
        self._pending: dict[bytes, bool] = {}
        self._anew = False
        """True if the index must be rewritten because changes were dropped."""
        self._wake = asyncio.Event()

    def on_event(self, event: EngineEvent) -> None:
        """Record an event's changes; the last change of a block wins."""
        self._held.update(event.blocks.stored)
        self._held.difference_update(event.blocks.removed)
        for held, hashes in ((True, event.blocks.stored), (False, event.blocks.removed)):
            for block_hash in hashes:
                self._pending.pop(block_hash, None)
                self._pending[block_hash] = held
        if len(self._pending) > MAX_PENDING_BLOCKS:
            log.warning("KV index is behind and is rewritten", pending=len(self._pending), held=len(self._held))
            self._pending.clear()
            self._anew = True
        if self._pending or self._anew:
            self._wake.set()

    async def run(self) -> None:
        """Clear this worker's entries, then publish changes and renew the lease until cancelled."""
        await self._index.forget(self._model, self._worker_id)
        loop = asyncio.get_running_loop()
        renew_at_s = loop.time()
        while True:
            if loop.time() >= renew_at_s:
                await self._index.renew(self._model, self._worker_id, lease_ms=self._lease_ms)
                renew_at_s = loop.time() + self._lease_ms / 1000 / RENEWALS_PER_LEASE
            try:
                async with asyncio.timeout_at(renew_at_s):
                    await self._wake.wait()
            except TimeoutError:
                continue
            await self._publish()
            await asyncio.sleep(BEHIND_S)

    async def forget(self) -> None:
        """Remove this worker's entries. If the index is away, their lease expires by itself."""
        try:
            async with asyncio.timeout(FORGET_TIMEOUT_S):
                await self._index.forget(self._model, self._worker_id)
        except TimeoutError:
            return

    async def _publish(self) -> None:
        if self._anew:
            await self._publish_all()
            return
        batch = list(islice(self._pending.items(), MAX_PUBLISHED_BLOCKS))
        for block_hash, _ in batch:
            del self._pending[block_hash]
        if not self._pending:
            self._wake.clear()
        stored = [block_hash for block_hash, held in batch if held]
        removed = [block_hash for block_hash, held in batch if not held]
        await self._index.publish(self._model, self._worker_id, stored=stored, removed=removed)

    async def _publish_all(self) -> None:
        self._anew = False
        self._pending.clear()
        self._wake.clear()
        held = list(self._held)
        await self._index.forget(self._model, self._worker_id)
        await self._index.publish(self._model, self._worker_id, stored=held, removed=())
