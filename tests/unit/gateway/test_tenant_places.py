"""A gateway's places to decode: whose choices are bound, and which give way."""

from libs.dispatch.generation import Generation
from libs.dispatch.places import COMING_NS, KNOWN_NS, NOBODY, ModelPlaces, Others, TenantCount, TenantPlaces
from libs.dispatch.ports import OneForAll, QueuedDemand
from tests.unit.gateway.places_rig import Known, choice, run


def flooded(places: TenantPlaces, tenant: str, count: int) -> list[Generation]:
    return [run(places, choice(tenant, number)) for number in range(count)]


def test_the_youngest_of_the_tenant_above_its_share_give_way_and_batch_lines_before_them() -> None:
    places = TenantPlaces(Known())
    running = flooded(places, "flood", 7)
    line = run(places, choice("flood", 0, batch=True))
    assert places.giving_way("m", {"modest": 3}, 0, 0) == [line, running[6], running[5]]


def test_nobody_gives_way_again_before_the_places_are_back() -> None:
    places = TenantPlaces(Known())
    flooded(places, "flood", 8)
    for each in places.giving_way("m", {"modest": 2}, 0, 0):
        places.left(each)
    waiting = {"modest": 2, "flood": 2}
    assert places.giving_way("m", waiting, 0, COMING_NS - 1) == []
    assert places.giving_way("m", waiting, 2, COMING_NS - 1) == [], "they are back"
    assert places.given_up == 2


def test_a_tenant_alone_holds_and_gets_every_place() -> None:
    places = TenantPlaces(Known())
    flooded(places, "flood", 8)
    ready = [choice("flood", number) for number in range(3)]
    assert list(places.within("m", ready, {"flood": 3}, 2, 0)) == ready
    assert places.giving_way("m", {"flood": 3}, 0, 0) == []


def test_free_places_are_kept_for_whoever_is_below_its_share() -> None:
    places = TenantPlaces(Known())
    flooded(places, "flood", 6)
    ready = [choice("flood", 0), choice("modest", 1), choice("modest", 2)]
    assert list(places.within("m", ready, {"flood": 1, "modest": 2}, 2, 0)) == ready[1:]


def test_places_go_by_weight() -> None:
    places = TenantPlaces(Known())
    flooded(places, "flood", 8)
    assert len(places.giving_way("m", {"heavy": 20}, 0, 0)) == 6
    places = TenantPlaces(Known())
    flooded(places, "heavy", 8)
    assert len(places.giving_way("m", {"flood": 20}, 0, 0)) == 2


def test_what_is_on_its_way_to_a_worker_does_not_give_way() -> None:
    places = TenantPlaces(Known())
    running = flooded(places, "flood", 4)
    running[3].placement.reserved = ("other", 1)
    assert places.giving_way("m", {"modest": 1}, 0, 0) == [running[2]]


def test_where_anybody_may_name_any_tenant_nobody_is_held_back() -> None:
    places = TenantPlaces(OneForAll())
    flooded(places, "flood", 8)
    ready = [choice("flood", 0), choice("modest", 1)]
    assert list(places.within("m", ready, {"flood": 1, "modest": 1}, 1, 0)) == ready
    assert places.giving_way("m", {"modest": 1}, 0, 0) == []
    assert places.contested({"m": {"modest": 1}}) == {}


def test_nothing_is_remembered_of_choices_that_have_ended() -> None:
    places = TenantPlaces(Known())
    for each in flooded(places, "flood", 3):
        places.left(each)
        places.left(each)
    assert places.contested({"m": {"modest": 1}}) == {}


def elsewhere(free: int = 0, **tenants: tuple[int, ...]) -> Others:
    """What a gateway that comes after this one has of the model."""
    return Others((), ({"m": ModelPlaces(free, {tenant: TenantCount(*count) for tenant, count in tenants.items()})},))


def tell(places: TenantPlaces, others: Others) -> None:
    """Until every gateway has heard what this one has."""
    for _ in range(2):
        places.report({}, {}, 0)
        places.hear(others)


def test_choices_give_way_to_those_that_wait_at_another_gateway() -> None:
    places = TenantPlaces(Known())
    running = flooded(places, "flood", 8)
    assert places.contested({}) == {}
    places.hear(elsewhere(modest=(0, 3)))
    assert places.contested({}) == {"m": {}}
    assert places.giving_way("m", {}, 0, 0) == [running[7], running[6], running[5]]


def test_a_gateway_gives_up_its_part_of_what_its_tenant_runs() -> None:
    places = TenantPlaces(Known())
    flooded(places, "flood", 6)
    tell(places, elsewhere(flood=(18, 0), modest=(0, 12)))
    assert len(places.giving_way("m", {}, 0, 0)) == 3


