"""Measure how much there is to read: `make measure`, or `python -m libs.testing.measure --docstrings 40 --seed 7`."""

from __future__ import annotations

import argparse
import ast
import json
import random
import re
import statistics
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from libs.testing.guides import GUIDES, NOT_TYPED

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("libs", "services", "deploy", "locks")
NOT_PRODUCT = ("libs/testing", "libs/contracts/pb")
SMALL_MODULE_LINES = 100
SHORT_DOCSTRING_WORDS = 6
PATHS = {
    "A request, file by file": "paths.md",
    "A role move, file by file": "paths.md",
    "Occupancy, file by file": "occupancy.md",
}
"""Headings whose tables name the files on a path, with their pages in docs."""
GENERATED_PAGES = ("docs/settings.md",)
RECORDS = ("results", "adr")
"""Folders of docs with records, which are no pages to be read through."""
TYPED_PAGES = ("examples.md", *(f"{page}.md" for page in GUIDES))
"""Pages beside the tutorials whose shell blocks a test types, but for those marked `NOT_TYPED`."""
LONG_PAGE_WORDS = 1_200
SHELL = re.compile(r"^```sh$", re.MULTILINE)

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Docstring:
    """A docstring with what it describes: a module or definition, or else the line of an attribute."""

    where: str
    text: str
    attribute: bool = False


@dataclass(frozen=True)
class Module:
    """One Python file of the product."""

    path: Path
    text: str
    tree: ast.Module

    @property
    def name(self) -> str:
        """The dotted name by which others import it."""
        parts = self.path.relative_to(ROOT).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def lines(self) -> int:
        return self.text.count("\n")


def modules(*folders: str) -> list[Module]:
    """Return the modules under folders that hold anything, generated code and test helpers left out."""
    found = []
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            relative = path.relative_to(ROOT).as_posix()
            if relative.startswith(NOT_PRODUCT):
                continue
            text = path.read_text()
            if text.strip():
                found.append(Module(path, text, ast.parse(text)))
    return found


def imported(module: Module) -> set[str]:
    """Return every dotted name that a module imports, members of packages included."""
    names: set[str] = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def docstrings(module: Module) -> Iterator[Docstring]:
    """Yield a module's docstrings, those of attributes (a string after an assignment) too."""

    def visit(node: ast.Module | Definition, where: str) -> Iterator[Docstring]:
        text = ast.get_docstring(node)
        if text:
            yield Docstring(where, text)
        for before, statement in zip([None, *node.body], node.body, strict=False):
            if isinstance(statement, Definition):
                yield from visit(
                    statement, f"{where}:{statement.name}" if ":" not in where else f"{where}.{statement.name}"
                )
            elif (
                isinstance(before, ast.Assign | ast.AnnAssign)
                and isinstance(statement, ast.Expr)
                and isinstance(statement.value, ast.Constant)
                and isinstance(statement.value.value, str)
            ):
                yield Docstring(f"{where}:{before.lineno}", statement.value.value, attribute=True)

    yield from visit(module.tree, module.path.relative_to(ROOT).as_posix())


def comment_lines(path: Path) -> int:
    """Count lines that hold a comment and nothing else."""
    with path.open("rb") as file:
        return sum(
            token.type == tokenize.COMMENT and token.line.lstrip().startswith("#")
            for token in tokenize.tokenize(file.readline)
        )


def docstring_lines(module: Module) -> int:
    return sum(
        (node.end_lineno or node.lineno) - node.lineno + 1
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    )


def files_on_path(heading: str) -> list[str]:
    """Return the Python files that the section of a heading in `PATHS` names."""
    page = (ROOT / "docs" / PATHS[heading]).read_text()
    _, found, section = page.partition(f"## {heading}\n")
    if not found:
        return []
    return sorted(set(re.findall(r"`((?:libs|services)/[\w/]+(?:\.py)?)`", section.partition("\n## ")[0])))


