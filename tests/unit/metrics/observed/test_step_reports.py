"""Tests of step reports by observed servers: accepted, or refused and counted."""

from collections.abc import Callable

import httpx
import pytest
from fastapi import FastAPI
from fastapi.responses import JSONResponse
from starlette.requests import Request

from libs.contracts.errors import FulcrumError
from libs.contracts.pb.fulcrum.common.v1.common_pb2 import ROLE_MIXED, ROLE_PREFILL, ROLE_STANDBY, Assignment
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import PhaseEstimate, StepBatch
from libs.contracts.step_row import StepRow, step_columns
from libs.keys.book import KeySet, draw_key
from libs.keys.table import KeyTable
from libs.runtime.web import error_response
from services.metrics.http.login import REPORTS_PATH, AccessControl
from services.metrics.observed import reports
from services.metrics.observed.reports import EXACT_NS, REPORTS_A_SECOND, StepReports
from services.metrics.observed.routes import CONTENT_TYPE, MAX_BODY_BYTES, reports_router
from services.metrics.observed.server import ServerState
from services.metrics.settings import MetricsSettings
from tests.observe_rig import Load
from tests.unit.metrics.observed.observed_rig import BEGAN_NS, SECOND_NS, Observed, suite

EVERY_NS = SECOND_NS // 10
TOKEN = "suite-token"


def report(now_ns: int, number: int = 1, name: str = "p0", *, incarnation: int = 1) -> StepBatch:
    """A report of the last tenth of a second, of which a prompt took a half."""
    step = StepRow(now_ns - EVERY_NS, now_ns - EVERY_NS // 2, prefill_tokens=100, prefill_sequences=1)
    return StepBatch(
        worker_id=name, incarnation=incarnation, sequence=number, node="n", gpus=1, engine="vllm (plugin)",
        assignment=Assignment(model="m", role=ROLE_MIXED, budget_tokens=2048), steps=step_columns([step]),
        covered_from_unix_ns=now_ns - EVERY_NS, covered_to_unix_ns=now_ns,
    )  # fmt: skip


def changed(change: Callable[[StepBatch], object]) -> bytes:
    batch = report(BEGAN_NS)
    change(batch)
    return batch.SerializeToString()


WRONG: dict[str, Callable[[StepBatch], object]] = {
    "worker_id": lambda it: it.ClearField("worker_id"),
    "control characters": lambda it: setattr(it, "node", "a\nb"),
    "over 200 characters": lambda it: setattr(it, "group", "g" * 201),
    "gpus must be": lambda it: setattr(it, "gpus", 0),
    "a model, and role": lambda it: setattr(it.assignment, "role", ROLE_STANDBY),
    "may not have estimate": lambda it: it.estimate.CopyFrom(PhaseEstimate(busy_ns=1)),
    "ahead of this clock": lambda it: (
        setattr(it, "covered_from_unix_ns", BEGAN_NS + 9 * SECOND_NS),
        setattr(it, "covered_to_unix_ns", BEGAN_NS + 10 * SECOND_NS),
    ),
    "s old": lambda it: (
        setattr(it, "covered_from_unix_ns", BEGAN_NS - 101 * SECOND_NS),
        setattr(it, "covered_to_unix_ns", BEGAN_NS - 100 * SECOND_NS),
    ),
    "covers up to": lambda it: setattr(it, "covered_from_unix_ns", BEGAN_NS - 5 * SECOND_NS),
    "different lengths": lambda it: setattr(it.steps, "decode_sequences", b"\1" * 16),
    "begin in order": lambda it: it.steps.CopyFrom(step_columns([StepRow(BEGAN_NS + 1, BEGAN_NS + 2)])),
}


@pytest.mark.parametrize("said", WRONG)
def test_an_invalid_report_is_refused_with_the_reason_and_counted(said: str) -> None:
    desk = StepReports()
    body = changed(WRONG[said])
    with pytest.raises(FulcrumError, match=said):
        desk.take(body, BEGAN_NS)
    assert (desk.counts.taken, desk.counts.refused.total()) == (0, 1)
    sent = StepBatch.FromString(body)
    assert not any(desk.is_exact(name, BEGAN_NS) for name in (sent.worker_id, sent.group))


def test_garbage_is_refused() -> None:
    with pytest.raises(FulcrumError, match="no StepBatch"):
        StepReports().take(b"\xff\xff\xff", BEGAN_NS)


def test_repeated_reports_and_those_of_an_older_process_are_refused() -> None:
    desk = StepReports()
    desk.take(report(BEGAN_NS, 2, incarnation=2).SerializeToString(), BEGAN_NS)
    for number, incarnation in ((2, 2), (1, 2), (3, 1)):
        with pytest.raises(FulcrumError):
            desk.take(report(BEGAN_NS, number, incarnation=incarnation).SerializeToString(), BEGAN_NS)
    assert desk.counts.refused == {"conflict": 3}
    desk.take(report(BEGAN_NS, 1, incarnation=3).SerializeToString(), BEGAN_NS)


def test_rate_and_number_of_engines_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "MOST_REPORTERS", 1)
    desk = StepReports()
    for number in range(REPORTS_A_SECOND):
        desk.take(report(BEGAN_NS, number + 1).SerializeToString(), BEGAN_NS)
    with pytest.raises(FulcrumError, match="reports a second"):
        desk.take(report(BEGAN_NS, 1_000).SerializeToString(), BEGAN_NS)
    with pytest.raises(FulcrumError, match="engines report already"):
        desk.take(report(BEGAN_NS, 1, "other").SerializeToString(), BEGAN_NS)
    desk.take(report(BEGAN_NS + SECOND_NS, 1_000).SerializeToString(), BEGAN_NS + SECOND_NS)


