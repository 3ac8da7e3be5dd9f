"""The command group `fulcrum tune`: measures workers and sets them accordingly."""

from pathlib import Path
from typing import Annotated

import typer

from libs.cli.options import Json, ReadyFile

tune = typer.Typer(help="Measure workers and set them accordingly.", no_args_is_help=True)

Target = Annotated[float, typer.Option("--tpot", min=0, metavar="MS", help="TPOT target in milliseconds.")]


@tune.callback()
def options() -> None:
    """Measure workers and set them accordingly."""


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
            "--kept", metavar="", help="Show the last measurement, which may be that of the start, and measure nothing."
        ),
    ] = False,
    set_tokens: Annotated[
        int,
        typer.Option(
            "--set",
            min=0,
            metavar="N",
            help="Use this chunk size until the worker restarts and measure nothing;"
            " FULCRUM_WORKER_PREFILL_CHUNK_TOKENS is for good.",
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
    from libs.cli.tune.measure import tune_prefill  # noqa: PLC0415 (what only this command needs)
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

    Requests with a TPOT target are held to theirs at every step, whatever is asked here.
    """
    from libs.cli.tune.measure import tune_decode  # noqa: PLC0415 (what only this command needs)

    tune_decode(ready, worker=worker, tpot_ms=tpot_ms, context=context, as_json=json)
