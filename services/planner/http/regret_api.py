import re
from dataclasses import dataclass
from typing import Annotated, Final

from fastapi import APIRouter, Query

from libs.contracts.errors import InvalidRequest
from libs.runtime.clock import Clock
from services.planner.regret import MAX_HOURS, RegretLedger

_WINDOW: Final = re.compile(r"([0-9]{1,4})(m|h)", re.ASCII)
_UNIT_NS: Final = {"m": 60_000_000_000, "h": 3_600_000_000_000}


@dataclass(frozen=True, slots=True)
class RegretAnswer:
    """GPU-hours of work that another split would have served in time, by a closed form over the observed demand.

    Hours are counted whole. `too_small` is work that no split of the available workers would have served; it is not
    part of `lost_gpu_hours`.
    """

    method: str
    window_s: float
    gpu_hours: float
    lost_gpu_hours: float
    by_cause: dict[str, float]
    by_model: dict[str, dict[str, float]]


def regret_router(ledger: RegretLedger, clock: Clock) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/regret")
    async def regret(
        window: Annotated[str, Query(description="A number and m or h, up to 48h.")] = "24h",
    ) -> RegretAnswer:
        """Return what was lost against the split that hindsight shows to be best."""
        found = _WINDOW.fullmatch(window)
        window_ns = int(found[1]) * _UNIT_NS[found[2]] if found else 0
        if not 0 < window_ns <= MAX_HOURS * _UNIT_NS["h"]:
            raise InvalidRequest(
                f"window={window[:40]!r} is not a number and m or h, up to {MAX_HOURS}h", param="window"
            )
        lost = ledger.regret(clock.now_ns(), window_ns)
        return RegretAnswer(
            lost.method, lost.window_s, lost.gpu_hours, lost.lost_gpu_hours, lost.by_cause, lost.by_model
        )

    return router
