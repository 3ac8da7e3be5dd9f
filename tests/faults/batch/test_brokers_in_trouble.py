"""Test of a batch job and requests over three Kafka brokers, of which one has a full disk or a broken network."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from libs.contracts.topics import BATCH_RESULTS
from libs.testing.batch.jobs import (
    ENDED,
    answered,
    committed,
    done,
    retrieve,
    shown,
    submit,
    unanswered,
    until_answered,
    write_lines,
)
from libs.testing.batch.records import sent, until_in_step
from libs.testing.servers.machines import NotPermitted, SwitchedNetwork, fill, small_disk, switched_network
from libs.testing.servers.replicated import BROKERS, BrokerSite, KafkaCluster, kafka_cluster
from libs.testing.servers.server import Server
from libs.testing.servers.stores import KafkaUnavailable
from libs.testing.suites.processes import until_whole
from libs.testing.suites.steady_load import SteadyLoad, steady_load
from libs.testing.suites.suite import RunningSuite, running_suite
from libs.testing.wait import until
from tests.programs import skip_or_fail_in_ci

pytestmark = [pytest.mark.alone, pytest.mark.suite, pytest.mark.kafka, pytest.mark.faults, pytest.mark.timeout(1800)]

# Starved cores answer five lines a second, so the job takes half of `END_S` there.
LINES = 1_000
TOKENS = 16
END_S = 400.0
START_S = 600.0
FAULT_S = 25.0
"""The time from a fault until it is mended: several times the session timeout of a broker."""
DISK_MIB = 256
POLL_S = 0.1
MS_PER_S = 1000


@dataclass(frozen=True, slots=True)
class Trouble:
    """A fault of the first broker."""

    inflict: Callable[[], None]
    mend: Callable[[], None]
    alert: str = ""
    """The alert that fires before it is mended."""


@dataclass
class Rig:
    """A cluster and a suite over it, with the faults that this machine permits."""

    suite: RunningSuite
    kafka: KafkaCluster
    faults: dict[str, Trouble] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    """Why other faults are not possible."""


def full_disk(disk: Path, broker: Server) -> Trouble:
    """Kafka stops a broker that cannot write, so mending starts it again."""

    def mend() -> None:
        (disk / "filler").unlink()
        broker.kill()
        broker.start()

    return Trouble(lambda: fill(disk / "filler"), mend)


def parted(network: SwitchedNetwork) -> dict[str, Trouble]:
    """A broker parted from everything, from the other brokers alone, and from the suite alone."""
    first, *others = network.hosts
    brokers, suite = [each.address for each in others], [network.address]
    return {
        "all": Trouble(first.unplug, first.plug_in),
        "brokers": Trouble(lambda: first.refuse(brokers), lambda: first.accept(brokers)),
        "suite": Trouble(lambda: first.refuse(suite), lambda: first.accept(suite), "FulcrumBrokerUnreachable"),
    }


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder = tmp_path_factory.mktemp("suite")
    refused: dict[str, str] = {}
    with ExitStack() as stack:
        sites, network, disk = [BrokerSite()] * BROKERS, None, None
        try:
            network = stack.enter_context(switched_network(BROKERS))
            sites = [BrokerSite(each.address, each.enter) for each in network.hosts]
        except NotPermitted as error:
            refused |= dict.fromkeys(("all", "brokers", "suite"), str(error))
        try:
            disk = stack.enter_context(small_disk(folder / "disk", DISK_MIB))
            sites[0] = replace(sites[0], data=disk)
        except NotPermitted as error:
            refused["disk"] = str(error)
        try:
            kafka = stack.enter_context(kafka_cluster(sites))
        except KafkaUnavailable as error:
            skip_or_fail_in_ci(error)
        env = {
            "FULCRUM_CLUSTER": f"test-{uuid.uuid4().hex[:12]}",
            "FULCRUM_GATEWAY_FILES_FOLDER": str(folder / "files"),
            "FULCRUM_WORKER_SIM_SPEEDUP": "0.25",
        }
        shape = ("--engine", "sim", "--prefill", "1", "--decode", "2", "--gateways", "2", "--kafka", kafka.servers)
        found = Rig(stack.enter_context(running_suite(folder, *shape, env=env, start_s=START_S)), kafka)
        found.refused = refused
        if network is not None:
            found.faults |= parted(network)
        if disk is not None:
            found.faults["disk"] = full_disk(disk, next(iter(kafka.brokers.values())))
        yield found


@dataclass
class Observed:
    """The progress of a job and the voices of the suite, by the time of the event loop."""

    lines: list[tuple[float, int]] = field(default_factory=list)
    voices: dict[str, float] = field(default_factory=dict)
    """The first time of each sentence of a firing alert or of the verdict."""

    def announced(self, alert: str) -> bool:
        return any(sentence.startswith(f"{alert}:") for sentence in self.voices)

    def longest_stall_s(self, from_s: float, to_s: float) -> float:
        """Return the longest time without another answered line, until all are answered."""
        moved_s, longest_s, known = from_s, 0.0, -1
        for at_s, count in self.lines:
            if from_s <= at_s <= to_s and count > known:
                moved_s, longest_s, known = at_s, max(longest_s, at_s - moved_s), count
        return longest_s if known == LINES else max(longest_s, min(to_s, self.lines[-1][0]) - moved_s)

    def lines_per_s(self, from_s: float, to_s: float) -> float:
        inside = [each for each in self.lines if from_s <= each[0] <= to_s]
        return (inside[-1][1] - inside[0][1]) / (inside[-1][0] - inside[0][0]) if len(inside) > 1 else 0.0


@asynccontextmanager
async def observing(http: httpx.AsyncClient, suite: RunningSuite, batch_id: str) -> AsyncIterator[Observed]:
    found, now_s = Observed(), asyncio.get_running_loop().time

    async def answer(path: str) -> Any:
        try:
            response = await http.get(f"{suite.ready['metrics']}{path}")
        except httpx.TransportError:
            return None
        return response.json() if response.is_success else None

    async def look() -> None:
        while True:
            for url in suite.ready["gateways"]:
                if batch := await retrieve(http, url, batch_id):
                    found.lines.append((now_s(), done(batch)))
                    break
            status, alerts = await answer("/v1/status"), await answer("/v1/alerts")
            said = [f"status: {status['verdict']['sentence']}"] if status else []
            said += [f"{each['name']}: {each['reason']}" for each in (alerts or {"firing": ()})["firing"]]
            for sentence in said:
                found.voices.setdefault(sentence, now_s())
            await asyncio.sleep(POLL_S)

    task = asyncio.create_task(look())
    try:
        yield found
    finally:
        task.cancel()
        await asyncio.wait([task])


def percentiles_ms(took_s: Sequence[float]) -> str:
    if not took_s:
        return "none"
    ordered = sorted(took_s)
    middle, late = (ordered[int(len(ordered) * share)] * MS_PER_S for share in (0.5, 0.99))
    return f"p50 {middle:.0f}, p99 {late:.0f}, longest {ordered[-1] * MS_PER_S:.0f} ms of {len(ordered)}"


async def endure(rig: Rig, fault: Trouble, http: httpx.AsyncClient, batch_id: str, load: SteadyLoad) -> list[str]:
    """Inflict the fault for FAULT_S in the middle of the job, mend it, and return figures."""
    loop, figures, suite = asyncio.get_running_loop(), [], rig.suite
    urls = suite.ready["gateways"]
    async with observing(http, suite, batch_id) as observed:
        began_s = loop.time()
        batch = await until_answered(http, urls, batch_id, lines=LINES // 10, timeout_s=END_S)
        assert batch["status"] not in ENDED
        before = len(load.took_s)
        fault_s = loop.time()
        try:
            await asyncio.to_thread(fault.inflict)
            await until(lambda: loop.time() > fault_s + FAULT_S, timeout_s=2 * FAULT_S)
            await load.more(16, timeout_s=END_S)
            if fault.alert:
                await until(lambda: observed.announced(fault.alert), timeout_s=END_S)
            mended_s, during = loop.time(), len(load.took_s)
        finally:  # the next test begins with a sound cluster
            # In this thread, since a server dies with the thread that started it.
            fault.mend()
        await until_in_step(rig.kafka.servers, suite.ready["cluster"])
        whole_s = loop.time()
        batch = await until_answered(http, urls, batch_id, timeout_s=END_S)
        assert (batch["status"], done(batch)) == ("completed", LINES)
        await load.more(16, timeout_s=END_S)
    for name, from_s, to_s, took_s in (
        ("before", began_s, fault_s, load.took_s[:before]),
        ("during", fault_s, mended_s, load.took_s[before:during]),
        ("after", mended_s, loop.time(), load.took_s[during:]),
    ):
        stall_s, rate = observed.longest_stall_s(from_s, to_s), observed.lines_per_s(from_s, to_s)
        figures.append(f"{name}: {rate:.0f} lines/s, longest stall {stall_s:.1f} s, requests {percentiles_ms(took_s)}")
    figures.append(f"in step {whole_s - mended_s:.1f} s after mending")
    figures += [f"{at_s - fault_s:+.1f} s {sentence}" for sentence, at_s in observed.voices.items()]
    return figures


@pytest.mark.parametrize("kind", ["disk", "all", "brokers", "suite"])
async def test_a_broker_in_trouble_costs_no_request_no_line_and_no_telemetry(
    rig: Rig, kind: str, tmp_path: Path
) -> None:
    if kind in rig.refused:
        pytest.skip(rig.refused[kind])
    write_lines(tmp_path / "lines.jsonl", LINES, max_tokens=TOKENS)
    servers, cluster, urls = rig.kafka.servers, rig.suite.ready["cluster"], rig.suite.ready["gateways"]
    async with httpx.AsyncClient(timeout=60) as http:
        assert BATCH_RESULTS.name(cluster) in await until_in_step(servers, cluster)
        batch_id = await submit(http, urls[0], tmp_path / "lines.jsonl")
        async with steady_load(urls, clients=4, tokens=TOKENS) as load:
            figures = await endure(rig, rig.faults[kind], http, batch_id, load)
        print(f"{kind}: {LINES} lines, {load.served} requests", *figures, sep="\n")
        assert (load.failed, load.broken) == ([], 0)
        await until_whole(http, rig.suite)
        batch = await retrieve(http, urls[0], batch_id)
        assert batch is not None
        files = await answered(http, urls[0], batch)
    assert not shown(unanswered(files, LINES))
    assert not shown(unanswered(await committed(servers, cluster, batch_id), LINES))
    steps, decisions = await sent(servers, cluster)
    assert steps and decisions
    for numbers in (*steps.values(), *decisions.values()):
        assert set(numbers) == set(range(min(numbers), max(numbers) + 1))  # a batch may come twice, none is missing
