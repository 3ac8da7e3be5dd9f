"""Tests of catalogue models at one gateway: who waits and for how long, what clients receive and what is reported."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from libs.contracts.errors import NoWorkers, UnknownModel
from libs.stores.catalogue import Catalogued, LoadTimes, ModelEntry, ModelOutlook
from libs.testing.memory.models import MemoryCatalogue
from libs.testing.memory.store import MemoryStore
from libs.testing.wait import ManualClock
from services.gateway.request.models import GRACE_MS, MARGIN, SPREAD, LoadableModels
from services.gateway.request.prompt import Catalog

NOW_MS = 1_700_000_000_000


class Rig:
    """A desk whose queue and workers are what the test says."""

    def __init__(self, draw: float = 0.5) -> None:
        self.waiting: dict[str, int] = {}
        self.served: set[str] = set()
        self.clock = ManualClock(NOW_MS * 1_000_000)
        self.catalog = Catalog([])
        self.store = MemoryCatalogue(MemoryStore(), "test")
        self.desk = LoadableModels(
            self.store,
            self.catalog,
            self.clock,
            gateway_id="g",
            max_wait_s=10.0,
            waiting=lambda name: self.waiting.get(name, 0),
            served=self.served.__contains__,
            draw=lambda: draw,
        )

    async def knows(self, outlook: ModelOutlook | None = None, times: LoadTimes | None = None) -> None:
        await self.desk.take(
            Catalogued(
                {"a": ModelEntry("a", "builtin:sim", 4_000_000_000, tpot_ms=20.0)},
                {"a": times} if times else {},
                {"a": outlook} if outlook else {},
            )
        )


async def test_a_request_waits_for_the_expected_load_time_of_its_model() -> None:
    rig = Rig()
    await rig.knows(ModelOutlook("disk", wait_s=4.5))
    with rig.desk.requested("a") as wait_s:
        assert wait_s == 4.5
        assert rig.desk.ends("a", 5.0) is None
        assert isinstance(rig.desk.ends("a", 6.0), NoWorkers)
    await rig.knows(ModelOutlook("loading", ready_unix_ms=NOW_MS + 2_000))
    assert rig.desk.state("a") == ("loading", 2.0)
    await rig.knows(ModelOutlook("disk", wait_s=400.0))
    assert rig.desk.ends("a", 1.0, begun=True) is None, "an answer that has begun is not given up for an estimate"
    assert isinstance(rig.desk.ends("a", 11.0, begun=True), NoWorkers)
    await rig.knows(ModelOutlook("loading", ready_unix_ms=NOW_MS + 2_000))
    rig.served.add("a")
    with rig.desk.requested("a") as wait_s:
        assert wait_s == 0.0
    assert rig.desk.state("a") == ("serving", 0.0)


@pytest.mark.parametrize("draw", [0.0, 0.5, 1.0])
async def test_a_longer_wait_is_503_with_a_retry_after_that_is_spread_and_sufficient(draw: float) -> None:
    rig = Rig(draw)
    await rig.knows(ModelOutlook("disk", wait_s=30.0))
    with pytest.raises(NoWorkers, match="expected to be in 30 s") as refused, rig.desk.requested("a"):
        pass
    back_s = refused.value.retry_after_s
    assert back_s is not None and 30 * MARGIN <= back_s <= 30 * SPREAD + 1
    use = rig.desk.uses()["a"]
    assert (use.in_flight, use.arrivals) == (0, 1)
    assert use.promised_unix_ms == NOW_MS + back_s * 1000 + GRACE_MS


async def test_without_a_planner_the_wait_follows_past_load_times_or_the_size() -> None:
    rig = Rig()
    await rig.knows()
    assert rig.desk.state("a") == ("unknown", 4.0)
    await rig.knows(times=LoadTimes(load_s=7.0))
    assert rig.desk.state("a") == ("unknown", 7.0)


async def test_a_model_that_cannot_be_loaded_is_503_with_the_reason_for_new_and_waiting_requests() -> None:
    rig = Rig()
    await rig.knows(ModelOutlook("failed", error="no such folder"))
    with pytest.raises(NoWorkers, match="cannot be loaded: no such folder"), rig.desk.requested("a"):
        pass
    assert isinstance(rig.desk.ends("a", 0.1), NoWorkers)


async def test_a_removed_model_is_404_for_waiting_requests_and_unknown_to_the_next() -> None:
    rig = Rig()
    await rig.knows()
    assert rig.catalog.get("a").tpot_ms == 20.0
    await rig.desk.take(Catalogued({"b": ModelEntry("b", "builtin:sim", 1)}))
    assert isinstance(rig.desk.ends("a", 0.1), UnknownModel)
    with pytest.raises(UnknownModel):
        rig.catalog.get("a")
    assert rig.catalog.names == ["b"]


async def test_a_momentarily_lost_catalogue_removes_nothing() -> None:
    rig = Rig()
    await rig.knows()
    await rig.desk.take(Catalogued())
    assert rig.catalog.names == ["a"]
    await rig.desk.take(Catalogued())
    assert rig.catalog.names == []


async def test_the_last_model_is_unknown_once_it_is_removed() -> None:
    rig = Rig()
    await rig.knows()
    await rig.desk.take(Catalogued(edits=2))
    assert rig.catalog.names == []


async def test_a_model_whose_files_are_missing_here_leaves_the_others_served() -> None:
    rig = Rig()
    entries = {"a": ModelEntry("a", "builtin:sim", 1), "b": ModelEntry("b", "/no/such/folder", 1)}
    await rig.desk.take(Catalogued(entries))
    assert rig.catalog.names == ["a"]


async def test_answers_ended_by_a_leaving_worker_are_not_reported_as_waiting() -> None:
    rig = Rig()
    await rig.knows(ModelOutlook("serving"))
    rig.served.add("a")
    with rig.desk.requested("a"):
        rig.served.clear()
        use = rig.desk.uses()["a"]
        assert (use.waiting, use.in_flight) == (0, 1)


async def test_a_batch_line_that_waits_outside_the_queue_causes_its_model_to_load() -> None:
    rig = Rig()
    await rig.knows(ModelOutlook("disk", wait_s=400.0))
    assert rig.desk.fault("a") == ""
    with rig.desk.line("a"):
        with rig.desk.wakes("a"):
            use = rig.desk.uses()["a"]
            assert (use.arrivals, use.waiting, use.in_flight) == (1, 1, 1)
        assert (rig.desk.uses()["a"].waiting, rig.desk.uses()["a"].in_flight) == (0, 1)
    assert rig.desk.uses()["a"].in_flight == 0
    await rig.knows(ModelOutlook("failed", error="no such folder"))
    assert rig.desk.fault("a") == "no such folder"
    with pytest.raises(UnknownModel, match="was removed"):
        rig.desk.fault("gone")


async def test_use_is_reported_at_once_for_a_cold_model_and_again_when_it_changes() -> None:
    rig = Rig()
    await rig.knows(ModelOutlook("disk", wait_s=1.0))
    reporting = asyncio.ensure_future(rig.desk.report())

    async def reported(holds: Callable[[Any], bool]) -> None:
        async with asyncio.timeout(10):
            while not holds((await rig.store.uses()).get("g", {}).get("a")):
                await asyncio.sleep(0.01)

    with rig.desk.requested("a"):
        await reported(lambda use: use is not None and (use.waiting, use.in_flight, use.arrivals) == (1, 1, 1))
    await reported(lambda use: use.in_flight == 0)
    reporting.cancel()


async def test_lines_of_batch_jobs_are_reported_separately_and_as_waiting_only_if_they_wait_alone() -> None:
    rig = Rig()
    await rig.knows(ModelOutlook("disk", wait_s=4.5))
    with rig.desk.line("a"), rig.desk.wakes("a"):
        use = rig.desk.uses()["a"]
        assert (use.waiting, use.lines_waiting, use.in_flight, use.lines_in_flight) == (1, 1, 1, 1)
        assert use.waiting_since_unix_ms == NOW_MS
        rig.clock.advance_ms(5_000)
        with rig.desk.requested("a"):
            rig.waiting["a"] = 1
            use = rig.desk.uses()["a"]
            assert (use.waiting, use.lines_waiting, use.in_flight, use.lines_in_flight) == (2, 1, 2, 1)
            assert use.waiting_since_unix_ms == NOW_MS + 5_000, "a person's wait begins with the person"
            rig.clock.advance_ms(1_000)
            assert rig.desk.uses()["a"].waiting_since_unix_ms == NOW_MS + 5_000


async def test_an_adapter_is_counted_separately_and_also_within_its_model() -> None:
    rig = Rig()
    entries = {
        "a": ModelEntry("a", "builtin:sim", 1),
        "sql": ModelEntry("sql", "/adapters/sql", 0, parent="a"),
        "lost": ModelEntry("lost", "/adapters/lost", 0, parent="nowhere"),
    }
    await rig.desk.take(Catalogued(entries))
    assert rig.catalog.names == ["a", "sql"]
    served = rig.catalog.get("sql")
    assert (served.routed, served.adapter_name, served.adapter_source) == ("a", "sql", "/adapters/sql")
    with pytest.raises(NoWorkers, match="adapter of nowhere"):
        rig.catalog.get("lost")
    rig.served.add("a")
    assert rig.desk.state("sql") == ("serving", 0.0)
    with rig.desk.requested("a"), rig.desk.requested("a", "sql"), rig.desk.line("a", "sql"):
        uses = rig.desk.uses()
        assert {name: use.in_flight for name, use in uses.items()} == {"a": 3, "sql": 2}
    assert {name: (use.arrivals, use.in_flight) for name, use in rig.desk.uses().items()} == {
        "a": (3, 0),
        "sql": (2, 0),
    }


async def test_an_adapter_from_another_folder_shares_nothing_with_an_earlier_one_of_its_name() -> None:
    rig = Rig()
    found = set()
    for source in ("/adapters/one", "/adapters/two"):
        adapter = ModelEntry("sql", source, 0, parent="a")
        await rig.desk.take(Catalogued({"a": ModelEntry("a", "builtin:sim", 1), "sql": adapter}))
        found.add(rig.catalog.get("sql").adapter)
    assert len(found) == 2
