"""The `fulcrum` command, with one module for the subcommands of one subject.

A subcommand imports what it needs only when it runs. Typer itself is imported only if a command line is not plain (see
`QUICK`): it and pydantic take longer to import than a frequent command takes to run. Help, abbreviations and errors are
left to typer; a test checks that both have the same signatures.
"""

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    import typer

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
    """The minimum number of arguments, passed as the keyword `words`; 0 means that none are taken."""


QUICK: Final[Mapping[str, Quick]] = {  # keys are one or two words of the command
    "status": Quick("status.show", "show_status", {"--watch": "watch", "-w": "watch"}),
    "advice": Quick("status.alerts", "show_advice", {}, {"apply": False, "yes": False}),
    "alerts": Quick("status.alerts", "show_alerts", {"--all": "over", "-a": "over"}),
    "events": Quick(
        "status.events", "show_events", {"--follow": "follow", "-f": "follow"}, {"limit": None, "since": None}
    ),
    "workers": Quick("status.tables", "show_workers"),
    "occupancy": Quick("status.tables", "show_occupancy", {}, {"window": "2s"}),
    "top": Quick("top.show", "show_top", {"--once": "once", "--light": "light"}, {"metrics": None}),
    "tune decode": Quick("planner.tune", "tune_decode", {}, {"worker": None, "tpot_ms": 50.0, "context": 1024}),
    "role": Quick(
        "suite.role",
        "change",
        {"--force": "force"},
        {"epoch": None, "reason": "by hand", "first_step_s": 2.0},
        words=MOVE_WORDS,
    ),
}


def plain_call(arguments: Sequence[str]) -> Callable[[], None] | None:
    """Return the call for a command line, or None if it is not plain."""
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


class _Command(NamedTuple):
    """The module of a command or of a command group."""

    module: str
    # None for a group.
    epilog: str | None = None


COMMANDS: Final[Mapping[str, _Command]] = {
    "up": _Command("up.command", "Example: fulcrum up --engine sim --prefill 2 --decode 2 --gateway-port 9000"),
    "chat": _Command(
        "suite.commands", 'Example: fulcrum chat "What is the capital of France?" --max-tokens 32 --temperature 0'
    ),
    "doctor": _Command("up.command", "Example: fulcrum doctor --engine vllm"),
    "status": _Command("status.commands", "Example: fulcrum status --watch"),
    "advice": _Command("status.commands", "Example: fulcrum advice --apply"),
    "events": _Command("status.commands", "Example: fulcrum events --since 10m --json"),
    "request": _Command("status.commands", "Example: fulcrum request --slowest 5"),
    "workers": _Command("status.commands", "Example: fulcrum workers --json"),
    "occupancy": _Command("status.commands", "Example: fulcrum occupancy --window 500ms"),
    "top": _Command(
        "top.command",
        "Example: fulcrum top --metrics http://HOST:8002, or for pipes: fulcrum top --json | jq .ratio",
    ),
    "observe": _Command("status.commands", "Example: fulcrum observe --vllm http://10.0.0.5:8000"),
    "role": _Command("suite.commands", "Example: fulcrum role gpu-4 gpu-5 prefill"),
    "logs": _Command("suite.commands", "Example: fulcrum logs gpu-0 --follow"),
    "audit": _Command("suite.commands", "Example: fulcrum audit --follow --json"),
    "down": _Command("suite.commands", "Example: fulcrum down"),
    "profile": _Command("up.command", "Example: fulcrum profile gpt-oss-120b-8xh100"),
    "alerts": _Command("status.commands"),
    "planner": _Command("planner.commands"),
    "batch": _Command("batch.commands"),
    "tune": _Command("planner.commands"),
    "lab": _Command("lab.commands"),
    "forecast": _Command("forecast.commands"),
    "capacity": _Command("forecast.commands"),
    "models": _Command("models.commands"),
    "keys": _Command("keys.commands"),
    "tls": _Command("keys.commands"),
}
"""The commands by name, in the order of the help."""


def make_app(names: Iterable[str] = COMMANDS) -> "typer.Typer":
    """Return the app of these commands. Each costs the import of its module, and typer reads all signatures."""
    import typer  # noqa: PLC0415 (start-up time)

    from libs.cli.options import options  # noqa: PLC0415

    made = typer.Typer(
        name="fulcrum",
        help="LLM serving split into prefill and decode, kept in balance.",
        epilog='Example: fulcrum up --decode 2, then in another terminal: fulcrum chat "Why is the sky blue?"',
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    made.callback()(options)
    for name in names:
        module = import_module(f"libs.cli.{COMMANDS[name].module}")
        found = getattr(module, name)
        if isinstance(found, typer.Typer):
            made.add_typer(found, name=name)
        else:
            made.command(epilog=COMMANDS[name].epilog)(found)
    return made


def __getattr__(name: str) -> "typer.Typer":
    """Return `app` with all commands, which is built on first use."""
    if name != "app":
        raise AttributeError(name)
    return make_app()


def main() -> None:
    """Run the command line. An expected error is one line on stderr and exit code 1."""
    named = sys.argv[1] if len(sys.argv) > 1 else ""
    try:
        direct = plain_call(sys.argv[1:])
        (direct or make_app([named] if named in COMMANDS else COMMANDS))()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(1)
    except Exception as error:
        from libs.contracts.errors import FulcrumError  # noqa: PLC0415 (start-up time)
        from libs.contracts.foreign_text import plain  # noqa: PLC0415

        if not isinstance(error, FulcrumError):
            raise
        print(f"fulcrum: {plain(error.message, lines=True)}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
