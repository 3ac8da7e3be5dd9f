"""The counts kept of arrivals, and the keys of their rows."""

from typing import Final, NamedTuple

OTHER: Final = "other"
"""Stands for a tenant or class without a row of its own."""
MAX_ROWS: Final = 256
"""The most combinations of model, class and tenant at one gateway, without those in `OTHER`."""
# Clients name classes freely, so further ones of a model are counted as `OTHER`.
MAX_CLASSES: Final = 8


class DemandKey(NamedTuple):
    """The model, class and tenant of an arrival."""

    model: str
    service_class: str
    tenant: str


class Counts(NamedTuple):
    """Sums over arrivals; a gateway's rows count from its start."""

    requests: int = 0
    """Arrivals, one for each choice; a retry of a refused one is not counted again."""
    known_requests: int = 0
    """Admitted arrivals, to which the token counts refer."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Cached tokens of the prompts that were computed."""
    output_tokens: int = 0
    """Output tokens so far, including those of unfinished answers."""
    ended: int = 0
    """The number of answers that ended by themselves."""
    refused: int = 0
    """Arrivals turned away, each counted once."""

    def plus(self, other: "Counts") -> "Counts":
        return Counts(*(mine + its for mine, its in zip(self, other, strict=True)))

    def minus(self, other: "Counts") -> "Counts":
        return Counts(*(mine - its for mine, its in zip(self, other, strict=True)))


NOTHING: Final = Counts()


class RowCounts:
    """Running counts in a bounded number of rows; the rest is counted in `OTHER`."""

    def __init__(self, max_rows: int = MAX_ROWS) -> None:
        self._max_rows = max_rows
        self._rows: dict[DemandKey, Counts] = {}
        self._classes: dict[str, set[str]] = {}

    def add(self, key: DemandKey, counts: Counts) -> DemandKey:
        """Add counts and return the row that they went into."""
        row = self._row_of(key)
        self._rows[row] = self._rows.get(row, NOTHING).plus(counts)
        return row

    def rows(self) -> dict[DemandKey, Counts]:
        """Return a copy of all rows as they are now."""
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
