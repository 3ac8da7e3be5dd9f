"""Model use over time: a log of requests as arrays, its files, and the peak number of models and GPUs in use per
window.
"""

import csv
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from libs.contracts.errors import InvalidRequest, quoted
from libs.lab.traces.formats import AEGAEON_COLUMNS, GENAI_COLUMNS, read_aegaeon
from libs.lab.traces.lines import MAX_REQUESTS, Fault, Source, broken, csv_cells, numbered_lines, real

Floats = NDArray[np.float64]
Whole = NDArray[np.int64]

# Two weeks of one-second windows are 1.2 million.
MAX_WINDOWS: Final = 2_000_000


@dataclass(frozen=True, slots=True, eq=False)
class UsageLog:
    """A log of requests in order of arrival."""

    name: str
    t_s: Floats
    """Arrivals, counted from a zero at or before the first (see `read_usage`)."""
    model: Whole
    """Each request's model, as an index into `models`."""
    exec_s: Floats
    """The seconds from arrival to the last token."""
    models: Sequence[str]
    gpus: Floats
    """The GPUs that each model needs while in use, by index."""
    notes: Sequence[str] = ()

    @property
    def end_s(self) -> float:
        """The time of the last arrival. Runs beyond it do not count, since later arrivals are unknown."""
        return float(self.t_s[-1]) if len(self.t_s) else 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Use:
    """The use in consecutive windows, beginning at 0."""

    window_s: float
    peak_models: Whole
    """The maximum number of models in use at once."""
    peak_gpus: Floats
    """The maximum number of GPUs needed at once by the models in use."""
    mean_models: Floats
    """The average number of models in use over time."""
    mean_gpus: Floats

    def __len__(self) -> int:
        return len(self.peak_models)


def spells(log: UsageLog, hold_s: float = 0.0) -> tuple[Floats, Floats, Whole]:
    """Return the start, end and model of every stretch of use, prolonged by `hold_s`, in no particular order."""
    order = np.lexsort((log.t_s, log.model))
    start, model = log.t_s[order], log.model[order]
    end = start + log.exec_s[order] + hold_s
    # Models occupy consecutive ranges of one axis of ranks, so that one running maximum serves all of them.
    ends, rank = np.unique(end, return_inverse=True)
    latest = ends[np.maximum.accumulate(rank + model * len(ends)) - model * len(ends)] if len(end) else end
    is_first = np.ones(len(start), dtype=bool)
    is_first[1:] = (model[1:] != model[:-1]) | (start[1:] > latest[:-1])
    firsts = np.flatnonzero(is_first)
    lasts = np.append(firsts[1:], len(start)) - 1 if len(firsts) else firsts
    return start[firsts], latest[lasts], model[firsts]


def use_by_window(log: UsageLog, window_s: float, hold_s: float = 0.0) -> Use:
    """Return the use of each whole window up to the last arrival. An end at the same moment as a begin comes first."""
    count = int(log.end_s / window_s)
    begin_s, end_s, model = spells(log, hold_s)
    lengthy = end_s > begin_s
    begin_s, end_s, model = begin_s[lengthy], end_s[lengthy], model[lengthy]
    edges = np.arange(count + 1) * window_s
    at = np.concatenate([end_s, begin_s, edges])
    kind = np.concatenate([np.zeros(len(end_s)), np.ones(len(begin_s)), np.full(len(edges), 2)])
    size = log.gpus[model]
    models = np.concatenate([np.full(len(end_s), -1), np.full(len(begin_s), 1), np.zeros(len(edges), dtype=np.int64)])
    gpus = np.concatenate([-size, size, np.zeros(len(edges))])
    order = np.lexsort((kind, at))
    at, models, gpus = at[order], np.cumsum(models[order]), np.cumsum(gpus[order])
    window = np.minimum((at / window_s + 1e-9).astype(np.int64), count)
    lasting_s = np.diff(at, append=at[-1] if len(at) else 0.0)
    starts = np.searchsorted(window, np.arange(count))
    if not count:
        empty = np.zeros(0)
        return Use(window_s, np.zeros(0, dtype=np.int64), empty, empty, empty)
    inside = slice(0, int(np.searchsorted(window, count)))
    return Use(
        window_s,
        np.maximum.reduceat(models[inside], starts),
        np.asarray(np.round(np.maximum.reduceat(gpus[inside], starts), 6), dtype=np.float64),
        np.add.reduceat((models * lasting_s)[inside], starts) / window_s,
        np.add.reduceat((gpus * lasting_s)[inside], starts) / window_s,
    )


USAGE_COLUMNS: Final = ("t_s", "model", "exec_s")
SIZE_COLUMN: Final = "gpus"
"""An additional column, used if sizes differ: the GPUs that the model needs while in use."""
MAX_GPUS: Final = 1024.0
# Unix times are allowed as well.
MAX_T_S: Final = 1e11
MAX_EXEC_S: Final = 7 * 86_400.0
PREFILL_TOKENS_PER_S: Final = 8000.0
TPOT_S: Final = 0.05
"""Rates that turn tokens into seconds for logs without execution times. They give Aegaeon's mean of 16.8 s for the 335
output tokens of its ShareGPT lengths.
"""
MINUTE_S: Final = 60.0
NOTE_EVERY: Final = 100_000
"""The number of requests between two lines of progress."""

