"""CSV files with columns for times and lengths under common names."""

import re
from collections.abc import Sequence
from typing import Final

from libs.contracts.errors import InvalidRequest
from libs.lab.traces.formats import SERVEGEN_COLUMNS, date_time_ns
from libs.lab.traces.lines import MAX_TOKENS, Source, broken, real, tokens, whole
from libs.lab.traces.logs import Gathered
from libs.lab.traces.request import TraceRequest

WORKING_HEADER: Final = ("time_s", "input_tokens", "output_tokens")
"""A header that is always accepted, with seconds as decimals."""
ROLES: Final = {
    "time": (
        "time", "timestamp", "arrival", "arrivaltime", "arrivedat", "start", "starttime", "startedat", "requesttime",
        "requeststart", "requeststarttime", "receivedat", "createdat", "datetime", "t", "ts",
    ),
    "input": (
        "inputtokens", "prompttokens", "contexttokens", "requesttokens", "numinputtokens", "numprompttokens",
        "inputlength", "promptlength", "inputlen", "promptlen", "inputsequencelength", "isl", "prefilltokens",
        "numprefilltokens", "nprompttokens", "inputtokencount", "prompttokencount",
    ),
    "output": (
        "outputtokens", "completiontokens", "generatedtokens", "responsetokens", "numoutputtokens",
        "numcompletiontokens", "outputlength", "completionlength", "outputlen", "completionlen",
        "outputsequencelength", "osl", "decodetokens", "numdecodetokens", "ncompletiontokens", "outputtokencount",
        "completiontokencount",
    ),
    "limit": ("maxtokens", "maxoutputtokens", "maxcompletiontokens"),
    "model": ("model", "modelname", "modelid"),
}  # fmt: skip
"""Known names of columns, without case, spaces, dots, dashes and underscores."""
NEEDED: Final = ("time", "input", "output")
COUNTS: Final = frozenset((
    "requests", "numrequests", "nrequests", "requestcount", "requestsper", "requestspersecond", "rps", "qps",
))  # fmt: skip
"""Names of columns that count requests, so that a row is a bin of many."""
UNITS_NS: Final = {"s": 1_000_000_000, "sec": 1_000_000_000, "seconds": 1_000_000_000, "ms": 1_000_000,
                   "us": 1_000, "ns": 1}  # fmt: skip
"""Endings of a time column's name, after an underscore, dash, space or bracket."""
_SPLIT: Final = re.compile(r"[\s_.()\[\]-]+")
_NUMBER: Final = re.compile(r"[0-9]{1,19}(\.[0-9]*)?([eE][+-]?[0-9]{1,2})?", re.ASCII)
# A Unix time in ms, us or ns is above these; one in seconds is below the first until the year 5138.
_UNIX_FROM: Final = ((1e17, "ns"), (1e14, "us"), (1e11, "ms"))


def roles_of(columns: Sequence[str], path: object) -> dict[str, tuple[str, str]] | None:
    """Return (column, unit of time) by role; None without times and lengths.

    Raise InvalidRequest if two columns are named alike, or if the rows are bins of many requests.
    """
    found: dict[str, tuple[str, str]] = {}
    counts = ""
    for column in columns:
        words = [word for word in _SPLIT.split(column.lower()) if word]
        unit = words[-1] if len(words) > 1 and words[-1] in UNITS_NS else ""
        bare = "".join(words[:-1] if unit else words)
        counts = column if bare in COUNTS else counts
        role = next((role for role, names in ROLES.items() if bare in names), None)
        if role is None or (unit and role != "time"):
            continue
        if role in found:
            raise InvalidRequest(f"{path}: {found[role][0]} and {column} are both columns of {role}: remove one")
        found[role] = column, unit
    if any(role not in found for role in NEEDED):
        return None
    if counts:
        # Read as requests, bins would become a few requests with the tokens of thousands.
        raise InvalidRequest(
            f"{path}: {counts} counts requests, so a row is a bin: columns must be {','.join(SERVEGEN_COLUMNS)}; remove"
            f" {counts} if each row is one request"
        )
    return found


def read_columns(source: Source, roles: dict[str, tuple[str, str]]) -> Gathered:
    """Read a CSV file by the roles of its columns. Requests without tokens are left out."""
    gathered = Gathered()
    (time, unit), input_name, output_name = roles["time"], roles["input"][0], roles["output"][0]
    guessed = ""

    def request(text: str) -> TraceRequest | None:
        nonlocal guessed
        cells = source.cells(text)
        if cells[input_name] in ("", "0") or cells[output_name] in ("", "0"):
            return None
        at, limit, model = cells[time], roles.get("limit"), roles.get("model")
        if _NUMBER.fullmatch(at):
            guessed = unit or guessed or _unit_of(float(at))
            # Whole numbers of nanoseconds are too long for a float.
            scale = UNITS_NS[guessed]
            arrival_ns = int(at) * scale if at.isdigit() else round(real(at, time, 0, 1e19) * scale)
        else:
            arrival_ns = date_time_ns(at, time)
        return TraceRequest(
            number=0,
            arrival_ns=arrival_ns,
            input_tokens=tokens(cells[input_name], input_name),
            output_tokens=tokens(cells[output_name], output_name),
            max_output_tokens=whole(cells[limit[0]] or "0", limit[0], 0, MAX_TOKENS) if limit else 0,
            model=cells[model[0]] if model else "",
        )

    for line, row in source.rows(request):
        if len(gathered.requests) and row and row.arrival_ns > gathered.requests[0].arrival_ns + _MOST_NS:
            raise broken(source.path, line, f"{time} is years after the first: its unit may be another, e.g. time_ms")
        gathered.add(row)
    used = [roles[role][0] for role in roles]
    gathered.notes.append(f"Read by its columns {', '.join(used)}" + (f"; times are in {guessed}." if guessed else "."))
    return gathered


def _unit_of(number: float) -> str:
    return next((unit for least, unit in _UNIX_FROM if number >= least), "s")


_MOST_NS: Final = 10 * 366 * 24 * 3600 * 1_000_000_000
