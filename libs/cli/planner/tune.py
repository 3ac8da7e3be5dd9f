"""The commands of `fulcrum tune`: measure workers over gRPC and show what they found."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Collection, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Group
from rich.table import Table
from rich.text import Text

from libs.cli.console import plain_table
from libs.cli.find import call_settings, find_one_suite, get_json
from libs.cli.page import check_plots
from libs.contracts.errors import FulcrumError, InvalidRequest, StartupError
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
    """Tune one worker, or all prefill workers one after the other, and print what each found.

    Raises StartupError for failed workers once all were tuned, since the others may have changed.
    """

    suite = find_one_suite(ready_file)

    def ask(each: dict[str, Any]) -> dict[str, Any]:
        answer = _ask(suite, each, lambda admin: admin.tune_prefill(request))
        return figures(each["id"], answer, applied=not (request.measure_only or request.kept))

    tell = None if as_json else _printer()
    found, failed = of_each(_workers(suite, worker, ("prefill",)), ask, tell)
    if picture is not None and found:
        try:
            draw(picture, found)
        except StartupError as error:
            failed.append(error.message)
    _end(failed)


def _printer() -> Callable[[dict[str, Any]], None]:
    from libs.cli.console import make_console  # noqa: PLC0415 (start-up time, of rich)

    console = make_console()
    return lambda each: console.print(reported(each))


def tune_decode(ready_file: Path | None, *, worker: str | None, tpot_ms: float, context: int, as_json: bool) -> None:
    """Print the largest decode batch of one worker, or of all that decode. Raises StartupError."""
    request = pb.TuneDecodeRequest(tpot_target_us=round(tpot_ms * 1000), context_tokens=context)
    suite = find_one_suite(ready_file)

    def ask(each: dict[str, Any]) -> dict[str, Any]:
        answer = _ask(suite, each, lambda admin: admin.tune_decode(request))
        return _decode_figures(each["id"], request, answer)

    tell = None if as_json else lambda each: print(_decode_line(each))
    _, failed = of_each(_workers(suite, worker, ("decode", "mixed")), ask, tell)
    _end(failed)


def of_each(
    workers: Sequence[dict[str, Any]],
    ask: Callable[[dict[str, Any]], dict[str, Any]],
    tell: Callable[[dict[str, Any]], None] | None,
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return (figures of the workers that answered, errors of the others).

    Figures are printed one by one, or together as JSON without `tell`.
    """
    entries: list[dict[str, Any]] = []
    for each in workers:
        try:
            entries.append(ask(each))
        except FulcrumError as error:
            entries.append({"worker": each["id"], "error": error.message})
        else:
            if tell is not None:
                tell(entries[-1])
    if tell is None:
        print(json.dumps(entries))
    failed = [entry["error"] for entry in entries if "error" in entry]
    return [entry for entry in entries if "error" not in entry], failed


def _end(failed: Sequence[str]) -> None:
    if failed:
        raise StartupError("; ".join(failed))


