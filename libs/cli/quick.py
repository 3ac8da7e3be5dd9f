"""Calls to frequent commands without typer, if the command line is plain.

Typer and pydantic take longer to import than such a command takes to run. Help, abbreviations and mistakes are left
to typer; a test checks that both have the same signatures.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NamedTuple

READY_VARIABLE: Final = "FULCRUM_READY"
# A move names at least a worker and its role.
MOVE_WORDS: Final = 2


class Quick(NamedTuple):
    """A function below `libs.cli` that takes a ready file and keyword arguments."""

    module: str
    function: str
    flags: Mapping[str, str] = {}
    """The keyword that each flag sets, beside `--json` and `--ready`."""
    more: Mapping[str, Any] = {}
    """The keyword arguments that keep their default."""
    words: int = 0
    """The least number of arguments, passed as the keyword `words`; 0 means that none are taken."""


QUICK: Final[Mapping[str, Quick]] = {  # by one word or two
    "status": Quick("status.watch", "show_status", {"--watch": "watch", "-w": "watch"}),
    "advice": Quick("status.advice", "show_advice", {}, {"apply": False, "yes": False}),
    "alerts": Quick("status.alerts", "show_alerts", {"--all": "over", "-a": "over"}),
    "events": Quick("status.events", "show_events", {"--follow": "follow", "-f": "follow"}, {"limit": 30}),
    "workers": Quick("tables", "show_workers"),
    "occupancy": Quick("tables", "show_occupancy", {}, {"window": "2s"}),
    "top": Quick("top.show", "show_top", {"--once": "once", "--light": "light"}, {"metrics": None}),
    "tune decode": Quick("tune.measure", "tune_decode", {}, {"worker": None, "tpot_ms": 50.0, "context": 1024}),
    "role": Quick(
        "role.change",
        "change",
        {"--force": "force"},
        {"epoch": None, "reason": "by hand", "first_step_s": 2.0},
        words=MOVE_WORDS,
    ),
}


def plain_call(arguments: Sequence[str]) -> Callable[[], None] | None:
    """Return the call that a command line stands for, or None if it is not plain."""
    named_by = next((count for count in (2, 1) if " ".join(arguments[:count]) in QUICK), 0)
    quick = QUICK[" ".join(arguments[:named_by])] if named_by else None
    if quick is None or any(name.startswith("_FULCRUM_COMPLETE") for name in os.environ):
        return None
    flags = {**quick.flags, "--json": "as_json"}
    keywords: dict[str, Any] = {**quick.more, **dict.fromkeys(flags.values(), False)}
    named = os.environ.get(READY_VARIABLE, "")
    plain: list[str] = []
    words = iter(arguments[named_by:])
    for word in words:
        if word in flags:
            keywords[flags[word]] = True
        elif word == "--ready":
            named = next(words, "")
            if not named or named.startswith("-"):
                return None
        elif quick.words and not word.startswith("-"):
            plain.append(word)
        else:
            return None
    if len(plain) < quick.words:
        return None
    if quick.words:
        keywords["words"] = plain
    ready = Path(named) if named else None
    return lambda: getattr(import_module(f"libs.cli.{quick.module}"), quick.function)(ready, **keywords)
