"""What `fulcrum tune prefill` does: asks workers over gRPC, draws their curves."""

import asyncio
import json
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from libs.cli.find import find_one_suite, get_json
from libs.contracts.errors import StartupError
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.runtime.rpc import make_channel
from libs.runtime.settings import CommonSettings, load_settings
from libs.worker.admin_client import WorkerAdmin

PLOT_CELLS = 40


def tune_prefill(
    ready_file: Path | None,
    worker: str | None,
    request: pb.TunePrefillRequest,
    *,
    as_json: bool,
) -> None:
    """Tune one worker, or all in role prefill one after the other, and print what each found. Raises StartupError."""
    suite = find_one_suite(ready_file)
    workers: list[dict[str, Any]] = get_json(suite.planner, "/v1/workers")
    chosen = [w for w in workers if (w["id"] == worker if worker else w["role"] == "prefill")]
    if not chosen:
        raise StartupError(f"there is no worker {worker!r}" if worker else "there is no worker in role prefill")
    found = []
    for each in chosen:
        answer = asyncio.run(_ask(each, suite.token, request))
        found.append(_figures(each["id"], answer, applied=not request.measure_only))
        if not as_json:
            Console(highlight=False).print(_picture(found[-1]))
    if as_json:
        print(json.dumps(found))


async def _ask(worker: dict[str, Any], token: str, request: pb.TunePrefillRequest) -> pb.TunePrefillResponse:
    settings = load_settings(CommonSettings)
    async with make_channel(settings, worker["address"]) as channel:
        admin = WorkerAdmin(channel, worker["id"], token or settings.token.get_secret_value())
        return await admin.tune_prefill(request)


def _figures(worker: str, answer: pb.TunePrefillResponse, *, applied: bool) -> dict[str, Any]:
    return {
        "worker": worker,
        "chunk_tokens": answer.chunk_tokens,
        "chunk_tokens_before": answer.chunk_tokens_before,
        "applied": applied,
        "plateau_tokens_per_s": round(answer.plateau_tokens_per_s, 1),
        "ttft_ms": round(answer.prompt_ns / 1e6, 3),
        "ttft_ms_before": round(answer.prompt_ns_before / 1e6, 3),
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


def _picture(found: dict[str, Any]) -> Group:
    """The curve as bars: what was measured, with a mark where the fitted curve is."""
    top = max(*(p["measured_tokens_per_s"] for p in found["curve"]), found["plateau_tokens_per_s"])
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("tokens", justify="right")
    table.add_column("tokens/s", justify="right")
    table.add_column(f"{found['worker']}: prefill", no_wrap=True)
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
    verb = "set" if found["applied"] else "not set"
    gain = 1 - found["ttft_ms"] / found["ttft_ms_before"] if found["ttft_ms_before"] else 0.0
    words = (
        f"{found['chunk_tokens']} tokens reach 97 % of {found['plateau_tokens_per_s']:,.0f} tokens/s ({verb}; it was "
        f"{found['chunk_tokens_before']}).\nA prompt of 512 tokens at a busy worker: {found['ttft_ms']:.1f} ms to its "
        f"first token, {found['ttft_ms_before']:.1f} ms before ({gain:+.0%} gained).\n"
        f"{found['decode_batch']} sequences of 1,024 tokens decode together within the TPOT target."
    )
    return Group(table, Text(), Text(words))
