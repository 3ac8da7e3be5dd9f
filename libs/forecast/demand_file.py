"""Reading of files with demand in time bins. docs/forecast.md lists their columns."""

from math import nan
from pathlib import Path
from typing import Final

from libs.contracts.errors import InvalidRequest
from libs.lab.traces.lines import Fault, broken, csv_cells, numbered_lines, real
from libs.policy.forecast.history import MOST_BINS, DemandHistory, history_from_rates

COLUMNS: Final = {
    "requests_per_s": "requests",
    "known_requests_per_s": "known_requests",
    "prefill_tokens_per_s": "prefill",
    "decode_tokens_per_s": "decode",
}
"""The series of `history_from_rates` by column. The column `t_s` is required too, and others are ignored."""
MOST_S: Final = 1e12
MOST_RATE: Final = 1e15


def read_demand(path: Path) -> DemandHistory:
    """Read the bins of a file onto a regular grid. Empty cells are unknown.

    Raise InvalidRequest, which names the line, if the file is invalid.
    """
    lines = numbered_lines(path)
    number, head = next(lines, (0, ""))
    if not number:
        raise InvalidRequest(f"{path}: nothing in it; columns needed: {', '.join(('t_s', *COLUMNS))}")
    times_s: list[float] = []
    rates: dict[str, list[float]] = {name: [] for name in COLUMNS.values()}
    try:
        header = _header(head)
        for number, text in lines:  # noqa: B007 (the error below says where)
            row = _row(text, header)
            times_s.append(real(row["t_s"], "t_s", -MOST_S, MOST_S))
            for column, name in COLUMNS.items():
                rates[name].append(real(row[column], column, 0, MOST_RATE) if row[column] else nan)
            if len(times_s) > MOST_BINS:
                raise InvalidRequest(f"{path}: more than {MOST_BINS} bins")
    except Fault as fault:
        raise broken(path, number, str(fault)) from None
    if not times_s:
        raise InvalidRequest(f"{path}: no bin after the header")
    return history_from_rates(times_s, rates)


def _header(text: str) -> list[str]:
    header = csv_cells(text)
    missing = [name for name in ("t_s", *COLUMNS) if name not in header]
    if missing:
        raise Fault(f"no column {missing[0]}; needed are {', '.join(('t_s', *COLUMNS))}")
    return header


def _row(text: str, header: list[str]) -> dict[str, str]:
    cells = csv_cells(text)
    if len(cells) != len(header):
        raise Fault(f"{len(cells)} cells, where the header has {len(header)}")
    return dict(zip(header, cells, strict=True))