def _workers(suite: Ready, worker: str | None, roles: Collection[str]) -> list[dict[str, Any]]:
    """Return the named worker, else all workers of these roles."""
    workers: list[dict[str, Any]] = get_json(suite.planner, "/v1/workers")
    chosen = [w for w in workers if (w["id"] == worker if worker else w["role"] in roles)]
    if not chosen:
        there = ", ".join(w["id"] for w in workers) or "none"
        raise StartupError(
            f"there is no worker {worker!r} here, but: {there}"
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


PLOT_CELLS = 40
# A smaller relative difference in time to first token is not mentioned.
LEAST_DIFFERENCE = 0.02


def figures(worker: str, answer: pb.TunePrefillResponse, *, applied: bool) -> dict[str, Any]:
    """Return what `--json` prints of one worker."""
    return {
        "worker": worker,
        "chunk_tokens": answer.chunk_tokens,
        "chunk_tokens_before": answer.chunk_tokens_before,
        "chunk_tokens_default": answer.chunk_tokens_default,
        "applied": applied,
        "truncated": answer.truncated,
        "measured_unix_s": round(answer.measured_unix_ns / 1e9, 3) or None,
        "plateau_tokens_per_s": round(answer.plateau_tokens_per_s, 1) or None,
        "ttft_ms": round(answer.prompt_ns / 1e6, 3),
        "ttft_ms_before": round(answer.prompt_ns_before / 1e6, 3),
        "ttft_ms_default": round(answer.prompt_ns_default / 1e6, 3),
        "decode_batch": answer.decode_batch,
        "curve": [
            {
                "tokens": point.tokens,
                "measured_tokens_per_s": round(point.measured_tokens_per_s, 1),
                "fitted_tokens_per_s": round(point.fitted_tokens_per_s, 1),
            }
            for point in answer.curve
        ],
    }


def reported(found: dict[str, Any]) -> Group:
    """Return the curve as bars, measured points with a mark at the fitted curve, then the choice in words."""
    words = Text(_words(found))
    return Group(_bars(found), Text(), words) if found["curve"] else Group(words)


def _bars(found: dict[str, Any]) -> Table:
    top = max(*(p["measured_tokens_per_s"] for p in found["curve"]), found["plateau_tokens_per_s"])
    worker = f"{found['worker']}: prefill"
    table = plain_table("tokens", "tokens/s", worker, left=(worker,), gap=1)
    for point in found["curve"]:
        bar = "█" * round(point["measured_tokens_per_s"] / top * PLOT_CELLS)
        mark = min(round(point["fitted_tokens_per_s"] / top * PLOT_CELLS), PLOT_CELLS)
        cells = f"{bar:<{PLOT_CELLS + 1}}"
        saturated = point["tokens"] >= found["chunk_tokens"]
        table.add_row(
            str(point["tokens"]),
            f"{point['measured_tokens_per_s']:,.0f}",
            Text(cells[:mark] + "|" + cells[mark + 1 :], style="green" if saturated else "cyan"),
        )
    return table


def _words(found: dict[str, Any]) -> str:
    chunk, before, default = (found[f"chunk_tokens{of}"] for of in ("", "_before", "_default"))
    lines = [f"{found['worker']} computes {chunk} prompt tokens a step at most."]
    if not found["applied"] and chunk != before:
        lines = [f"{found['worker']} would do with {chunk} prompt tokens a step; it computes {before}."]
    elif chunk != before:
        lines[0] += f" It was {before}."
    if found["curve"]:
        when = datetime.fromtimestamp(found["measured_unix_s"] or 0, UTC).strftime("%Y-%m-%d %H:%M:%S")
        share = _reached(found)
        reach = f"{share:.0%} of" if share is not None else "with"
        lines.append(f"That reaches {reach} {found['plateau_tokens_per_s']:,.0f} tokens/s, measured {when} UTC.")
    if found["truncated"]:
        lines.append(
            f"Steps of {found['curve'][-1]['tokens']} tokens, the largest measured, do not reach the plateau: this is"
            " kept for no other worker. --limit, --most-tokens, or measuring when less runs reaches further."
        )
    lines.append(
        f"A prompt of 512 tokens at a busy worker: {found['ttft_ms']:.1f} ms to its first token by the fitted curve; "
        f"with the engine's default of {default} tokens {found['ttft_ms_default']:.1f} ms, {_against(found)}."
    )
    if found["curve"]:
        lines.append("Requests that came while it measured waited for one such step at a time.")
    lines.append(f"{found['decode_batch']} sequences of 1,024 tokens decode together within the TPOT target.")
    return "\n".join(lines)


def _against(found: dict[str, Any]) -> str:
    """Return how much sooner the default's chunk would give the first token: the choice is for throughput."""
    chosen, default = found["ttft_ms"], found["ttft_ms_default"]
    if not chosen or not default or abs(default - chosen) < LEAST_DIFFERENCE * chosen:
        return "as soon"
    return f"{default / chosen:.1f} times as long" if default > chosen else f"{1 - default / chosen:.0%} sooner"


def _reached(found: dict[str, Any]) -> float | None:
    """Return the share of the plateau at the chunk, between points of the fitted curve; None outside of them."""
    points = [(p["tokens"], p["fitted_tokens_per_s"]) for p in found["curve"]]
    for (low, low_rate), (high, high_rate) in pairwise(points):
        if low <= found["chunk_tokens"] <= high:
            part = (found["chunk_tokens"] - low) / (high - low)
            return float((low_rate + part * (high_rate - low_rate)) / found["plateau_tokens_per_s"])
    return None


def draw(file: Path, workers: list[dict[str, Any]]) -> None:
    """Draw every worker's points, fitted curve and choice in one picture. Raises StartupError without matplotlib."""
    try:
        check_plots("--picture")
    except InvalidRequest as error:
        raise StartupError(error.message) from None
    from matplotlib import pyplot  # noqa: PLC0415 (only where a picture is asked for)

    figure, axes = pyplot.subplots(figsize=(6.4, 4), layout="constrained")
    for number, found in enumerate(workers):
        colour, curve = f"C{number}", found["curve"]
        tokens = [point["tokens"] for point in curve]
        axes.plot(tokens, [p["fitted_tokens_per_s"] for p in curve], color=colour, label=f"{found['worker']}, fitted")
        axes.scatter(tokens, [p["measured_tokens_per_s"] for p in curve], color=colour, s=22, label="measured")
        axes.axvline(found["chunk_tokens"], color=colour, linestyle="--", label=f"choice: {found['chunk_tokens']}")
        axes.axvline(found["chunk_tokens_default"], color="grey", linestyle=":", label="engine's default")
        if found["plateau_tokens_per_s"]:
            axes.axhspan(0.97 * found["plateau_tokens_per_s"], found["plateau_tokens_per_s"], color=colour, alpha=0.12)
    axes.set(xscale="log", ylim=(0, None), xlabel="prompt tokens in a step", ylabel="tokens a second")
    axes.legend(fontsize=8)
    figure.savefig(file, dpi=110)
