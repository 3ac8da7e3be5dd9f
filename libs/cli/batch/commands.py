"""The command group `fulcrum batch`: files of requests that run when there is room."""

import os
from pathlib import Path
from typing import Annotated

import typer

from libs.cli.options import Json, ReadyFile

batch = typer.Typer(help="Run files of requests with free capacity; each line is answered once.", no_args_is_help=True)

Id = Annotated[str, typer.Argument(metavar="ID", help="The job's id, as `fulcrum batch list` shows it.")]
Output = Annotated[Path | None, typer.Option(metavar="FILE", help="File to write answers to.")]
Errors = Annotated[Path | None, typer.Option(metavar="FILE", help="File to write failed lines to.")]


@batch.command(epilog="Example: fulcrum batch submit requests.jsonl --wait --output answers.jsonl")
def submit(
    file: Annotated[Path | None, typer.Argument(help="Lines of custom_id, method, url, body; - for stdin.")] = None,
    *,
    topic: Annotated[
        str | None, typer.Option(metavar="NAME", help="Kafka topic to read lines from, up to its present end.")
    ] = None,
    output_topic: Annotated[str, typer.Option(metavar="NAME", help="Topic to write answers to as well.")] = "",
    error_topic: Annotated[str, typer.Option(metavar="NAME", help="Topic to write failed lines to as well.")] = "",
    priority: Annotated[
        int, typer.Option(min=-100, max=100, help="Priority among the tenant's jobs; the highest runs first.")
    ] = 0,
    tenant: Annotated[
        str | None, typer.Option(metavar="NAME", help="Tenant whose share of the capacity the job uses.")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", metavar="", help="Show progress until the job has ended.")] = False,
    output: Output = None,
    errors: Errors = None,
    window: Annotated[
        str, typer.Option(metavar="T", help="Give up on lines not answered within this time: 24h, 30m.")
    ] = "24h",
    endpoint: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Route of every line. Default for a file: that of its first line."),
    ] = None,
    ready: ReadyFile = None,
    json: Json = False,
) -> None:
    """Run the requests of a file, which is uploaded, or of a Kafka topic. --output and --errors imply --wait.

    With --wait the exit code is 1 unless the job was completed and at least one line of it was answered.
    """
    from libs.cli.batch.jobs import JobOptions, submit_job  # noqa: PLC0415 (start-up time)

    if (file is None) == (topic is None):
        raise typer.BadParameter("name either FILE or --topic as the source of lines")
    if file not in (None, Path("-")) and (file.is_dir() or not os.access(file, os.R_OK)):
        raise typer.BadParameter(f"{file} is not a readable file", param_hint="FILE")
    options = JobOptions(
        file=file,
        topic=topic,
        endpoint=endpoint,
        window=window,
        priority=priority,
        tenant=tenant,
        output_topic=output_topic,
        error_topic=error_topic,
    )
    waiting = wait or output is not None or errors is not None
    submit_job(ready, options, wait=waiting, output=output, errors=errors, as_json=json)


@batch.command(epilog="Example: fulcrum batch status batch_0123 --json")
def status(batch_id: Id, *, ready: ReadyFile = None, json: Json = False) -> None:
    """Show a job's progress."""
    from libs.cli.batch.jobs import show_status  # noqa: PLC0415

    show_status(ready, batch_id, as_json=json)


@batch.command(epilog="Example: fulcrum batch cancel batch_0123")
def cancel(batch_id: Id, *, ready: ReadyFile = None, json: Json = False) -> None:
    """Answer no further lines of a job. Lines already answered can be fetched once it has ended."""
    from libs.cli.batch.jobs import cancel_job  # noqa: PLC0415

    cancel_job(ready, batch_id, as_json=json)


@batch.command("list", help="List jobs.", epilog="Example: fulcrum batch list --limit 5")
def list_jobs(
    *,
    limit: Annotated[int, typer.Option(min=1, max=100, help="How many jobs to list, the newest first.")] = 20,
    ready: ReadyFile = None,
    json: Json = False,
) -> None:
    from libs.cli.batch.jobs import show_list  # noqa: PLC0415

    show_list(ready, limit, as_json=json)


@batch.command(epilog="Example: fulcrum batch results batch_0123 --output answers.jsonl --errors errors.jsonl")
def results(
    batch_id: Id, *, output: Output = None, errors: Errors = None, ready: ReadyFile = None, json: Json = False
) -> None:
    """Fetch the answers of a finished job, into files or to stdout."""
    from libs.cli.batch.jobs import fetch_results  # noqa: PLC0415

    if json and output is None and errors is None:
        raise typer.BadParameter("--json prints the job's figures: name --output or --errors too, or leave it out")
    fetch_results(ready, batch_id, output=output, errors=errors, as_json=json)
