"""The actuator over a Kubernetes cluster: started workers are the pods of one Deployment, named after them.

The number goes to the Deployment's scale subresource; who goes first, to its pods' deletion costs. Its ReplicaSet, the
scheduler and the node autoscaler do the rest.
"""

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Final

import structlog

from libs.actuators.kubernetes.api import DeploymentPool, KubeApi, ScaledMeanwhile
from libs.actuators.kubernetes.steps import Pod, SetCosts, SetReplicas, Wait, Wish, next_step, oldest_first
from libs.actuators.kubernetes.view import PodView
from libs.actuators.port import ActuatorDown, Started
from libs.runtime.tasks import TaskOwner

log = structlog.get_logger()

CONFLICTS: Final = 3
"""Times that a number is written again because somebody else wrote one meanwhile."""
ORDER_S: Final = 20.0
"""How long pods that start may hold up others that are to go first."""
PURSUED_S: Final = 60.0
"""A wish that is not the cluster's by then is given up: whoever wished it asks again."""
PACE_S: Final = 0.1
LOOK_AGAIN_S: Final = 1.0
BY_HAND_S: Final = 600.0
"""Time for which a number that somebody else wrote is not lowered: a person who scales by hand has a reason."""
SHOWN_AT_ONCE: Final = 8
"""Roles that one call writes at most; the next one goes on."""

SAID_AT_ONCE: Final = 5
"""Pods that are named in an event, and have one of their own, at most."""


class KubernetesActuator:
    """`deployment`: NAMESPACE/NAME; `kubeconfig`: a file, empty: the account of the pod that this runs in."""

    kind = "kubernetes"

    def __init__(self, *, deployment: str, most: int, kubeconfig: str = "", by_hand_s: float = BY_HAND_S) -> None:
        namespace, _, name = deployment.rpartition("/")
        self._most = most
        self._api = KubeApi(namespace or "default", name, kubeconfig)
        self._view = PodView(self._api)
        self._tasks = TaskOwner()
        self._watching: asyncio.Task[None] | None = None
        self._pursuing: asyncio.Task[None] | None = None
        self._wish = Wish(0)
        self._wished_s = 0.0
        self._by_hand_s = by_hand_s
        self._replicas: int | None = None
        """As it was read or written last."""
        self._held = 0
        """What somebody else wrote last, until `_held_until_s`."""
        self._held_until_s = 0.0
        self._shown: dict[str, str] = {}
        """Roles that were written, of workers that there still are."""
        self._lock = asyncio.Lock()

    async def look(self) -> Started:
        """As the watch has it."""
        pool, pods = await self._known()
        waiting = frozenset(pod.name for pod in pods if not pod.started and not pod.ending)
        return Started(tuple(pod.name for pod in oldest_first(pods)), self._most, pool.model, waiting)

    async def have(self, count: int, *, first_to_end: Sequence[str] = ()) -> None:
        """Asks the API server now; what has to wait for pods is asked for as they change."""
        now_s = asyncio.get_running_loop().time()
        if now_s < self._held_until_s and count < self._held:
            return
        self._wish, self._wished_s = Wish(count, tuple(first_to_end)), now_s
        if not await self._advance() and (self._pursuing is None or self._pursuing.done()):
            self._pursuing = self._tasks.spawn("pursue a wish", self._pursue())

    async def show(self, roles: Mapping[str, str]) -> None:
        """Labels of the pods that are named like them; each is written once it has changed."""
        self._shown = {name: role for name, role in self._shown.items() if name in roles}
        changed = [name for name, role in roles.items() if self._shown.get(name) != role]
        for name in changed[:SHOWN_AT_ONCE]:
            await self._api.set_role(name, roles[name])
            self._shown[name] = roles[name]

    async def close(self) -> None:
        """Disconnect."""
        await self._tasks.close()
        await self._api.close()

    async def _known(self) -> tuple[DeploymentPool, list[Pod]]:
        if self._watching is None or self._watching.done():
            self._watching = self._tasks.spawn("watch pods", self._view.run())
        return await self._view.known()

    async def _pursue(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while loop.time() - self._wished_s < PURSUED_S:
                await self._view.change(LOOK_AGAIN_S)
                await asyncio.sleep(PACE_S)  # changes come in bursts
                if await self._advance():
                    return
            log.warning("a wish has not come true: it is given up", wished=self._wish.count)
        except ActuatorDown as error:
            log.warning("a wish is given up until it is asked for again", error=str(error))

    async def _advance(self) -> bool:
        """Take the next step; whether the wish is the cluster's now."""
        async with self._lock:
            for _ in range(CONFLICTS):
                pool, pods = await self._known()
                replicas, version = await self._api.scale()
                if await self._is_held(pool, replicas):
                    return True
                in_order = asyncio.get_running_loop().time() - self._wished_s < ORDER_S
                step = next_step(pods, replicas, self._wish, most=self._most, in_order=in_order)
                match step:
                    case None:
                        return True
                    case Wait():
                        return False
                    case SetCosts(costs):
                        for name, cost in costs.items():
                            await self._api.set_cost(name, cost)
                        return False  # a ReplicaSet's controller sees them about when our own watch does
                    case SetReplicas(count):
                        try:
                            await self._api.set_scale(count, version)
                            self._replicas = count
                        except ScaledMeanwhile:
                            continue
                        await self._say_scaled(pool, pods, replicas, count)
                        return count == min(self._wish.count, self._most)
            raise ActuatorDown(f"somebody else scales the Deployment as well: {CONFLICTS} conflicts")

    async def _is_held(self, pool: DeploymentPool, replicas: int) -> bool:
        """Whether somebody else wants at least that number for now, and the wish is for fewer."""
        known, self._replicas = self._replicas, replicas
        if known is not None and replicas > known:
            self._held, self._held_until_s = replicas, asyncio.get_running_loop().time() + self._by_hand_s
            if self._by_hand_s:
                message = (
                    f"somebody set {replicas} workers in place of {known}: not lowered for {self._by_hand_s:.0f} s"
                )
                await self._say(pool, "ScaledByHand", message)
        held = asyncio.get_running_loop().time() < self._held_until_s
        return held and min(self._wish.count, self._most) < min(self._held, replicas)

    async def _say_scaled(self, pool: DeploymentPool, pods: Sequence[Pod], before: int, count: int) -> None:
        wish = self._wish
        message = f"the planner wishes for {wish.count} workers of {pool.model or 'this pool'}: {before} to {count}"
        if count >= before or not wish.first_to_end:
            return await self._say(pool, "ScaledByPlanner", message)
        named = wish.first_to_end[:SAID_AT_ONCE]
        await self._say(pool, "ScaledByPlanner", f"{message}; first to end: {', '.join(named)}")
        there = {pod.name: pod for pod in pods if not pod.ending}
        for name in [each for each in named if each in there][: before - count]:
            said = f"stood by, and the planner wishes for {count} workers in place of {before}"
            await self._said(self._api.say_of_pod(there[name], "EndedByPlanner", said))
        return None

    async def _say(self, pool: DeploymentPool, reason: str, message: str) -> None:
        await self._said(self._api.say(pool, reason, message))

    async def _said(self, event: Coroutine[Any, Any, None]) -> None:
        try:
            await event
        except ActuatorDown as error:
            log.warning("an event could not be written", error=str(error))
