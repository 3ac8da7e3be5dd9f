"""Lines of a trace file, plain or gzip, and the checks of their fields. Errors name the file and the line."""

import csv
import gzip
import json
import math
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeVar, cast

from libs.contracts.errors import InvalidRequest, quoted

# Fits a prompt of ten million tokens in blocks of 16, and keeps a binary file from filling the memory.
MAX_LINE_BYTES: Final = 1 << 24
MAX_REQUESTS: Final = 5_000_000
"""The maximum number of requests that one trace may have."""
MAX_TOKENS: Final = 10_000_000
"""The maximum number of tokens of one prompt or one output, more than any model's context."""
MAX_NS: Final = (1 << 63) - 1

GZIP: Final = b"\x1f\x8b"
_WHOLE: Final = re.compile(r"-?[0-9]{1,19}")

_Row = TypeVar("_Row")


class Fault(Exception):
    """A malformed line, without its file and line number; `Source.rows` adds them."""


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield each non-blank line without its line ending, with its line number counted from 1."""
    try:
        with path.open("rb") as file:
            zipped = file.read(len(GZIP)) == GZIP
            file.seek(0)
            if not zipped:
                yield from _lines(path, file)
                return
            with gzip.GzipFile(fileobj=file) as plain:
                yield from _lines(path, cast("BinaryIO", plain))
    except (OSError, EOFError, zlib.error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise InvalidRequest(f"{path}: cannot be read: {reason}") from error


def _lines(path: Path, file: BinaryIO) -> Iterator[tuple[int, str]]:
    number = 0
    while data := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(data) > MAX_LINE_BYTES:
            raise broken(path, number, f"over {MAX_LINE_BYTES} bytes")
        try:
            text = data.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
        except UnicodeDecodeError:
            raise broken(path, number, "not UTF-8 text") from None
        if text.strip():
            yield number, text


def broken(path: Path, line: int, what: str) -> InvalidRequest:
    """Return the InvalidRequest that reports a fault in one line of a file."""
    return InvalidRequest(f"{path}:{line}: {what}")


@dataclass(frozen=True, slots=True)
class Source:
    """An open trace file whose format is known."""

    path: Path
    columns: Sequence[str]
    """The columns of a CSV header in order, or the keys of a JSONL file's first line."""
    lines: Iterator[tuple[int, str]]
    """Line number and text of every line that holds data."""
    seed: int
    notes: list[str] = field(default_factory=list)
    """Remarks for readers of the trace, added while the file is parsed."""

    def rows(self, parse: Callable[[str], _Row]) -> Iterator[tuple[int, _Row]]:
        """Yield each line number with the parsed line. A `Fault` raised by `parse` becomes an InvalidRequest."""
        for number, text in self.lines:
            try:
                row = parse(text)
            except Fault as fault:
                raise broken(self.path, number, str(fault)) from None
            yield number, row

    def cells(self, text: str) -> dict[str, str]:
        """Return the cells of a CSV line by column name."""
        cells = csv_cells(text)
        if len(cells) != len(self.columns):
            raise Fault(f"{len(cells)} cells, where the header has {len(self.columns)}")
        return dict(zip(self.columns, cells, strict=True))


def csv_cells(text: str) -> list[str]:
    """Return the stripped cells of one line. A quoted cell may not contain a line break."""
    if '"' not in text:
        return [cell.strip() for cell in text.split(",")]
    try:
        return [cell.strip() for cell in next(csv.reader([text], strict=True))]
    except csv.Error as error:
        raise Fault(f"not a line of CSV: {error}") from None


def json_row(text: str) -> dict[str, Any]:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        raise Fault("not a line of JSON") from None
    if not isinstance(row, dict):
        raise Fault("not a JSON object")
    return row


def whole(value: object, name: str, least: int, most: int) -> int:
    """Return an integer from the text of a CSV cell or from a JSON value."""
    # The common case first: traces hold hundreds of thousands of block ids.
    if type(value) is int and least <= value <= most:
        return value
    if isinstance(value, str) and _WHOLE.fullmatch(value):
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise Fault(f"{name} is {quoted(str(value))}, not a whole number")
    if not least <= value <= most:
        raise Fault(f"{name} is {value}: it has to be {least} to {most}")
    return value


def real(value: object, name: str, least: float, most: float) -> float:
    """Return a finite number from the text of a CSV cell or from a JSON value."""
    number = math.nan
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        try:
            number = float(value)
        except (ValueError, OverflowError):
            number = math.nan
    if not math.isfinite(number):
        raise Fault(f"{name} is {quoted(str(value))}, not a number")
    if not least <= number <= most:
        raise Fault(f"{name} is {number:g}: it has to be {least:g} to {most:g}")
    return number


def tokens(value: object, name: str) -> int:
    """Return the token count of a prompt or an output, which is at least 1."""
    return whole(value, name, 1, MAX_TOKENS)
