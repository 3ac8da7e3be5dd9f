"""Tests of how long a worker takes to start, with and without a machine that has to start first."""

from libs.policy.planner.scaling import SECOND_NS, StartUp


def seen(start_up: StartUp, at_s: float, *names: str, without: str = "", there: str = "") -> None:
    start_up.note(names, without_machine=set(without), there=set(there), now_ns=round(at_s * SECOND_NS))


def test_on_existing_machines_only_the_start_time_of_the_worker_counts() -> None:
    start_up = StartUp(30 * SECOND_NS, machine_ns=120 * SECOND_NS)
    seen(start_up, 0, "a", without="a")
    seen(start_up, 1, "a")
    seen(start_up, 21, "a", there="a")
    assert not start_up.scarce
    assert start_up.ahead_ns == 25 * SECOND_NS, "half way from what was set to the 20 s that it took"


def test_a_worker_that_waits_for_its_machine_predicts_the_next_wait() -> None:
    start_up = StartUp(10 * SECOND_NS)
    seen(start_up, 0, "a", without="a")
    assert start_up.ahead_ns == 10 * SECOND_NS
    seen(start_up, 60, "a", without="a")
    assert start_up.ahead_ns == 70 * SECOND_NS, "it has waited for a minute already"
    seen(start_up, 90, "a")
    seen(start_up, 100, "a", there="a")
    assert start_up.ahead_ns == 100 * SECOND_NS
    seen(start_up, 200, "a", "b", without="b", there="a")
    seen(start_up, 201, "a", "b", there="a")
    assert start_up.ahead_ns == 10 * SECOND_NS, "a machine had room at once"
    seen(start_up, 300, "a", "b", "c", without="c", there="ab")
    seen(start_up, 310, "a", "b", "c", without="c", there="ab")
    assert start_up.ahead_ns >= 100 * SECOND_NS, "there is none again: what was learned of the wait counts"


def test_the_configured_wait_applies_until_one_has_been_measured() -> None:
    start_up = StartUp(10 * SECOND_NS, machine_ns=180 * SECOND_NS)
    seen(start_up, 0, "a", without="a")
    seen(start_up, 6, "a", without="a")
    assert start_up.ahead_ns == 190 * SECOND_NS


def test_departed_workers_are_forgotten() -> None:
    start_up = StartUp(10 * SECOND_NS)
    for number in range(50):
        seen(start_up, number, f"a{number}")
    seen(start_up, 60)
    seen(start_up, 100, "a1")
    seen(start_up, 101, "a1", there=" ")
    start_up.note(["a1"], without_machine=(), there={"a1"}, now_ns=102 * SECOND_NS)
    assert start_up.ahead_ns == 6 * SECOND_NS, "the second of that name took 2 s"
