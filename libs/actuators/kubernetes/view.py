"""A Deployment's pods as a watch keeps them: one list, then changes, so that looking costs no call."""

import asyncio
from typing import Final

import structlog

from libs.actuators.kubernetes.api import CALL_S, KubeApi, Pool
from libs.actuators.kubernetes.steps import Pod
from libs.actuators.port import ActuatorDown

log = structlog.get_logger()

FIRST_PAUSE_S: Final = 0.5
LONGEST_PAUSE_S: Final = 8.0


class PodView:
    """Follows pods while `run` runs."""

    def __init__(self, api: KubeApi) -> None:
        self._api = api
        self._pods: dict[str, Pod] = {}
        """At most MAX_PODS at each list."""
        self._pool: Pool | None = None
        self._failed = ""
        self._changed = asyncio.Event()

    async def known(self) -> tuple[Pool, list[Pod]]:
        """The Deployment and its pods. Raises ActuatorDown while they cannot be followed."""
        if self._pool is None and not self._failed:
            await self.change(CALL_S)
        if self._pool is None or self._failed:
            raise ActuatorDown(self._failed or "Kubernetes' API server takes too long")
        return self._pool, list(self._pods.values())

    async def change(self, timeout_s: float) -> None:
        """Returns after the next change, or so long."""
        self._changed.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return

    async def run(self) -> None:
        """Until cancelled. While the server is away it is asked again and again, less and less often."""
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                pool = await self._api.pool()
                self._pods, version = await self._api.pods(pool.selector)
                self._pool, self._failed, pause_s = pool, "", FIRST_PAUSE_S
                self._changed.set()
                async for name, pod in self._api.changes(pool.selector, version):
                    self._take(name, pod)
                await asyncio.sleep(FIRST_PAUSE_S)
            except ActuatorDown as error:
                if not self._failed:
                    log.warning("a Deployment's pods cannot be followed: asked again", error=str(error))
                self._failed = str(error)
                self._changed.set()
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _take(self, name: str, pod: Pod | None) -> None:
        if pod is None:
            self._pods.pop(name, None)
        else:
            self._pods[name] = pod
        self._changed.set()
