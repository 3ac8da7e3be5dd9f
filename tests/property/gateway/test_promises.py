"""Properties of Retry-After times that hold: clients that return on time find room, and no worker is idle."""

import heapq

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libs.contracts.errors import QueueFull
from libs.dispatch.waiting import WaitingQueue
from libs.policy.gateway.queues import GRACE_NS, MAX_PROMISES, SECOND_NS, Promises
from tests.unit.gateway.test_gateway_parts import generation

MS = 1_000_000
COME_NS = 40 * SECOND_NS
"""The time for which new clients arrive: at the lowest load this fills the deepest queue."""


@given(st.floats(1.2, 4.0), st.integers(2, 6), st.integers(4, 20), st.randoms(use_true_random=False))
@settings(max_examples=10, deadline=None)
def test_nine_in_ten_obedient_clients_are_accepted_when_they_return(
    load: float, deep_s: int, rate: int, random: "object"
) -> None:
    # Clients count whole seconds: with a queue of less than two seconds' work they come in lots that it cannot hold.
    queue, now_ns, served = WaitingQueue(rate * deep_s), 0, 0
    arrivals = [
        (round(number * SECOND_NS / (rate * load)), number, False)
        for number in range(int(rate * load * COME_NS // SECOND_NS))
    ]
    heapq.heapify(arrivals)
    serve_ns, held, broken, idle = 0, 0, 0, 0
    number = 0
    while arrivals:
        now_ns, who, returns = heapq.heappop(arrivals)
        while serve_ns <= now_ns:  # a worker takes the first that waits, at its pace
            first = next(iter(queue), None)
            if first is None:
                idle += SECOND_NS < serve_ns < COME_NS  # later no new client fills what is not promised
            else:
                queue.bound(first, serve_ns)
                served += 1
            serve_ns += round(SECOND_NS / rate)
        key = who.to_bytes(8, "big") if queue.wants_keys else b""
        try:
            queue.check_room(1, now_ns, key)
        except QueueFull as refused:
            assert refused.retry_after_s is not None
            broken += returns
            back_ns = now_ns + int(refused.http_headers["retry-after"]) * SECOND_NS
            heapq.heappush(arrivals, (back_ns + random.randrange(200) * MS, who, True))  # type: ignore[attr-defined]
            continue
        queue.kept(key)
        held += returns
        number += 1
        queue.add(generation(number), now_ns)
    assert held > 0 and held >= 0.9 * (held + broken)
    assert idle <= 0.1 * rate * COME_NS / SECOND_NS


def test_an_early_client_gets_its_own_time_again_and_one_that_never_returns_is_forgotten() -> None:
    promises = Promises()
    first = promises.make(b"a", 1, room_in_s=4.0, per_s=1.0, now_ns=0)
    assert first == 4.0
    assert promises.make(b"b", 1, room_in_s=4.0, per_s=1.0, now_ns=0) == 6.0, (
        "the next place, a little later than needed"
    )
    assert promises.make(b"a", 1, room_in_s=9.0, per_s=1.0, now_ns=SECOND_NS) == 3.0
    assert not promises.holds(b"a", SECOND_NS) and promises.holds(b"a", 4 * SECOND_NS)
    promises.kept(b"a")
    assert not promises.holds(b"a", 4 * SECOND_NS) and promises
    promises.forget(6 * SECOND_NS + GRACE_NS + 1)
    assert not promises


@pytest.mark.parametrize("why", ["no key", "no rate", "too far", "too many"])
def test_an_impossible_promise_is_not_made(why: str) -> None:
    promises = Promises()
    for number in range(MAX_PROMISES if why == "too many" else 0):
        promises.make(number.to_bytes(4, "big"), 1, room_in_s=0.0, per_s=1e9, now_ns=0)
    made = promises.make(
        b"" if why == "no key" else b"key", 1, room_in_s=1e4 if why == "too far" else 1.0,
        per_s=0.0 if why == "no rate" else 1.0, now_ns=0,
    )  # fmt: skip
    assert made is None
