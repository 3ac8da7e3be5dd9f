"""The command group `fulcrum models`: the use of models over time, and the GPUs to reserve for them."""

from pathlib import Path
from typing import Annotated

import typer

from libs.cli.options import Json, ReadyFile

models = typer.Typer(
    help="Manage many models on few GPUs: how many will be active at once, and what to reserve for them.",
    no_args_is_help=True,
)

Confidence = Annotated[
    float, typer.Option(min=0.5, max=0.999, metavar="P", help="Share of windows in which the reservation must suffice.")
]


@models.callback()
def options() -> None:
    """Manage many models on few GPUs: how many will be active at once, and what to reserve for them."""


@models.command(epilog="Example: fulcrum models backtest monday.csv --window 60s --report out/")
def backtest(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="Log: CSV of t_s, model, exec_s, or in the format of Aegaeon or Alibaba GenAI."
        ),
    ],
    *,
    window: Annotated[
        str, typer.Option(metavar="TIME", help="Window in which the most models active at once are counted.")
    ] = "60s",
    confidence: Confidence = 0.99,
    period: Annotated[
        str, typer.Option(metavar="TIME", help="Period in which the reservation in hindsight stays constant.")
    ] = "1h",
    report: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Folder for a page, the figures, and every window as CSV.")
    ] = None,
    json: Json = False,
) -> None:
    """Predict the use in a log window by window, each from earlier windows only, and show the resulting cost.

    The first third is learned from and not scored. Ctrl-C scores what was replayed until then.
    """
    from libs.cli.models.backtest import run_backtest  # noqa: PLC0415 (what only this command needs)

    run_backtest(file, window=window, confidence=confidence, period=period, report=report, as_json=json)


@models.command(epilog="Example: fulcrum models generate gamma:models=100,cv=4 --seed 7 --out day.csv")
def generate(
    spec: Annotated[
        str | None, typer.Argument(metavar="[SPEC]", help="Kind of log to make, e.g. surge:correlation=0.3.")
    ] = None,
    *,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Seed of random draws.")] = 1,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File to write. Default: only print its figures.")
    ] = None,
    json: Json = False,
) -> None:
    """Generate a usage log of many models by Aegaeon's recipe. Without a SPEC, list the kinds."""
    from libs.cli.models.backtest import run_generate  # noqa: PLC0415

    run_generate(spec, seed=seed, out=out, as_json=json)


Name = Annotated[str, typer.Argument(metavar="MODEL", help="Name of the model, as requests give it.")]
Floor = Annotated[int | None, typer.Option(min=0, metavar="N", help="Minimum number of workers for the model.")]
Priority = Annotated[
    int | None, typer.Option(min=-100, max=100, metavar="N", help="Priority; higher ones are loaded first.")
]


@models.command(name="list", epilog="Example: fulcrum models list --json")
def list_models(ready: ReadyFile = None, json: Json = False) -> None:
    """List the models of the catalogue: state, load time, last use, and likely next use."""
    from libs.cli.models.catalogue import show_list  # noqa: PLC0415

    show_list(ready, as_json=json)


@models.command(epilog="Example: fulcrum models add org/chat-70b --size 141GB --priority 1")
def add(
    name: Name,
    *,
    source: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Folder of its weights; not needed for a simulated model.")
    ] = None,
    adapter_of: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Model of which this is a LoRA adapter, in PEFT's layout.")
    ] = None,
    size: Annotated[str | None, typer.Option(metavar="SIZE", help="Size of its weights, e.g. 16GB.")] = None,
    floor: Floor = None,
    priority: Priority = None,
    ttft_ms: Annotated[float | None, typer.Option(min=1, metavar="MS", help="TTFT target in milliseconds.")] = None,
    tpot_ms: Annotated[float | None, typer.Option(min=0.1, metavar="MS", help="TPOT target in milliseconds.")] = None,
    ready: ReadyFile = None,
    json: Json = False,
) -> None:
    """Add a model to the catalogue, or change the given fields of one that exists."""
    from libs.cli.models import catalogue  # noqa: PLC0415

    catalogue.add(
        name, source=source, size=size, floor=floor, priority=priority, ttft_ms=ttft_ms, tpot_ms=tpot_ms,
        parent=adapter_of, ready_file=ready, as_json=json,
    )  # fmt: skip


@models.command(epilog="Example: fulcrum models remove org/chat-70b")
def remove(name: Name, ready: ReadyFile = None, json: Json = False) -> None:
    """Remove a model: running requests end normally, waiting ones are answered 404."""
    from libs.cli.models import catalogue  # noqa: PLC0415

    catalogue.remove(name, ready_file=ready, as_json=json)


@models.command(epilog="Example: fulcrum models pin org/chat-8b; fulcrum models pin org/chat-8b --off")
def pin(
    name: Name,
    *,
    off: Annotated[bool, typer.Option("--off", metavar="", help="Unpin the model.")] = False,
    ready: ReadyFile = None,
    json: Json = False,
) -> None:
    """Keep a model on its worker once it is loaded."""
    from libs.cli.models import catalogue  # noqa: PLC0415

    catalogue.add(name, source=None, size=None, pinned=not off, ready_file=ready, as_json=json)


@models.command(epilog="Example: fulcrum models reserve org/chat-8b --gpus 2 --from 09:00 --to 18:00")
def reserve(
    name: Name,
    *,
    gpus: Annotated[int, typer.Option(min=0, metavar="N", help="GPUs to reserve; 0 ends the model's reservations.")],
    start: Annotated[str, typer.Option("--from", metavar="HH:MM", help="Begin, as a time of day in UTC.")] = "00:00",
    end: Annotated[
        str, typer.Option("--to", metavar="HH:MM", help="End. The same as --from reserves all day.")
    ] = "00:00",
    ready: ReadyFile = None,
    json: Json = False,
) -> None:
    """Reserve GPUs for a model at a time of day, or report what would have to give way."""
    from libs.cli.models import catalogue  # noqa: PLC0415

    catalogue.reserve(name, gpus, start=start, end=end, ready_file=ready, as_json=json)


@models.command(epilog="Example: fulcrum models forecast")
def forecast(ready: ReadyFile = None, json: Json = False) -> None:
    """Show how many models are and will be active, what to reserve, and what would be evicted next."""
    from libs.cli.models.catalogue import show_forecast  # noqa: PLC0415

    show_forecast(ready, as_json=json)
