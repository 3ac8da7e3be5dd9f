"""The registration of a worker: renewed well before its lease ends, and at once after a change."""

import asyncio

import structlog

from libs.contracts.protocol import unpaired
from libs.stores.registry.port import Registry, RegistryDown
from libs.worker.host import WorkerHost

log = structlog.get_logger()

RENEWALS_PER_LEASE = 3
WITHDRAW_TIMEOUT_S = 2.0


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

    async def _look_for_partners(self, worker_id: str) -> None:
        """Log why this worker will get no work, once in each role."""
        alone = unpaired(await self._registry.workers()).get(worker_id)
        if alone is not None:
            log.warning("no partner", worker=worker_id, why=str(alone))

    async def withdraw(self) -> None:
        """Leave the registry. If it is away, the lease expires by itself."""
        worker = self._host.worker()
        try:
            async with asyncio.timeout(WITHDRAW_TIMEOUT_S):
                await self._registry.withdraw(worker.id, worker.incarnation)
        except (RegistryDown, TimeoutError) as error:
            log.warning("could not withdraw", error=repr(error))
