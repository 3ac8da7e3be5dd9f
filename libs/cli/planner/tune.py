"""The commands of `fulcrum tune`: measure workers over gRPC and show the results."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Collection, Sequence
from pathlib import Path
from typing import Any, TypeVar

from libs.cli.find import call_settings, find_one_suite, get_json
from libs.contracts.errors import FulcrumError, StartupError
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.launch.ready import Ready
from libs.runtime.net.access import admin_token
from libs.runtime.net.rpc import make_channel
from libs.worker.admin_client import WorkerAdmin

AnswerT = TypeVar("AnswerT")


def tune_prefill(
    ready_file: Path | None,
    worker: str | None,
    request: pb.TunePrefillRequest,
    *,
    picture: Path | None,
    as_json: bool,
) -> None:
    """Tune one worker, or all prefill workers one after the other, and print each result.

    Raise StartupError for failed workers once all have been tuned, since the others may have changed.
    """
    from libs.cli.planner.curves import draw, figures  # noqa: PLC0415 (start-up time, of rich)

    suite = find_one_suite(ready_file)

    def ask(each: dict[str, Any]) -> dict[str, Any]:
        answer = _ask(suite, each, lambda admin: admin.tune_prefill(request))
        return figures(each["id"], answer, applied=not (request.measure_only or request.kept))

    report = None if as_json else _printer()
    found, failed = of_each(_workers(suite, worker, ("prefill",)), ask, report)
    if picture is not None and found:
        try:
            draw(picture, found)
        except StartupError as error:
            failed.append(error.message)
    _end(failed)


def _printer() -> Callable[[dict[str, Any]], None]:
    from libs.cli.console import make_console  # noqa: PLC0415 (start-up time, of rich)
    from libs.cli.planner.curves import reported  # noqa: PLC0415

    console = make_console()
    return lambda each: console.print(reported(each))


def tune_decode(ready_file: Path | None, *, worker: str | None, tpot_ms: float, context: int, as_json: bool) -> None:
    """Print the largest decode batch of one worker, or of all that decode. Raise StartupError."""
    request = pb.TuneDecodeRequest(tpot_target_us=round(tpot_ms * 1000), context_tokens=context)
    suite = find_one_suite(ready_file)

    def ask(each: dict[str, Any]) -> dict[str, Any]:
        answer = _ask(suite, each, lambda admin: admin.tune_decode(request))
        return _decode_figures(each["id"], request, answer)

    report = None if as_json else lambda each: print(_decode_line(each))
    _, failed = of_each(_workers(suite, worker, ("decode", "mixed")), ask, report)
    _end(failed)


def of_each(
    workers: Sequence[dict[str, Any]],
    ask: Callable[[dict[str, Any]], dict[str, Any]],
    report: Callable[[dict[str, Any]], None] | None,
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return (figures of the workers that answered, errors of the others).

    Figures are printed one by one, or together as JSON without `report`.
    """
    entries: list[dict[str, Any]] = []
    for each in workers:
        try:
            entries.append(ask(each))
        except FulcrumError as error:
            entries.append({"worker": each["id"], "error": error.message})
        else:
            if report is not None:
                report(entries[-1])
    if report is None:
        print(json.dumps(entries))
    failed = [entry["error"] for entry in entries if "error" in entry]
    return [entry for entry in entries if "error" not in entry], failed


def _end(failed: Sequence[str]) -> None:
    if failed:
        raise StartupError("; ".join(failed))


def _workers(suite: Ready, worker: str | None, roles: Collection[str]) -> list[dict[str, Any]]:
    """Return the named worker, or all workers of these roles."""
    workers: list[dict[str, Any]] = get_json(suite.planner, "/v1/workers")
    chosen = [w for w in workers if (w["id"] == worker if worker else w["role"] in roles)]
    if not chosen:
        there = ", ".join(w["id"] for w in workers) or "none"
        raise StartupError(
            f"there is no worker {worker!r} here; there are: {there}"
            if worker
            else f"there is no worker in role {' or '.join(roles)}"
        )
    return chosen


def _ask(suite: Ready, worker: dict[str, Any], ask: Callable[[WorkerAdmin], Awaitable[AnswerT]]) -> AnswerT:
    async def call() -> AnswerT:
        settings = call_settings()
        async with make_channel(settings, worker["address"]) as channel:
            token = admin_token(settings, worker["address"], suite.token)
            return await ask(WorkerAdmin(channel, worker["id"], token))

    return asyncio.run(call())


def _decode_figures(worker: str, request: pb.TuneDecodeRequest, answer: pb.TuneDecodeResponse) -> dict[str, Any]:
    return {
        "worker": worker,
        "tpot_target_ms": request.tpot_target_us / 1000,
        "context_tokens": request.context_tokens,
        "decode_batch": answer.batch,
        "step_ms": round(answer.step_ns / 1e6, 3),
        "step_ms_with_one_more": round(answer.next_step_ns / 1e6, 3),
        "max_sequences": answer.max_sequences,
        "steps_learned": answer.steps,
        "step_error_p50": round(answer.error_p50, 4),
    }


def _decode_line(found: dict[str, Any]) -> str:
    if found["decode_batch"]:
        bound = " (no more run there at once)" if found["decode_batch"] == found["max_sequences"] else ""
        batch = f"{found['decode_batch']} sequences{bound}, in steps of {found['step_ms']:.1f} ms"
        more = "" if bound else f"; one more makes them {found['step_ms_with_one_more']:.1f} ms"
    else:
        batch, more = "no sequence", f": one alone takes {found['step_ms']:.1f} ms"
    basis = (
        f"learned from {found['steps_learned']:,} of its decode steps, predicted {found['step_error_p50']:.1%} off"
        if found["steps_learned"]
        else "it has decoded nothing yet: by what is known of its kind"
    )
    return (
        f"{found['worker']}: of {found['context_tokens']:,} tokens each, {batch} hold"
        f"{'s' if not found['decode_batch'] else ''} a TPOT of {found['tpot_target_ms']:g} ms{more}\n  ({basis})"
    )
