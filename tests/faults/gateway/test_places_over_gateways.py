"""Tests in virtual time of tenants that share a model's places to decode over two gateways, with workers and the
ledger between them."""

import asyncio
import io
import os
from collections.abc import Callable, Coroutine, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from random import Random
from typing import Any, TypeVar
from unittest.mock import patch

import pytest
import structlog

from libs.contracts.errors import FulcrumError
from libs.contracts.packing import pack_u32
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.dispatch.generation import ApiFinishReason, Generation, RequestTimes
from libs.engine.reports import Logprob
from libs.keys.book import KeySet, TenantLimits
from libs.keys.table import KeyTable
from libs.stores.limits import REPORT_HOLD_S
from libs.testing.memory.limits import MemoryLedger
from load.chaos.cluster import Cluster, Stores
from load.chaos.loop import Node, SimLoop
from load.chaos.net import Log, Net

T = TypeVar("T")

ROLES = {"p0": "prefill", "d0": "decode", "d1": "decode"}
PLACES = 24
"""The places of both workers together."""
SETTLE_S, LOOK_S, SETTLED_S, WATCHED_S = 3.0, 0.02, 3.1, 6.0
"""No request falls on the instants at which gateways exchange reports."""
WITHIN = 0.05
ENGINE = {"engine": "sim", "sim_speedup": 4.0, "prefill_chunk_tokens": 128}


class Known(KeyTable):
    """Tenants are separated, as with keys, although no request comes over HTTP here."""

    @property
    def are_distinct(self) -> bool:
        return True

    def weight(self, tenant: str) -> int:
        return self.limits[tenant].weight or 1 if tenant in self.limits else 1


@dataclass(eq=False)
class Client:
    """A client that keeps `count` requests of one tenant in progress at a gateway."""

    cluster: Cluster
    gateway: str
    tenant: str
    count: int
    tokens: int = 300
    first_token_s: float | None = None
    ended: int = 0
    failed: list[FulcrumError] = field(default_factory=list)

    def ask(self, count: int | None = None) -> None:
        """Send requests from within the gateway's process."""
        process = self.cluster.processes[self.gateway]
        process.node.context.copy().run(self._submit, self.count if count is None else count)

    def _submit(self, count: int) -> None:
        gateway, now_ns = self.cluster.processes[self.gateway].gateway, self.cluster.clock.now_ns()
        assert gateway is not None
        for number in range(count):
            prompt = [97 + (self.ended + number) % 26] * 8
            one = Generation(
                request_id=f"{self.tenant}-{self.ended + number}", model="sim", prompt=pack_u32(prompt),
                prompt_tokens=len(prompt), max_output_tokens=self.tokens, sampling=pb.Sampling(ignore_eos=True),
                context=pb.RequestContext(
                    tenant=self.tenant, arrival_unix_ns=now_ns, ttft_deadline_unix_ns=now_ns + 5 * 10**9
                ),
                end_token_ids=frozenset(), sink=self, timeline=RequestTimes(now_ns),
            )  # fmt: skip
            gateway.dispatcher.submit([one])

    def token(self, _token_id: int, _logprob: Logprob | None) -> bool:
        if self.first_token_s is None:
            self.first_token_s = self.cluster.loop.time()
        return False

    def finish(self, _reason: ApiFinishReason) -> None:
        self.ended += 1
        self.ask(1)

    def fail(self, error: FulcrumError) -> None:
        self.failed.append(error)


@dataclass
class Watched:
    """The results of a run."""

    held: dict[str, float]
    """Mean of the places that each tenant held over both gateways."""
    first_token_s: dict[str, float]
    """Seconds from its first request."""
    ended: dict[str, int]
    gave_way: int


def run(
    floods: Mapping[str, Mapping[str, int]],
    limits: Mapping[str, TenantLimits] | None = None,
    *,
    away: bool = False,
    gateways: int = 2,
    tokens: int = 300,
) -> Watched:
    """`floods`: by gateway and tenant, the number of choices that it always requests there; those of "modest" come
    second. `away`: the ledger does not answer. `tokens`: the length of each answer."""
    ledger = SimLedger(away)
    return simulated(ledger, lambda cluster: _run(cluster, floods, gateways, tokens), limits)


