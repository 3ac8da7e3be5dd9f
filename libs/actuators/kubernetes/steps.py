"""The next call of the API server on the way to a requested number of workers, given a Deployment's state. Pure.

A ReplicaSet first deletes pods that have not started, then those of the lowest deletion cost. A request that names
others therefore takes several steps: set the costs, wait until they are visible, set the number.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from libs.actuators.port import to_end


@dataclass(frozen=True, slots=True)
class Pod:
    """The pod of a worker, which has not ended."""

    name: str
    created: str
    """The time of creation in RFC 3339, with a resolution of a second."""
    ending: bool
    started: int
    """The progress of its start: 0 without a node, 1 on one, 2 running, 3 ready. A ReplicaSet ends the lowest first."""
    cost: int
    """The deletion cost; 0 for a pod without one."""
    uid: str = ""


@dataclass(frozen=True, slots=True)
class ScaleRequest:
    """The arguments of the latest call of the port's `have`."""

    count: int
    first_to_end: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SetCosts:
    """A step that sets deletion costs, by pod name."""

    costs: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class SetReplicas:
    """A step that scales the Deployment to this number."""

    count: int


@dataclass(frozen=True, slots=True)
class Wait:
    """A step that waits for a pod to change."""


Step = SetCosts | SetReplicas | Wait | None
"""The next step, or None once the request has been fulfilled."""


def oldest_first(pods: Sequence[Pod]) -> list[Pod]:
    return sorted(pods, key=lambda pod: (pod.created, pod.name))


def next_step(pods: Sequence[Pod], replicas: int, request: ScaleRequest, *, most: int, in_order: bool = True) -> Step:
    """Return the next step.

    `replicas` is the Deployment's present scale. `in_order` is whether unnamed pods that are still starting may
    delay the removal of the named ones. A ReplicaSet would end those first.
    """
    count = min(request.count, most)
    staying = [pod for pod in oldest_first(pods) if not pod.ending]
    if count == replicas:
        return None
    if count > replicas:
        # Ending pods still hold their GPUs, and the ReplicaSet may not have begun to end some of them.
        ending = len(pods) - len(staying) + max(len(staying) - replicas, 0)
        target = min(count, most - ending)
        return SetReplicas(target) if target > replicas else Wait()
    going = to_end([pod.name for pod in staying], count, request.first_to_end)
    wanted = {name: place - len(going) for place, name in enumerate(going)}
    costs = {pod.name: wanted.get(pod.name, 0) for pod in staying if pod.cost != wanted.get(pod.name, 0)}
    if costs:
        return SetCosts(costs)
    furthest = max((pod.started for pod in staying if pod.name in wanted), default=0)
    if in_order and any(pod.started < furthest for pod in staying if pod.name not in wanted):
        return Wait()
    return SetReplicas(count)
