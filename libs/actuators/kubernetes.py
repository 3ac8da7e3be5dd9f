"""The actuator for a Kubernetes cluster, whose workers are the pods of one Deployment and named after them.

It writes the number of workers to the Deployment's scale subresource, and the order of removal to the pods'
deletion costs. The ReplicaSet, the scheduler and the node autoscaler do the rest.
"""

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Final

import structlog

from libs.actuators.kubernetes_api import (
    Change,
    DeploymentPool,
    KubeApi,
    Pod,
    ScaleRequest,
    SetCosts,
    SetReplicas,
    Wait,
    next_step,
    oldest_first,
)
from libs.actuators.kubernetes_client import CALL_S, ApiRefusal, ScaledMeanwhile, TooOld
from libs.actuators.port import ActuatorDown, Started
from libs.runtime.tasks import TaskOwner

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
        """Return the Deployment and its pods. Raise ActuatorDown while they cannot be watched."""
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
                    version = ""  # a server restored to an older state does not know the version
                if not self._failed:
                    log.warning("a Deployment's pods cannot be watched: retrying", error=str(error))
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


CONFLICTS: Final = 3
"""The number of times that the scale may change between a read and a write."""
TRIES: Final = 10
"""The largest number of attempts to write the scale at once; after that, the request is pursued in the background."""
ORDER_S: Final = 20.0
"""The longest time for which starting pods may delay the removal of others that should be removed first."""
PURSUED_S: Final = 60.0
"""The time after which an unfulfilled request is dropped; the planner repeats requests that it still needs."""
PACE_S: Final = 0.1
LOOK_AGAIN_S: Final = 1.0
# A scale written by somebody else is not lowered for this long, since a person who scales by hand has a reason.
BY_HAND_S: Final = 600.0
SHOWN_AT_ONCE: Final = 8
"""The maximum number of role labels written by one call; the next call continues."""

SAID_AT_ONCE: Final = 5
"""The maximum number of pods that are named in an event and get their own event."""


