"""Arrivals at one gateway, counted as they are admitted and as their answers grow; without clock or I/O."""

from collections import Counter, OrderedDict
from collections.abc import Hashable, Sequence, Sized
from dataclasses import dataclass
from typing import Final, Protocol

from libs.demand.counts import Counts, DemandKey, RowCounts

# Refused arrivals are remembered to recognise their retries; the oldest is forgotten first.
MAX_REFUSED: Final = 4096
# A client that comes back later than this counts as a new arrival.
REMEMBER_NS: Final = 300_000_000_000


class AdmittedChoice(Hashable, Protocol):
    """An admitted choice with the figures that are counted."""

    @property
    def output(self) -> Sized:
        """The tokens generated so far, of which only the number counts."""
        ...

    @property
    def cached_tokens(self) -> int:
        """The number of cached tokens of its prompt; 0 until that is known."""
        ...


@dataclass(slots=True)
class _Open:
    row: DemandKey
    output_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class _Refused:
    at_ns: int
    known: bool
    """Whether it had been admitted, so that its prompt was counted."""


class ArrivalCounter:
    """A counter that counts each arrival once, recognising retries by their mark.

    A mark is anything that a client repeats, such as tenant and body.
    """

    def __init__(self) -> None:
        self._counts = RowCounts()
        self._open: dict[AdmittedChoice, _Open] = {}
        self._refused: OrderedDict[bytes, _Refused] = OrderedDict()
        self.queue_full: Counter[DemandKey] = Counter()
        """Refused arrivals that a full queue turned away, by row."""
        self.retries = 0
        """Arrivals recognised as retries of a refused one."""

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
        """Count the choices of an admitted arrival; `prompt_tokens` is the sum over all of them."""
        back = self._refused.pop(mark, None)
        if back is not None and now_ns - back.at_ns > REMEMBER_NS:
            back = None
        self.retries += back is not None
        known = 0 if back is not None and back.known else len(answers)
        more = Counts(len(answers) if back is None else 0, known, prompt_tokens if known else 0)
        row = self._counts.add(key, more)
        for answer in answers:
            self._open[answer] = _Open(row)

    def refused(
        self, key: DemandKey, choices: int, mark: bytes, now_ns: int, *, known: bool = False, full: bool = False
    ) -> None:
        """Count an arrival that was turned away; without a mark every refusal counts.

        `known` says that it had been admitted and counted already. `full` says that a full queue turned it away.
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
        """Stop tracking an answer; `well` says that it ended by itself, so its length is complete."""
        held = self._open.pop(answer, None)
        if held is not None:
            self._grow(answer, held, ended=int(well))

    def rows(self) -> dict[DemandKey, Counts]:
        """Return the present totals, with the tokens of unfinished answers so far."""
        for answer, held in self._open.items():
            self._grow(answer, held)
        return self._counts.rows()

    def _grow(self, answer: AdmittedChoice, held: _Open, *, ended: int = 0) -> None:
        outputs, cached = len(answer.output), max(answer.cached_tokens, held.cached_tokens)
        more = Counts(
            output_tokens=outputs - held.output_tokens, cached_tokens=cached - held.cached_tokens, ended=ended
        )
        if any(more):
            self._counts.add(held.row, more)
        held.output_tokens, held.cached_tokens = outputs, cached
