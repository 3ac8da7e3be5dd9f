"""vLLM's source as syntax trees: the definition of a dotted name, and the arguments of a function.

Nothing is imported. Names are followed through re-exports, base classes and annotations. If the syntax does not show
the class of an object, the rest of the name is not checked.
"""

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Final

# Bounds re-exports and base classes that lead to one another.
MOST_STEPS: Final = 24
Function = ast.FunctionDef | ast.AsyncFunctionDef
# Class attributes with these annotations are no fields of a dataclass.
NO_FIELDS: Final = ("ClassVar", "KW_ONLY")


@dataclass(frozen=True, slots=True)
class Found:
    """The definition of a dotted name."""

    module: "Module"
    node: ast.AST | None
    """The node of the definition; None for a module."""
    owner: ast.ClassDef | None = None
    """The class that defines it, if it is a member of a class."""


class Module:
    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self.is_package = path.name == "__init__.py"
        self._path = path

    @cached_property
    def text(self) -> str:
        return self._path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def bindings(self) -> dict[str, ast.AST]:
        """The binding of each name at the top of the module. A class or function precedes an assignment."""
        found: dict[str, ast.AST] = {}
        for name, node in _bound(self.tree.body):
            if not isinstance(found.get(name), (ast.ClassDef, Function)) or isinstance(node, (ast.ClassDef, Function)):
                found[name] = node
        return found

    @cached_property
    def star_imports(self) -> list[str]:
        """The modules from which everything is imported."""
        imports = [node for node in ast.walk(self.tree) if isinstance(node, ast.ImportFrom)]
        return [self.absolute(node) for node in imports if any(alias.name == "*" for alias in node.names)]

    @cached_property
    def texts(self) -> frozenset[str]:
        """All string constants, and the names of all keyword arguments."""
        constants = (each.value for each in ast.walk(self.tree) if isinstance(each, ast.Constant))
        keywords = (each.arg for each in ast.walk(self.tree) if isinstance(each, ast.keyword) and each.arg)
        return frozenset((*(each for each in constants if isinstance(each, str)), *keywords))

    def absolute(self, node: ast.ImportFrom) -> str:
        """Return the absolute name of the module in an import statement."""
        if not node.level:
            return node.module or ""
        parts = self.name.split(".")
        parts = parts[: len(parts) - node.level + self.is_package]
        return ".".join([*parts, *([node.module] if node.module else [])])


