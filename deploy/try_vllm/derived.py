"""The names of vLLM that follow from our source: imports, and uses of imported and annotated names."""

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Final

from deploy.try_vllm.touched import CallArguments, Kind, Touched

ROOT: Final = Path(__file__).resolve().parents[2]
# The code of a worker, the code of a server with the plug-in, and the tests' replacements for parts of vLLM.
SOURCES: Final = ("libs/engine/vllm", "deploy/vllm-plugin", "libs/testing/engines")
LIBRARY: Final = "vllm"
VARIABLE: Final = re.compile(r"VLLM_[A-Z0-9_]+")
Function = ast.FunctionDef | ast.AsyncFunctionDef
Names = dict[str, str]


def our_files() -> list[Path]:
    return [path for folder in SOURCES for path in sorted((ROOT / folder).rglob("*.py"))]


def derive() -> list[Touched]:
    """Return all names that our files use, each once per file, in order."""
    found: dict[tuple[object, ...], Touched] = {}
    for path in our_files():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for each in _Reader(str(path.relative_to(ROOT))).read(tree):
            key = (each.name, each.kind, str(each.arguments), each.text, each.where.partition(":")[0])
            found.setdefault(key, each)
    return list(found.values())


@cache
def subclasses() -> dict[str, tuple[str, frozenset[str]]]:
    """Return our subclasses of vLLM's classes by FILE:CLASS, with vLLM's class and all names that they define.

    A class with several base classes in vLLM has an entry for each, numbered from the second on.
    """
    found: dict[str, tuple[str, frozenset[str]]] = {}
    for path in our_files():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        classes = _classes(tree)
        aliases = imported(tree.body)
        for name in classes:
            for number, base in enumerate(_foreign_bases(name, classes, aliases)):
                key = f"{path.relative_to(ROOT)}:{name}" + f"#{number + 1}" * bool(number)
                found[key] = base, frozenset(_own_members(name, classes))
    return found


def our_method(where: str, name: str) -> Function | None:
    """Return a method of our class FILE:CLASS, or of its base classes in the same file; None if there is none."""
    file, _, of = where.partition("#")[0].partition(":")
    classes = _classes(ast.parse((ROOT / file).read_text(encoding="utf-8")))
    for each in _lineage(of, classes):
        for node in each.body:
            if isinstance(node, Function) and node.name == name:
                return node
    return None


def imported(body: Iterable[ast.stmt]) -> Names:
    """Return vLLM's dotted names by the local names under which statements import them."""
    names: Names = {}
    for node in body:
        if isinstance(node, ast.If):
            names |= imported(node.body)
        if isinstance(node, ast.Import):
            own = [alias for alias in node.names if alias.name.partition(".")[0] == LIBRARY]
            names |= {alias.asname or LIBRARY: alias.name if alias.asname else LIBRARY for alias in own}
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").partition(".")[0] == LIBRARY:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


