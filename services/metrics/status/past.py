"""Pressure, traffic and verdicts of the past, recorded from the status twice a second.

Figures are kept as means over rings of windows, the finest first. Everything except `record_status` is pure.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from libs.runtime.clock import Clock
from libs.telemetry.rollups import TIERS as OCCUPANCY_TIERS
from services.metrics.status.report import ClusterStatus, ModelStatus

TIERS: Final = OCCUPANCY_TIERS[1:]
"""The tiers of occupancy without its finest, since a status covers seconds: an hour, six hours, two days."""


class Rings:
    """Rows of `fields` numbers by time, NaN where unknown. The 8,640 windows take 35 kB a field."""

    def __init__(self, fields: int) -> None:
        self._fields = fields
        self._sums = [np.zeros((tier.windows, fields), np.float32) for tier in TIERS]
        self._known = [np.zeros((tier.windows, fields), np.uint8) for tier in TIERS]
        """The number of rows in each sum, 120 at most."""
        self._numbers = [np.full(tier.windows, -1, np.int64) for tier in TIERS]

    def add(self, unix_ns: int, row: NDArray[np.float32]) -> None:
        """Add the figures of a moment; moments before the start of the rings are ignored."""
        known = ~np.isnan(row)
        values = np.where(known, row, np.float32(0))
        for tier, sums, counts, numbers in zip(TIERS, self._sums, self._known, self._numbers, strict=True):
            number = unix_ns // tier.window_ns
            place = number % tier.windows
            if numbers[place] > number:
                continue
            if numbers[place] < number:
                numbers[place], sums[place], counts[place] = number, 0, 0
            sums[place] += values
            counts[place] += known

    def read(self, window_ns: int, first_ns: int, last_ns: int) -> NDArray[np.float32]:
        """Return the means [windows, fields] of the windows that start in [first, last), NaN where nothing is known.

        Both bounds are multiples of `window_ns`, which is one of the lengths in `TIERS`.
        """
        place = [tier.window_ns for tier in TIERS].index(window_ns)
        wanted = np.arange(first_ns // window_ns, last_ns // window_ns)
        at = wanted % TIERS[place].windows
        counts = np.where((self._numbers[place][at] == wanted)[:, None], self._known[place][at], 0)
        with np.errstate(invalid="ignore", divide="ignore"):
            found: NDArray[np.float32] = np.where(counts > 0, self._sums[place][at] / counts, np.float32(np.nan))
        return found


MAX_MODELS: Final = 64
"""The maximum number of models whose figures are kept, 16 MB."""
MAX_VERDICTS: Final = 2_000
"""The maximum number of changes of the verdict that are kept."""
MS_NS: Final = 1_000_000
DIGITS: Final = 4
"""The decimal places of figures in a history. Charts cannot show more."""


@dataclass(frozen=True, slots=True)
class ModelPoint:
    """One model's figures at a moment; None where unknown."""

    prefill: float | None
    """Pressure of the prefill pool; the next two are those of the decode pool and of the best split."""
    decode: float | None
    cluster: float | None
    waiting_tokens: float | None
    running: float | None
    starved: float | None
    """The share of decode workers' time (see `DecodeStatus`)."""
    kv_wait: float | None


@dataclass(frozen=True, slots=True)
class TrafficPoint:
    """The traffic of all models at a moment; None where unknown."""

    requests_per_s: float | None
    prompt_tokens_per_s: float | None
    output_tokens_per_s: float | None
    errors_per_s: float | None
    rejected_per_s: float | None
    too_many_per_s: float | None
    cache_hit: float | None
    ttft_p50_ms: float | None
    ttft_p95_ms: float | None
    tpot_p50_ms: float | None
    tpot_p95_ms: float | None
    batch_lines_per_s: float | None
    batch_waiting: float | None
    batch_at_workers: float | None