class SimLedger(MemoryLedger):
    """A ledger on the clock of the loop in which it is used."""

    def __init__(self, away: bool = False) -> None:
        super().__init__(lambda: asyncio.get_running_loop().time())
        self.away = away


def simulated(
    ledger: MemoryLedger,
    work: Callable[[Cluster], Coroutine[Any, Any, T]],
    limits: Mapping[str, TenantLimits] | None = None,
    places: int = PLACES,
) -> T:
    """Return the result of `work` in virtual time."""
    loop = SimLoop(Random("turns"))
    structlog.configure(processors=[_drop])
    try:
        with patch.object(os, "getpid", lambda: 1), redirect_stdout(io.StringIO()):
            net, table = Net(loop, Random("network"), Log(loop, None)), Known(open_without_keys=True)
            table.replace(KeySet(limits=dict(limits or {})), 0.0)
            cluster = Cluster(
                loop, net, Stores(loop, Random("stores")), engine=ENGINE | {"max_sequences": places // 2}, keys=table,
                limits=ledger, settings={"gateway": {"max_waiting": 4096, "drain_s": 1}},
            )  # fmt: skip
            return cluster.run(work(cluster))
    finally:
        structlog.reset_defaults()


def _drop(_logger: Any, _method: str, _event: Any) -> str:
    raise structlog.DropEvent


async def _start(cluster: Cluster, gateways: int) -> None:
    for number in range(gateways):
        cluster.start_gateway(f"g{number}")
    for name, role in ROLES.items():
        cluster.start_worker(name, role)
    cluster.loop.add(Node("client"))
    await asyncio.sleep(SETTLE_S)


async def _run(cluster: Cluster, floods: Mapping[str, Mapping[str, int]], gateways: int, tokens: int) -> Watched:
    loop = cluster.loop
    await _start(cluster, gateways)
    requested_s: dict[str, float] = {}
    clients = [Client(cluster, gateway, tenant, count, tokens) for gateway, tenants in floods.items()
               for tenant, count in tenants.items()]  # fmt: skip
    for client in sorted(clients, key=lambda each: each.tenant == "modest"):
        if client.tenant == "modest" and "modest" not in requested_s:
            await asyncio.sleep(SETTLED_S)  # the others hold every place by now
        requested_s.setdefault(client.tenant, loop.time())
        client.ask()
    await asyncio.sleep(SETTLED_S)
    held, looks = dict.fromkeys(requested_s, 0), round(WATCHED_S / LOOK_S)
    for _ in range(looks):
        await asyncio.sleep(LOOK_S)
        for gateway in cluster.gateways():
            assert gateway.gateway is not None
            for model in gateway.gateway.dispatcher.places_here().values():
                for tenant, count in model.tenants.items():
                    held[tenant] += count.running
    assert cluster.wrong == []
    assert [error for client in clients for error in client.failed] == []
    first = {tenant: min(each.first_token_s or float("inf") for each in clients if each.tenant == tenant) - at_s
             for tenant, at_s in requested_s.items()}  # fmt: skip
    ended = {tenant: sum(each.ended for each in clients if each.tenant == tenant) for tenant in requested_s}
    gave_way = sum(each.gateway.dispatcher.places.given_up for each in cluster.gateways() if each.gateway is not None)
    return Watched({tenant: total / looks for tenant, total in held.items()}, first, ended, gave_way)


def shares(found: Watched) -> dict[str, float]:
    """Return each tenant's share of all held places."""
    total = sum(found.held.values())
    return {tenant: held / total for tenant, held in found.held.items()}


@pytest.mark.parametrize(
    ("floods", "weight", "share"),
    [
        ({"g0": {"flood": 60}, "g1": {"modest": 60}}, 1, 1 / 2),
        ({"g0": {"flood": 60, "modest": 30}, "g1": {"flood": 60, "modest": 30}}, 1, 1 / 2),
        ({"g0": {"flood": 60}, "g1": {"flood": 60, "modest": 60}}, 1, 1 / 2),
        ({"g0": {"flood": 60}, "g1": {"flood": 20, "modest": 60}}, 3, 3 / 4),
        ({"g0": {"flood": 60}, "g1": {"modest": 6}}, 1, 6 / PLACES),
    ],
    ids=["one each", "both at both", "the flood at both", "by weight", "below its share"],
)
def test_each_tenants_places_over_two_gateways_match_its_share_to_within_5_percent(
    floods: dict[str, dict[str, int]], weight: int, share: float
) -> None:
    found = run(floods, {"modest": TenantLimits(weight=weight)})
    assert abs(shares(found)["modest"] - share) <= WITHIN * share
    assert abs(shares(found)["flood"] - (1 - share)) <= WITHIN * (1 - share)
    assert sum(found.held.values()) >= (1 - WITHIN) * PLACES, "places stay free while a request waits"
    assert found.first_token_s["modest"] <= 1.0, "its gateway held no place when it arrived"
    assert min(found.ended.values()) > 0


def test_without_the_ledger_gateways_continue_with_the_places_they_hold() -> None:
    found = run({"g0": {"flood": 60}, "g1": {"modest": 60}}, away=True)
    assert min(found.ended.values()) > 0
    assert sum(found.held.values()) >= (1 - WITHIN) * PLACES


@pytest.mark.parametrize("gateways", [2, 4])
def test_one_answer_is_preempted_for_each_place_that_another_tenant_takes(gateways: int) -> None:
    """Answers are long, so that every place changes hands once."""
    floods = {f"g{number}": {"flood": 60 // gateways} for number in range(gateways)}
    floods[f"g{gateways - 1}"]["modest"] = 6
    found = run(floods, gateways=gateways, tokens=20_000)
    assert round(found.held["modest"]) == found.gave_way == 6
    assert found.first_token_s["modest"] <= 1.0


async def _grow(cluster: Cluster) -> int:
    """Places that are held where two tenants of four gateways ask for half of all first, and then for more than all."""
    await _start(cluster, 4)
    clients = [Client(cluster, "g0", "flood", 2, 20_000), Client(cluster, "g1", "other", 2, 20_000)]
    for count in (2, 58):
        for client in clients:
            client.ask(count)
        await asyncio.sleep(SETTLED_S)
    gateways = [each.gateway.dispatcher for each in cluster.gateways() if each.gateway is not None]
    models = [model for each in gateways for model in each.places_here().values()]
    return sum(count.running for model in models for count in model.tenants.values())


def test_places_held_by_idle_gateways_go_to_tenants_that_wait_elsewhere() -> None:
    assert simulated(SimLedger(), _grow, places=8) == 8


async def _leaves(cluster: Cluster, ledger: MemoryLedger, ends: Callable[[Cluster, str], None]) -> tuple[bool, int]:
    """Return whether others still have the report of g1 after its end, and what the tenant of g0 holds soon after."""
    await _start(cluster, 2)
    for client in (Client(cluster, "g0", "flood", 60, 20_000), Client(cluster, "g1", "modest", 60, 20_000)):
        client.ask()
    await asyncio.sleep(SETTLED_S)
    assert "g1" in await ledger.exchange("", b"")
    going = cluster.processes["g1"]
    ends(cluster, "g1")
    while going not in cluster.past:
        await asyncio.sleep(LOOK_S)
    found = "g1" in await ledger.exchange("", b"")
    await asyncio.sleep(REPORT_HOLD_S + 0.5)
    gateway = cluster.processes["g0"].gateway
    assert gateway is not None
    return found, gateway.dispatcher.places_here()["sim"].tenants["flood"].running


def test_a_gateway_that_stops_withdraws_its_report() -> None:
    ledger = SimLedger()
    assert simulated(ledger, lambda cluster: _leaves(cluster, ledger, Cluster.stop)) == (False, PLACES)


def test_a_dead_gateway_is_forgotten_within_a_second_and_its_places_go_to_others() -> None:
    ledger = SimLedger()
    assert simulated(ledger, lambda cluster: _leaves(cluster, ledger, Cluster.kill)) == (True, PLACES)
