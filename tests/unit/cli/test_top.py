"""Tests of `fulcrum top` with textual's pilot, over a real metrics service's app, tick and stream."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry
from rich.text import Text
from textual.pilot import Pilot
from textual.widgets import DataTable, Input, Static
from typer.testing import CliRunner

from libs.bus.port import Record
from libs.cli.main import app as cli
from libs.cli.status.tables import show_occupancy_of
from libs.cli.top import draw
from libs.cli.top.detail import Detail
from libs.cli.top.feed import Feed, NotShown
from libs.cli.top.head import Workers, _planner
from libs.cli.top.lists import REQUEST_HEADS, STEP_HEADS
from libs.cli.top.model import TopModel
from libs.cli.top.screen import GroupDetail, Top
from libs.contracts.pb.fulcrum.planner.v1.planner_pb2 import ACTION_ROLE_MOVED, Decision
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import (
    OUTCOME_CLIENT_GONE,
    OUTCOME_OK,
    GatewayQueues,
    ModelQueue,
    RequestEvent,
)
from libs.contracts.topics import DECISIONS, QUEUES, REQUESTS, STEPS
from libs.runtime.clock import SystemClock
from libs.runtime.net.ports import held_port
from libs.telemetry.columns import prefill_shares
from libs.telemetry.fleet import FleetTelemetry
from libs.testing.workers.telemetry import MS, ORIGIN_NS, step, step_batch
from services.metrics.requests import RequestMetrics
from services.metrics.settings import MetricsSettings
from services.metrics.state import MetricsState
from services.metrics.stream import TICK_NS, Hub
from tests.metrics_rig import serving_metrics

pytestmark = pytest.mark.system

SEEN_S = 15.0
SIZE = (150, 30)


@dataclass
class Service:
    """The metrics service; workers send straight into its state."""

    state: MetricsState
    clock: SystemClock
    group: str = ""
    """The group of workers whose names end in -dp0 and -dp1."""
    busy: dict[str, float] = field(default_factory=lambda: {"prefill-0": 0.6, "decode-0": 0.2, "decode-1": 0.1})
    url: str = ""

    def finish(self, request_id: str, prefill: str, decode: str, **more: Any) -> None:
        """A request of 100 ms until its first token and 20 ms a token has just ended."""
        reported = {
            "model": "sim",
            "prompt_tokens": 32,
            "cached_tokens": 16,
            "output_tokens": 11,
            "outcome": OUTCOME_OK,
        }
        event = RequestEvent(
            request_id=request_id, prefill_worker=prefill, decode_worker=decode, queue_ns=5 * MS, ttft_ns=100 * MS,
            decode_ns=200 * MS, arrival_unix_ns=self.clock.now_ns() - 300 * MS, **{**reported, **more},
        )  # fmt: skip
        self.state.take(Record(REQUESTS, request_id, event, 0, 0), self.clock.now_ns())

    async def send_forever(self) -> None:
        sent = self.clock.now_ns() // TICK_NS
        while True:
            for number in range(sent, self.clock.now_ns() // TICK_NS):
                start_ms = (number * TICK_NS - ORIGIN_NS) / MS
                for worker_id, busy in self.busy.items():
                    role = worker_id.split("-")[0]
                    steps = [step(start_ms, start_ms + 100 * busy, **{role: 1})]
                    batch = step_batch(number, (start_ms, start_ms + 100), steps, worker=worker_id, role=role)
                    batch.group = self.group if "-dp" in worker_id else ""
                    self.state.take(Record(STEPS, worker_id, batch, 0, 0), self.clock.now_ns())
                sent = number + 1
            await asyncio.sleep(0.02)


@asynccontextmanager
async def serving(port: int = 0) -> AsyncIterator[Service]:
    clock = SystemClock()
    service = Service(MetricsState(prefill_shares, RequestMetrics(CollectorRegistry())), clock)
    settings = MetricsSettings(alert_for_ms=0, alert_stale_ms=500)
    sending = service.send_forever()
    async with serving_metrics(service.state, clock, Hub(), sending, settings=settings, port=port) as service.url:
        yield service


async def seen(pilot: Pilot[None], holds: Callable[[], object]) -> None:
    async with asyncio.timeout(SEEN_S):
        while not holds():
            await pilot.pause(0.05)


def text(app: Top, name: str) -> str:
    return str(app.query_one(f"#{name}", Static).render())


def rows(app: Top) -> list[str]:
    return [str(key.value) for key in app.query_one(DataTable).rows]


async def test_ratio_pools_and_workers_equal_the_services_and_stay_live() -> None:
    async with serving() as service:
        app = Top(Feed(service.url))
        async with app.run_test(size=SIZE) as pilot:
            await seen(pilot, lambda: "P:D 2.00 : 1" in text(app, "head") and "covered 100%" in text(app, "head"))
            assert "decode 15%" in text(app, "pools")
            assert rows(app) == ["decode-0", "decode-1", "prefill-0"]
            assert str(app.query_one(DataTable).get_cell("prefill-0", "prefill")) == "60%"
            service.busy["prefill-0"] = 0.3
            await seen(pilot, lambda: "P:D 1.00 : 1" in text(app, "head"))
            del service.busy["decode-1"]
            await seen(pilot, lambda: " 1 alert " in text(app, "head") and "no telemetry" in text(app, "events"))
            assert str(app.query_one(DataTable).get_cell("decode-1", "decode")) != "0%"


async def test_keys_sort_filter_pause_and_open_a_worker() -> None:
    async with serving() as service:
        app = Top(Feed(service.url))
        async with app.run_test(size=SIZE) as pilot:
            await seen(pilot, lambda: len(rows(app)) == 3)
            await pilot.press("r")
            await seen(pilot, lambda: rows(app)[0] == "prefill-0")
            await pilot.press("slash", *"decode-1", "enter")
            await seen(pilot, lambda: rows(app) == ["decode-1"])
            await pilot.press("enter")
            await seen(pilot, lambda: isinstance(app.screen, Detail))
            assert "decode-1" in str(app.screen.query_one("#detail", Static).render())
            await pilot.press("escape", "slash", *["backspace"] * 8, "enter")
            await seen(pilot, lambda: len(rows(app)) == 3)
            assert not app.query_one("#filter", Input).has_class("open")
            await pilot.press("space")
            shown = text(app, "head")
            service.busy["prefill-0"] = 0.1
            await seen(pilot, lambda: app.feed.model.spent(app.feed.model.workers.values())[1] < 400 * MS)
            assert text(app, "head") == shown
            await pilot.press("space", "t")
            await seen(pilot, lambda: text(app, "head") != shown)
            assert app.theme == "textual-light"


async def test_waiting_requests_are_shown_and_unknown_while_no_gateway_reports() -> None:
    async with serving() as service:
        app = Top(Feed(service.url))
        async with app.run_test(size=SIZE) as pilot:
            await seen(pilot, lambda: "waiting for prefill 0" in text(app, "head"))
            queue = ModelQueue(model="sim", prefill_requests=1_200, prefill_tokens=90_000)
            message = GatewayQueues(gateway_id="g", told_unix_ns=service.clock.now_ns(), queues=[queue])
            service.state.take(Record(QUEUES, "g", message, 0, 0), service.clock.now_ns())
            await seen(pilot, lambda: "waiting for prefill 1,200 of 90,000 tokens" in text(app, "head"))
            await seen(pilot, lambda: "waiting for prefill unknown" in text(app, "head"))


@pytest.mark.parametrize("size", [(80, 24), (160, 50)])
async def test_every_line_fits_the_terminal_and_a_wide_one_has_more_columns(size: tuple[int, int]) -> None:
    async with serving() as service:
        app = Top(Feed(service.url))
        service.finish("r-1", "prefill-0", "decode-1")
        async with app.run_test(size=size) as pilot:
            await seen(pilot, lambda: len(rows(app)) == 3 and "TTFT 100 ms/100 ms" in text(app, "head"))
            for name in ("head", "pools"):
                shown = app.query_one(f"#{name}", Static)
                assert max(map(len, text(app, name).splitlines())) <= size[0] - 2
                await seen(pilot, lambda: shown.size.height == len(text(app, name).splitlines()))  # noqa: B023
            table = app.query_one(DataTable)
            assert table.virtual_size.width <= size[0]
            assert ("MBU" in [str(key.value) for key in table.columns]) == (size[0] > 100)


async def test_the_cursor_stays_on_its_worker_in_any_order() -> None:
    async with serving() as service:
        app = Top(Feed(service.url))
        async with app.run_test(size=SIZE) as pilot:
            await seen(pilot, lambda: len(rows(app)) == 3)
            table = app.query_one(DataTable)
            # In an order of figures that have not come, another worker would be under the cursor, and stay there.
            await seen(pilot, lambda: str(table.get_cell("prefill-0", "prefill")) not in ("–", "0%"))
            await pilot.press("down", *"ssss")  # by prefill
            await seen(pilot, lambda: rows(app)[0] == "prefill-0" and table.cursor_row == 0)
            assert "prefill ▾" in [str(column.label) for column in table.columns.values()]
            await pilot.press("s")  # by decode
            await seen(pilot, lambda: rows(app)[0] == "decode-0")
            await pilot.press("down")
            service.busy["decode-1"] = 0.9
            await seen(pilot, lambda: rows(app)[0] == "decode-1")
            assert table.cursor_row == 0
            await pilot.press("S", "r", "r", "space")
            assert "paused" in text(app, "head")
            assert "prefill ▾" in [str(column.label) for column in table.columns.values()]


async def test_one_key_leads_from_a_worker_to_its_requests_and_back() -> None:
    async with serving() as service:
        app = Top(Feed(service.url))
        service.finish("r-1", "prefill-0", "decode-1", prompt_tokens=1234, output_tokens=11)
        service.finish("r-2", "prefill-0", "decode-0", prompt_tokens=70)

        def requests() -> list[str]:
            return [str(line) for line in str(app.screen.query_one("#list", Static).render()).splitlines()]

        async with app.run_test(size=SIZE) as pilot:
            await seen(pilot, lambda: rows(app) == ["decode-0", "decode-1", "prefill-0"])
            await pilot.press("down", "enter")
            await seen(pilot, lambda: isinstance(app.screen, Detail) and len(requests()) == 2)
            heads, line = requests()
            assert heads.split() == list(REQUEST_HEADS)
            reported = line.split(maxsplit=1)[1]
            assert reported.split() == [
                "decode",
                "1,234",
                "16",
                "11",
                "5.0",
                "ms",
                "100",
                "ms",
                "20.0",
                "ms",
                "ok",
                "r-1",
            ]
            service.finish("r-3", "decode-1", "decode-1", outcome=OUTCOME_CLIENT_GONE)
            await seen(pilot, lambda: len(requests()) == 3)
            assert "client_gone" in requests()[1] and "both" in requests()[1]
            await pilot.press("escape", "down", "enter")
            await seen(pilot, lambda: isinstance(app.screen, Detail) and len(requests()) == 3)
            assert [line.split()[-1] for line in requests()] == ["request", "r-2", "r-1"]
            assert all("prefill" in line for line in requests()[1:])


async def test_one_key_leads_from_a_worker_to_its_steps_and_back() -> None:
    async with serving() as service:
        app = Top(Feed(service.url))

        def lines() -> list[str]:
            return [str(line) for line in str(app.screen.query_one("#list", Static).render()).splitlines()]

        async with app.run_test(size=SIZE) as pilot:
            await seen(pilot, lambda: rows(app) == ["decode-0", "decode-1", "prefill-0"])
            await pilot.press("down", "down", "enter", "s")
            await seen(pilot, lambda: isinstance(app.screen, Detail) and len(lines()) > 5)
            assert lines()[0].split() == " ".join(STEP_HEADS).split()
            newest, older = lines()[1].split(), lines()[2].split()
            assert newest[0] > older[0] and newest[3:5] == ["prefill", "100%"]
            await pilot.press("s")
            await seen(pilot, lambda: "no request" in lines()[0])


async def test_a_reason_for_missing_steps_replaces_the_old_steps() -> None:
    app = Top(Feed(""))

    def listed() -> str:
        return str(app.screen.query_one("#list", Static).render())

    async with serving() as service:
        app.feed.url = service.url
        async with app.run_test(size=SIZE) as pilot:
            await seen(pilot, lambda: rows(app) == ["decode-0", "decode-1", "prefill-0"])
            await pilot.press("down", "down", "enter", "s")
            await seen(pilot, lambda: isinstance(app.screen, Detail) and "prefill" in listed())
            service.state.fleet = FleetTelemetry(prefill_shares)
            service.busy.clear()
            await seen(pilot, lambda: "worker='prefill-0' is not known" in listed())


async def test_the_newest_of_thousands_of_steps_are_shown() -> None:
    async with serving() as service:
        start_ms = (service.clock.now_ns() - ORIGIN_NS) / MS - 2000
        steps = [step(start_ms + each / 2, start_ms + (each + 1) / 2, decode=1) for each in range(2000)]
        batch = step_batch(1, (start_ms, start_ms + 1000), steps, worker="decode-9")
        service.state.take(Record(STEPS, "decode-9", batch, 0, 0), service.clock.now_ns())
        reported = await anext(aiter(Feed(service.url).steps_of("decode-9", "10s")))
        assert not isinstance(reported, NotShown) and len(reported) == len(steps)
        assert reported[0].end_unix_ns == steps[-1].end_unix_ns


async def test_a_service_outage_is_shown_and_the_service_is_followed_again_afterwards() -> None:
    with held_port() as port:
        app = Top(Feed(f"http://127.0.0.1:{port}"))
        async with app.run_test(size=SIZE) as pilot:
            for _ in range(2):
                await seen(pilot, lambda: "does not answer" in text(app, "head"))
                async with serving(port):
                    await seen(pilot, lambda: len(rows(app)) == 3 and "does not answer" not in text(app, "head"))


async def test_old_data_are_shown_with_their_age() -> None:
    async with serving() as service:
        app = Top(Feed(service.url))
        async with app.run_test(size=SIZE) as pilot:
            await seen(pilot, lambda: "covered 100%" in text(app, "head"))
            assert "behind" not in text(app, "head")
            service.busy.clear()
            await seen(pilot, lambda: " 3 s behind " in text(app, "head"))
        done = await asyncio.to_thread(CliRunner().invoke, cli, ["top", "--metrics", service.url, "--once"])
        assert "s behind" in done.stdout


@pytest.mark.parametrize("arguments", [("--once",), ("--json",)])
def test_a_missing_service_is_one_line(arguments: tuple[str, ...]) -> None:
    done = CliRunner().invoke(cli, ["top", "--metrics", "http://127.0.0.1:9", *arguments])
    assert done.exit_code == 1
    assert "no suite answers at http://127.0.0.1:9" in str(done.exception)


async def test_once_prints_one_snapshot_as_json_or_for_people() -> None:
    async with serving() as service:
        app = Feed(service.url)
        following = asyncio.ensure_future(app.follow())
        async with asyncio.timeout(SEEN_S):
            while len(app.model.workers) < 3:
                await asyncio.sleep(0.05)
        following.cancel()
        done = await asyncio.to_thread(CliRunner().invoke, cli, ["top", "--metrics", service.url, "--json", "--once"])
        snapshot = json.loads(done.stdout)
        assert set(snapshot) == {"unix_ms", "age_ms", "ratio", "occupancy", "requests", "alerts"}
        assert len(snapshot["occupancy"]["workers"]) == 3
        done = await asyncio.to_thread(CliRunner().invoke, cli, ["top", "--metrics", service.url, "--once"])
        assert "prefill-0" in done.stdout


def test_a_bar_is_always_full_and_unknown_time_is_no_phase() -> None:
    assert draw.bar((300, 100, 100, 100), 10).plain == "█" * 10
    assert draw.bar((3, 1, 1, 0), 10).plain.count("·") == 3
    assert draw.bar((0, 0, 0, 0), 4).plain == draw.UNKNOWN * 4
    assert draw.sparkline([None, 0, 1, 2]) == " ▁▅█"


async def test_a_frame_updates_the_table_only_for_changed_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = []

    def update_cell(self: Workers, row: str, column: str, value: Any) -> None:
        changed.append((row, column))
        DataTable.update_cell(self, row, column, value)

    monkeypatch.setattr(Workers, "update_cell", update_cell)
    async with serving() as service, Top(Feed(service.url)).run_test(size=SIZE) as pilot:
        app = pilot.app
        assert isinstance(app, Top)
        await seen(pilot, lambda: len(rows(app)) == 3)
        app.action_pause()
        table, workers = app.query_one(Workers), list(app.feed.model.workers.values())
        table.fill(workers, app.feed.model.last_ms)
        changed.clear()
        table.fill(workers, app.feed.model.last_ms)
        assert changed == []
        app.feed.model.workers["decode-0"].running += 1
        table.fill(workers, app.feed.model.last_ms)
        assert changed == [("decode-0", "run")]


@pytest.mark.parametrize(("decided_unix_ms", "said"), [(None, ", decided: "), (8_000, ", decided 2.0 s ago: ")])
def test_a_decision_of_unknown_time_is_shown_without_its_age(decided_unix_ms: int | None, said: str) -> None:
    planner = SimpleNamespace(
        heard=True, mode="auto", idle_because="", reason="decodes press", acts=True, decided_unix_ms=decided_unix_ms
    )
    status = SimpleNamespace(observed=None, planner=planner, as_of_unix_ms=10_000)
    shown = _planner(cast("TopModel", SimpleNamespace(status=status)))
    assert shown.plain == f"planner auto{said}decodes press"


async def test_an_event_is_drawn_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draw, "REFRESH_S", 3600.0)
    async with serving() as service:
        app = Top(Feed(service.url))
        async with app.run_test(size=SIZE) as pilot:
            await seen(pilot, lambda: len(rows(app)) == 3)
            moved = Decision(
                action=ACTION_ROLE_MOVED, worker_id="decode-0", reason="a spike", planner_id="p", sequence=1,
                incarnation=1, decided_unix_ns=service.clock.now_ns(),
            )  # fmt: skip
            service.state.take(Record(DECISIONS, "p", moved, 0, 0), service.clock.now_ns())
            await seen(pilot, lambda: "a spike" in text(app, "events"))
            service.busy["decode-2"] = 0.5
            await seen(pilot, lambda: len(rows(app)) == 4)


def inside(app: Top) -> list[str]:
    """Return the ranks of the open group; none until its table has the focus."""
    table = app.screen.focused
    if not (isinstance(app.screen, GroupDetail) and isinstance(table, Workers)):
        return []
    return [str(key.value) for key in table.rows]


def head_clicked(table: Workers, name: str) -> DataTable.HeaderSelected:
    key = next(key for key in table.columns if key.value == name)
    return DataTable.HeaderSelected(table, key, 0, Text(name))


async def test_a_data_parallel_group_is_one_row_that_opens_on_its_ranks() -> None:
    async with serving() as service:
        service.group, service.busy = "10.0.0.1:29550", {"decode-dp0": 0.4, "decode-dp1": 0.2, "prefill-0": 0.6}
        app = Top(Feed(service.url))
        async with app.run_test(size=SIZE) as pilot:
            await seen(pilot, lambda: rows(app) == ["group:sim/10.0.0.1:29550", "prefill-0"])
            model = app.feed.model
            group = model.groups["group:sim/10.0.0.1:29550"]
            await seen(pilot, lambda: all(rank.spent(model.last_ms)[2] for rank in group.ranks))
            ranks = [rank.spent(model.last_ms) for rank in group.ranks]
            assert group.spent(model.last_ms) == tuple(map(sum, zip(*ranks, strict=True)))
            assert (group.gpus, group.role) == (2, "decode")
            await pilot.press("enter")
            await seen(pilot, lambda: inside(app) == ["decode-dp0", "decode-dp1"])
            app.screen.query_one(Workers).post_message(head_clicked(app.screen.query_one(Workers), "worker"))
            await seen(pilot, lambda: inside(app) == ["decode-dp1", "decode-dp0"])
            assert not app.query_one(Workers).reverse  # of the table below
            await pilot.press("enter")
            await seen(pilot, lambda: isinstance(app.screen, Detail))
            await pilot.press("escape")
            await seen(pilot, lambda: isinstance(app.screen, GroupDetail))
            await pilot.press("escape")
            await seen(pilot, lambda: not isinstance(app.screen, GroupDetail))


async def test_occupancy_prints_a_group_above_its_ranks_and_dummy_steps_as_a_part_of_idle(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shares = {"prefill": 0.0, "decode": 0.25, "kv_wait": 0.0, "idle": 0.75, "ratio": None, "coverage": 1.0}
    ranks = [{"id": f"w-{n}", "group": "g", **shares, "dummy": 0.5 * n, "dummy_steps": n} for n in range(2)]
    group = {"group": "g", "model": "m", "ranks": ["w-0", "w-1"], **shares, "dummy": 0.25, "dummy_steps": 1}
    alone = {"id": "a", "group": "", **shares, "dummy": 0.0, "dummy_steps": 0}
    show_occupancy_of(
        {"window_ms": 2000, "age_ms": None, **shares, "dummy": 0.2, "workers": [alone, *ranks], "groups": [group]}
    )
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    reported = {line[0]: line for line in lines if line}
    assert "dummy" in lines[0]
    assert list(reported)[1:6] == ["all", "a", "g", "w-0", "w-1"]
    assert "25.0%" in reported["g"] and "50.0%" in reported["w-1"] and "×2" in reported["g"]


def test_occupancy_shows_encode_beside_prefill_and_decode_where_images_were_encoded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def used(encode: int, prefill: int, decode: int) -> dict[str, Any]:
        times = {"covered": 1000, "prefill": prefill, "decode": decode, "kv_wait": 0, "idle": 1000 - prefill - decode}
        shares = {name: ns / 1000 for name, ns in times.items()}
        ratio = prefill / decode if decode else None
        return {**shares, "ratio": ratio, "coverage": 1.0, "gpu_ns": times, "encode_gpu_ns": encode}

    workers = [{"id": "p", **used(100, 300, 0)}, {"id": "d", **used(0, 0, 400)}, {"id": "idle", **used(0, 0, 0)}]
    workers.append({"id": "elsewhere", **used(0, 300, 400), "encode_gpu_ns": None})
    show_occupancy_of({"window_ms": 2000, "age_ms": None, **used(100, 300, 400), "workers": workers})
    out = capsys.readouterr().out
    assert "E:P:D" in out
    reported = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    assert "0.25:0.50:1" in reported["all"]
    assert "0.50:1:0" in reported["p"]
    assert "0:0:1" in reported["d"]
    assert "?:0.75:1" in reported["elsewhere"], "another instance reads it"
    show_occupancy_of({"window_ms": 2000, "age_ms": None, **used(0, 300, 400), "workers": workers[1:]})
    out = capsys.readouterr().out
    assert " P:D" in out and "E:P:D" not in out


def test_occupancy_of_a_service_without_groups_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    shares = {"prefill": 0.0, "decode": 0.25, "kv_wait": 0.0, "idle": 0.75, "ratio": None, "coverage": 1.0}
    show_occupancy_of({"window_ms": 2000, "age_ms": None, **shares, "workers": [{"id": "a", **shares}]})
    out = capsys.readouterr().out
    assert "dummy" not in out
    assert [line.split()[0] for line in out.splitlines() if "25.0%" in line] == ["all", "a"]