MODEL_FIELDS: Final = tuple(field.name for field in fields(ModelPoint))
TRAFFIC_FIELDS: Final = tuple(field.name for field in fields(TrafficPoint))


class StoodVerdict(msgspec.Struct, frozen=True):
    """A verdict with the time from which it stood."""

    unix_ms: int
    code: str
    sentence: str
    command: str
    """The advised command, or the manual instruction if there is none; empty if nothing was advised."""


class StatusHistory(msgspec.Struct):
    """Windows of `window_ms` from `first_start_unix_ms` on, with figures in the same order, null where unknown."""

    window_ms: int
    first_start_unix_ms: int
    models: dict[str, dict[str, list[float | None]]]
    traffic: dict[str, list[float | None]]
    verdicts: list[StoodVerdict]
    """The verdict at the start and the changes since, the oldest first."""


class StatusRecorder:
    """The history of the status, which grows by one point at each record."""

    def __init__(self) -> None:
        self._traffic = Rings(len(TRAFFIC_FIELDS))
        self._models: dict[str, Rings] = {}
        self._verdicts: deque[StoodVerdict] = deque(maxlen=MAX_VERDICTS)
        self.left_out_models = 0
        """Points of models that did not fit."""

    def add(self, unix_ns: int, models: Mapping[str, ModelPoint], traffic: TrafficPoint, verdict: StoodVerdict) -> None:
        self._traffic.add(unix_ns, _row(traffic, TRAFFIC_FIELDS))
        for name, point in models.items():
            rings = self._models.get(name)
            if rings is None:
                if len(self._models) >= MAX_MODELS:
                    self.left_out_models += 1
                    continue
                rings = self._models[name] = Rings(len(MODEL_FIELDS))
            rings.add(unix_ns, _row(point, MODEL_FIELDS))
        last = self._verdicts[-1] if self._verdicts else None
        if last is None or (last.code, last.command) != (verdict.code, verdict.command):
            self._verdicts.append(verdict)

    def history(self, window_ns: int, first_ns: int, last_ns: int) -> StatusHistory:
        """Return windows that start in [first, last), both multiples of `window_ns`, a length that is kept."""
        first_ms, last_ms = first_ns // MS_NS, last_ns // MS_NS
        read = {name: rings.read(window_ns, first_ns, last_ns) for name, rings in sorted(self._models.items())}
        before = [each for each in self._verdicts if each.unix_ms <= first_ms][-1:]
        since = [each for each in self._verdicts if first_ms < each.unix_ms < last_ms]
        return StatusHistory(
            window_ms=window_ns // MS_NS,
            first_start_unix_ms=first_ms,
            models={name: _columns(rows, MODEL_FIELDS) for name, rows in read.items() if not np.isnan(rows).all()},
            traffic=_columns(self._traffic.read(window_ns, first_ns, last_ns), TRAFFIC_FIELDS),
            verdicts=[*before, *since],
        )


def _row(point: ModelPoint | TrafficPoint, names: tuple[str, ...]) -> NDArray[np.float32]:
    return np.array([np.nan if (value := getattr(point, name)) is None else value for name in names], np.float32)


def _columns(rows: NDArray[np.float32], names: tuple[str, ...]) -> dict[str, list[float | None]]:
    return {name: [None if math.isnan(value) else value for value in np.round(column, DIGITS).tolist()]
            for name, column in zip(names, rows.T, strict=True)}  # fmt: skip


EVERY_NS: Final = 500_000_000
"""The interval between two records, half the shortest window, so that a short stall leaves no gap."""


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
    advised = "" if verdict.action is None else verdict.action.command or verdict.action.instruction
    recorder.add(
        now_ns,
        {each.model: _point(each) for each in status.models if each.known},
        TrafficPoint(**{field.name: getattr(traffic, field.name) for field in fields(TrafficPoint)}),
        StoodVerdict(now_ns // 1_000_000, verdict.code, verdict.sentence, advised),
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
