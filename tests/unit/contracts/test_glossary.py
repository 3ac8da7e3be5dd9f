"""Tests that the glossaries are complete, that their terms are in use, and that no class has a banned word in its
name."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
ROW = re.compile(r"^\| (?P<term>[a-z]+) \| (?P<meaning>[A-Z].+?) \|$", re.MULTILINE)
PAGES = ("glossary.md", "glossary-code.md")
ROWS = [row.groupdict() for page in PAGES for row in ROW.finditer((ROOT / "docs" / page).read_text("utf-8"))]
# Participles and pronouns that say nothing of what a class is, whichever term they stood for.
BANNED = {
    *("Asked", "Told", "Heard", "Kept", "Due", "Spent", "Way", "Visit"),
    *("Desk", "Book", "Door", "Teller", "Again", "Happened"),
}
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


def test_the_glossaries_have_at_most_60_terms_of_one_sentence_or_two_and_none_twice() -> None:
    terms = [row["term"] for row in ROWS]
    assert 40 < len(terms) <= 60 and len(set(terms)) == len(terms)
    assert all(row["meaning"].endswith(".") and row["meaning"].count(". ") <= 1 for row in ROWS)


def test_every_term_is_a_word_of_the_code() -> None:
    source = "\n".join(path.read_text("utf-8") for top in ("libs", "services") for path in (ROOT / top).rglob("*.py"))
    used = {word.lower() for name in set(re.findall(r"\w+", source)) for word in words(name)}
    assert not {row["term"] for row in ROWS} - used


def test_no_class_is_named_by_a_banned_word() -> None:
    assert sorted({name for name in classes() if BANNED & set(words(name))} - ON_THE_WIRE) == []
