"""The check of the names that this project uses against one version's source."""

import ast
import copy
import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

from deploy.try_vllm.derived import our_method, subclasses
from deploy.try_vllm.source import Found, Function, Signature, Sources, is_bound
from deploy.try_vllm.touched import WITH_TEXT, CallArguments, Kind, Touched
from deploy.try_vllm.wheel import FILE_LIST

# The packages in which vLLM's engine calls functions that this project replaces.
CALLERS: Final = ("vllm.v1", "vllm.distributed")
MOST_HINTS: Final = 3
CODE: Final = frozenset({Kind.NAME, Kind.CALL, Kind.OVERRIDE})


@dataclass(frozen=True, slots=True)
class Problem:
    """A used name that a version lacks or has changed."""

    touched: Touched
    reason: str

    def __str__(self) -> str:
        what = self.touched
        name = f"{what.name} ({what.text})" if what.kind in WITH_TEXT else what.name
        return f"{what.kind.value:8}  {name}{what.arguments or ''}\n          {self.reason}; {what.where}"


class Check:
    """The check against the source in a folder that contains `vllm`."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._sources = Sources(root)

    def problems(self, touched: list[Touched]) -> list[Problem]:
        """Return the missing or changed names that are not optional, and our names that would hide one of vLLM's."""
        needed = [each for each in touched if not each.optional]
        found = [Problem(each, reason) for each in needed for reason in self._reasons(each)]
        return found + list(self._collisions(touched))

    def absent(self, touched: list[Touched]) -> list[Touched]:
        """Return the optional names that the version lacks."""
        return [each for each in touched if each.optional and list(self._reasons(each))]

    def changed(self, touched: list[Touched], before: "Check") -> list[tuple[str, int]]:
        """Return (name, changed lines) of used classes and functions whose code differs from another version's.

        Comments, docstrings and layout are ignored. A method that is used by its own name is listed without its class.
        """
        found: dict[str, int] = {}
        for name in dict.fromkeys(each.name for each in touched if each.kind in CODE):
            new, old = self._sources.find(name), before._sources.find(name)
            if new is None or old is None or not isinstance(new.node, (ast.ClassDef, Function)) or old.node is None:
                continue
            owner = f"{new.owner.name}." if new.owner else ""
            if lines := changed_lines(old.node, new.node):
                found[f"{new.module.name}.{owner}{new.node.name}"] = lines
        return sorted(found.items(), key=lambda each: -each[1])

    def _reasons(self, each: Touched) -> Iterator[str]:
        match each.kind:
            case Kind.NAME:
                if not self._is_there(each.name):
                    yield self._missing(each.name)
            case Kind.CALL:
                yield from self._call(each.name, each.arguments or CallArguments())
            case Kind.OVERRIDE:
                yield from self._override(each)
            case Kind.TEXT:
                if not any(each.text in module.texts for module in self._sources.modules(each.name)):
                    yield f"no such string in {each.name}"
            case Kind.METRIC:
                forms = {each.text, each.text.removesuffix("_total")}
                if not any(forms & module.texts for module in self._sources.modules(each.name)):
                    yield f"no such metric in {each.name}"
            case Kind.STAND_IN:
                yield from self._stand_in(each)
            case Kind.FILE:
                if not any(line.startswith(each.name) for line in self._files):
                    yield "no such file in the wheel"

    def _is_there(self, name: str) -> bool:
        owner, _, last = name.rpartition(".")
        if last.startswith("__") and last not in {"__version__", "__init__"}:
            return self._is_there(owner)
        return self._sources.find(name) is not None

    def _missing(self, name: str) -> str:
        """Describe a missing name by the part of it that exists and the modules that define its last part now."""
        parts = name.split(".")
        whole = next((n for n in range(len(parts) - 1, 0, -1) if self._sources.find(".".join(parts[:n]))), 0)
        places = self._definitions.get(parts[whole], [])[:MOST_HINTS]
        hint = f"; {parts[whole]!r} is in {', '.join(places)}" if places else ""
        return f"{'.'.join(parts[:whole])} has no {parts[whole]!r}{hint}"

    def _call(self, name: str, arguments: CallArguments) -> Iterator[str]:
        found = self._sources.find(name)
        if found is None:
            yield self._missing(name)
            return
        if isinstance(found.node, ast.ClassDef):
            signature = self._sources.constructor(found)
        elif isinstance(found.node, Function) and not _follows_no_further(found, name):
            signature = Signature.of(found.node, bound=is_bound(found))
        else:
            return
        reasons = signature.refuses(arguments.positional, arguments.names, partly=arguments.partly)
        if reasons and is_bound(found) and isinstance(found.node, Function):  # called on the class, with its instance
            unbound = Signature.of(found.node, bound=False)
            if not unbound.refuses(arguments.positional, arguments.names) and arguments.positional:
                return
        yield from (f"{name.rpartition('.')[2]}{signature} {reason}" for reason in reasons)

    def _override(self, each: Touched) -> Iterator[str]:
        found = self._sources.find(each.name)
        method = each.name.rpartition(".")[2]
        if found is None or not isinstance(found.node, Function):
            yield self._missing(each.name)
            return
        ours = our_method(f"{each.where}:{each.text}", method) if each.text else None
        if ours is not None:
            theirs = Signature.of(found.node, bound=True)
            yield from (f"{method}{theirs} {why}" for why in Signature.of(ours, bound=True).differs(theirs))
        if not re.search(rf"\.{method}\(|[\"']{method}[\"']", self._callers):
            yield "nothing in vLLM calls it"

    def _stand_in(self, each: Touched) -> Iterator[str]:
        used = set(re.findall(rf"\.{each.text}\.(\w+)", self._callers))
        for name in sorted(used):
            if our_method(each.where, name) is None:
                yield f"vLLM asks it for {name!r}, which ours lacks"

    def _collisions(self, touched: list[Touched]) -> Iterator[Problem]:
        """Yield our own attributes that would hide one of vLLM's in its class and are not listed."""
        listed = {each.name for each in touched}
        for where, (base, own) in subclasses().items():
            found = self._sources.find(base)
            if found is None:
                continue
            for name in sorted(own - {"__init__"}):
                known = {f"{each}.{name}" for each in (base, *_other_bases(where))}
                if self._sources.member(found, name) is not None and not known & listed:
                    here = Touched(f"{base}.{name}", Kind.OVERRIDE, where)
                    yield Problem(here, f"ours has {name!r} too, and would hide vLLM's")

    @cached_property
    def _callers(self) -> str:
        return "\n".join(module.text for package in CALLERS for module in self._sources.modules(package))

    @cached_property
    def _files(self) -> list[str]:
        return (self._root / FILE_LIST).read_text(encoding="utf-8").splitlines()

    @cached_property
    def _definitions(self) -> dict[str, list[str]]:
        """The modules that define a top-level class or function, or a method, by its name."""
        found: dict[str, list[str]] = {}
        pattern = re.compile(r"^(?:    )?(?:async )?(?:class|def) (\w+)", re.MULTILINE)
        for module in self._sources.modules("vllm"):
            for name in dict.fromkeys(pattern.findall(module.text)):
                found.setdefault(name, []).append(module.name)
        return found


def changed_lines(old: ast.AST, new: ast.AST) -> int:
    """Return the number of lines of code in which two definitions differ."""
    before, after = (ast.unparse(_without_docstrings(node)).splitlines() for node in (old, new))
    return sum(line[0] in "+-" for line in difflib.ndiff(before, after)) if before != after else 0


def _without_docstrings(node: ast.AST) -> ast.AST:
    node = copy.deepcopy(node)
    for each in ast.walk(node):
        body = getattr(each, "body", None)
        if isinstance(body, list):
            texts = [line for line in body if isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant)]
            each.body = [line for line in body if line not in texts] or [ast.Pass()]  # type: ignore[attr-defined]
    return node


def _follows_no_further(found: Found, name: str) -> bool:
    """Return whether `found` is the function itself, of whose result `name` is an attribute."""
    assert isinstance(found.node, Function)
    return found.node.name != name.rpartition(".")[2]


def _other_bases(where: str) -> list[str]:
    name = where.partition("#")[0]
    return [base for other, (base, _) in subclasses().items() if other.partition("#")[0] == name]
