"""Golden files of what other programs depend on: equal text, or JSON of an equal shape.

`FULCRUM_GOLDEN=write` rewrites the files, whose difference is then reviewed.
"""

import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

FOLDER: Final = Path(__file__).parents[2] / "tests" / "golden"
ANY_ID: Final = "<id>"
"""Replaces keys that differ from run to run."""

MIXED: Final = "mixed"
"""The shape of a value with several shapes, which matches everything."""

Shape = Any
"""The shape of a JSON value: the name of a leaf's type, a list of at most one shape, or an object of shapes by key."""


def shape(value: Any, ids: Collection[str] = ()) -> Shape:
    """Return the shape of a JSON value. Keys among `ids` count as one; null says nothing of its shape."""
    if isinstance(value, dict):
        found: dict[str, Shape] = {}
        for key, each in value.items():
            name = ANY_ID if key in ids else key
            found[name] = join(found.get(name), shape(each, ids))
        return found
    if isinstance(value, list):
        joined: Shape = None
        for each in value:
            joined = join(joined, shape(each, ids))
        return [] if joined is None else [joined]
    if value is None:
        return None
    return {bool: "bool", int: "number", float: "number", str: "string"}[type(value)]


def join(one: Shape, other: Shape) -> Shape:
    """Return the shape that covers both; a key that only one of two objects has is marked with a `?`."""
    if one is None or other is None:
        return one if other is None else other
    if isinstance(one, dict) and isinstance(other, dict):
        plain = [{key.removesuffix("?"): key for key in each} for each in (one, other)]
        found = {}
        for name in [*plain[0], *(name for name in plain[1] if name not in plain[0])]:
            in_both = plain[0].get(name) == plain[1].get(name) == name
            found[name if in_both else f"{name}?"] = join(one.get(plain[0].get(name)), other.get(plain[1].get(name)))
        return found
    if isinstance(one, list) and isinstance(other, list):
        return [join(one[0], other[0])] if one and other else one or other
    return one if one == other else MIXED


def differences(golden: Shape, now: Shape, at: str = "") -> list[str]:
    """Return the differences between two shapes. A null, an empty list or a mixed shape differs from nothing."""
    if golden is None or now is None or MIXED in (golden, now):
        return []
    if isinstance(golden, dict) and isinstance(now, dict):
        was, found = ({key.removesuffix("?"): key for key in each} for each in (golden, now))
        missing = [f"{at}.{name} is missing" for name, key in was.items() if name not in found and key == name]
        new = [f"{at}.{name} is new" for name in found if name not in was]
        both = [(name, golden[was[name]], now[found[name]]) for name in was if name in found]
        return [*missing, *new, *(text for name, one, two in both for text in differences(one, two, f"{at}.{name}"))]
    if isinstance(golden, list) and isinstance(now, list):
        return differences(golden[0], now[0], f"{at}[]") if golden and now else []
    return [] if golden == now else [f"{at} was {_brief(golden)}, is {_brief(now)}"]


def hold_shapes(name: str, now: Mapping[str, Shape]) -> None:
    """Compare shapes with those in the file of that name, or write them. Raise AssertionError with every difference."""
    golden = _kept(name, now)
    found = differences(golden, dict(now))
    assert not found, "\n".join([f"{FOLDER.name}/{name}.json:", *found])


def hold(name: str, now: Any) -> None:
    """Compare a JSON value for equality with the one in a file, or write it."""
    golden = _kept(name, now)
    assert golden == json.loads(json.dumps(now)), f"differs from {FOLDER.name}/{name}.json"


def _kept(name: str, now: Any) -> Any:
    file = FOLDER / f"{name}.json"
    if os.environ.get("FULCRUM_GOLDEN") == "write":
        file.write_text(json.dumps(now, indent=1, sort_keys=True) + "\n")
    return json.loads(file.read_text())


def _brief(value: Shape) -> str:
    return value if isinstance(value, str) else "an object" if isinstance(value, dict) else "a list"
