"""`fulcrum forecast`: demand ahead, with bands, and how good such forecasts were."""

from pathlib import Path
from typing import Annotated

import typer

from libs.cli.options import Json

forecast = typer.Typer(help="Predict demand with honest bands, and hold forecasts against what came.",
                       no_args_is_help=True)  # fmt: skip


@forecast.callback()
def options() -> None:
    """Predict demand with honest bands, and hold forecasts against what came."""


@forecast.command(epilog="Example: fulcrum forecast backtest demand.csv --report out/")
def backtest(
    files: Annotated[list[Path], typer.Argument(metavar="FILE…", help="CSV in time bins, see docs/forecast.md.")],
    *,
    baselines: Annotated[
        str, typer.Option(metavar="NAMES", help="light, all (with the extra 'forecast'), or names with commas between.")
    ] = "light",
    horizons: Annotated[str, typer.Option(metavar="TIMES", help="How far ahead, e.g. 30m,2h.")] = "10m,1h,3h,24h",
    test_days: Annotated[
        float, typer.Option(min=0.01, metavar="DAYS", help="At the end that are scored; half of a short file.")
    ] = 4.0,
    every: Annotated[int, typer.Option(min=1, metavar="N", help="Forecast from every N-th bin only.")] = 1,
    report: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="One HTML page with plots, and the figures as JSON.")
    ] = None,
    json: Json = False,
) -> None:
    """Forecasts of days that are known, each from what was known before, beside simple forecasters.

    A forecast is made at each bin, and models are fitted anew each day, on earlier bins alone.
    """
    from libs.cli.forecast.backtest import backtest_all  # noqa: PLC0415 (what only this command needs)

    backtest_all(
        files, baselines, horizons, test_s=test_days * 86_400, every=every, report=report, as_json=json
    )  # fmt: skip