def test_a_gateway_gives_up_what_another_cannot() -> None:
    """There prompts are computed still, or KV blocks move."""
    places = TenantPlaces(Known())
    flooded(places, "flood", 6)
    tell(places, elsewhere(flood=(18, 0, 0, 16), modest=(0, 4)))
    assert len(places.giving_way("m", {}, 0, 0)) == 2
    places = TenantPlaces(Known())
    flooded(places, "flood", 6)
    tell(places, elsewhere(flood=(18, 0, 0, 18), modest=(0, 12)))
    assert len(places.giving_way("m", {}, 0, 0)) == 6


def test_what_no_other_gateway_has_heard_to_run_does_not_give_way_yet() -> None:
    """The other would give up the same, as it can too by now and has not said so."""
    places, others = TenantPlaces(Known()), elsewhere(flood=(6, 0, 0, 6), modest=(0, 2))
    flooded(places, "flood", 6)
    places.hear(others)
    assert places.giving_way("m", {}, 0, 0) == []
    tell(places, others)
    assert len(places.giving_way("m", {}, 0, 0)) == 2


def test_what_is_free_at_another_gateway_lets_nobody_give_way() -> None:
    places = TenantPlaces(Known())
    flooded(places, "flood", 8)
    places.hear(elsewhere(free=3, modest=(0, 3)))
    assert places.giving_way("m", {}, 0, 0) == []


def test_workers_are_not_asked_for_places_beyond_a_tenants_share() -> None:
    """So what gave way goes to the gateway that it gave way to."""
    places, queued = TenantPlaces(Known()), QueuedDemand(waiting=10, waiting_tokens=99)
    flooded(places, "flood", 8)
    assert places.asked("m", queued, {"flood": 9}, 0, 0) == queued, "and a line of a batch job"
    places.hear(elsewhere(modest=(0, 4)))
    assert places.asked("m", queued, {"flood": 9}, 0, 0) == queued._replace(waiting=1)
    places.hear(NOBODY)
    assert places.asked("m", queued, {"flood": 9}, 0, 0) == queued


def test_what_others_are_to_know_is_what_runs_and_waits_here() -> None:
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


def test_others_hear_of_places_that_were_given_up_until_they_are_back_and_of_who_gave_them_up() -> None:
    places, known = TenantPlaces(Known()), ModelPlaces(2, {"flood": TenantCount(6, 2, 2), "modest": TenantCount(0, 2)})
    flooded(places, "flood", 8)
    for each in places.giving_way("m", {"modest": 2}, 0, 0):
        places.left(each)
    waiting = {"m": {"flood": 2, "modest": 2}}
    assert places.report(waiting, {"m": 0}, 1) == {"m": known}, "on their way"
    assert places.report(waiting, {"m": 2}, 1) == {"m": known}, "back"
    places.hear(elsewhere(modest=(2, 0)))
    assert places.report(waiting, {}, 1)["m"].free == 0, "another gateway has them"
    assert places.report(waiting, {}, KNOWN_NS)["m"].tenants["flood"] == TenantCount(6, 2)


def test_an_idle_gateway_tells_what_it_holds_of_models_that_others_ask_for() -> None:
    places = TenantPlaces(Known())
    assert places.report({}, {"m": 2, "n": 1}, 0) == {}
    places.hear(elsewhere(flood=(3, 9)))
    assert places.report({}, {"m": 2, "n": 1}, 0) == {"m": ModelPlaces(2, {})}
    places.hear(elsewhere(free=3))
    assert places.report({}, {"m": 2, "n": 1}, 0) == {}, "two idle gateways would talk for ever"


def test_workers_are_asked_for_places_that_lie_free_at_another_gateway() -> None:
    places, queued = TenantPlaces(Known()), QueuedDemand(waiting=9)
    flooded(places, "flood", 3)
    places.hear(elsewhere(modest=(3, 9)))
    assert places.asked("m", queued, {"flood": 9}, 0, 0).waiting == 0
    places.hear(elsewhere(free=2, modest=(3, 9)))
    assert places.asked("m", queued, {"flood": 9}, 0, 0).waiting == 1


def test_a_gateway_does_not_take_on_the_part_of_another_whose_report_is_old() -> None:
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
    places.hear(elsewhere(flood=(9, 0, 3), free=3))
    assert places.giving_way("m", {"flood": 3, "modest": 3}, 0, COMING_NS - 1) == []
    assert len(places.giving_way("m", {"flood": 3, "modest": 8}, 0, COMING_NS - 1)) in (2, 3), "five more wait"


def test_nobody_gives_way_until_a_gateway_that_would_take_the_place_has_heard_for_whom_it_is() -> None:
    places, waiting, flood = TenantPlaces(Known()), {"m": {"modest": 6}}, elsewhere(flood=(12, 9))
    flooded(places, "flood", 12)
    for _ in range(2):
        places.report({}, {}, 0)
        places.hear(flood)
    for _ in range(2):
        assert places.giving_way("m", waiting["m"], 0, 0) == []
        places.report(waiting, {}, 0)
        places.hear(flood)
    assert len(places.giving_way("m", waiting["m"], 0, 0)) == 3
