"""The command group `fulcrum forecast`: demand ahead, with bands, and how good such forecasts were."""

from pathlib import Path
from typing import Annotated

import typer

from libs.cli.options import Json, ReadyFile

forecast = typer.Typer(help="Predict demand with calibrated bands, and compare forecasts with what came.",
                       invoke_without_command=True)  # fmt: skip


@forecast.callback(epilog="Example: fulcrum forecast --horizon 6h")
def live(
    context: typer.Context,
    model: Annotated[
        str, typer.Option(metavar="M", help="Model of the suite. Default: the one with most requests.")
    ] = "",
    horizon: Annotated[str, typer.Option(metavar="TIME", help="How far ahead, e.g. 90m, 24h, 7d.")] = "24h",
    ready: ReadyFile = None,
    json: Json = False,
) -> None:
    """Show a running suite's demand ahead: requests, prefill and decode work with bands, and their trend."""
    if context.invoked_subcommand is None:
        from libs.cli.forecast.live import show_forecast  # noqa: PLC0415 (what only this command needs)

        show_forecast(ready, model, horizon, as_json=json)


@forecast.command("import", epilog="Example: fulcrum forecast import demand.csv --model llama-8b")
def bring(
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="CSV in time bins, see docs/forecast.md.")
    ] = None,
    *,
    prometheus: Annotated[
        str, typer.Option(metavar="URL", help="Prometheus to read from instead of a file, e.g. http://localhost:9090.")
    ] = "",
    model: Annotated[str, typer.Option(metavar="M", help="Model whose demand it is. Default: the suite's own.")] = "",
    days: Annotated[
        float, typer.Option(min=0.01, max=400, metavar="DAYS", help="How many days to read from Prometheus.")
    ] = 14.0,
    end: Annotated[
        str, typer.Option(metavar="TIME", help="End of the file's last bin, e.g. 2026-11-20T00:00Z. Default: now.")
    ] = "",
    queries: Annotated[
        str,
        typer.Option(
            metavar="KIND|R;P;D",
            help="vllm, fulcrum, or three PromQL queries with ';' between: requests, prompt and output tokens per s.",
        ),
    ] = "vllm",
    ready: ReadyFile = None,
    json: Json = False,
) -> None:
    """Import a history into a running suite, so that it has a forecast on its first day. Its own history stays."""
    from libs.cli.forecast.bring import bring_history  # noqa: PLC0415 (what only this command needs)

    bring_history(ready, file, prometheus, model=model, days=days, end=end, queries=queries, as_json=json)


@forecast.command(epilog="Example: fulcrum forecast explain demand.csv")
def explain(
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="CSV in time bins. Default: the running suite.")
    ] = None,
    *,
    model: Annotated[
        str, typer.Option(metavar="M", help="Model of the suite. Default: the one with most requests.")
    ] = "",
    horizon: Annotated[str, typer.Option(metavar="TIME", help="How far ahead, e.g. 90m, 24h, 7d.")] = "24h",
    ready: ReadyFile = None,
    json: Json = False,
) -> None:
    """Show which simple forecasts carry each phase and horizon, how far each has been off, and since when."""
    from libs.cli.forecast.explain import show_explanation  # noqa: PLC0415 (what only this command needs)

    show_explanation(ready, file, model, horizon, as_json=json)


@forecast.command(epilog="Example: fulcrum forecast backtest demand.csv --report out/")
def backtest(
    files: Annotated[list[Path], typer.Argument(metavar="FILE…", help="CSV in time bins, see docs/forecast.md.")],
    *,
    baselines: Annotated[
        str,
        typer.Option(metavar="NAMES", help="light, all (needs the extra 'forecast'), or names separated by commas."),
    ] = "light",
    horizons: Annotated[str, typer.Option(metavar="TIMES", help="How far ahead, e.g. 30m,2h.")] = "10m,1h,3h,24h",
    test_days: Annotated[
        float, typer.Option(min=0.01, metavar="DAYS", help="Days at the end that are scored; at most half of a file.")
    ] = 4.0,
    every: Annotated[int, typer.Option(min=1, metavar="N", help="Forecast from every N-th bin.")] = 1,
    report: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Folder for an HTML page with plots and the figures as JSON.")
    ] = None,
    json: Json = False,
) -> None:
    """Forecast days that are already known, each from what was known before, and compare with simple forecasters.

    A forecast is made at each bin, and models are fitted anew each day, on earlier bins alone.
    """
    from libs.cli.forecast.backtest import backtest_all  # noqa: PLC0415 (what only this command needs)

    backtest_all(
        files, baselines, horizons, test_s=test_days * 86_400, every=every, report=report, as_json=json
    )  # fmt: skip
