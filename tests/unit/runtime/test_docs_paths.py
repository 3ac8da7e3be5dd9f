"""Tests that README and docs name only existing files, folders, modules and links."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs/adr").glob("*.md")]
)
TOPS = "libs|services|load|proto|deploy|tests|locks|docs"
PATH = re.compile(rf"(?<![\w/.-])(?:{TOPS})/[\w/.-]+")
MODULE = re.compile(r"\bpython -m ((?:libs|services|load)(?:\.\w+)+)")
# A file that was removed is named with the commit that has it: "`load/x.py --all` at commit 0123abcd".
PAST = re.compile(r"`[^`]*` at commit [0-9a-f]{7,40}\b")
LINK = re.compile(r"\]\((?![a-z]+:)([^)#\s]+)(?:#[^)]*)?\)")


def named(page: Path) -> list[Path]:
    """Return every path of the repository that a page names, by itself, as a module or in a link."""
    text = PAST.sub("", page.read_text())
    found = [ROOT / path.rstrip("./-") for path in PATH.findall(re.sub(r"\]\([^)]*\)", "", text))]
    found += [ROOT / module.replace(".", "/") for module in MODULE.findall(text)]
    return found + [page.parent / link for link in LINK.findall(text)]


def exists(path: Path) -> bool:
    """A file or folder, or a module or page named without its ending."""
    return path.exists() or path.with_name(path.name + ".py").exists()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_names_only_existing_paths(page: Path) -> None:
    assert [str(path) for path in named(page) if not exists(path)] == []


def test_a_path_that_does_not_exist_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "`libs/no/such.py` and `python -m load.nowhere`, [here](gone.md), not "
        "https://x.org/libs/y.py, nor `libs/past.py --all` at commit 0123abcd"
    )
    assert [path.name for path in named(page) if not exists(path)] == ["such.py", "nowhere", "gone.md"]


def test_every_adr_is_in_the_index() -> None:
    index = (ROOT / "docs/adr/README.md").read_text()
    written = {path.name for path in (ROOT / "docs/adr").glob("0*.md")}
    assert written == {link for link in LINK.findall(index) if link.startswith("0")}
    numbers = [int(number) for number in re.findall(r"^\| (?:\[)?(\d+)", index, re.MULTILINE)]
    assert numbers == list(range(1, max(numbers) + 1)), "a line for each number"