class KubernetesActuator:
    """An actuator for one Deployment, given as NAMESPACE/NAME.

    `kubeconfig` is a file; if empty, the service account of this pod is used.
    """

    kind = "kubernetes"

    def __init__(self, *, deployment: str, most: int, kubeconfig: str = "", by_hand_s: float = BY_HAND_S) -> None:
        namespace, _, name = deployment.rpartition("/")
        self._most = most
        self._api = KubeApi(namespace or "default", name, kubeconfig)
        self._view = PodView(self._api)
        self._tasks = TaskOwner()
        self._watching: asyncio.Task[None] | None = None
        self._pursuing: asyncio.Task[None] | None = None
        self._request = ScaleRequest(0)
        self._requested_s = 0.0
        self._by_hand_s = by_hand_s
        self._replicas: int | None = None
        """The scale as last read or written."""
        self._held = 0
        """The scale written by somebody else, which holds until `_held_until_s`."""
        self._held_until_s = 0.0
        self._shown: dict[str, str] = {}
        """Role labels written so far, of workers that still exist."""
        self._lock = asyncio.Lock()

    async def look(self) -> Started:
        """Return the workers as last seen by the watch."""
        pool, pods = await self._known()
        waiting = frozenset(pod.name for pod in pods if not pod.started and not pod.ending)
        return Started(tuple(pod.name for pod in oldest_first(pods)), self._most, pool.model, waiting)

    async def have(self, count: int, *, first_to_end: Sequence[str] = ()) -> None:
        """Take the first step at once. Steps that depend on pods follow in the background as pods change."""
        now_s = asyncio.get_running_loop().time()
        if now_s < self._held_until_s and count < self._held:
            return
        self._request, self._requested_s = ScaleRequest(count, tuple(first_to_end)), now_s
        if not await self._advance() and (self._pursuing is None or self._pursuing.done()):
            self._pursuing = self._tasks.spawn("pursue a wish", self._pursue())

    async def show(self, roles: Mapping[str, str]) -> None:
        """Label the pods of these workers, writing only what has changed."""
        self._shown = {name: role for name, role in self._shown.items() if name in roles}
        changed = [name for name, role in roles.items() if self._shown.get(name) != role]
        for name in changed[:SHOWN_AT_ONCE]:
            await self._api.set_role(name, roles[name])
            self._shown[name] = roles[name]

    async def close(self) -> None:
        await self._tasks.close()
        await self._api.close()

    async def _known(self) -> tuple[DeploymentPool, list[Pod]]:
        if self._watching is None or self._watching.done():
            self._watching = self._tasks.spawn("watch pods", self._view.run())
        return await self._view.known()

    async def _pursue(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while loop.time() - self._requested_s < PURSUED_S:
                await self._view.change(LOOK_AGAIN_S)
                await asyncio.sleep(PACE_S)  # changes come in bursts
                if await self._advance():
                    return
            log.warning("the deployment did not reach the wanted number of workers in time", wanted=self._request.count)
        except ActuatorDown as error:
            log.warning("scaling stopped until it is requested again", error=str(error))

    async def _advance(self) -> bool:
        """Take the next step and return whether the request has been fulfilled."""
        async with self._lock:
            conflicts = 0
            before: int | None = None
            for _ in range(TRIES):
                pool, pods = await self._known()
                replicas, version = await self._api.scale()
                # A version also changes with the controller's writes of status, which are not conflicts.
                conflicts += before is not None and replicas != before
                if conflicts == CONFLICTS:
                    raise ActuatorDown(f"somebody else scales the Deployment as well: {CONFLICTS} conflicts")
                before = replicas
                if await self._is_held(pool, replicas):
                    return True
                in_order = asyncio.get_running_loop().time() - self._requested_s < ORDER_S
                step = next_step(pods, replicas, self._request, most=self._most, in_order=in_order)
                match step:
                    case None:
                        return True
                    case Wait():
                        return False
                    case SetCosts(costs):
                        for name, cost in costs.items():
                            await self._api.set_cost(name, cost)
                        return False  # the ReplicaSet's controller sees them at about the same time as the watch
                    case SetReplicas(count):
                        try:
                            await self._api.set_scale(count, version)
                            self._replicas = count
                        except ScaledMeanwhile:
                            continue
                        await self._say_scaled(pool, pods, replicas, count)
                        return count == min(self._request.count, self._most)
            return False

    async def _is_held(self, pool: DeploymentPool, replicas: int) -> bool:
        """Return whether somebody else's scale holds for now and the request would lower it."""
        known, self._replicas = self._replicas, replicas
        if known is not None and replicas > known:
            self._held, self._held_until_s = replicas, asyncio.get_running_loop().time() + self._by_hand_s
            if self._by_hand_s:
                message = (
                    f"somebody set {replicas} workers in place of {known}: not lowered for {self._by_hand_s:.0f} s"
                )
                await self._say(pool, "ScaledByHand", message)
        held = asyncio.get_running_loop().time() < self._held_until_s
        return held and min(self._request.count, self._most) < min(self._held, replicas)

    async def _say_scaled(self, pool: DeploymentPool, pods: Sequence[Pod], before: int, count: int) -> None:
        request = self._request
        message = f"the planner wishes for {request.count} workers of {pool.model or 'this pool'}: {before} to {count}"
        if count >= before or not request.first_to_end:
            return await self._say(pool, "ScaledByPlanner", message)
        named = request.first_to_end[:SAID_AT_ONCE]
        await self._say(pool, "ScaledByPlanner", f"{message}; first to end: {', '.join(named)}")
        there = {pod.name: pod for pod in pods if not pod.ending}
        for name in [each for each in named if each in there][: before - count]:
            said = f"stood by, and the planner wishes for {count} workers in place of {before}"
            await self._said(self._api.write_pod_event(there[name], "EndedByPlanner", said))
        return None

    async def _say(self, pool: DeploymentPool, reason: str, message: str) -> None:
        await self._said(self._api.write_event(pool, reason, message))

    async def _said(self, event: Coroutine[Any, Any, None]) -> None:
        try:
            await event
        except ActuatorDown as error:
            log.warning("an event could not be written", error=str(error))