Note = Callable[[str], None]
Row = tuple[float, str, float, float]
"""Arrival, model, seconds of execution, and GPUs (0 if the log does not have them)."""


def read_usage(path: str | Path, note: Note = lambda line: None) -> UsageLog:
    """Read a log, with times counted from the minute of its first request.

    Raise InvalidRequest, which names the line.
    """
    path = Path(path)
    lines = numbered_lines(path)
    number, first = next(lines, (0, ""))
    if not number:
        raise InvalidRequest(f"{path}: nothing in it; {_known()}")
    try:
        columns = tuple(csv_cells(first))
    except Fault as fault:
        raise broken(path, number, f"{fault}; {_known()}") from None
    source = Source(path, columns, lines, 0)
    keys, notes = set(columns), []
    if len(keys) == len(columns) and keys == set(AEGAEON_COLUMNS):
        rows = _aegaeon_rows(source)
        notes.append(
            f"The log has no times of execution: prompts were taken to run at {PREFILL_TOKENS_PER_S:g} tokens a "
            f"second, outputs at {TPOT_S * 1e3:g} ms a token."
        )
    elif len(keys) == len(columns) and set(USAGE_COLUMNS) <= keys <= {*USAGE_COLUMNS, *GENAI_COLUMNS, SIZE_COLUMN}:
        rows = _usage_rows(source)
    else:
        found = ", ".join(columns[:20])
        raise InvalidRequest(f"{path}: no log of models has the columns {found[:200]}; {_known()}")
    return _log(path, rows, notes, note)


def _usage_rows(source: Source) -> Iterator[Row]:
    has_size = SIZE_COLUMN in source.columns

    def row(text: str) -> Row | None:
        cells = source.cells(text)
        run_s = real(cells["exec_s"], "exec_s", 0, MAX_EXEC_S)
        if not cells["model"]:
            if not run_s:
                return None  # Alibaba's log contains requests that never reached a model
            raise Fault("model is empty")
        gpus = real(cells[SIZE_COLUMN], SIZE_COLUMN, 0.125, MAX_GPUS) if has_size else 0.0
        return real(cells["t_s"], "t_s", 0, MAX_T_S), cells["model"], run_s, gpus

    return (each for _, each in source.rows(row) if each is not None)


def _aegaeon_rows(source: Source) -> Iterator[Row]:
    for each in read_aegaeon(source):
        run_s = each.input_tokens / PREFILL_TOKENS_PER_S + each.output_tokens * TPOT_S
        yield each.arrival_ns / 1e9, each.model, run_s, 0.0


def _log(path: Path, rows: Iterator[Row], notes: list[str], note: Note) -> UsageLog:
    places: dict[str, int] = {}
    sizes: list[float] = []
    t_s: list[float] = []
    model: list[int] = []
    exec_s: list[float] = []
    for count, (at_s, name, run_s, gpus) in enumerate(rows, 1):
        if count > MAX_REQUESTS:
            raise InvalidRequest(f"{path}: more than {MAX_REQUESTS} requests")
        if t_s and at_s < t_s[-1]:
            raise InvalidRequest(f"{path}: request {count} came before the one above it: sort the file by time")
        place = places.setdefault(name, len(places))
        if place == len(sizes):
            sizes.append(gpus or 1.0)
        elif gpus and gpus != sizes[place]:
            raise InvalidRequest(f"{path}: {quoted(name)} has {sizes[place]:g} GPUs in one line, {gpus:g} in another")
        t_s.append(at_s)
        model.append(place)
        exec_s.append(run_s)
        if count % NOTE_EVERY == 0:
            note(f"{path.name}: {count:,} requests read")
    if not t_s:
        raise InvalidRequest(f"{path}: no request in it")
    begin_s = t_s[0] // MINUTE_S * MINUTE_S
    return UsageLog(
        path.name,
        np.array(t_s) - begin_s,
        np.array(model),
        np.array(exec_s),
        list(places),
        np.array(sizes),
        tuple(notes),
    )


def write_usage(log: UsageLog, path: Path) -> None:
    """Write CSV with Fulcrum's columns, and sizes if they differ. Raise InvalidRequest if writing fails."""
    has_size = bool(np.any(log.gpus != 1))
    try:
        with path.open("w", newline="") as file:
            rows = csv.writer(file, lineterminator="\n")
            rows.writerow([*USAGE_COLUMNS, *([SIZE_COLUMN] if has_size else [])])
            for at_s, place, run_s in zip(log.t_s.tolist(), log.model.tolist(), log.exec_s.tolist(), strict=True):
                size = [f"{log.gpus[place]:g}"] if has_size else []
                rows.writerow([f"{at_s:.3f}", log.models[place], f"{run_s:.3f}", *size])
    except OSError as error:
        raise InvalidRequest(f"{path}: cannot be written: {error.strerror}") from None


def _known() -> str:
    ours = ", ".join(USAGE_COLUMNS)
    return f"known are {ours} (and {SIZE_COLUMN}), {', '.join(AEGAEON_COLUMNS)}, and {', '.join(GENAI_COLUMNS)}"
