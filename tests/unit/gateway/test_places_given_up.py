"""Tests of how many answers are preempted across gateways whose knowledge of each other is a quarter second old."""

from dataclasses import replace
from random import Random
from typing import Final

import msgspec
import pytest

from libs.dispatch.generation import Generation
from libs.dispatch.places import Others, TenantPlaces
from libs.dispatch.ports import QueuedDemand
from services.gateway.request.limits import EXCHANGE_EVERY_S, read_places
from tests.unit.gateway.places_rig import Known, choice, run

STEP_NS: Final = 5_000_000
EXCHANGE_EVERY_NS: Final = round(EXCHANGE_EVERY_S * 1e9)
BACK_NS: Final = 30_000_000
"""Time until a worker grants a returned place again."""


class Gateway:
    """A gateway's places, its waiting requests by tenant, and the times of its reports."""

    def __init__(self, name: str, running: int, waiting: int, tells_ns: int) -> None:
        self.name, self.tells_ns = name, tells_ns
        self.places = TenantPlaces(Known())
        self.queue = [choice("flood", number) for number in range(waiting)]
        self.running = [run(self.places, choice("flood", number)) for number in range(running)]
        self.free = 0

    @property
    def waiting(self) -> dict[str, int]:
        tenants = {each.context.tenant for each in self.queue}
        return {tenant: sum(each.context.tenant == tenant for each in self.queue) for tenant in tenants}

    def exchange(self, reports: dict[str, bytes], now_ns: int) -> None:
        own = self.places.report({"m": self.waiting} if self.queue else {}, {"m": self.free}, now_ns)
        reports[self.name] = msgspec.json.encode(own)
        before, after = (
            tuple(read_places(each) for name, each in sorted(reports.items()) if name < self.name),
            tuple(read_places(each) for name, each in sorted(reports.items()) if name > self.name),
        )
        self.places.adopt_reports(Others(before, after))

    def prefill(self, count: int) -> None:
        """Make that many of the running choices still compute their prompts."""
        for each in self.running[:count]:
            attempt = each.placement.decode_attempt
            assert attempt is not None
            each.placement.decode_attempt = replace(attempt, tokens=0)

    def decode(self) -> None:
        """Make all running choices decode from now on."""
        for each in self.running:
            attempt = each.placement.decode_attempt
            assert attempt is not None
            each.placement.decode_attempt = replace(attempt, tokens=1)

    def within_share(self, now_ns: int) -> int:
        contested = "m" in self.places.contested({"m": self.waiting} if self.queue else {})
        queued = QueuedDemand(waiting=len(self.queue))
        return (self.places.within_share("m", queued, self.waiting, self.free, now_ns) if contested else queued).waiting

    def turn(self, now_ns: int) -> list[Generation]:
        """Bind what may be bound, and return the preempted choices."""
        ready = self.places.within("m", list(self.queue), self.waiting, self.free, now_ns)
        for each in [found for found, _ in zip(ready, range(self.free), strict=False)]:
            self.queue.remove(each)
            self.running.append(run(self.places, each))
            self.free -= 1
        gone = self.places.giving_way("m", self.waiting, self.free, now_ns)
        for each in gone:
            self.places.left(each)
            self.running.remove(each)
            self.queue.insert(0, choice(each.context.tenant, each.arrival_unix_ns))
        return gone


class Rig:
    """Gateways whose tenant "flood" holds every place, and the worker between them."""

    def __init__(self, gateways: int, each: int, chance: Random) -> None:
        self.gateways = [
            Gateway(f"g{number}", each, each, chance.randrange(EXCHANGE_EVERY_NS)) for number in range(gateways)
        ]
        self.reports: dict[str, bytes] = {}
        self.back_ns: list[int] = []
        self.now_ns = 0

    def go_on(self, seconds: float) -> None:
        for _ in range(round(seconds * 1e9 / STEP_NS)):
            self.now_ns += STEP_NS
            for gateway in self.gateways:
                if self.now_ns % EXCHANGE_EVERY_NS // STEP_NS == gateway.tells_ns // STEP_NS:
                    gateway.exchange(self.reports, self.now_ns)
                self.back_ns += [self.now_ns + BACK_NS] * len(gateway.turn(self.now_ns))
            for at_ns in [each for each in self.back_ns if each <= self.now_ns]:
                short = {each: each.within_share(self.now_ns) - each.free for each in self.gateways}
                first = max(short, key=lambda each: short[each])
                if short[first] > 0:
                    first.free += 1
                    self.back_ns.remove(at_ns)

    def held(self, tenant: str) -> int:
        return sum(each.context.tenant == tenant for gateway in self.gateways for each in gateway.running)

    @property
    def given_up(self) -> int:
        return sum(gateway.places.given_up for gateway in self.gateways)


