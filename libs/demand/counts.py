"""What is counted of arrivals, and by what."""

from typing import Final, NamedTuple

OTHER: Final = "other"
"""In place of a tenant, or a class, for which there is no row."""
MAX_ROWS: Final = 256
"""Models x classes x tenants of one gateway, those in `OTHER` not counted."""
MAX_CLASSES: Final = 8
"""Of each model; further ones are `OTHER`, as clients name them."""


class DemandKey(NamedTuple):
    """Whose arrivals."""

    model: str
    service_class: str
    tenant: str


class Counts(NamedTuple):
    """Sums over arrivals; of rows of a gateway, since it began."""

    requests: int = 0
    """Arrivals, each choice one; a retry of a refused one is not counted again."""
    known_requests: int = 0
    """Those that were admitted: tokens are theirs."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Of prompts that were computed."""
    output_tokens: int = 0
    """So far, those of unfinished answers too."""
    ended: int = 0
    """Answers that came to their end by themselves."""
    refused: int = 0
    """Arrivals turned away, each once."""

    def plus(self, other: "Counts") -> "Counts":
        """Side by side."""
        return Counts(*(mine + its for mine, its in zip(self, other, strict=True)))

    def minus(self, other: "Counts") -> "Counts":
        """Side by side."""
        return Counts(*(mine - its for mine, its in zip(self, other, strict=True)))


NOTHING: Final = Counts()


class RowBook:
    """Running counts by row; bounded, what has no row of its own is counted in `OTHER`."""

    def __init__(self, max_rows: int = MAX_ROWS) -> None:
        self._max_rows = max_rows
        self._rows: dict[DemandKey, Counts] = {}
        self._classes: dict[str, set[str]] = {}

    def add(self, key: DemandKey, counts: Counts) -> DemandKey:
        """Count; gives the row that it went into."""
        row = self._row_of(key)
        self._rows[row] = self._rows.get(row, NOTHING).plus(counts)
        return row

    def rows(self) -> dict[DemandKey, Counts]:
        """All of them, as of now."""
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
