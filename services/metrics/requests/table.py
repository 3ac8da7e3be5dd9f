"""Figures of finished requests as arrays, in which sums and percentiles of fifty thousand take milliseconds. Pure."""

from collections import Counter
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from services.metrics.requests.wire import FinishedRequest, Percentiles, RequestSummary, ServiceLevel

END, QUEUE, TTFT, TPOT, PROMPT, CACHED, OUTPUT, TTFT_TARGET, TPOT_TARGET, TTFT_MISSED, TPOT_MISSED = range(11)
COLUMNS: Final = 11
NONE: Final = -1
"""The value of a latency, target or verdict that a request does not have."""
MOST: Final = (1 << 63) - 1
"""Largest value of a column; larger reported values are clipped to it."""


class Names:
    """Numbers for names, counted by reference. Names come from clients, so unused ones must be freed."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._bearers: Counter[int] = Counter()
        self._free: list[int] = []

    def take(self, name: str) -> int:
        """Return a name's number, to be released with `give_back`."""
        number = self._numbers.get(name)
        if number is None:
            number = self._free.pop() if self._free else len(self._numbers)
            self._numbers[name], self._names[number] = number, name
        self._bearers[number] += 1
        return number

    def give_back(self, number: int) -> None:
        """Release one use of a number."""
        self._bearers[number] -= 1
        if not self._bearers[number]:
            del self._bearers[number], self._numbers[self._names.pop(number)]
            self._free.append(number)

    def of(self, number: int) -> str:
        return self._names[number]


@dataclass(frozen=True, slots=True)
class RequestRows:
    """Rows of some requests: figures [n, COLUMNS] int64, model and outcome [n, 2] int32."""

    numbers: NDArray[np.int64]
    names: NDArray[np.int32]


class RequestTable:
    """A ring of rows, whose owner decides which row is next and which is free."""

    def __init__(self, rows: int) -> None:
        self._numbers = np.full((rows, COLUMNS), NONE, np.int64)
        self._names = np.zeros((rows, 2), np.int32)
        self._models, self._outcomes = Names(), Names()

    def put(self, row: int, finished: FinishedRequest) -> None:
        optional = (finished.ttft_target_ns, finished.tpot_target_ns, finished.ttft_missed, finished.tpot_missed)
        numbers = (
            finished.end_unix_ns,
            finished.queue_ns,
            NONE if finished.ttft_ns is None else finished.ttft_ns,
            NONE if finished.tpot_ns is None else finished.tpot_ns,
            finished.prompt_tokens,
            finished.cached_tokens,
            finished.output_tokens,
            *(NONE if value is None else value for value in optional),
        )
        self._numbers[row] = [min(number, MOST) for number in numbers]
        self._names[row] = self._models.take(finished.model), self._outcomes.take(finished.outcome)

    def drop(self, row: int) -> None:
        self._numbers[row, END] = NONE
        model, outcome = self._names[row].tolist()
        self._models.give_back(model)
        self._outcomes.give_back(outcome)

    def within(self, low_ns: int, high_ns: int) -> RequestRows:
        """Return the requests that ended in [low, high)."""
        ends = self._numbers[:, END]
        inside = np.flatnonzero((ends >= max(low_ns, 0)) & (ends < high_ns))
        return RequestRows(self._numbers[inside], self._names[inside])

    def by_model(self, rows: RequestRows) -> list[tuple[str, RequestRows]]:
        """Group rows by the name of the model, in order."""
        order = np.argsort(rows.names[:, 0], kind="stable")
        models, starts = np.unique(rows.names[order, 0], return_index=True)
        parts = np.split(order, starts[1:]) if len(models) else []
        named = zip((self._models.of(int(number)) for number in models), parts, strict=True)
        return sorted(
            ((name, RequestRows(rows.numbers[part], rows.names[part])) for name, part in named), key=lambda p: p[0]
        )

    def summary(self, rows: RequestRows) -> RequestSummary:
        numbers = rows.numbers
        outcomes, counts = np.unique(rows.names[:, 1], return_counts=True)
        by_outcome = {self._outcomes.of(int(each)): int(count) for each, count in zip(outcomes, counts, strict=True)}
        prompt, cached, output = numbers[:, [PROMPT, CACHED, OUTPUT]].sum(axis=0).tolist()
        return RequestSummary(
            requests=len(numbers),
            outcomes=dict(sorted(by_outcome.items())),
            prompt_tokens=prompt,
            cached_tokens=cached,
            output_tokens=output,
            ttft_s=percentiles(_there(numbers[:, TTFT])),
            tpot_s=percentiles(_there(numbers[:, TPOT])),
            queue_s=percentiles(numbers[numbers[:, TTFT] != NONE, QUEUE]),
            ttft_slo=_level(numbers[:, TTFT_TARGET], numbers[:, TTFT_MISSED]),
            tpot_slo=_level(numbers[:, TPOT_TARGET], numbers[:, TPOT_MISSED]),
        )


def percentiles(values_ns: NDArray[np.int64]) -> Percentiles:
    """Compute percentiles by nearest rank, so that each is a latency that some request had."""
    if not len(values_ns):
        return Percentiles(0, None, None, None)
    ranks = [-(-len(values_ns) * percent // 100) - 1 for percent in (50, 90, 99)]
    p50, p90, p99 = (np.partition(values_ns, ranks)[ranks] / 1e9).tolist()
    return Percentiles(len(values_ns), p50, p90, p99)


def _level(targets_ns: NDArray[np.int64], missed: NDArray[np.int64]) -> ServiceLevel:
    judged = _there(missed)
    return ServiceLevel(
        requests=len(judged),
        target_s=percentiles(_there(targets_ns)).p50,
        met=1 - float(judged.mean()) if len(judged) else None,
    )


def _there(values: NDArray[np.int64]) -> NDArray[np.int64]:
    there: NDArray[np.int64] = values[values != NONE]
    return there
