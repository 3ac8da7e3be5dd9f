"""Tests of limits that can never be met: the route refuses them with a sentence that the CLI prints."""

from typing import Any

import httpx
import pytest

from tests.unit.keys.doors_rig import TOKEN, serving


@pytest.mark.parametrize(
    ("every", "said"),
    [
        ({"prefill_min": 3, "prefill_max": 2}, "every: prefill_min is 3, more than prefill_max, 2"),
        ({"decode_min": 3, "decode_max": 2}, "every: decode_min is 3, more than decode_max, 2"),
        ({"workers_min": 3, "workers_max": 2}, "every: workers_min is 3, more than workers_max, 2"),
        (
            {"prefill_min": 2, "decode_min": 3, "workers_max": 4},
            "every: prefill_min and decode_min are 5 together, more than workers_max, 4",
        ),
    ],
)
async def test_limits_that_can_never_be_met_are_refused_with_a_sentence(every: dict[str, Any], said: str) -> None:
    async with serving("planner") as served:
        key = {"authorization": f"Bearer {TOKEN}"}
        transport = httpx.ASGITransport(served.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", headers=key) as http:
            refused = await http.put("/v1/limits?actor=me", json={"every": every})
            assert (refused.status_code, refused.json()["error"]["message"]) == (400, said)
            assert (await http.get("/v1/limits")).json()["limits"]["revision"] == 0
