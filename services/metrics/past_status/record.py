import asyncio
from collections.abc import Callable
from dataclasses import fields
from typing import Final

from libs.runtime.clock import Clock
from services.metrics.past_status.recorder import ModelPoint, StatusRecorder, StoodVerdict, TrafficPoint
from services.metrics.status.report import ClusterStatus, ModelStatus

EVERY_NS: Final = 500_000_000
"""Interval between two records, half the shortest window, so that a short stall leaves no gap."""


async def record_status(recorder: StatusRecorder, look: Callable[[int], ClusterStatus], clock: Clock) -> None:
    """Record the status every `EVERY_NS` while it is live; windows without a live status stay unknown."""
    while True:
        await asyncio.sleep((EVERY_NS - clock.now_ns() % EVERY_NS) / 1e9)
        now_ns = clock.now_ns()
        status = look(now_ns)
        if status.live:
            enter(recorder, status, now_ns)


def enter(recorder: StatusRecorder, status: ClusterStatus, now_ns: int) -> None:
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
