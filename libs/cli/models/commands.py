"""`fulcrum models`: which models are in use when, and how many GPUs to reserve for them."""

from pathlib import Path
from typing import Annotated

import typer

from libs.cli.options import Json

models = typer.Typer(
    help="Many models on few GPUs: how many will be active at once, and what to reserve for them.",
    no_args_is_help=True,
)

Confidence = Annotated[
    float, typer.Option(min=0.5, max=0.999, metavar="P", help="Share of windows that the reservation has to hold in.")
]


@models.callback()
def options() -> None:
    """Many models on few GPUs: how many will be active at once, and what to reserve for them."""


@models.command(epilog="Example: fulcrum models backtest monday.csv --window 60s --report out/")
def backtest(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="CSV: t_s, model, exec_s; Aegaeon's; Alibaba GenAI's.")],
    *,
    window: Annotated[str, typer.Option(metavar="TIME", help="In which the most active at once count.")] = "60s",
    confidence: Confidence = 0.99,
    period: Annotated[
        str, typer.Option(metavar="TIME", help="Over which the reservation in hindsight is constant.")
    ] = "1h",
    report: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="A page, the figures, and every window as CSV.")
    ] = None,
    json: Json = False,
) -> None:
    """How well a log's use was predicted window by window, from what came before alone, and what that would have cost.

    The first third is learned from and not scored. Ctrl-C scores what was replayed until then.
    """
    from libs.cli.models.backtest import run_backtest  # noqa: PLC0415 (what only this command needs)

    run_backtest(file, window=window, confidence=confidence, period=period, report=report, as_json=json)


@models.command(epilog="Example: fulcrum models generate gamma:models=100,cv=4 --seed 7 --out day.csv")
def generate(
    spec: Annotated[str | None, typer.Argument(metavar="[SPEC]", help="e.g. surge:correlation=0.3.")] = None,
    *,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Of whatever is drawn.")] = 1,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Where to; else its figures are shown only.")] = None,
    json: Json = False,
) -> None:
    """Make a log of many models, after Aegaeon's recipe; without a SPEC, which there can be."""
    from libs.cli.models.generate import run_generate  # noqa: PLC0415

    run_generate(spec, seed=seed, out=out, as_json=json)