class Sources:
    """All modules of one version of vLLM."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._modules: dict[str, Module | None] = {}

    def module(self, name: str) -> Module | None:
        if name not in self._modules:
            path = self._root.joinpath(*name.split("."))
            files = (path / "__init__.py", path.with_name(f"{path.name}.py"))
            file = next((each for each in files if each.is_file()), None)
            self._modules[name] = Module(name, file) if file else None
        return self._modules[name]

    def modules(self, package: str) -> Iterator[Module]:
        """Yield a module, or all modules of a package."""
        folder = self._root.joinpath(*package.split("."))
        for path in sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_name(f"{folder.name}.py")]:
            parts = path.relative_to(self._root).with_suffix("").parts
            module = self.module(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
            if module is not None:
                yield module

    def find(self, name: str, steps: int = MOST_STEPS) -> Found | None:
        """Return the definition of a dotted name; None if there is none.

        If the syntax does not show the class of a prefix, the prefix's definition is returned for the whole name.
        """
        parts = name.split(".")
        for split in range(len(parts), 0, -1):
            module = self.module(".".join(parts[:split]))
            if module is not None:
                return self._inside(Found(module, None), parts[split:], steps)
        return None

    def _inside(self, found: Found, rest: list[str], steps: int) -> Found | None:
        for part in rest:
            if steps <= 0:
                return None
            if found.node is None:
                inner = self._top(found.module, part, steps - 1)
            else:
                of = self.class_of(found, steps - 1)
                if of is None:
                    return found
                inner = self.member(of, part)
            if inner is None:
                return None
            found = inner
        return found

    def _top(self, module: Module, name: str, steps: int) -> Found | None:
        node = module.bindings.get(name)
        if isinstance(node, ast.ImportFrom):
            alias = next(each for each in node.names if (each.asname or each.name) == name)
            return self._outside(f"{module.absolute(node)}.{alias.name}", Found(module, node), steps)
        if isinstance(node, ast.Import):
            alias = next(each for each in node.names if (each.asname or each.name.partition(".")[0]) == name)
            return self._outside(alias.name if alias.asname else name, Found(module, node), steps)
        if node is not None:
            return Found(module, node)
        if (inner := self.module(f"{module.name}.{name}")) is not None:
            return Found(inner, None)
        for star in module.star_imports if steps > 0 else ():
            if (found := self.find(f"{star}.{name}", steps - 1)) is not None:
                return found
        return None

    def _outside(self, name: str, here: Found, steps: int) -> Found | None:
        """Follow an import. A name from outside vLLM is found at the import statement."""
        return self.find(name, steps) if name.partition(".")[0] == here.module.name.partition(".")[0] else here

    def class_of(self, found: Found, steps: int = MOST_STEPS) -> Found | None:
        """Return the class itself, or the class of a value by its annotation or the call that creates it."""
        node = found.node
        if isinstance(node, ast.ClassDef):
            return found
        if isinstance(node, ast.AnnAssign):
            return self._annotated(found.module, node.annotation, steps)
        if isinstance(node, Function) and _is_property(node) and node.returns is not None:
            return self._annotated(found.module, node.returns, steps)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            return self._annotated(found.module, node.value.func, steps)
        return None

    def _annotated(self, module: Module, annotation: ast.expr, steps: int) -> Found | None:
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            annotation = ast.parse(annotation.value, mode="eval").body
        match annotation:
            case ast.Name() | ast.Attribute():
                found = self._inside(Found(module, None), ast.unparse(annotation).split("."), steps)
                return found if found is not None and isinstance(found.node, ast.ClassDef) else None
            case ast.BinOp(left, ast.BitOr(), right):
                return self._annotated(module, left, steps) or self._annotated(module, right, steps)
            case ast.Subscript(ast.Name("Optional" | "Annotated" | "Final"), inner):
                first = inner.elts[0] if isinstance(inner, ast.Tuple) else inner
                return self._annotated(module, first, steps)
        return None

    def bases(self, found: Found) -> list[Found]:
        """Return a class and its base classes inside vLLM, in the order in which attributes are looked up.

        The order is exact only if no class is inherited twice.
        """
        order: list[Found] = []
        waiting = [found]
        while waiting and len(order) < MOST_STEPS:
            each = waiting.pop(0)
            if any(known.node is each.node for known in order) or not isinstance(each.node, ast.ClassDef):
                continue
            order.append(each)
            named = [base.value if isinstance(base, ast.Subscript) else base for base in each.node.bases]
            inner = (self._annotated(each.module, base, MOST_STEPS) for base in named)
            waiting = [base for base in inner if base is not None] + waiting
        return order

    def member(self, found: Found, name: str) -> Found | None:
        """Return an attribute of a class or its instances, including inherited ones."""
        for each in self.bases(found):
            assert isinstance(each.node, ast.ClassDef)
            node = _members(each.node).get(name)
            if node is not None:
                return Found(each.module, node, each.node)
        return None

    def constructor(self, found: Found) -> "Signature":
        """Return the arguments of a class: those of `__init__`, or else the fields of a dataclass or Struct."""
        init = self.member(found, "__init__")
        if init is not None and isinstance(init.node, Function):
            return Signature.of(init.node, bound=True)
        fields: dict[str, bool] = {}
        for each in reversed(self.bases(found)):
            assert isinstance(each.node, ast.ClassDef)
            fields |= dict(_fields(each.node))
        return Signature(tuple(fields), frozenset(name for name, needed in fields.items() if needed))


@dataclass(frozen=True, slots=True)
class Signature:
    """The arguments of a function, without `self`."""

    positional: tuple[str, ...]
    required: frozenset[str]
    named_only: frozenset[str] = frozenset()
    more: bool = False
    """True if the function takes any number of positional arguments."""
    any_name: bool = False
    """True if the function takes keyword arguments of any name."""

    @classmethod
    def of(cls, node: Function, *, bound: bool) -> "Signature":
        """Return a function's signature; without its first argument if `bound`."""
        arguments = node.args
        given = [each.arg for each in (*arguments.posonlyargs, *arguments.args)]
        needed = given[: len(given) - len(arguments.defaults)]
        named = [each.arg for each in arguments.kwonlyargs]
        needed += [name for name, value in zip(named, arguments.kw_defaults, strict=True) if value is None]
        skipped = given[:1] if bound else []
        return cls(
            tuple(given[len(skipped) :]),
            frozenset(needed) - {*skipped},
            frozenset(named),
            arguments.vararg is not None,
            arguments.kwarg is not None,
        )

    def refuses(self, positional: int, names: Iterable[str], *, partly: bool = False) -> list[str]:
        """Return the reasons why a call would fail.

        If `partly`, the call has further arguments that the syntax does not show.
        """
        names = set(names)
        reasons = [
            f"takes no argument {name!r}"
            for name in sorted(names - {*self.positional} - self.named_only)
            if not self.any_name
        ]
        if positional > len(self.positional) and not self.more:
            reasons.append(f"takes {len(self.positional)} positional arguments, not {positional}")
        lacking = self.required - names - {*self.positional[:positional]}
        if lacking and not partly:
            reasons.append(f"needs {', '.join(sorted(lacking))}")
        return reasons

    def differs(self, base: "Signature") -> list[str]:
        """Return the reasons why a method with this signature cannot replace one with the signature `base`."""
        reasons = []
        for place, name in enumerate(base.positional):
            own = self.positional[place] if place < len(self.positional) else None
            if own is None and not self.more:
                reasons.append(f"is also given {name!r}")
            elif own is not None and own.lstrip("_") != name.lstrip("_"):
                reasons.append(f"is given {name!r} where ours has {own!r}")
        reasons += [
            f"is also given {name!r}" for name in sorted(base.named_only - self.named_only) if not self.any_name
        ]
        lacking = self.required - {*base.positional} - {f"_{name}" for name in base.positional} - base.named_only
        return reasons + [f"is not given {name!r}" for name in sorted(lacking)]

    def __str__(self) -> str:
        named = sorted(self.named_only)
        return f"({', '.join((*self.positional, *['*'] * bool(named), *named))})"


