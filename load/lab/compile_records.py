"""Writes out what `@dataclass` would generate, so that mypyc compiles it: a constructor of its own in each record.

mypyc leaves the generated `__init__` to the interpreter, which sets one attribute after the other through the class; of
what the compiled lab took, a third was that. Only copies that are to be compiled are changed. In them records lose
their `frozen`, which the sources were checked for, and keep fields, defaults, equality and hash.
"""

import ast
from collections.abc import Iterable
from typing import NamedTuple


class _Field(NamedTuple):
    name: str
    annotation: str
    default: str
    """Empty: there is none."""
    factory: str
    init: bool


def bases(sources: Iterable[str]) -> frozenset[str]:
    """Names of all classes that others derive from: their fields go into constructors elsewhere."""
    found: set[str] = set()
    for source in sources:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                found.update(base.id for base in node.bases if isinstance(base, ast.Name))
    return frozenset(found)


def with_constructors(source: str, derived_from: frozenset[str] = frozenset()) -> str:
    """The module with a written constructor in each dataclass that neither derives from another nor is derived from,
    nor has one already."""
    lines = source.splitlines()
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    for node in reversed(classes):
        decorator = _decorator(node)
        if decorator is None or node.bases or node.name in derived_from or _has_constructor(node):
            continue
        fields = _fields(node)
        if fields is None:
            continue
        assert node.end_lineno is not None and decorator.end_lineno is not None
        lines[node.end_lineno : node.end_lineno] = _constructor(node, fields)
        lines[decorator.lineno - 1 : decorator.end_lineno] = [_plain(decorator)]
    return "\n".join(lines) + "\n"


def _decorator(node: ast.ClassDef) -> ast.expr | None:
    if len(node.decorator_list) != 1:
        return None
    found = node.decorator_list[0]
    name = found.func if isinstance(found, ast.Call) else found
    return found if isinstance(name, ast.Name) and name.id == "dataclass" else None


def _plain(decorator: ast.expr) -> str:
    """As it was, without a constructor; what was frozen keeps its hash."""
    keywords = decorator.keywords if isinstance(decorator, ast.Call) else []
    options = {each.arg: ast.unparse(each.value) for each in keywords if each.arg is not None}
    frozen = options.pop("frozen", "False") == "True"
    if frozen and options.get("eq") != "False":
        options["unsafe_hash"] = "True"
    options["init"] = "False"
    return f"@dataclass({', '.join(f'{name}={value}' for name, value in options.items())})"


def _has_constructor(node: ast.ClassDef) -> bool:
    return any(isinstance(each, ast.FunctionDef) and each.name == "__init__" for each in node.body)


def _fields(node: ast.ClassDef) -> list[_Field] | None:
    """None where it has some of a kind that is not known here."""
    found = []
    for each in node.body:
        if not isinstance(each, ast.AnnAssign):
            continue
        annotation = _unquoted(each.annotation)
        if not isinstance(each.target, ast.Name) or any(
            word in annotation for word in ("ClassVar", "InitVar", "KW_ON")
        ):
            return None
        field = _field(each.target.id, annotation, each.value)
        if field.factory and "None" in annotation:
            return None
        found.append(field)
    return found or None


def _unquoted(annotation: ast.expr) -> str:
    is_quoted = isinstance(annotation, ast.Constant) and isinstance(annotation.value, str)
    return str(annotation.value) if is_quoted else ast.unparse(annotation)  # type: ignore[attr-defined]


def _field(name: str, annotation: str, value: ast.expr | None) -> _Field:
    if not (isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "field"):
        return _Field(name, annotation, ast.unparse(value) if value is not None else "", "", init=True)
    options = {each.arg: ast.unparse(each.value) for each in value.keywords}
    default, factory = options.get("default", ""), options.get("default_factory", "")
    return _Field(name, annotation, default, factory, init=options.get("init") != "False")


def _constructor(node: ast.ClassDef, fields: list[_Field]) -> list[str]:
    taken, body = [], []
    for each in fields:
        if not each.init:
            if each.default or each.factory:
                body.append(f"self.{each.name} = {each.default or f'({each.factory})()'}")
        elif each.factory:
            taken.append(f'{each.name}: "{each.annotation} | None" = None')
            body.append(f"self.{each.name} = {each.name} if {each.name} is not None else ({each.factory})()")
        else:
            taken.append(f'{each.name}: "{each.annotation}"' + (f" = {each.default}" if each.default else ""))
            body.append(f"self.{each.name} = {each.name}")
    if any(isinstance(each, ast.FunctionDef) and each.name == "__post_init__" for each in node.body):
        body.append("self.__post_init__()")
    return [
        "",
        f"    def __init__(self, {', '.join(taken)}) -> None:",
        *(f"        {line}" for line in body or ["pass"]),
    ]
