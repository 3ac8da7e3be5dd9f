"""Tests of the API calls towards a requested number of pods: ordered, bounded and finite."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hypothesis import given
from hypothesis import strategies as st

from libs.actuators.kubernetes_api import Pod, ScaleRequest, SetCosts, SetReplicas, Wait, next_step

MOST = 6


def pod(
    name: str, *, started: int = 3, ending: bool = False, cost: int = 0, created: str = "2026-01-01T00:00:00Z"
) -> Pod:
    return Pod(name, created, ending, started, cost)


@dataclass
class Cluster:
    """A cluster whose controllers take time: a number takes effect later, and pods start and end slowly."""

    replicas: int
    pods: dict[str, Pod] = field(default_factory=dict)
    made: int = 0
    deleted: list[str] = field(default_factory=list)

    def take(self, step: SetCosts | SetReplicas | Wait | None) -> None:
        if isinstance(step, SetCosts):
            self.pods |= {name: replace(self.pods[name], cost=cost) for name, cost in step.costs.items()}
        elif isinstance(step, SetReplicas):
            self.replicas = step.count

    def reconcile(self) -> None:
        staying = sorted((each for each in self.pods.values() if not each.ending), key=lambda p: (p.started, p.cost))
        for each in staying[: max(len(staying) - self.replicas, 0)]:
            self.pods[each.name] = replace(each, ending=True)
            self.deleted.append(each.name)
        for _ in range(self.replicas - len(staying)):
            self.made += 1
            name = f"new-{self.made}"
            self.pods[name] = pod(name, started=0, created="2026-01-02T00:00:00Z")

    def go_on(self) -> None:
        kept = [each for each in self.pods.values() if not each.ending]
        self.pods = {each.name: replace(each, started=min(each.started + 1, 3)) for each in kept}


def test_more_pods_are_requested_in_one_call_and_an_unchanged_number_in_none() -> None:
    pods = [pod("a")]
    assert next_step(pods, 1, ScaleRequest(3), most=MOST) == SetReplicas(3)
    assert next_step(pods, 3, ScaleRequest(3), most=MOST) is None
    assert next_step(pods, 1, ScaleRequest(99), most=MOST) == SetReplicas(MOST)
    assert next_step(pods, MOST, ScaleRequest(99), most=MOST) is None


def test_a_terminating_pod_still_counts() -> None:
    pods = [pod("a", ending=True), pod("b", ending=True), pod("c")]
    assert next_step(pods, 1, ScaleRequest(4), most=4) == SetReplicas(2)
    assert next_step(pods, 2, ScaleRequest(4), most=4) == Wait()
    not_begun = [pod("a"), pod("b"), pod("c")]  # the number is written, and no pod ends yet
    assert next_step(not_begun, 0, ScaleRequest(3), most=3) == Wait()


def test_pods_to_remove_get_the_lowest_deletion_cost_before_the_number_is_written() -> None:
    pods = [pod("a"), pod("b"), pod("c", cost=-7)]
    step = next_step(pods, 3, ScaleRequest(1, ("a", "somebody else")), most=MOST)
    assert step == SetCosts({"a": -2, "c": -1})
    costly = [pod("a", cost=-2), pod("b"), pod("c", cost=-1)]
    assert next_step(costly, 3, ScaleRequest(1, ("a",)), most=MOST) == SetReplicas(1)


def test_the_deletion_cost_of_an_earlier_request_is_reset() -> None:
    pods = [pod("a", cost=-5), pod("b")]
    assert next_step(pods, 2, ScaleRequest(1, ("b",)), most=MOST) == SetCosts({"a": 0, "b": -1})


def test_a_starting_pod_delays_the_removal_of_a_named_one_for_a_bounded_time() -> None:
    pods = [pod("a", cost=-1), pod("b", started=1)]
    request = ScaleRequest(1, ("a",))
    assert next_step(pods, 2, request, most=MOST) == Wait()
    assert next_step(pods, 2, request, most=MOST, in_order=False) == SetReplicas(1)
    assert next_step([pods[0], replace(pods[1], started=3)], 2, request, most=MOST) == SetReplicas(1)


def test_a_starting_pod_that_is_named_is_removed_without_delay() -> None:
    pods = [pod("a"), pod("b", started=0, cost=-1)]
    assert next_step(pods, 2, ScaleRequest(1, ("b",)), most=MOST) == SetReplicas(1)


@given(
    started=st.lists(st.integers(0, 3), max_size=MOST),
    wishes=st.lists(st.tuples(st.integers(0, MOST + 2), st.permutations(range(MOST))), min_size=1, max_size=5),
    lag=st.integers(0, 2),
)
def test_every_request_is_met_within_the_bound_and_removes_the_named_pods(
    started: Sequence[int], wishes: Sequence[tuple[int, Sequence[int]]], lag: int
) -> None:
    pods = {
        f"pod-{n}": pod(f"pod-{n}", started=how, created=f"2026-01-01T00:00:0{n}Z") for n, how in enumerate(started)
    }
    cluster = Cluster(len(pods), pods)
    for count, order in wishes:
        there = [each.name for each in cluster.pods.values() if not each.ending]
        named = tuple(there[place] for place in order if place < len(there))
        gone_before = len(cluster.deleted)
        for turn in range(100):
            step = next_step(list(cluster.pods.values()), cluster.replicas, ScaleRequest(count, named), most=MOST)
            cluster.take(step)
            if turn % (lag + 1) == lag:
                cluster.reconcile()
                assert len(cluster.pods) <= MOST
                cluster.go_on()
            if step is None and len(cluster.pods) == cluster.replicas:
                break
        assert len(cluster.pods) == cluster.replicas == min(count, MOST)
        gone = cluster.deleted[gone_before:]
        assert set(gone) == set(named[: len(gone)])
