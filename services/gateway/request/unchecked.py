"""The check of complete answers against schema keywords that a grammar cannot enforce."""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from msgspec import Struct


class Unchecked(Struct):
    """Schema keywords that the grammar did not enforce, with the result of checking the whole answer."""

    choice: int
    field: str
    """The request's field that contains the schema."""
    keywords: list[str]
    """JSON pointers within the schema."""
    satisfied: bool | None
    """True if the answer is an instance of the whole schema; null if the check failed."""


class Omitted(NamedTuple):
    field: str
    schema: Mapping[str, Any]
    """The schema as the client sent it."""
    keywords: tuple[str, ...]
    tool: str = ""
    """The tool whose arguments the schema describes; empty for a schema of the answer's text."""


Satisfied = Callable[[Sequence[tuple[str, Mapping[str, Any]]]], Awaitable[list[bool | None]]]


@dataclass(slots=True)
class AnswerRecord:
    """The text and the calls of one choice, collected for a check once the choice is complete."""

    index: int
    omitted: Sequence[Omitted]
    satisfied: Satisfied
    text: list[str] = field(default_factory=list)
    calls: list[tuple[str, list[str]]] = field(default_factory=list)
    """The name and the argument pieces of each call."""
    found: list[Unchecked] = field(default_factory=list)
    """The results of `check`."""

    async def check(self) -> None:
        """Check the complete answer against all schemas with omitted keywords.

        Tools that were not called have no result. If there are calls, the schema of the text has none either.
        """
        parts = [(each, text) for each in self.omitted if (text := self._texts(each))]
        pairs = [(text, each.schema) for each, texts in parts for text in texts]
        results = iter(await self.satisfied(pairs) if pairs else ())
        self.found = [
            Unchecked(self.index, each.field, list(each.keywords), _all([next(results) for _ in texts]))
            for each, texts in parts
        ]

    def _texts(self, omitted: Omitted) -> list[str]:
        if not omitted.tool:
            return [] if self.calls else ["".join(self.text)]
        return ["".join(arguments) for name, arguments in self.calls if name == omitted.tool]


def _all(results: Sequence[bool | None]) -> bool | None:
    if False in results:
        return False
    return None if None in results else True


async def check_answers(records: Iterable[AnswerRecord | None]) -> None:
    """Check all answers of a request. They are checked one after another, because each check starts a process."""
    for record in records:
        if record is not None:
            await record.check()
