"""A Deployment's pods, kept current by a watch: one list, then changes, so that reading them costs no call."""

import asyncio
from typing import Final

import structlog

from libs.actuators.kubernetes.api import CALL_S, ApiRefusal, Change, DeploymentPool, KubeApi, TooOld
from libs.actuators.kubernetes.steps import Pod
from libs.actuators.port import ActuatorDown

log = structlog.get_logger()

FIRST_PAUSE_S: Final = 0.5
LONGEST_PAUSE_S: Final = 8.0


class PodView:
    """The state of a Deployment's pods, which is current while `run` runs."""

    def __init__(self, api: KubeApi) -> None:
        self._api = api
        self.pods: dict[str, Pod] = {}
        """The pods as last seen, at most MAX_PODS at each list."""
        self._pool: DeploymentPool | None = None
        self._failed = ""
        self._changed = asyncio.Event()
        self.lists = 0
        """The number of times that all pods were listed."""

    async def known(self) -> tuple[DeploymentPool, list[Pod]]:
        """Return the Deployment and its pods. Raises ActuatorDown while they cannot be watched."""
        if self._pool is None and not self._failed:
            await self.change(CALL_S)
        if self._pool is None or self._failed:
            raise ActuatorDown(self._failed or "Kubernetes' API server takes too long")
        return self._pool, list(self.pods.values())

    async def change(self, timeout_s: float) -> None:
        """Wait for the next change, but no longer than `timeout_s`."""
        self._changed.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return

    async def run(self) -> None:
        """Watch until cancelled.

        While the server is unreachable, retry at growing intervals. A watch that ends continues from its last
        version; pods are listed again only if the server no longer keeps the changes since then.
        """
        pause_s, version = FIRST_PAUSE_S, ""
        while True:
            try:
                pool = await self._api.pool()  # an upgrade may have changed it
                if not version or pool != self._pool:
                    self.pods, version = await self._api.pods(pool.selector)
                    self.lists += 1
                self._pool, self._failed, pause_s = pool, "", FIRST_PAUSE_S
                self._changed.set()
                async for change in self._api.changes(pool.selector, version):
                    version = change.version
                    self._take(change)
                await asyncio.sleep(FIRST_PAUSE_S)
            except TooOld:
                version = ""
                await asyncio.sleep(FIRST_PAUSE_S)
            except ActuatorDown as error:
                if isinstance(error, ApiRefusal):
                    version = ""  # a server restored to an older state does not have our version
                if not self._failed:
                    log.warning("a Deployment's pods cannot be followed: asked again", error=str(error))
                self._failed = str(error)
                self._changed.set()
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _take(self, change: Change) -> None:
        if not change.name:
            return
        if change.pod is None:
            self.pods.pop(change.name, None)
        else:
            self.pods[change.name] = change.pod
        self._changed.set()
