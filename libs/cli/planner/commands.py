"""The command groups `fulcrum planner` (decisions and their reasons) and `fulcrum tune`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from libs.cli.options import Json, ReadyFile

planner = typer.Typer(help="Show the planner's decisions; set its mode and limits.", no_args_is_help=True)


@planner.command(epilog="Example: fulcrum planner mode auto")
def mode(
    mode: Annotated[
        Literal["off", "advisory", "auto"] | None,
        typer.Argument(
            help="off decides nothing; advisory publishes decisions without acting; auto carries out decisions on "
            "roles and budgets.",
            show_default=False,
        ),
    ] = None,
    ready: ReadyFile = None,
    json: Json = False,
) -> None:
    """Set the planner's mode, which survives its restart. Without an argument, print it."""
    from libs.cli.planner.decisions import planner_mode  # noqa: PLC0415 (what only this command needs)

    planner_mode(mode, ready_file=ready, as_json=json)


@planner.command(epilog="Example: fulcrum planner status")
def status(ready: ReadyFile = None, json: Json = False) -> None:
    """Show the pressure on each model's workers, and the last decision."""
    from libs.cli.planner.decisions import planner_status  # noqa: PLC0415 (what only this command needs)

    planner_status(ready_file=ready, as_json=json)


@planner.command(epilog="Example: fulcrum planner decisions --follow")
def decisions(
    limit: Annotated[
        int, typer.Option("--limit", metavar="N", min=1, max=1000, help="How many of the newest decisions to list.")
    ] = 20,
    follow: Annotated[
        bool, typer.Option("--follow", metavar="", help="Continue with new decisions until Ctrl-C.")
    ] = False,
    keeps: Annotated[
        bool,
        typer.Option(
            "--keeps", metavar="", help="Include decisions that change nothing, and each change as it is observed."
        ),
    ] = False,
    ready: ReadyFile = None,
    json: Annotated[
        bool, typer.Option("--json", metavar="", help="Print one JSON value a line for each decision, keeps included.")
    ] = False,
) -> None:
    """List decisions, the oldest first, a line each."""
    from libs.cli.planner.decisions import planner_decisions  # noqa: PLC0415 (what only this command needs)

    planner_decisions(limit, follow=follow, keeps=keeps or json, ready_file=ready, as_json=json)


@planner.command(epilog="Example: fulcrum planner explain 17 --lab")
def explain(
    decision: Annotated[str, typer.Argument(help="Id or number of a decision, from `fulcrum planner decisions`.")],
    lab: Annotated[
        bool,
        typer.Option("--lab", metavar="", help="Replay the demand around it in the lab, with and without it."),
    ] = False,
    ready: ReadyFile = None,
    json: Json = False,
) -> None:
    """Explain one decision: its reason, the alternatives, what was predicted, and what was measured afterwards."""
    from libs.cli.planner.decisions import planner_explain  # noqa: PLC0415 (what only this command needs)

    planner_explain(decision, lab=lab, ready_file=ready, as_json=json)


@planner.command(epilog="Example: fulcrum planner advice")
def advice(ready: ReadyFile = None, json: Json = False) -> None:
    """Show advice on changes the planner may not make itself, with the expected and the measured effect."""
    from libs.cli.planner.decisions import planner_advice  # noqa: PLC0415 (what only this command needs)

    planner_advice(ready_file=ready, as_json=json)


@planner.command(epilog="Example: fulcrum planner regret --window 24h")
def regret(
    window: Annotated[
        str, typer.Option("--window", metavar="W", help="How far back, e.g. 30m or 24h; rounded to whole hours.")
    ] = "24h",
    ready: ReadyFile = None,
    json: Json = False,
) -> None:
    """Show by cause the GPU-hours lost against the splits that were best in hindsight."""
    from libs.cli.planner.decisions import planner_regret  # noqa: PLC0415 (what only this command needs)

    planner_regret(window, ready_file=ready, as_json=json)


