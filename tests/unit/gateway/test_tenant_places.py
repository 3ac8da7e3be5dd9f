"""A gateway's places to decode: whose choices are bound, and which give way."""

from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.dispatch.generation import Generation, RequestTimes
from libs.dispatch.places import COMING_NS, TenantPlaces
from libs.dispatch.ports import OneForAll
from libs.policy.gateway.effects import Attempt
from libs.policy.roles import Phase


class Known(OneForAll):
    """Tenants that are told apart; `heavy` weighs three times what others do."""

    told_apart = True

    def weight(self, tenant: str) -> int:
        return 3 if tenant == "heavy" else 1


def choice(tenant: str, arrival_ns: int = 0, *, batch: bool = False) -> Generation:
    found = Generation(
        request_id=tenant, model="m", prompt=b"\1\0\0\0", prompt_tokens=1, max_output_tokens=9,
        sampling=pb.Sampling(), context=pb.RequestContext(tenant=tenant), end_token_ids=frozenset(),
        sink=None, timeline=RequestTimes(arrival_ns), batch=batch,  # type: ignore[arg-type]
    )  # fmt: skip
    found.placement.queued(arrival_ns)
    return found


def run(places: TenantPlaces, each: Generation, tokens: int = 1) -> Generation:
    """It decodes from now on."""
    each.placement.waiting = False
    each.placement.decode_attempt = Attempt(("w", 1), each.placement.sequence_id, Phase.DECODE, 0, tokens)
    places.bound(each)
    return each


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
