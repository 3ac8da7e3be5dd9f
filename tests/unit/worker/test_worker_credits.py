"""Tests of who gets a credit, case by case."""

from libs.policy.worker.credits import CreditPool, GatewayDemand


def pool_with(slots: int, gateways: int) -> CreditPool:
    pool = CreditPool(slots)
    for gateway in range(gateways):
        pool.attach(gateway)
    return pool


def idle(*names: str) -> dict[int, GatewayDemand]:
    return {gateway: GatewayDemand(name) for gateway, name in enumerate(names)}


def test_an_idle_worker_grants_all_its_slots_evenly() -> None:
    pool = pool_with(5, 2)
    pool.settle(idle("a", "b"))
    assert (pool.take(0), pool.take(1)) == ((3, 0), (2, 0))


def test_a_free_slot_goes_to_the_gateway_with_the_earliest_deadline() -> None:
    pool = pool_with(1, 2)
    pool.settle({0: GatewayDemand("a", 1, head_deadline_ns=20), 1: GatewayDemand("b", 1, head_deadline_ns=10)})
    assert (pool.take(0), pool.take(1)) == ((0, 0), (1, 0))


def test_unused_credits_of_an_idle_gateway_are_recalled_for_a_waiting_one() -> None:
    pool = pool_with(2, 2)
    pool.settle(idle("a", "b"))
    pool.take(0), pool.take(1)
    assert pool.use(0)
    waiting = {0: GatewayDemand("a", 1, 10), 1: GatewayDemand("b")}
    pool.settle(waiting)
    assert pool.take(1) == (0, 1)
    pool.returned(1, 1)
    pool.settle(waiting)
    assert pool.take(0) == (1, 0)


def test_a_recall_is_sent_once() -> None:
    pool = pool_with(2, 2)
    pool.settle(idle("a", "b"))
    pool.take(0), pool.take(1)
    pool.use(0)
    for _ in range(3):
        pool.settle({0: GatewayDemand("a", 1, 10), 1: GatewayDemand("b")})
    assert pool.take(1) == (0, 1)
    assert not pool.has_news(1)


def test_a_submit_without_a_credit_gets_no_slot() -> None:
    pool = pool_with(1, 2)
    pool.settle(idle("a", "b"))
    pool.take(0)
    assert not pool.use(1)
    assert pool.use(0)
    assert not pool.use(0)


def test_losing_all_slots_recalls_all_credits() -> None:
    pool = pool_with(4, 2)
    pool.settle(idle("a", "b"))
    pool.take(0), pool.take(1)
    pool.slots = 0
    pool.settle(idle("a", "b"))
    assert (pool.take(0), pool.take(1)) == ((0, 2), (0, 2))


def test_two_gateways_never_permanently_hold_credits_that_the_other_needs() -> None:
    """A has the only prefill credit, B the only decode credit, both wait: the less urgent one is asked to give."""
    prefill, decode = pool_with(1, 2), pool_with(1, 2)
    prefill.settle({0: GatewayDemand("a", 1), 1: GatewayDemand("b")})
    decode.settle({0: GatewayDemand("a"), 1: GatewayDemand("b", 1)})
    prefill.take(0), decode.take(1)
    both = {0: GatewayDemand("a", 1, 10), 1: GatewayDemand("b", 1, 20)}
    prefill.settle(both)
    decode.settle(both)
    assert not prefill.has_news(0)
    assert decode.take(1) == (0, 1)
    decode.returned(1, 1)
    decode.settle(both)
    assert decode.take(0) == (1, 0)


def test_a_gateway_without_deadlines_is_not_passed_over_forever() -> None:
    pool = pool_with(1, 2)
    waiting = {0: GatewayDemand("a", 1, head_deadline_ns=0), 1: GatewayDemand("b", 100, head_deadline_ns=10)}
    for _ in range(50):
        pool.settle(waiting)
        if pool.take(0)[0]:
            return
        pool.take(1)
        pool.use(1)
        pool.free()
    raise AssertionError("never served")


def test_a_gateway_that_joins_late_gets_its_share_of_standing_credit() -> None:
    pool = pool_with(4, 1)
    pool.settle(idle("a"))
    assert pool.take(0) == (4, 0)
    pool.attach(1)
    pool.settle(idle("a", "b"))
    assert pool.take(0) == (0, 2)
    pool.returned(0, 2)
    pool.settle(idle("a", "b"))
    assert (pool.take(0), pool.take(1)) == ((0, 0), (2, 0))