@planner.command(epilog="Example: fulcrum planner limits prefill_min=1 decode_max=6 --pin gpu-4")
def limits(
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME=VALUE]...",
            help="prefill_min, prefill_max, decode_min, decode_max, workers_min, workers_max, gpu_hours_day (of "
            "workers that were started), tpot_ms (none: no bound), moves_per_s, or "
            "quiet_hours=22:00-06:00,… (UTC, none: none). With --model, none alone removes the model's own limits.",
            show_default=False,
        ),
    ] = None,
    *,
    model: Annotated[str, typer.Option("--model", metavar="M", help="Limit only this model.")] = "",
    pin: Annotated[
        list[str] | None,
        typer.Option("--pin", metavar="WORKER", help="Keep this worker's role and budget.", show_default=False),
    ] = None,
    unpin: Annotated[
        list[str] | None,
        typer.Option("--unpin", metavar="WORKER", help="Allow this worker to be changed again.", show_default=False),
    ] = None,
    ready: ReadyFile = None,
    json: Json = False,
) -> None:
    """Set limits for the planner; they apply at once and survive its restart. Without arguments, print them."""
    from libs.cli.planner.decisions import planner_limits  # noqa: PLC0415 (what only this command needs)

    planner_limits(settings or [], model=model, pin=pin or [], unpin=unpin or [], ready_file=ready, as_json=json)


tune = typer.Typer(help="Measure workers, and set their prefill chunks.", no_args_is_help=True)

Target = Annotated[float, typer.Option("--tpot", min=0, metavar="MS", help="TPOT target in milliseconds.")]


@tune.callback()
def options() -> None: ...


@tune.command(epilog="Example: fulcrum tune prefill gpu-0 --json")
def prefill(
    worker: Annotated[str | None, typer.Argument(help="Id of the worker. Default: every prefill worker.")] = None,
    *,
    most_tokens: Annotated[
        int, typer.Option(min=0, metavar="N", help="Largest step to measure. Default: the worker's bound.")
    ] = 0,
    limit: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="Time for measuring. Default: the worker's bound.")
    ] = 0.0,
    tpot_ms: Target = 50.0,
    measure_only: Annotated[
        bool, typer.Option("--measure-only", metavar="", help="Leave the chunk size as it is.")
    ] = False,
    kept: Annotated[
        bool,
        typer.Option(
            "--kept", metavar="", help="Show the last measurement, such as that of the start, without measuring."
        ),
    ] = False,
    set_tokens: Annotated[
        int,
        typer.Option(
            "--set",
            min=0,
            metavar="N",
            help="Use this chunk size until the worker restarts and measure nothing;"
            " FULCRUM_WORKER_PREFILL_CHUNK_TOKENS sets it permanently.",
        ),
    ] = 0,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the curves into an SVG or PNG file; needs matplotlib.")
    ] = None,
    ready: ReadyFile = None,
    json: Json = False,
) -> None:
    """Find the smallest prefill chunk that saturates the device, and use it from now on."""
    from libs.cli.find import local_user  # noqa: PLC0415
    from libs.cli.planner.tune import tune_prefill  # noqa: PLC0415 (what only this command needs)
    from libs.contracts.pb.fulcrum.worker.v1.worker_pb2 import TunePrefillRequest  # noqa: PLC0415
    from libs.keys.table import SUITE_TOKEN, actor_of  # noqa: PLC0415

    request = TunePrefillRequest(
        most_tokens=most_tokens,
        limit_ms=round(limit * 1000),
        measure_only=measure_only,
        tpot_target_us=round(tpot_ms * 1000),
        kept=kept,
        set_tokens=set_tokens,
        actor=actor_of(SUITE_TOKEN, local_user()),
    )
    tune_prefill(ready, worker, request, picture=picture, as_json=json)


@tune.command(epilog="Example: fulcrum tune decode --tpot 30 --context 2048")
def decode(
    worker: Annotated[str | None, typer.Argument(help="Id of the worker. Default: every worker that decodes.")] = None,
    *,
    tpot_ms: Target = 50.0,
    context: Annotated[int, typer.Option(min=1, metavar="TOKENS", help="Context length of each sequence.")] = 1024,
    ready: ReadyFile = None,
    json: Json = False,
) -> None:
    """Show the largest decode batch within a TPOT target, by the step times that each worker has learned.

    This changes nothing: workers keep the TPOT targets of requests anyway.
    """
    from libs.cli.planner.tune import tune_decode  # noqa: PLC0415 (what only this command needs)

    tune_decode(ready, worker=worker, tpot_ms=tpot_ms, context=context, as_json=json)
