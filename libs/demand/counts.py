"""Counts of arrivals by model, class and tenant, and the counter at one gateway. Pure: no clock, no I/O."""

from collections import Counter, OrderedDict
from collections.abc import Hashable, Sequence, Sized
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

OTHER: Final = "other"
"""The row name of tenants and classes that have no row of their own."""
MAX_ROWS: Final = 256
"""The maximum number of combinations of model, class and tenant at one gateway. Rows named `OTHER` come on top."""
# Clients choose the names of classes, so a model's further classes are counted as `OTHER`.
MAX_CLASSES: Final = 8


class DemandKey(NamedTuple):
    """The model, class and tenant by which arrivals are counted."""

    model: str
    service_class: str
    tenant: str


class Counts(NamedTuple):
    """Sums over arrivals. A gateway counts from its start."""

    requests: int = 0
    """The number of arriving choices. A retry of a refused request is not counted again."""
    known_requests: int = 0
    """The number of admitted choices, to which the token counts refer."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """The number of prompt tokens that were found cached."""
    output_tokens: int = 0
    """The number of output tokens so far, including those of unfinished answers."""
    ended: int = 0
    """The number of answers that ended regularly."""
    refused: int = 0
    """The number of refused choices. A retry of a refused request is not counted again."""

    def plus(self, other: "Counts") -> "Counts":
        return Counts(*(mine + its for mine, its in zip(self, other, strict=True)))

    def minus(self, other: "Counts") -> "Counts":
        return Counts(*(mine - its for mine, its in zip(self, other, strict=True)))


NOTHING: Final = Counts()


class RowCounts:
    """Counts in a bounded number of rows. Further combinations are counted in `OTHER`."""

    def __init__(self, max_rows: int = MAX_ROWS) -> None:
        self._max_rows = max_rows
        self._rows: dict[DemandKey, Counts] = {}
        self._classes: dict[str, set[str]] = {}

    def add(self, key: DemandKey, counts: Counts) -> DemandKey:
        """Add counts. Return the row to which they were added."""
        row = self._row_of(key)
        self._rows[row] = self._rows.get(row, NOTHING).plus(counts)
        return row

    def rows(self) -> dict[DemandKey, Counts]:
        """Return a copy of the current rows."""
        return dict(self._rows)

    def _row_of(self, key: DemandKey) -> DemandKey:
        if key in self._rows:
            return key
        classes = self._classes.setdefault(key.model, set())
        if key.service_class not in classes:
            if len(classes) >= MAX_CLASSES:
                key = key._replace(service_class=OTHER)
            classes.add(key.service_class)
        if key in self._rows or sum(row.tenant != OTHER for row in self._rows) < self._max_rows:
            return key
        return key._replace(tenant=OTHER)


# The bound on remembered refusals, by which retries are recognised. The oldest is forgotten first.
MAX_REFUSED: Final = 4096
# A client that retries later than this is counted as a new arrival.
REMEMBER_NS: Final = 300_000_000_000


class AdmittedChoice(Hashable, Protocol):
    """An admitted choice with the properties that are counted."""

    @property
    def output(self) -> Sized:
        """The tokens generated so far. Only their number is read."""
        ...

    @property
    def cached_tokens(self) -> int:
        """The number of cached prompt tokens; 0 until it is known."""
        ...


@dataclass(slots=True)
class _OpenAnswer:
    row: DemandKey
    output_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class _Refused:
    at_ns: int
    known: bool
    """True if the request had been admitted before its refusal, so that its prompt has been counted."""


class ArrivalCounter:
    """A counter of arrivals that recognises retries.

    A retry has the same mark as the refused request, such as a hash of tenant and body, and is not counted again.
    """

    def __init__(self) -> None:
        self._counts = RowCounts()
        self._open: dict[AdmittedChoice, _OpenAnswer] = {}
        self._refused: OrderedDict[bytes, _Refused] = OrderedDict()
        self.queue_full: Counter[DemandKey] = Counter()
        """The number of choices refused because the queue was full, by row."""
        self.retries = 0
        """The number of retries of refused requests."""

    @property
    def open(self) -> int:
        """The number of answers that have not ended."""
        return len(self._open)

    def holds(self, answer: AdmittedChoice) -> bool:
        """Return whether the answer was admitted and has not ended."""
        return answer in self._open

    def admitted(
        self, key: DemandKey, answers: Sequence[AdmittedChoice], prompt_tokens: int, mark: bytes, now_ns: int
    ) -> None:
        """Count the choices of an admitted request. `prompt_tokens` is the sum over all of them."""
        back = self._refused.pop(mark, None)
        if back is not None and now_ns - back.at_ns > REMEMBER_NS:
            back = None
        self.retries += back is not None
        known = 0 if back is not None and back.known else len(answers)
        more = Counts(len(answers) if back is None else 0, known, prompt_tokens if known else 0)
        row = self._counts.add(key, more)
        for answer in answers:
            self._open[answer] = _OpenAnswer(row)

    def refused(
        self, key: DemandKey, choices: int, mark: bytes, now_ns: int, *, known: bool = False, full: bool = False
    ) -> None:
        """Count a refused request. Without a mark, every refusal is counted.

        `known` means that the request had been admitted and counted before. `full` means that the queue was full.
        """
        before = self._refused.pop(mark, None) if mark else None
        if before is not None and now_ns - before.at_ns <= REMEMBER_NS:
            self.retries += 1
            known = known or before.known
        elif not known:
            row = self._counts.add(key, Counts(requests=choices, refused=choices))
            if full:
                self.queue_full[row] += choices
        if mark:
            self._refused[mark] = _Refused(now_ns, known)
            if len(self._refused) > MAX_REFUSED:
                self._refused.popitem(last=False)

    def ended(self, answer: AdmittedChoice, *, well: bool) -> None:
        """Stop counting the tokens of an answer.

        `well` means that it ended regularly, so that its length is complete.
        """
        held = self._open.pop(answer, None)
        if held is not None:
            self._grow(answer, held, ended=int(well))

    def rows(self) -> dict[DemandKey, Counts]:
        """Return the current counts, including the tokens of unfinished answers so far."""
        for answer, held in self._open.items():
            self._grow(answer, held)
        return self._counts.rows()

    def _grow(self, answer: AdmittedChoice, held: _OpenAnswer, *, ended: int = 0) -> None:
        outputs, cached = len(answer.output), max(answer.cached_tokens, held.cached_tokens)
        more = Counts(
            output_tokens=outputs - held.output_tokens, cached_tokens=cached - held.cached_tokens, ended=ended
        )
        if any(more):
            self._counts.add(held.row, more)
        held.output_tokens, held.cached_tokens = outputs, cached