def is_bound(found: Found) -> bool:
    """Return whether attribute access supplies the first argument of a function."""
    if found.owner is None or not isinstance(found.node, Function):
        return False
    return not any("staticmethod" in ast.unparse(each) for each in found.node.decorator_list)


def _is_property(node: Function) -> bool:
    return any("property" in ast.unparse(each) for each in node.decorator_list)


def _bound(body: list[ast.stmt]) -> Iterator[tuple[str, ast.AST]]:
    """Yield the names that statements bind, including those in branches, with the statements."""
    for node in body:
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                yield node.name, node
            case ast.Import():
                yield from ((alias.asname or alias.name.partition(".")[0], node) for alias in node.names)
            case ast.ImportFrom():
                yield from ((alias.asname or alias.name, node) for alias in node.names if alias.name != "*")
            case ast.AnnAssign(target=ast.Name(name)):
                yield name, node
            case ast.Assign():
                names = (each for target in node.targets for each in ast.walk(target))
                yield from ((each.id, node) for each in names if isinstance(each, ast.Name))
            case ast.If() | ast.Try() | ast.With() | ast.For() | ast.While():
                inner = [*node.body, *getattr(node, "orelse", []), *getattr(node, "finalbody", [])]
                inner += [each for handler in getattr(node, "handlers", []) for each in handler.body]
                yield from _bound(inner)


@cache
def _members(node: ast.ClassDef) -> dict[str, ast.AST]:
    """Return the names that a class binds in its body or its methods assign to `self`."""
    found: dict[str, ast.AST] = {}
    for method in node.body:
        if isinstance(method, Function):
            found |= dict(_assigned_to_self(method))
    return found | dict(_bound(node.body))


def _assigned_to_self(method: Function) -> Iterator[tuple[str, ast.AST]]:
    arguments = {each.arg: each.annotation for each in (*method.args.args, *method.args.kwonlyargs)}
    for node in ast.walk(method):
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.withitem)):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            for target in targets:
                for each in ast.walk(target) if target is not None else ():
                    match each:
                        case ast.Attribute(ast.Name("self"), name, ast.Store()) as place:
                            yield name, _with_annotation(node, place, arguments)


def _with_annotation(node: ast.AST, target: ast.Attribute, arguments: dict[str, ast.expr | None]) -> ast.AST:
    """Return an assignment with the annotation of the argument that it assigns, if it assigns one."""
    match node:
        case ast.Assign(value=ast.Name(name)) if (annotation := arguments.get(name)) is not None:
            return ast.AnnAssign(target, annotation, ast.Name(name), simple=0)
    return node


def _fields(node: ast.ClassDef) -> Iterator[tuple[str, bool]]:
    """Yield the fields that the constructor of a dataclass or Struct takes, each with whether it is required."""
    for each in node.body:
        match each:
            case ast.AnnAssign(target=ast.Name(name)):
                text = ast.unparse(each)
                if not any(word in ast.unparse(each.annotation) for word in NO_FIELDS) and "init=False" not in text:
                    yield name, each.value is None
