"""From a wished number of workers to the next call of the API server, by what is seen of a Deployment. Pure.

A ReplicaSet deletes pods that have not started first, then those of the least deletion cost. A wish that names others
therefore takes several steps: costs, the wait until they are seen, the number.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from libs.actuators.port import to_end


@dataclass(frozen=True, slots=True)
class Pod:
    """A worker's pod that has not ended."""

    name: str
    created: str
    """RFC 3339, of whole seconds."""
    ending: bool
    started: int
    """How far it has come: 0 without a node, 1 on one, 2 running, 3 ready. A ReplicaSet ends the least first."""
    cost: int
    """Its deletion cost, 0 without one."""
    uid: str = ""


@dataclass(frozen=True, slots=True)
class Wish:
    """What the port's `have` asks for."""

    count: int
    first_to_end: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SetCosts:
    """Have these deletion costs, by pod."""

    costs: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class SetReplicas:
    """Have this many pods."""

    count: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Look again when a pod has changed."""


Step = SetCosts | SetReplicas | Wait | None
"""None: the wish is the cluster's by now."""


def oldest_first(pods: Sequence[Pod]) -> list[Pod]:
    """In the order of their creation."""
    return sorted(pods, key=lambda pod: (pod.created, pod.name))


def next_step(pods: Sequence[Pod], replicas: int, wish: Wish, *, most: int, in_order: bool = True) -> Step:
    """What to ask for next. `replicas`: as the Deployment has it now; `in_order`: whether pods that were not named may
    hold up those that were, until they have started and go no sooner."""
    count = min(wish.count, most)
    staying = [pod for pod in oldest_first(pods) if not pod.ending]
    if count == replicas:
        return None
    if count > replicas:
        # What ends still holds its GPUs: the ReplicaSet may not have begun with some of it.
        ending = len(pods) - len(staying) + max(len(staying) - replicas, 0)
        target = min(count, most - ending)
        return SetReplicas(target) if target > replicas else Wait()
    going = to_end([pod.name for pod in staying], count, wish.first_to_end)
    wanted = {name: place - len(going) for place, name in enumerate(going)}
    costs = {pod.name: wanted.get(pod.name, 0) for pod in staying if pod.cost != wanted.get(pod.name, 0)}
    if costs:
        return SetCosts(costs)
    furthest = max((pod.started for pod in staying if pod.name in wanted), default=0)
    if in_order and any(pod.started < furthest for pod in staying if pod.name not in wanted):
        return Wait()
    return SetReplicas(count)
