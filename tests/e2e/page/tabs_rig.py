"""Contents of the page's other views: answers by the services' own code, of made-up demand."""

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from playwright.async_api import Page, Route

from libs.capacity.planning import PlanQuery
from libs.demand.counts import Counts, DemandKey
from libs.demand.history import DemandBins
from libs.demand.report import forecast_report, model_demand
from services.planner.models.api import (
    CatalogueAnswer,
    CatalogueModel,
    EvictionAnswer,
    Outcomes,
    ReservationAnswer,
)
from tests.unit.capacity.test_planning import SLO, plan_row

QUARTER_S = 900
DAYS = 6


def forecast(horizon_s: float = 86_400.0) -> dict[str, Any]:
    """Demand of six days with an afternoon peak, up to now; prompts are twice as long in the last four hours."""
    count = DAYS * 96
    end = int(time.time()) // QUARTER_S
    hours = (np.arange(end - count, end) * QUARTER_S / 3600) % 24
    noise = np.exp(np.random.default_rng(3).normal(0, 0.12, count))
    requests = np.round((40 + 160 * np.exp(-(((hours - 14) / 3.5) ** 2))) * noise * QUARTER_S).astype(np.int64)
    prompts = np.where(np.arange(count) > count - 16, 1_600, 800) * requests
    columns = dict.fromkeys(Counts._fields, np.zeros(count, np.int64))
    columns |= {"requests": requests, "known_requests": requests, "ended": requests}
    columns |= {"prompt_tokens": prompts, "output_tokens": 200 * requests}
    rows = {DemandKey("llama-70b", "online", "default"): np.stack([columns[name] for name in Counts._fields], axis=1)}
    bins = DemandBins(QUARTER_S * 10**9, end - count, np.ones(count, np.bool_), rows)
    found = forecast_report(model_demand(bins, "llama-70b"), None, horizon_s=horizon_s, tpot_s=0.05)
    return json.loads(json.dumps(found))  # type: ignore[no-any-return]


def plan(folder: Path) -> dict[str, Any]:
    """A plan for a day whose afternoon needs more GPUs than there are."""
    row = plan_row(folder, PlanQuery(SLO, 86_400.0))
    row["model"] = "llama-70b"
    shift_s = time.time() // 3600 * 3600 - row["starts_unix_s"][0]
    row["starts_unix_s"] = [each + shift_s for each in row["starts_unix_s"]]
    for pool in row["pools"].values():
        short = pool["runs_short_unix_s"]
        pool["runs_short_unix_s"] = {name: None if at is None else at + shift_s for name, at in short.items()}
    for each in row["shortages"]:
        each["at_unix_s"] += shift_s
    return row


def model(name: str, state: str, **more: Any) -> CatalogueModel:
    """A model without requests at present."""
    plain: dict[str, Any] = {
        "source": "builtin:sim", "parent": "", "size_bytes": 16 * 10**9,
        "workers": [], "priority": 0, "floor": 0, "pinned": False,
        "reservations": [], "ttft_ms": None, "tpot_ms": None, "load_s": 4.5, "wake_s": 1.1, "load_measured": True,
        "last_use": None, "next_use_s": None, "in_flight": 0, "waiting": 0, "expected_wait_s": 0.0, "error": "",
    }  # fmt: skip
    return CatalogueModel(name, state=state, **(plain | more))


def catalogue() -> dict[str, Any]:
    """Five models on two GPUs."""
    used = "2026-11-24T02:00:00+00:00"
    models = [
        model("coder-34b", "serving", workers=["pool-1"], in_flight=3, last_use=used),
        model("chat-8b", "serving", workers=["pool-2"], next_use_s=42.0, last_use=used, pinned=True),
        model("rare <b>70b</b>", "asleep", next_use_s=7_300.0, expected_wait_s=1.1, load_s=12.0, load_measured=False),
        model("night", "on_disk", reservations=[ReservationAnswer(1, "22:00", "06:00")], expected_wait_s=4.5, floor=1),
        model("broken", "failed", error="its weights are not a safetensors file"),
    ]
    answer = CatalogueAnswer(
        models, 2, 2, 1, 1, 2, 60.0, 37, 1, Outcomes(1.4, 1, 2, 2), {"600": Outcomes(2.2, 2, 3, 4), "3600": None},
        0, {"600": None, "3600": None},
        [EvictionAnswer("pool-2", "chat-8b", "nobody uses it; asked again soon with 40%")], {"load": 9}, 9, 30.0,
    )  # fmt: skip
    return asdict(answer)


async def answers(page: Page, **found: Any) -> list[str]:
    """Set the service's answers by the last part of a path, where an int is a refusal; return the requested paths."""
    calls: list[str] = []

    async def say(route: Route) -> None:
        calls.append(route.request.url)
        value = found[route.request.url.partition("?")[0].rsplit("/", 1)[-1]]
        if isinstance(value, str):
            await route.fulfill(status=400, json={"error": {"message": value}})
        else:
            await route.fulfill(json=value)

    for name in found:
        await page.route(f"**/v1/**/{name}**", say)
        await page.route(f"**/v1/{name}**", say)
    return calls
