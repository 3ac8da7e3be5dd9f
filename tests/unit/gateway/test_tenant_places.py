"""Tests of a gateway's places to decode: whose choices are bound, and which are preempted."""

from libs.dispatch.generation import Generation
from libs.dispatch.places import COMING_NS, KNOWN_NS, NOBODY, ModelPlaces, Others, TenantCount, TenantPlaces
from libs.dispatch.ports import OneForAll, QueuedDemand
from tests.unit.gateway.places_rig import Known, choice, run


def flooded(places: TenantPlaces, tenant: str, count: int) -> list[Generation]:
    return [run(places, choice(tenant, number)) for number in range(count)]


def test_the_youngest_choices_above_the_share_are_preempted_and_batch_lines_first() -> None:
    places = TenantPlaces(Known())
    running = flooded(places, "flood", 7)
    line = run(places, choice("flood", 0, batch=True))
    assert places.giving_way("m", {"modest": 3}, 0, 0) == [line, running[6], running[5]]


def test_no_choice_is_preempted_again_before_the_places_are_returned() -> None:
    places = TenantPlaces(Known())
    flooded(places, "flood", 8)
    for each in places.giving_way("m", {"modest": 2}, 0, 0):
        places.left(each)
    waiting = {"modest": 2, "flood": 2}
    assert places.giving_way("m", waiting, 0, COMING_NS - 1) == []
    assert places.giving_way("m", waiting, 2, COMING_NS - 1) == [], "they are back"
    assert places.given_up == 2


def test_a_tenant_alone_gets_every_place() -> None:
    places = TenantPlaces(Known())
    flooded(places, "flood", 8)
    ready = [choice("flood", number) for number in range(3)]
    assert list(places.within("m", ready, {"flood": 3}, 2, 0)) == ready
    assert places.giving_way("m", {"flood": 3}, 0, 0) == []


def test_free_places_are_reserved_for_tenants_below_their_share() -> None:
    places = TenantPlaces(Known())
    flooded(places, "flood", 6)
    ready = [choice("flood", 0), choice("modest", 1), choice("modest", 2)]
    assert list(places.within("m", ready, {"flood": 1, "modest": 2}, 2, 0)) == ready[1:]


def test_places_are_shared_by_weight() -> None:
    places = TenantPlaces(Known())
    flooded(places, "flood", 8)
    assert len(places.giving_way("m", {"heavy": 20}, 0, 0)) == 6
    places = TenantPlaces(Known())
    flooded(places, "heavy", 8)
    assert len(places.giving_way("m", {"flood": 20}, 0, 0)) == 2


def test_a_choice_on_its_way_to_a_worker_is_not_preempted() -> None:
    places = TenantPlaces(Known())
    running = flooded(places, "flood", 4)
    running[3].placement.reserved = ("other", 1)
    assert places.giving_way("m", {"modest": 1}, 0, 0) == [running[2]]


def test_no_choice_is_delayed_if_any_client_may_name_any_tenant() -> None:
    places = TenantPlaces(OneForAll())
    flooded(places, "flood", 8)
    ready = [choice("flood", 0), choice("modest", 1)]
    assert list(places.within("m", ready, {"flood": 1, "modest": 1}, 1, 0)) == ready
    assert places.giving_way("m", {"modest": 1}, 0, 0) == []
    assert places.contested({"m": {"modest": 1}}) == {}


def test_no_state_of_ended_choices_remains() -> None:
    places = TenantPlaces(Known())
    for each in flooded(places, "flood", 3):
        places.left(each)
        places.left(each)
    assert places.contested({"m": {"modest": 1}}) == {}


def elsewhere(free: int = 0, **tenants: tuple[int, ...]) -> Others:
    """Return the counts of the model at another gateway."""
    return Others((), ({"m": ModelPlaces(free, {tenant: TenantCount(*count) for tenant, count in tenants.items()})},))


def tell(places: TenantPlaces, others: Others) -> None:
    """Enter the others' report, and wait until every gateway has this one's."""
    for _ in range(2):
        places.report({}, {}, 0)
        places.adopt_reports(others)


def test_choices_are_preempted_for_those_that_wait_at_another_gateway() -> None:
    places = TenantPlaces(Known())
    running = flooded(places, "flood", 8)
    assert places.contested({}) == {}
    places.adopt_reports(elsewhere(modest=(0, 3)))
    assert places.contested({}) == {"m": {}}
    assert places.giving_way("m", {}, 0, 0) == [running[7], running[6], running[5]]


def test_a_gateway_preempts_only_its_part_of_its_tenants_choices() -> None:
    places = TenantPlaces(Known())
    flooded(places, "flood", 6)
    tell(places, elsewhere(flood=(18, 0), modest=(0, 12)))
    assert len(places.giving_way("m", {}, 0, 0)) == 3


def test_a_gateway_preempts_choices_that_another_cannot() -> None:
    """There prompts are computed still, or KV blocks move."""
    places = TenantPlaces(Known())
    flooded(places, "flood", 6)
    tell(places, elsewhere(flood=(18, 0, 0, 16), modest=(0, 4)))
    assert len(places.giving_way("m", {}, 0, 0)) == 2
    places = TenantPlaces(Known())
    flooded(places, "flood", 6)
    tell(places, elsewhere(flood=(18, 0, 0, 18), modest=(0, 12)))
    assert len(places.giving_way("m", {}, 0, 0)) == 6


def test_a_choice_that_no_other_gateway_knows_to_run_is_not_preempted_yet() -> None:
    """The other would give up the same, as it can too by now and has not said so."""
    places, others = TenantPlaces(Known()), elsewhere(flood=(6, 0, 0, 6), modest=(0, 2))
    flooded(places, "flood", 6)
    places.adopt_reports(others)
    assert places.giving_way("m", {}, 0, 0) == []
    tell(places, others)
    assert len(places.giving_way("m", {}, 0, 0)) == 2


