"""Outcomes of followed advice as clients and the status saw them: the backlog, and TTFT once it was gone."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from libs.policy.verdict.promises import LEAST_ANSWERS, p95
from libs.policy.verdict.state import in_hand_ns
from load.chaos.suite import VirtualSuite
from load.verdict.situations import Device

# How long a backlog is awaited, how long requests that arrive without one are counted, and how long their first tokens
# are awaited.
GONE_WITHIN_S: Final = 25.0
ARRIVE_S: Final = 8.0
ANSWER_S: Final = 4.0
LOOK_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class FollowedFigure:
    """A promised range, and what came of it."""

    figure: str
    least: float
    most: float
    came: float

    @property
    def kept(self) -> bool:
        return self.least <= self.came <= self.most


async def see_latencies(
    suite: VirtualSuite,
    device: Device,
    action: dict[str, Any],
    waits_s: Sequence[tuple[float, float]],
    moved_s: float,
) -> list[FollowedFigure]:
    """Wait until the backlog is gone, then for TTFT p95 of the requests that are sent next.

    `waits_s` grows meanwhile by pairs of a time and the seconds of work that wait for each prefill worker. A promise
    that reaches beyond the time watched is left out if it is still open.
    """
    found, in_hand_s = [], in_hand_ns(device.engine, 1) / 1e9

    def gone_s() -> float | None:
        return next((at_s for at_s, each_s in waits_s if at_s > moved_s and each_s <= in_hand_s), None)

    while (at_s := gone_s()) is None and suite.now_s < moved_s + GONE_WITHIN_S:  # noqa: ASYNC110
        await asyncio.sleep(LOOK_S)
    least, most = action["backlog_least_s"], action["backlog_most_s"]
    if most is not None and (at_s is not None or most <= GONE_WITHIN_S):
        found.append(FollowedFigure("backlog", least, most, (at_s or suite.now_s) - moved_s))
    if at_s is None or action["ttft_p95_most_ms"] is None:
        return found
    await asyncio.sleep(max(at_s + ARRIVE_S - suite.now_s, 0.0))
    asked = [each for each in suite.asked if at_s <= each.sent_s <= at_s + ARRIVE_S]
    await asyncio.sleep(ANSWER_S)
    ttfts = [(each.first_s or suite.now_s) - each.sent_s for each in asked if not each.broken]
    if len(ttfts) >= LEAST_ANSWERS:
        came_ms = p95(ttfts) * 1e3
        found.append(FollowedFigure("ttft", action["ttft_p95_least_ms"], action["ttft_p95_most_ms"], came_ms))
    return found
