"""The owned task that keeps what the status says, twice a second."""

import asyncio
from collections.abc import Callable
from dataclasses import fields
from typing import Final

from libs.runtime.clock import Clock
from services.metrics.past_status.recorder import ModelPoint, StatusRecorder, StoodVerdict, TrafficPoint
from services.metrics.status.report import ClusterStatus, ModelStatus

EVERY_NS: Final = 500_000_000
"""Twice in the shortest window that is kept: a service that is held up for a moment leaves no gap."""


async def record_status(recorder: StatusRecorder, look: Callable[[int], ClusterStatus], clock: Clock) -> None:
    """Enter the status every `EVERY_NS`, as long as it is of the present: what is not known then stays unknown."""
    while True:
        await asyncio.sleep((EVERY_NS - clock.now_ns() % EVERY_NS) / 1e9)
        now_ns = clock.now_ns()
        status = look(now_ns)
        if status.live:
            enter(recorder, status, now_ns)


def enter(recorder: StatusRecorder, status: ClusterStatus, now_ns: int) -> None:
    """One status."""
    verdict, traffic = status.verdict, status.traffic
    recorder.add(
        now_ns,
        {each.model: _point(each) for each in status.models if each.known},
        TrafficPoint(**{field.name: getattr(traffic, field.name) for field in fields(TrafficPoint)}),
        StoodVerdict(
            now_ns // 1_000_000, verdict.code, verdict.sentence, verdict.action.command if verdict.action else ""
        ),
    )


def _point(model: ModelStatus) -> ModelPoint:
    return ModelPoint(
        prefill=model.prefill.pressure,
        decode=model.decode.pressure,
        cluster=model.cluster_pressure,
        waiting_tokens=model.prefill.waiting_prompt_tokens,
        running=model.decode.running,
        starved=model.decode.starved,
        kv_wait=model.decode.kv_wait,
    )