def pages() -> dict[Path, str]:
    """Return the written pages of the docs site, each with its top-level entry in the navigation.

    Runbooks count with the how-to guides, whose page lists them. Generated pages, results and decisions are left out.
    """
    navigation = (ROOT / "deploy" / "docs" / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    found: dict[Path, str] = {}
    kind = ""
    for name, page in re.findall(r"^(?:  - ([^:]+):| +- [^:]+:)(?: (\S+\.md))?$", navigation, re.MULTILINE):
        kind = name or kind
        if page:
            found[ROOT / "docs" / page] = kind
    found |= dict.fromkeys((ROOT / "docs" / "runbook").glob("*.md"), "How-to")
    aside = {ROOT / name for name in GENERATED_PAGES}
    return {page: kind for page, kind in sorted(found.items()) if page not in aside and page.parent.name not in RECORDS}


def class_names(found: list[Module]) -> dict[str, list[str]]:
    """Return the modules in which each class name is defined."""
    where = defaultdict(list)
    for module in found:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                where[node.name].append(module.name)
    return where


def small_modules(product: list[Module]) -> list[tuple[Module, str]]:
    """Return the modules under 100 lines that a single module imports, each with the name of that one."""
    importers = defaultdict(list)
    for module in product:
        for name in imported(module):
            importers[name].append(module.name)
    return [
        (module, importers[module.name][0])
        for module in product
        if module.lines < SMALL_MODULE_LINES and len(importers[module.name]) == 1
    ]


def measure() -> dict[str, int | float]:
    product = modules(*PRODUCT)
    documented = [docstring for module in product for docstring in docstrings(module)]
    short = [docstring for docstring in documented if len(docstring.text.split()) <= SHORT_DOCSTRING_WORDS]
    repeated = {name: where for name, where in class_names(product).items() if len(where) > 1}
    load = modules("load")
    tests = modules("tests")
    figures: dict[str, int | float] = {
        "modules": len(product),
        "lines": sum(module.lines for module in product),
        "docstring_lines": sum(map(docstring_lines, product)),
        "comment_lines": sum(comment_lines(module.path) for module in product),
        "median_module_lines": statistics.median(module.lines for module in product),
        "small_modules_with_one_importer": len(small_modules(product)),
        "docstrings": sum(not docstring.attribute for docstring in documented),
        "docstrings_of_six_words_or_fewer": sum(not docstring.attribute for docstring in short),
        "attribute_docstrings": sum(docstring.attribute for docstring in documented),
        "attribute_docstrings_of_six_words_or_fewer": sum(docstring.attribute for docstring in short),
        "class_names_defined_twice": len(repeated),
        "class_names_defined_twice_in_one_service": sum(
            any(count > 1 for service, count in Counter(name.split(".")[1] for name in where).items())
            for where in repeated.values()
        ),
        "place_as_a_word_of_names": sum(
            len(re.findall(r"(?<![A-Za-z])(?:[A-Za-z]*_)?[Pp]laces?(?:_[a-z]+)*(?![a-z])", module.text))
            for module in product
        ),
        "load_modules": len(load),
        "load_lines": sum(module.lines for module in load),
        "raw_figure_lines_in_docs": sum(
            path.read_text().count("\n") for path in (ROOT / "docs" / "figures").glob("*.json")
        ),
        "test_files": sum(module.path.name.startswith("test_") for module in tests),
        "test_functions": sum(
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
            for module in tests
            for node in ast.walk(module.tree)
        ),
    }
    kinds = pages()
    texts = {page: page.read_text() for page in kinds}
    kind_kb: defaultdict[str, float] = defaultdict(float)
    for page, kind in kinds.items():
        kind_kb[kind.lower().replace("-", "_")] += len(texts[page]) / 1e3
    blocks = {page: len(SHELL.findall(text)) for page, text in texts.items()}
    figures |= {
        "docs_pages": len(texts),
        "docs_kb": sum(map(len, texts.values())) / 1e3,
        **{f"docs_kb_{kind}": kb for kind, kb in kind_kb.items()},
        f"docs_pages_over_{LONG_PAGE_WORDS}_words": sum(len(text.split()) > LONG_PAGE_WORDS for text in texts.values()),
        "docs_shell_blocks": sum(blocks.values()),
        "docs_shell_blocks_typed_by_a_test": sum(
            count - texts[page].count(NOT_TYPED)
            for page, count in blocks.items()
            if page.parent.name == "tutorials" or page.name in TYPED_PAGES
        ),
    }
    for heading in PATHS:
        files = files_on_path(heading)
        name = heading.split(",")[0].removeprefix("A ").replace(" ", "_").lower()
        figures[f"files_on_path_{name}"] = len(files)
        figures[f"folders_on_path_{name}"] = len({file.rpartition("/")[0] for file in files})
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--docstrings", type=int, default=0, metavar="N", help="print N docstrings drawn at random, to be read"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--repeated", action="store_true", help="list class names that are defined more than once")
    parser.add_argument("--small", action="store_true", help="list small modules that a single module imports")
    arguments = parser.parse_args()
    product = modules(*PRODUCT)
    if arguments.docstrings:
        drawn = random.Random(arguments.seed).sample(  # noqa: S311 - a draw to be read, not a secret
            [docstring for module in product for docstring in docstrings(module)], arguments.docstrings
        )
        for docstring in drawn:
            print(f"{docstring.where}\n    {docstring.text.strip().splitlines()[0]}")
    if arguments.repeated:
        for name, where in sorted(class_names(product).items()):
            if len(where) > 1:
                print(f"{name}: {', '.join(where)}")
    if arguments.small:
        for module, importer in small_modules(product):
            print(f"{module.lines:>4} {module.path.relative_to(ROOT)} <- {importer}")
    figures = measure()
    width = max(map(len, figures))
    for name, figure in figures.items():
        print(f"{name.replace('_', ' '):{width}}  {figure:>8,.0f}")
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
