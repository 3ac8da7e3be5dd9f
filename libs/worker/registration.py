"""Keeps a worker registered: renewed well before its lease ends, at once when something changed."""

import asyncio

import structlog

from libs.registry.port import Registry, RegistryDown
from libs.worker.host import WorkerHost

log = structlog.get_logger()

RENEWALS_PER_LEASE = 3
WITHDRAW_TIMEOUT_S = 2.0


class Registration:
    """A worker's entry in the registry. An outage is waited out: gateways keep the links that they have."""

    def __init__(self, registry: Registry, host: WorkerHost, *, lease_ms: int) -> None:
        self._registry = registry
        self._host = host
        self._lease_ms = lease_ms
        self._changed = asyncio.Event()
        host.on_change(self._changed.set)

    async def run(self) -> None:
        """Announce and renew until cancelled."""
        away = False
        while True:
            self._changed.clear()
            try:
                await self._registry.announce(self._host.worker(), lease_ms=self._lease_ms)
                away = False
            except RegistryDown as error:
                if not away:
                    log.warning("registry is away", error=str(error))
                away = True
            try:
                async with asyncio.timeout(self._lease_ms / 1000 / RENEWALS_PER_LEASE):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def withdraw(self) -> None:
        """Leave the registry; when it is away the lease ends by itself."""
        worker = self._host.worker()
        try:
            async with asyncio.timeout(WITHDRAW_TIMEOUT_S):
                await self._registry.withdraw(worker.id, worker.incarnation)
        except (RegistryDown, TimeoutError) as error:
            log.warning("could not withdraw", error=repr(error))
