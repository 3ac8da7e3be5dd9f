"""Workers, requests and clusters for tests of rivals, with step times that are easy to compute by hand."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from libs.lab.rivals.port import Move, RecentRequests, RivalSetting, SeenCluster, SeenRequest, SeenWorker, Slo
from libs.policy.roles import Role
from libs.policy.speed import Speed
from libs.policy.step_time import StepTimeModel

MS = 1_000_000
SECOND = 1000 * MS

SPEED = Speed(
    StepTimeModel(
        prefill_fixed_ns=0.0,
        prefill_token_ns=0.1 * MS,
        prefill_token_squared_ns=0.0,
        decode_fixed_ns=10.0 * MS,
        decode_sequence_ns=1.0 * MS,
        decode_kv_token_ns=0.001 * MS,
        interference=1.0,
    ),
    chunk_tokens=8000,
)
"""A prompt takes 0.1 ms a token; a decode step 10 ms, 1 ms a sequence and 1 µs a token of KV."""

SLO = Slo(ttft_ns=SECOND, tpot_ns=50 * MS)


def cluster(workers: int = 4, **fields: Any) -> RivalSetting:
    """Build a cluster with 1,000 blocks of 100 tokens and 64 slots each."""
    values = {"speed": SPEED, "max_sequences": 64, "kv_blocks": 1000, "block_tokens": 100, "slo": SLO, **fields}
    return RivalSetting(workers=workers, **values)


def worker(index: int, role: Role = Role.PREFILL, **fields: Any) -> SeenWorker:
    """Build a worker, idle by default. Its backlog and decode step follow from what it holds."""
    values: dict[str, Any] = {
        "budget_tokens": 0,
        "ready": True,
        "speed": SPEED,
        "max_sequences": 64,
        "kv_blocks": 1000,
        "block_tokens": 100,
        "free_blocks": 1000,
        **fields,
    }
    built = SeenWorker(index=index, role=role, **values)
    if "backlog_ns" not in fields:
        built.backlog_ns = SPEED.prompt_ns(built.prompt_tokens, 0.0)
    if "decode_step_ns" not in fields:
        built.decode_step_ns = SPEED.decode_ns(built.decodes, built.kv_tokens)
    return built


def prefill(index: int, **fields: Any) -> SeenWorker:
    """Build a worker in role prefill."""
    return worker(index, Role.PREFILL, **fields)


def mixed(index: int, **fields: Any) -> SeenWorker:
    """Build a worker in role mixed, which only decodes unless it has a budget."""
    return worker(index, Role.MIXED, **fields)


def request(input_tokens: int = 1000, *, workers: int = 8, cached: dict[int, int] | None = None) -> SeenRequest:
    """Build a request; cached: tokens by index of the worker."""
    found = cached or {}
    return SeenRequest(1, input_tokens, SLO, [found.get(index, 0) for index in range(workers)])


def seen(workers: Sequence[SeenWorker], now_ns: int = 0, **interval: Any) -> SeenCluster:
    """Build a look at the cluster; interval: of `RecentRequests`."""
    return SeenCluster(now_ns, workers, RecentRequests(**interval), SLO)


def after(workers: Sequence[SeenWorker], moves: Sequence[Move]) -> list[SeenWorker]:
    """Return the workers after the moves."""
    moved = {move.index: move for move in moves}
    return [
        replace(each, role=moved[each.index].role, budget_tokens=moved[each.index].budget_tokens)
        if each.index in moved
        else each
        for each in workers
    ]
