"""docs/glossary.md is complete: its terms are in use, and words it bans name no class."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
ROW = re.compile(r"^\| (?P<term>[a-z]+) \| (?P<meaning>.+?) \| ?(?P<banned>.*?) ?\|$", re.MULTILINE)
GLOSSARY = (ROOT / "docs/glossary.md").read_text("utf-8")
_, *ROWS = [row.groupdict() for row in ROW.finditer(GLOSSARY)]  # without the heading
# Participles and pronouns that say nothing of what a class is, whichever term they stood for.
BANNED_ANYWHERE = {"Asked", "Told", "Heard", "Kept", "Due", "Spent", "Way", "Visit", "Desk", "Book", "Door", "Teller"}
# The names of messages on the wire, which cannot change.
ON_THE_WIRE = {"CancelAsked"}


def classes() -> Iterator[str]:
    for folder in ("libs", "services"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.ClassDef):
                    yield node.name


def words(name: str) -> list[str]:
    return re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", name)


def test_the_glossary_has_at_most_60_terms_of_one_sentence_or_two_and_none_twice() -> None:
    terms = [row["term"] for row in ROWS]
    assert 40 < len(terms) <= 60 and len(set(terms)) == len(terms)
    assert all(row["meaning"].endswith(".") and row["meaning"].count(". ") <= 1 for row in ROWS)


def test_every_term_is_a_word_of_the_code() -> None:
    source = "\n".join(path.read_text("utf-8") for top in ("libs", "services") for path in (ROOT / top).rglob("*.py"))
    used = {word.lower() for name in set(re.findall(r"\w+", source)) for word in words(name)}
    assert not {row["term"] for row in ROWS} - used


def test_no_class_is_named_by_a_word_that_the_glossary_bans() -> None:
    banned = BANNED_ANYWHERE | {word for row in ROWS for word in row["banned"].split(", ") if word}
    assert sorted({name for name in classes() if banned & set(words(name))} - ON_THE_WIRE) == []
