"""Logs of model use in time, recognised by their columns: Fulcrum's own, Aegaeon's and Alibaba's GenAI."""

import csv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import numpy as np

from libs.contracts.errors import InvalidRequest, quoted
from libs.lab.models.usage import UsageLog
from libs.lab.traces.lines import MAX_REQUESTS, Fault, Source, broken, csv_cells, numbered_lines, real
from libs.lab.traces.logs import AEGAEON_COLUMNS, GENAI_COLUMNS, read_aegaeon

USAGE_COLUMNS: Final = ("t_s", "model", "exec_s")
SIZE_COLUMN: Final = "gpus"
"""An extra column beside `USAGE_COLUMNS` where sizes differ: the GPUs that the model needs while in use."""
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

    Raises InvalidRequest, which names the line.
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
                return None  # Alibaba's log has requests that never reached a model
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
    """Write CSV with Fulcrum's columns, and sizes if they differ. Raises InvalidRequest if writing fails."""
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
