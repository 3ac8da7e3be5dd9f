"""Tests that the compiled lab's records behave like the dataclasses in the sources."""

import dataclasses
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from deploy.compile import MODULES, ROOT, bases, digest, with_constructors

SOURCE = '''
from dataclasses import dataclass, field

_EMPTY = (1, 2)


@dataclass(frozen=True, slots=True)
class Frozen:
    """Words."""

    size: int
    """More words."""
    name: str = "x"
    items: tuple[int, ...] = _EMPTY


@dataclass(slots=True)
class Grown:
    first: int
    many: list[int] = field(default_factory=list)
    inner: "Frozen | None" = None
    seen: int | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.first += 1


@dataclass(eq=False, slots=True)
class Base:
    size: int


@dataclass(slots=True)
class Derived(Base):
    more: int = 2


@dataclass
class Own:
    size: int

    def __init__(self) -> None:
        self.size = 7
'''


def classes(source: str) -> dict[str, Any]:
    module = ModuleType("records_of_a_test")
    sys.modules[module.__name__] = module  # dataclasses look there for what annotations mean
    try:
        exec(source, vars(module))
    finally:
        del sys.modules[module.__name__]
    return vars(module)


WRITTEN = with_constructors(SOURCE, bases([SOURCE]))


def test_each_plain_record_gets_a_constructor_and_others_stay_unchanged() -> None:
    assert WRITTEN.count("def __init__") == SOURCE.count("def __init__") + 2
    assert "@dataclass(eq=False, slots=True)\nclass Base:" in WRITTEN
    assert "@dataclass(slots=True)\nclass Derived(Base):" in WRITTEN


@pytest.mark.parametrize(
    "make",
    [
        lambda of: of["Frozen"](3),
        lambda of: of["Frozen"](3, "y", (4,)),
        lambda of: of["Frozen"](name="z", size=1),
        lambda of: dataclasses.replace(of["Frozen"](3), size=5),
        lambda of: of["Grown"](1),
        lambda of: of["Grown"](1, [2], of["Frozen"](1)),
        lambda of: of["Derived"](1),
        lambda of: of["Own"](),
    ],
)
def test_construction_repr_and_equality_are_unchanged(make: Callable[[dict[str, Any]], Any]) -> None:
    made = classes(WRITTEN)
    before, after = make(classes(SOURCE)), make(made)
    assert repr(after) == repr(before)
    assert dataclasses.asdict(after) == dataclasses.asdict(before)
    assert after == make(made)


def test_a_frozen_record_has_a_hash_and_a_mutable_one_has_none() -> None:
    made = classes(WRITTEN)
    assert hash(made["Frozen"](1)) == hash(made["Frozen"](1)) != hash(made["Frozen"](2))
    with pytest.raises(TypeError, match="unhashable"):
        hash(made["Grown"](1))


def test_no_two_records_share_the_value_of_a_factory() -> None:
    grown = classes(WRITTEN)["Grown"]
    first, second = grown(1), grown(2)
    first.many.append(1)
    assert second.many == []


@pytest.mark.parametrize("glob", MODULES)
def test_each_module_that_the_lab_compiles_exists(glob: str) -> None:
    assert list(ROOT.glob(glob))


def test_a_build_with_other_compiler_flags_is_out_of_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CFLAGS", "-O1")
    before = digest(0)
    assert digest(0) == before
    monkeypatch.setenv("CFLAGS", "-O1 -g")
    assert digest(0) != before
