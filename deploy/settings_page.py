"""`python -m deploy.settings_page`: write docs/settings.md from the settings classes, so that the two agree."""

import ast
import inspect
import json
import socket
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from textwrap import dedent
from typing import Literal, get_args, get_origin

from pydantic import SecretStr
from pydantic.fields import FieldInfo

from libs.runtime.http.settings import HttpSettings
from libs.runtime.settings import CommonSettings, variable_of
from libs.worker.settings import WorkerSettings
from services.decode.settings import DecodeSettings
from services.gateway.settings import GatewaySettings
from services.metrics.settings import MetricsSettings
from services.planner.settings import PlannerSettings
from services.prefill.settings import PrefillSettings

PAGE = Path(__file__).resolve().parents[1] / "docs" / "settings.md"
INTRO = """# Settings
Every service reads its settings from the environment, once, at start. A wrong one stops it with a line that names the
variable, its value and what is allowed. This page is made from the code by `make settings-page`.
"""
SECTIONS: tuple[tuple[str, type[CommonSettings], type[CommonSettings] | None], ...] = (
    ("Every service", CommonSettings, None),
    ("Gateway, planner and metrics", HttpSettings, CommonSettings),
    ("Gateway", GatewaySettings, HttpSettings),
    ("Workers: prefill and decode", WorkerSettings, CommonSettings),
    ("Planner", PlannerSettings, HttpSettings),
    ("Metrics", MetricsSettings, HttpSettings),
)
FIRST_ROLES = (PrefillSettings, DecodeSettings)


def page() -> str:
    roles = ", ".join(f"`{cls.model_fields['role'].default}`" for cls in FIRST_ROLES)
    parts = [INTRO]
    for title, settings, base in SECTIONS:
        parts.append(f"\n## {title}\n")
        if settings is WorkerSettings:
            parts.append(f"The two services read the same variables; their first roles are {roles}.\n")
        parts.append("\n| variable | default | allowed | what |\n|---|---|---|---|\n")
        parts.extend(_rows(settings, base))
    return "".join(parts)


def _rows(settings: type[CommonSettings], base: type[CommonSettings] | None) -> Iterator[str]:
    said = docstrings(settings)
    for name, field in settings.model_fields.items():
        if base is None or name not in base.model_fields:
            what = " ".join(said.get(name, "").split())
            cells = (f"`{variable_of(settings, name)}`", _default(field), _allowed(field), what)
            yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True, validated_data={})
    shown = value.get_secret_value() if isinstance(value, SecretStr) else value
    if isinstance(shown, dict):
        shown = json.dumps(shown)
    return f"`{shown}`".replace(socket.gethostname(), "HOSTNAME") if shown not in ("", None) else "empty"


def _allowed(field: FieldInfo) -> str:
    if get_origin(field.annotation) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(field.annotation))
    kinds: dict[object, str] = {int: "whole number", float: "number", bool: "`true`, `false`"}
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<", "pattern": "matches"}
    rules = [(sign, getattr(rule, key, None)) for rule in field.metadata for key, sign in signs.items()]
    bounds = [
        f"{sign} {bound}" if sign != "matches" else f"matches `{bound}`" for sign, bound in rules if bound is not None
    ]
    return ", ".join([kinds.get(field.annotation, "text"), *bounds])


def docstrings(settings: type[CommonSettings]) -> dict[str, str]:
    """Return the docstring of each field, read from the source."""
    tree = ast.parse(dedent(inspect.getsource(settings)))
    assert isinstance(tree.body[0], ast.ClassDef)
    body = tree.body[0].body
    found = {}
    for field, text in pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            found[field.target.id] = ast.literal_eval(text.value)
    return found


if __name__ == "__main__":
    PAGE.write_text(page())
    print(PAGE, file=sys.stderr)
