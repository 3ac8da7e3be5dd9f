"""Display of prefill measurements: figures, bars in the terminal, a picture.

It is separate from `libs.cli.planner.tune`, which must start without rich.
"""

from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from libs.cli.console import plain_table
from libs.cli.page import check_plots
from libs.contracts.errors import InvalidRequest, StartupError
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb

PLOT_CELLS = 40
# A smaller relative difference in time to first token is not mentioned.
LEAST_DIFFERENCE = 0.02


def figures(worker: str, answer: pb.TunePrefillResponse, *, applied: bool) -> dict[str, Any]:
    """Return the figures of one worker for `--json`."""
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
    """Describe how much sooner the default chunk would give the first token, since the choice is for throughput."""
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
    """Draw every worker's points, fitted curve and choice in one picture. Raise StartupError without matplotlib."""
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
