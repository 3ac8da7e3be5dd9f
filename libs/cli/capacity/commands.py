"""The command group `fulcrum capacity`: how many GPUs each pool needs, hour by hour."""

from typing import Annotated, Final

import typer

from libs.cli.options import Json, ReadyFile

SLO: Final = "ttft=2s,tpot=50ms"

capacity = typer.Typer(
    help="How many GPUs each pool will need, hour by hour, and how sure that is.", no_args_is_help=True
)


@capacity.callback()
def options() -> None:
    """How many GPUs each pool will need, hour by hour, and how sure that is."""


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
    spare: Annotated[int, typer.Option(min=0, metavar="K", help="Spare workers of each pool beyond those needed.")] = 0,
    gpu_hour: Annotated[float, typer.Option(min=0, metavar="PRICE", help="Price of a GPU for an hour.")] = 0.0,
    check: Annotated[bool, typer.Option(help="Check the busiest stretch in the lab.")] = True,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Seed of random draws.")] = 1,
    ready: ReadyFile = None,
    json: Json = False,
) -> None:
    """Plan GPUs per pool and hour for a running suite's forecast or for a trace: when workers run short, and the cost.

    Demand is drawn as sample paths over tables that the lab measures once for workers, SLO and traffic (some
    seconds).
    """
    from libs.cli.capacity.plan import PlanOptions, print_plan  # noqa: PLC0415 (what only this command needs)

    wanted = PlanOptions(
        horizon, slo, confidence, trace, what_if, model, device, profile, there, spare, gpu_hour, check=check, seed=seed
    )  # fmt: skip
    print_plan(wanted, ready, as_json=json)
