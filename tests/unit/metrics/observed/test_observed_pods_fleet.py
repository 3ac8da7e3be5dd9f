"""Tests of a fleet whose list follows pods: what a change of the list preserves."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import pytest

from libs.bus.local import LocalBus
from libs.observe.fleet import ObservedTarget
from libs.policy.verdict.state import PodLabel
from libs.runtime.tasks import TaskOwner
from libs.testing.wait import ManualClock
from services.metrics.observed.run import ObservedFleet
from services.metrics.observed.traffic import ObservedTraffic
from tests.observe_rig import FakeVllm, Load

SECOND_NS = 10**9


@dataclass
class Pods:
    """Pods whose list a test sets."""

    targets: list[ObservedTarget] = field(default_factory=list)
    trouble: str = ""
    changed: Callable[[], None] = lambda: None
    label: PodLabel = field(default_factory=lambda: PodLabel("serving", "llm-d.ai/role"))

    async def follow(self, changed: Callable[[], None]) -> None:
        self.changed = changed
        await asyncio.Event().wait()


def server(name: str, role: str = "mixed", ip: str = "10.0.0.5") -> ObservedTarget:
    return ObservedTarget(f"http://{ip}:8000", name, role)


@dataclass
class Rig:
    pods: Pods
    fleet: ObservedFleet

    def set(self, *targets: ObservedTarget, trouble: str = "") -> None:
        self.pods.targets, self.pods.trouble = list(targets), trouble
        self.pods.changed()

    def roles(self) -> dict[str, str]:
        return {each.name: each.role for each in self.fleet.status().servers}


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    pods, tasks = Pods([server("a")]), TaskOwner()
    traffic = ObservedTraffic(ttft_limit_ns=5 * SECOND_NS, tpot_ns=100_000_000)
    clock = ManualClock(1_800_000_000 * SECOND_NS)
    fleet = ObservedFleet(pods.targets, LocalBus(), clock, traffic, every_ms=1_000, pods=pods)
    fleet.start(tasks)
    await asyncio.sleep(0)
    yield Rig(pods, fleet)
    await tasks.close()


async def test_a_changed_role_preserves_the_state_of_a_server(rig: Rig) -> None:
    known = rig.fleet.server("a")
    rig.fleet.take(known, FakeVllm(Load(decoding=8)).exposition().encode())
    rig.set(server("a", "prefill"))
    assert rig.roles() == {"a": "prefill"}
    assert rig.fleet.server("a") is known
    assert known.restarts == 0


async def test_the_list_follows_pods_that_come_and_go(rig: Rig) -> None:
    rig.set(server("a"), server("b", ip="10.0.0.6"))
    assert rig.roles() == {"a": "mixed", "b": "mixed"}
    rig.set(server("b", ip="10.0.0.6"))
    assert rig.roles() == {"b": "mixed"}


async def test_an_unreachable_api_server_leaves_the_list_unchanged_and_is_named(rig: Rig) -> None:
    rig.set(server("a"), trouble="the list of pods is that of before")
    assert rig.roles() == {"a": "mixed"}
    assert rig.fleet.status().trouble == "the list of pods is that of before"
    rig.set(server("a"))
    assert rig.fleet.status().trouble == ""


async def test_a_pod_recreated_at_another_address_has_the_same_name(rig: Rig) -> None:
    known = rig.fleet.server("a")
    rig.set(server("a", ip="10.0.0.9"))
    assert rig.fleet.server("a") is not known
    assert [(each.name, each.url) for each in rig.fleet.status().servers] == [("a", "http://10.0.0.9:8000")]
