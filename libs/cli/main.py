"""The `fulcrum` command: one module a command, each of which imports what it needs only when it runs."""

import sys
from typing import Annotated

import typer

from libs.cli.batch.commands import batch
from libs.cli.capacity.commands import capacity
from libs.cli.chat.command import chat
from libs.cli.doctor import doctor
from libs.cli.forecast.commands import forecast
from libs.cli.lab.commands import lab
from libs.cli.models.commands import models
from libs.cli.planner.commands import planner
from libs.cli.profile import profile
from libs.cli.role.command import role
from libs.cli.show import occupancy, workers
from libs.cli.status.commands import advice, alerts, events, status
from libs.cli.suite.commands import down, logs
from libs.cli.top.command import EPILOG, top
from libs.cli.tune.commands import tune
from libs.cli.up.command import up

app = typer.Typer(
    name="fulcrum",
    help="LLM serving split into prefill and decode, kept in balance.",
    epilog='Example: fulcrum up --decode 2, then in another terminal: fulcrum chat "Why is the sky blue?"',
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(epilog="Example: fulcrum up --engine sim --prefill 2 --decode 2 --gateway-port 9000")(up)
app.command(epilog='Example: fulcrum chat "What is the capital of France?" --max-tokens 32 --temperature 0')(chat)
app.command(epilog="Example: fulcrum doctor --engine vllm")(doctor)
app.command(epilog="Example: fulcrum status --watch")(status)
app.command(epilog="Example: fulcrum advice --apply")(advice)
app.command(epilog="Example: fulcrum alerts --all")(alerts)
app.command(epilog="Example: fulcrum events --follow --json")(events)
app.command(epilog="Example: fulcrum workers --json")(workers)
app.command(epilog="Example: fulcrum occupancy --window 500ms")(occupancy)
app.command(epilog=EPILOG)(top)
app.command(epilog="Example: fulcrum role decode-1 decode-2 prefill")(role)
app.command(epilog="Example: fulcrum logs prefill-1 --follow")(logs)
app.command(epilog="Example: fulcrum down")(down)
app.command(epilog="Example: fulcrum profile gpt-oss-120b-8xh100")(profile)
app.add_typer(planner, name="planner")
app.add_typer(batch, name="batch")

app.add_typer(tune, name="tune")
app.add_typer(lab, name="lab")
app.add_typer(forecast, name="forecast")
app.add_typer(capacity, name="capacity")
app.add_typer(models, name="models")


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version  # noqa: PLC0415 (only when asked)

        print(version("fulcrum"))
        raise typer.Exit


@app.callback()
def options(
    _version: Annotated[
        bool,
        typer.Option("--version", metavar="", callback=_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """LLM serving split into prefill and decode, kept in balance."""


def main() -> None:
    """Run the command line; what can go wrong for a person is one line on stderr and exit code 1."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(1)
    except Exception as error:
        from libs.contracts.errors import FulcrumError  # noqa: PLC0415 (start-up time)

        if not isinstance(error, FulcrumError):
            raise
        print(f"fulcrum: {error.message}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
