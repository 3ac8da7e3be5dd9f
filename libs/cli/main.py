"""The `fulcrum` command, with one module for each subcommand.

A subcommand imports what it needs only when it runs. Typer itself is imported only if a command line is not plain
(see `quick`).
"""

import sys
from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Final, NamedTuple

from libs.cli.quick import plain_call

if TYPE_CHECKING:
    import typer


class _Command(NamedTuple):
    """The module of a command or of a command group."""

    module: str
    # None for a group, or for a command that has its own.
    epilog: str | None = None


COMMANDS: Final[Mapping[str, _Command]] = {
    "up": _Command("up.command", "Example: fulcrum up --engine sim --prefill 2 --decode 2 --gateway-port 9000"),
    "chat": _Command(
        "chat.command", 'Example: fulcrum chat "What is the capital of France?" --max-tokens 32 --temperature 0'
    ),
    "doctor": _Command("doctor", "Example: fulcrum doctor --engine vllm"),
    "status": _Command("status.commands", "Example: fulcrum status --watch"),
    "advice": _Command("status.commands", "Example: fulcrum advice --apply"),
    "events": _Command("status.commands", "Example: fulcrum events --follow --json"),
    "workers": _Command("show", "Example: fulcrum workers --json"),
    "occupancy": _Command("show", "Example: fulcrum occupancy --window 500ms"),
    "top": _Command("top.command"),
    "observe": _Command("observe.commands", "Example: fulcrum observe --vllm http://10.0.0.5:8000"),
    "role": _Command("role.command", "Example: fulcrum role gpu-4 gpu-5 prefill"),
    "logs": _Command("suite.commands", "Example: fulcrum logs gpu-0 --follow"),
    "audit": _Command("suite.commands", "Example: fulcrum audit --follow --json"),
    "down": _Command("suite.commands", "Example: fulcrum down"),
    "profile": _Command("profile", "Example: fulcrum profile gpt-oss-120b-8xh100"),
    "alerts": _Command("status.commands"),
    "planner": _Command("planner.commands"),
    "batch": _Command("batch.commands"),
    "tune": _Command("tune.commands"),
    "lab": _Command("lab.commands"),
    "forecast": _Command("forecast.commands"),
    "capacity": _Command("capacity.commands"),
    "models": _Command("models.commands"),
    "keys": _Command("keys.commands"),
    "tls": _Command("tls.commands"),
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
            made.command(epilog=COMMANDS[name].epilog or module.EPILOG)(found)
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
