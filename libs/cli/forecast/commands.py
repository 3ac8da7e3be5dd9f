"""The command groups `fulcrum forecast` and `fulcrum capacity`: demand ahead, and the GPUs that it will need."""

from pathlib import Path
from typing import Annotated, Final

import typer

from libs.cli.options import Json, ReadyFile

forecast = typer.Typer(help="Predict demand with calibrated bands, and compare forecasts with actual demand.",
                       invoke_without_command=True)  # fmt: skip


@forecast.callback(epilog="Example: fulcrum forecast --horizon 6h")
def live(
    context: typer.Context,
    *,
    model: Annotated[
        str, typer.Option(metavar="M", help="Model of the suite. Default: the one with most requests.")
    ] = "",
    horizon: Annotated[str, typer.Option(metavar="TIME", help="How far ahead, e.g. 90m, 24h, 7d.")] = "24h",
    by: Annotated[
        str, typer.Option(metavar="WHAT", help="Parts that add up to the total: model, or the model's tenant or class.")
    ] = "",
    ready: ReadyFile = None,
    json: Json = False,
) -> None:
    """Show a running suite's expected demand: requests, prefill and decode work with bands, and their trend."""
    if context.invoked_subcommand is None:
        from libs.cli.forecast.live import show_forecast  # noqa: PLC0415 (what only this command needs)

        show_forecast(ready, model, horizon, by, as_json=json)


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
    """Import a demand history into a running suite, for a forecast on its first day. Only unknown bins are filled."""
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
    """Show the simple forecasts behind each phase and horizon, with their weights and past errors."""
    from libs.cli.forecast.backtest import show_explanation  # noqa: PLC0415 (what only this command needs)

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
    """Forecast past days, each from the data before it, and compare with simple forecasters.

    A forecast is made at each bin, and models are fitted anew each day, on earlier bins alone.
    """
    from libs.cli.forecast.backtest import backtest_all  # noqa: PLC0415 (what only this command needs)

    backtest_all(
        files, baselines, horizons, test_s=test_days * 86_400, every=every, report=report, as_json=json
    )  # fmt: skip


SLO: Final = "ttft=2s,tpot=50ms"

capacity = typer.Typer(
    help="Plan the GPUs that each pool will need, hour by hour, and how certain that is.", no_args_is_help=True
)


@capacity.callback()
def options() -> None:
    """Plan the GPUs that each pool will need, hour by hour, and how certain that is."""


@capacity.command(epilog="Example: fulcrum capacity plan --horizon 7d --slo ttft=2s,tpot=50ms --what-if traffic=1.3")
def plan(
    *,
    horizon: Annotated[str, typer.Option(metavar="TIME", help="How far ahead, e.g. 6h, 7d.")] = "24h",
    slo: Annotated[
        str, typer.Option(metavar="SLO", help="Targets; ttft=3x is three times the prompt's own prefill time.")
    ] = "ttft=2s,tpot=50ms",
    confidence: Annotated[
        float, typer.Option(min=0.5, max=0.999, metavar="P", help="Share of possible demand that the plan must meet.")
    ] = 0.95,
    trace: Annotated[
        str, typer.Option(metavar="FILE|SPEC", help="A trace, or CSV of demand in bins, instead of a suite's demand.")
    ] = "",
    what_if: Annotated[
        str,
        typer.Option(
            "--what-if",
            metavar="NAME=X,…",
            help="Change the demand or the device: traffic=1.3, isl=2, osl=0.5, device=b200.",
        ),
    ] = "",
    model: Annotated[
        str, typer.Option(metavar="M", help="Model whose demand is planned, or whose profile is used.")
    ] = "",
    device: Annotated[str, typer.Option(metavar="NAME", help="GPU to plan for with --trace: h100, b200, …")] = "h100",
    profile: Annotated[
        str,
        typer.Option(metavar="NAME|FILE", help="Worker profile, instead of model and device or of the suite's own."),
    ] = "",
    there: Annotated[
        str, typer.Option(metavar="P:D", help="Existing prefill and decode workers, with --trace, e.g. 4:6.")
    ] = "",
    growth: Annotated[
        float,
        typer.Option(
            min=1, metavar="X", help="Plan a time of day for at most X times the busiest demand so far around it."
        ),
    ] = 2.0,
    spare: Annotated[int, typer.Option(min=0, metavar="K", help="Spare workers of each pool beyond those needed.")] = 0,
    gpu_hour: Annotated[float, typer.Option(min=0, metavar="PRICE", help="Price of a GPU for an hour.")] = 0.0,
    check: Annotated[bool, typer.Option(help="Check the busiest stretch in the lab.")] = True,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Seed of random draws.")] = 1,
    ready: ReadyFile = None,
    json: Json = False,
) -> None:
    """Plan GPUs per pool and hour for a running suite's forecast or for a trace: when workers run short, and the cost.

    The lab first measures what such workers serve within the SLO, which takes a quarter of a minute for new traffic.
    The plan must then meet the given share of many possible courses of demand. Times are this machine's, or count from
    the beginning of a trace.
    """
    from libs.cli.forecast.capacity import PlanOptions, print_plan  # noqa: PLC0415 (what only this command needs)

    wanted = PlanOptions(
        horizon, slo, confidence, trace, what_if, model, device, profile, there, growth, spare, gpu_hour, check=check,
        seed=seed,
    )  # fmt: skip
    print_plan(wanted, ready, as_json=json)