def test_a_free_place_at_another_gateway_prevents_preemption() -> None:
    places = TenantPlaces(Known())
    flooded(places, "flood", 8)
    places.adopt_reports(elsewhere(free=3, modest=(0, 3)))
    assert places.giving_way("m", {}, 0, 0) == []


def test_no_places_beyond_a_tenants_share_are_requested_from_workers() -> None:
    """Preempted places thus go to the gateway that they were preempted for."""
    places, queued = TenantPlaces(Known()), QueuedDemand(waiting=10, waiting_tokens=99)
    flooded(places, "flood", 8)
    assert places.within_share("m", queued, {"flood": 9}, 0, 0) == queued, "and a line of a batch job"
    places.adopt_reports(elsewhere(modest=(0, 4)))
    assert places.within_share("m", queued, {"flood": 9}, 0, 0) == queued._replace(waiting=1)
    places.adopt_reports(NOBODY)
    assert places.within_share("m", queued, {"flood": 9}, 0, 0) == queued


def test_a_report_contains_running_and_waiting_choices_of_this_gateway() -> None:
    places = TenantPlaces(Known())
    flooded(places, "flood", 2)
    waiting = {"m": {"flood": 1, "modest": 5}, "n": {"modest": 1}}
    assert places.report(waiting, {"m": 3}, 0) == {
        "m": ModelPlaces(3, {"flood": TenantCount(2, 1), "modest": TenantCount(0, 5)}),
        "n": ModelPlaces(0, {"modest": TenantCount(0, 1)}),
    }
    run(places, choice("flood")).placement.reserved = ("other", 1)
    assert places.report({}, {}, 0)["m"].tenants["flood"] == TenantCount(3, fixed=1)
    assert TenantPlaces(OneForAll()).report(waiting, {}, 0) == {}


def test_preempted_places_are_reported_with_their_gateway_until_they_are_returned() -> None:
    places, known = TenantPlaces(Known()), ModelPlaces(2, {"flood": TenantCount(6, 2, 2), "modest": TenantCount(0, 2)})
    flooded(places, "flood", 8)
    for each in places.giving_way("m", {"modest": 2}, 0, 0):
        places.left(each)
    waiting = {"m": {"flood": 2, "modest": 2}}
    assert places.report(waiting, {"m": 0}, 1) == {"m": known}, "on their way"
    assert places.report(waiting, {"m": 2}, 1) == {"m": known}, "back"
    places.adopt_reports(elsewhere(modest=(2, 0)))
    assert places.report(waiting, {}, 1)["m"].free == 0, "another gateway has them"
    assert places.report(waiting, {}, KNOWN_NS)["m"].tenants["flood"] == TenantCount(6, 2)


def test_an_idle_gateway_reports_places_of_models_that_others_request() -> None:
    places = TenantPlaces(Known())
    assert places.report({}, {"m": 2, "n": 1}, 0) == {}
    places.adopt_reports(elsewhere(flood=(3, 9)))
    assert places.report({}, {"m": 2, "n": 1}, 0) == {"m": ModelPlaces(2, {})}
    places.adopt_reports(elsewhere(free=3))
    assert places.report({}, {"m": 2, "n": 1}, 0) == {}, "two idle gateways would talk for ever"


def test_free_places_at_another_gateway_are_requested_from_workers() -> None:
    places, queued = TenantPlaces(Known()), QueuedDemand(waiting=9)
    flooded(places, "flood", 3)
    places.adopt_reports(elsewhere(modest=(3, 9)))
    assert places.within_share("m", queued, {"flood": 9}, 0, 0).waiting == 0
    places.adopt_reports(elsewhere(free=2, modest=(3, 9)))
    assert places.within_share("m", queued, {"flood": 9}, 0, 0).waiting == 1


def test_a_gateway_does_not_act_for_another_whose_report_is_old() -> None:
    """Not before nor after its own places are back."""
    places = TenantPlaces(Known())
    flooded(places, "flood", 12)
    tell(places, elsewhere(flood=(12, 0)))
    first = places.giving_way("m", {"modest": 6}, 0, 0)
    for each in first:
        places.left(each)
    assert len(first) == 3
    waiting = {"flood": 3, "modest": 6}
    assert places.giving_way("m", waiting, 0, 1) == []
    assert places.giving_way("m", waiting, 3, COMING_NS - 1) == []
    for _ in range(3):
        run(places, choice("modest"))
    assert places.giving_way("m", {"flood": 3, "modest": 3}, 0, COMING_NS - 1) == []
    places.adopt_reports(elsewhere(flood=(9, 0, 3), free=3))
    assert places.giving_way("m", {"flood": 3, "modest": 3}, 0, COMING_NS - 1) == []
    assert len(places.giving_way("m", {"flood": 3, "modest": 8}, 0, COMING_NS - 1)) in (2, 3), "five more wait"


def test_no_choice_is_preempted_until_the_gateway_that_would_take_its_place_knows_for_whom() -> None:
    places, waiting, flood = TenantPlaces(Known()), {"m": {"modest": 6}}, elsewhere(flood=(12, 9))
    flooded(places, "flood", 12)
    for _ in range(2):
        places.report({}, {}, 0)
        places.adopt_reports(flood)
    for _ in range(2):
        assert places.giving_way("m", waiting["m"], 0, 0) == []
        places.report(waiting, {}, 0)
        places.adopt_reports(flood)
    assert len(places.giving_way("m", waiting["m"], 0, 0)) == 3