async def reporting(observed: Observed, seconds: float, name: str = "p0") -> None:
    """Let a server report ten times a second beside its scrapes."""
    for _ in range(round(2 * seconds)):
        for _ in range(5):
            observed.bus.now_ns += EVERY_NS
            now_ns = observed.bus.now_ns
            observed.fleet.report(report(now_ns, now_ns // EVERY_NS, name).SerializeToString())
        observed.bus.now_ns -= SECOND_NS // 2
        status = await observed.run(0.5)
    assert status.live


async def test_a_reporting_server_is_exact_and_not_estimated_until_it_stops() -> None:
    observed = suite({"p0": Load(decoding=24), "d0": Load(decoding=24)}, {"p0": "prefill", "d0": "decode"})
    await observed.run(15)
    assert observed.fleet.server("p0").state is ServerState.OBSERVED
    estimates = len(observed.bus.batches)
    await reporting(observed, 5)
    status = await observed.run(0.5)
    mine = [each for each in observed.bus.batches[estimates:] if each.worker_id == "p0"]
    assert mine and not any(each.HasField("estimate") for each in mine)
    assert {each.assignment.role for each in mine} == {ROLE_PREFILL}  # as the list says
    assert {each.id: each.estimate is None for each in status.workers} == {"p0": True, "d0": False}
    assert observed.fleet.server("p0").state is ServerState.EXACT
    phases = observed.state.fleet.phases("p0", observed.bus.now_ns - 3 * SECOND_NS, observed.bus.now_ns - SECOND_NS)
    assert (phases.covered_ns, phases.prefill_ns, phases.decode_ns) == (2 * SECOND_NS, SECOND_NS, 0)

    await observed.run(EXACT_NS / SECOND_NS + 5)
    assert observed.fleet.server("p0").state is ServerState.OBSERVED
    again = observed.state.fleet.phases("p0", observed.bus.now_ns - 3 * SECOND_NS, observed.bus.now_ns - SECOND_NS)
    assert again.covered_ns == 2 * SECOND_NS and again.decode_ns > again.prefill_ns
    await reporting(observed, 3)
    measured = observed.state.fleet.phases("p0", observed.bus.now_ns - 2 * SECOND_NS, observed.bus.now_ns - SECOND_NS)
    assert (measured.prefill_ns, measured.decode_ns) == (SECOND_NS // 2, 0)


async def test_step_times_are_learned_from_reports() -> None:
    observed = suite({"p0": Load()}, {"p0": "mixed"})
    await reporting(observed, 10)
    batch = observed.bus.batches[-1]
    assert batch.HasField("step_time") and batch.step_time.prefill.steps > 10


async def post(host: str, keys: KeyTable, body: bytes, **headers: str) -> int:
    observed = suite({"p0": Load()}, {"p0": "mixed"})
    settings = MetricsSettings.model_validate({"host": host, "token": TOKEN, "allow_plaintext_token": True})
    access = AccessControl(keys, settings, observed, token=TOKEN)  # type: ignore[arg-type]
    app = FastAPI()
    app.include_router(reports_router(observed.fleet, access.admit_report))

    @app.exception_handler(FulcrumError)
    async def answer(_request: Request, error: FulcrumError) -> JSONResponse:
        return error_response(error)

    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
        found = await http.post(REPORTS_PATH, content=body, headers={"content-type": CONTENT_TYPE, **headers})
        return found.status_code


async def test_this_machine_reports_without_a_token_and_others_only_with_one() -> None:
    body = report(BEGAN_NS).SerializeToString()
    trusted, keyed = KeyTable(open_without_keys=True, token=TOKEN), KeyTable(open_without_keys=True, token=TOKEN)
    trusted.replace(KeySet(), 0)
    _, key = draw_key("a", now_s=0, role="operator")
    keyed.replace(KeySet().with_key(key, 0), 0)
    authorized = {"authorization": f"Bearer {TOKEN}"}
    assert await post("127.0.0.1", trusted, body) == 204
    assert await post("0.0.0.0", trusted, body) == 401
    assert await post("0.0.0.0", trusted, body, **authorized) == 204
    assert await post("127.0.0.1", keyed, body) == 401
    assert await post("127.0.0.1", keyed, body, **authorized) == 204


async def test_another_content_type_and_a_body_that_is_too_long_are_refused() -> None:
    trusted = KeyTable(open_without_keys=True, token=TOKEN)
    trusted.replace(KeySet(), 0)
    assert await post("127.0.0.1", trusted, b"", **{"content-type": "text/plain"}) == 415
    assert await post("127.0.0.1", trusted, b"x" * (MAX_BODY_BYTES + 1)) == 413
