"""`fulcrum tune`: measure a worker and set it by what was found."""

from typing import Annotated

import typer

from libs.cli.options import Json, ReadyFile

tune = typer.Typer(help="Measure workers and set them by what was found.", no_args_is_help=True)


@tune.callback()
def options() -> None:
    """Measure workers and set them by what was found."""


@tune.command(epilog="Example: fulcrum tune prefill prefill-1 --json")
def prefill(
    worker: Annotated[str | None, typer.Argument(help="Its id; every prefill worker by default.")] = None,
    *,
    most_tokens: Annotated[int, typer.Option(min=0, metavar="N", help="The largest step; 0: the worker's bound.")] = 0,
    limit: Annotated[float, typer.Option(min=0, metavar="SECONDS", help="Of measuring; 0: the worker's bound.")] = 0.0,
    tpot_ms: Annotated[float, typer.Option("--tpot", min=0, metavar="MS", help="Target of the decode batch.")] = 50.0,
    measure_only: Annotated[
        bool, typer.Option("--measure-only", metavar="", help="Leave the chunk size as it is.")
    ] = False,
    ready: ReadyFile = None,
    json: Json = False,
) -> None:
    """Find the smallest prefill chunk that saturates the device, and use it from now on."""
    from libs.cli.tuning import tune_prefill  # noqa: PLC0415 (what only this command needs)
    from libs.contracts.pb.fulcrum.worker.v1.worker_pb2 import TunePrefillRequest  # noqa: PLC0415

    request = TunePrefillRequest(
        most_tokens=most_tokens,
        limit_ms=round(limit * 1000),
        measure_only=measure_only,
        tpot_target_us=round(tpot_ms * 1000),
    )
    tune_prefill(ready, worker, request, as_json=json)