@pytest.mark.parametrize(("gateways", "each", "asks"), [(2, 12, 6), (2, 12, 1), (4, 12, 12), (8, 32, 32), (8, 5, 7)])
@pytest.mark.parametrize("seed", range(4))
def test_one_answer_is_preempted_for_each_place_that_another_tenant_takes(
    gateways: int, each: int, asks: int, seed: int
) -> None:
    chance = Random(seed)
    rig = Rig(gateways, each, chance)
    rig.go_on(1.0 + chance.random())
    chance.choice(rig.gateways).queue += [choice("modest", number) for number in range(asks)]
    rig.go_on(2.5)
    assert (rig.held("modest"), rig.given_up) == (asks, asks)


@pytest.mark.parametrize("gateways", [2, 4, 8])
@pytest.mark.parametrize("seed", range(4))
def test_no_more_answers_are_preempted_if_both_tenants_wait_everywhere(gateways: int, seed: int) -> None:
    """The new tenant takes its half of all places, from all gateways at once."""
    chance = Random(seed)
    rig = Rig(gateways, 12, chance)
    rig.go_on(1.0 + chance.random())
    for gateway in rig.gateways:
        gateway.queue += [choice("modest", number) for number in range(12)]
    rig.go_on(4.0)
    half = gateways * 12 // 2
    assert abs(rig.held("modest") - half) <= 1
    assert rig.given_up <= half * 1.2


def prefilling(held: list[int], prompts: list[int]) -> Rig:
    """Build a rig by the places that "flood" holds at each gateway, and by how many of them are in prefill."""
    rig = Rig(len(held), 0, Random(0))
    for gateway, count, computed in zip(rig.gateways, held, prompts, strict=True):
        gateway.running = [run(gateway.places, choice("flood", number)) for number in range(count)]
        gateway.prefill(computed)
    rig.go_on(1.0)
    return rig


@pytest.mark.parametrize(("held", "prompts", "asks"), [([23, 1], [0, 1], 1), ([12, 12], [0, 12], 6),
                                                       ([12, 12], [12, 0], 6), ([8, 8, 8], [8, 0, 4], 12)])  # fmt: skip
def test_a_gateway_gives_up_places_that_another_cannot(held: list[int], prompts: list[int], asks: int) -> None:
    rig = prefilling(held, prompts)
    rig.gateways[0].queue += [choice("modest", number) for number in range(asks)]
    rig.go_on(2.0)
    assert (rig.held("modest"), rig.given_up) == (asks, asks)


def test_an_answer_still_in_prefill_is_preempted_once_its_prompt_is_computed() -> None:
    rig = prefilling([4, 4], [4, 4])
    rig.gateways[0].queue.append(choice("modest"))
    rig.go_on(2.0)
    assert rig.given_up == 0
    for gateway in rig.gateways:
        gateway.decode()
    rig.go_on(1.0)
    assert (rig.held("modest"), rig.given_up) == (1, 1)


def test_no_more_answers_are_preempted_if_a_gateway_gave_up_more_than_its_part_before() -> None:
    """Its answers have ended meanwhile, and the next ones of its tenant run at other gateways."""
    held, rig = [1, 4, 3], Rig(3, 0, Random(0))
    for gateway, count in zip(rig.gateways, [16, 0, 0], strict=True):
        gateway.running = [run(gateway.places, choice("flood", number)) for number in range(count)]
    rig.go_on(1.0)
    rig.gateways[0].queue += [choice("heavy", number) for number in range(8)]
    rig.go_on(0.4)
    assert (rig.held("heavy"), rig.given_up) == (8, 8)
    for each in [each for each in rig.gateways[0].running if each.context.tenant == "flood"][1:]:
        rig.gateways[0].places.left(each)
        rig.gateways[0].running.remove(each)
    for gateway, count in list(zip(rig.gateways, held, strict=True))[1:]:
        gateway.running += [run(gateway.places, choice("flood", number)) for number in range(count)]
    rig.go_on(0.25)
    rig.gateways[0].queue += [choice("heavy", 8 + number) for number in range(4)]
    rig.go_on(1.0)
    assert (rig.held("heavy"), rig.given_up) == (12, 12)