class _Reader:
    """A walk through one file that tracks which local names refer to objects of vLLM."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._classes: dict[str, ast.ClassDef] = {}

    def read(self, tree: ast.Module) -> Iterator[Touched]:
        self._classes = _classes(tree)
        yield from self._statements(tree.body, {})
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and VARIABLE.fullmatch(node.value):
                yield Touched("vllm.envs", Kind.TEXT, f"{self._file}:{node.lineno}", text=node.value)

    def _statements(self, body: list[ast.stmt], outer: Names) -> Iterator[Touched]:
        names = outer | imported(body)
        for node in body:
            yield from self._imports(node)
        for node in body:
            match node:
                case ast.ClassDef():
                    yield from self._class(node, names)
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    yield from self._function(node, names)
                case ast.If() | ast.Try() | ast.With() | ast.For() | ast.While():
                    inside = _without(names, node.target) if isinstance(node, ast.For) else names
                    yield from self._branches(node, inside)
                case _:
                    yield from self._uses(node, names)
                    if isinstance(node, ast.Assign):
                        given = _assigned(node, names)
                        for target in node.targets:
                            names = _without(names, target)
                        names |= given

    def _branches(self, node: ast.stmt | ast.ExceptHandler, names: Names) -> Iterator[Touched]:
        for field, part in ast.iter_fields(node):
            items = part if isinstance(part, list) else [part]
            inside = _narrowed(node.test, names) if isinstance(node, ast.If) and field == "body" else names
            yield from self._statements([each for each in items if isinstance(each, ast.stmt)], inside)
            for each in items:
                if isinstance(each, ast.ExceptHandler):
                    yield from self._branches(each, names)
                elif isinstance(each, ast.AST) and not isinstance(each, ast.stmt):
                    yield from self._uses(each, names)

    def _imports(self, node: ast.stmt) -> Iterator[Touched]:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for name in imported([node]).values():
                yield self._touched(name, Kind.NAME, node)

    def _class(self, node: ast.ClassDef, names: Names) -> Iterator[Touched]:
        bases = _foreign_bases(node.name, self._classes, names)
        own = _own_members(node.name, self._classes)
        own |= {each for other in self._classes if node in _lineage(other, self._classes)
                for each in _own_members(other, self._classes)}  # fmt: skip
        for base in bases:
            for each in ast.walk(node):
                match each:
                    case ast.Call(ast.Attribute(ast.Call(ast.Name("super")), name)) if name != "__init__":
                        yield self._touched(f"{base}.{name}", Kind.CALL, each, _arguments(each))
                    case ast.Attribute(ast.Name("self"), name) if name not in own:
                        yield self._touched(f"{base}.{name}", Kind.NAME, each)
        inside = names | ({"self": bases[0]} if len(bases) == 1 else {})
        for each in node.body:
            if isinstance(each, Function):
                yield from self._function(each, inside, own if len(bases) == 1 else frozenset())
            else:
                yield from self._uses(each, names)

    def _function(self, node: Function, outer: Names, own: Iterable[str] = ()) -> Iterator[Touched]:
        names = dict(outer)
        of_class = outer.get("self")
        for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg):
            if each is not None:
                names.pop(each.arg, None)
                typed = _dotted(each.annotation, outer) if each.annotation is not None else None
                if typed is not None:
                    names[each.arg] = typed
        if of_class and node.args.args and node.args.args[0].arg == "self":
            names |= {f"self.{name}": "" for name in own} | {"self": of_class}
        yield from self._statements(node.body, names)

    def _uses(self, node: ast.AST, names: Names) -> Iterator[Touched]:
        """Yield attributes and calls of known names. Of a chain of attributes, only the longest is yielded."""
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            return
        match node:
            case ast.Call(func) if (name := _dotted(func, names)) is not None:
                yield self._touched(name, Kind.CALL, node, _arguments(node))
                for each in (*node.args, *node.keywords):
                    yield from self._uses(each, names)
                return
            case ast.Attribute() if (name := _dotted(node, names)) is not None:
                yield self._touched(name, Kind.NAME, node)
                return
            case ast.IfExp(test, then, otherwise):
                yield from self._uses(test, names)
                yield from self._uses(then, _narrowed(test, names))
                yield from self._uses(otherwise, names)
                return
            case ast.BoolOp(ast.And(), values):
                for each in values:
                    yield from self._uses(each, names)
                    names = _narrowed(each, names)
                return
            case ast.comprehension() | ast.GeneratorExp() | ast.ListComp() | ast.SetComp() | ast.DictComp():
                generators = [node] if isinstance(node, ast.comprehension) else node.generators
                for part in generators:
                    names = _without(names, part.target)
        for child in ast.iter_child_nodes(node):
            yield from self._uses(child, names)

    def _touched(self, name: str, kind: Kind, node: ast.AST, arguments: CallArguments | None = None) -> Touched:
        return Touched(name, kind, f"{self._file}:{getattr(node, 'lineno', 0)}", arguments)


def _dotted(node: ast.expr, names: Names) -> str | None:
    """Return vLLM's name for an expression; None if it has none, or if our own class defines it."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
        return names.get(node.value)
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in names:
        return None
    if node.id == "self" and (not parts or f"self.{parts[-1]}" in names):
        return None
    return ".".join([names[node.id], *reversed(parts)])


def _narrowed(test: ast.expr, names: Names) -> Names:
    """Return the names inside a test's branch, narrowed to the classes that the test checks by `isinstance`."""
    tests = test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else [test]
    found = dict(names)
    for each in tests:
        match each:
            case ast.Call(ast.Name("isinstance"), [ast.Name(name), kind]) if name in names:
                found[name] = _dotted(kind, names) or names[name]
    return found


def _without(names: Names, target: ast.expr) -> Names:
    """Return the names that remain after an assignment to a target."""
    bound = {each.id for each in ast.walk(target) if isinstance(each, ast.Name)}
    return {name: value for name, value in names.items() if name not in bound}


def _assigned(node: ast.Assign, names: Names) -> Names:
    """Return the names that an assignment binds to objects of vLLM."""
    target, value = node.targets[0], node.value
    pairs = [(target, value)]
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        pairs = list(zip(target.elts, value.elts, strict=False))
    found = ((left.id, _dotted(right, names)) for left, right in pairs if isinstance(left, ast.Name))
    return {name: dotted for name, dotted in found if dotted is not None and isinstance(name, str)}


def _arguments(node: ast.Call) -> CallArguments:
    starred = any(isinstance(each, ast.Starred) for each in node.args)
    names = tuple(each.arg for each in node.keywords if each.arg)
    positional = sum(not isinstance(each, ast.Starred) for each in node.args)
    return CallArguments(positional, names, starred or len(names) < len(node.keywords))


def _classes(tree: ast.Module) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def _lineage(name: str, classes: dict[str, ast.ClassDef]) -> list[ast.ClassDef]:
    """Return a class and its base classes in the same file."""
    if name not in classes:
        return []
    bases = (ast.unparse(base) for base in classes[name].bases)
    return [classes[name], *(each for base in bases for each in _lineage(base, classes))]


def _foreign_bases(name: str, classes: dict[str, ast.ClassDef], names: Names) -> list[str]:
    found = (_dotted(base, names) for each in _lineage(name, classes) for base in each.bases)
    return [each for each in found if each is not None]


def _own_members(name: str, classes: dict[str, ast.ClassDef]) -> set[str]:
    """Return the names that a class and its base classes in the same file define, including instance attributes."""
    found: set[str] = set()
    for each in _lineage(name, classes):
        for node in ast.walk(each):
            match node:
                case ast.FunctionDef(member) | ast.AsyncFunctionDef(member):
                    found.add(member)
                case ast.Attribute(ast.Name("self"), member, ast.Store()):
                    found.add(member)
    return found
