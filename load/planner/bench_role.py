"""Move roles on a suite of real processes: measure each move's effect, and check that answers do not change.

For each engine, a suite with one prefill and three decode workers is started. Every request runs once without moves.
Workers then change roles, first idle, then under a load of four fifths of the decode slots. Every answer is compared
with the one without moves. Each effect is also given without the time in which the event loops involved were runnable
without a core, since that part depends on the machine. These are the loops of this process, the worker and the gateway.
For some of the moves, two rivals request a role at once, and one of them must win. The bench prints a table, then one
JSON line. It exits with 1 and a reason if answers, moves or the load were not as required.
"""

import asyncio
import gc
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from libs.launch.options import LaunchSettings
from libs.testing.engines.real_model import real_model_folder, write_random_llama
from libs.testing.suites.role_moves import HeldMove, RoleChanger, SteadyTraffic, request_bodies, suite_admins
from libs.testing.suites.suite import RunningSuite
from libs.testing.wait import until
from load.measure import bench_parser, processes_below, waited_s
from load.setup import bench_suite

# The aim for a move's effect at p99. Missing it is reported but is no fault, since a busy machine can miss it.
AIM_S = 0.1
# The share of moves that must find running sequences. Other moves do not show the cost for sequences.
MIN_CAUGHT = 0.5
# The minimum share of the decode slots that requests must use.
MIN_LOAD = 0.7
SPREADS = {
    "idle p50/p99 ms": "effect_idle_ms",
    "loaded p50/p99 ms": "effect_loaded_ms",
    "less core waits": "effect_loaded_without_core_waits_ms",
    "first step p50/p99": "first_step_ms",
}


def spread_ms(seconds: Sequence[float | None]) -> dict[str, float | None]:
    """Return p50, p99 and the maximum in ms; null without values.

    A move without effect counts as infinite, which also becomes null.
    """
    values = sorted(float("inf") if value is None else value for value in seconds)
    if not values:
        return {"p50": None, "p99": None, "max": None}
    at = {"p50": statistics.median_low(values), "p99": values[int(0.99 * (len(values) - 1))], "max": values[-1]}
    return {name: None if value == float("inf") else round(value * 1e3, 2) for name, value in at.items()}


def aim_met(spread: dict[str, float | None]) -> bool:
    return spread["p99"] is not None and spread["p99"] < AIM_S * 1e3


def faults(figures: dict[str, Any]) -> list[str]:
    """Return a sentence for each figure that breaks a promise or makes the run worthless."""
    moves, behind = figures["moves"], figures["moves_with_gateways_behind"]
    found = [f"{figures[name]} requests {what}" for name, what in _ANSWERS.items() if figures[name]]
    if figures["caught_running"] < MIN_CAUGHT * moves:
        found.append(
            f"only {figures['caught_running']} of {moves} moves caught running sequences, {MIN_CAUGHT:.0%} must"
        )
    if behind:
        found.append(f"gateways stayed behind {behind} moves")
    if figures["slots_used"] < MIN_LOAD:
        found.append(f"the load was {figures['slots_used']:.0%} of the decode slots, less than {MIN_LOAD:.0%}")
    found += [
        f"{what} won {figures[name]} of {figures['rival_rounds']} rounds"
        for name, what in _RIVALS.items()
        if figures[name]
    ]
    return found


_ANSWERS = {"failed": "failed", "wrong": "were answered differently than without moves"}
_RIVALS = {"both_won": "both rivals", "none_won": "no rival"}


def table(results: Sequence[dict[str, Any]]) -> str:
    head = (
        f"{'engine':<14}{'moves':>6}{'caught':>7}{'moved':>6}{'answers':>8}{'failed':>7}{'wrong':>6}{'rivals':>7}  "
        + "".join(f"{title:>20}" for title in SPREADS)
    )
    rows = [
        f"{r['engine']:<14}{r['moves']:>6}{r['caught_running']:>7}{r['sequences_moved']:>6}{r['answers']:>8}"
        f"{r['failed']:>7}{r['wrong']:>6}{r['rival_rounds']:>7}  "
        + "".join(f"{_ms(r[name]['p50']):>11} / {_ms(r[name]['p99']):<6}" for name in SPREADS.values())
        for r in results
    ]
    aims = [
        f"{r['engine']}: aim p99 < {AIM_S * 1e3:g} ms "
        + ", ".join(f"{name} {'met' if aim_met(r[f'effect_{name}_ms']) else 'missed'}" for name in ("idle", "loaded"))
        for r in results
    ]
    return "\n".join([head, *rows, *aims])


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


# The number of sequences that a worker decodes at once.
SLOTS = 8
# The share of all decode slots that clients request at the start.
LOAD = 0.8
# The share of moves under load that two rivals request at the same time.
RIVALS = 0.1
# The upper bound of a suite's start. vLLM takes long.
START_S = 400.0
# The upper bound of the time for an answer, even on a busy machine.
WAIT_S = 300.0


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    engine: str
    idle_moves: int
    moves: int
    kinds: int
    output_tokens: int
    decode: int = 3


CASES = (
    Case("sim", "sim", idle_moves=40, moves=200, kinds=16, output_tokens=64),
    Case("torch-tiny", "torch", idle_moves=40, moves=200, kinds=12, output_tokens=48),
    Case("vllm-tiny", "vllm", idle_moves=10, moves=50, kinds=8, output_tokens=48, decode=2),
    Case("torch-smollm2", "torch", idle_moves=10, moves=200, kinds=4, output_tokens=24, decode=2),
)
# The cases that need no environment of their own.
DEFAULT_CASES = tuple(case.name for case in CASES if case.engine != "vllm")


def tiny_model(folder: Path) -> Path:
    """Write random weights so small that a step costs almost nothing, with a real tokenizer.

    The weights have a large spread. If logits were nearly equal, the greatest would depend on the order of a sum.
    """
    real = real_model_folder()
    real_config = json.loads((real / "config.json").read_text())
    write_random_llama(
        folder,
        hidden_size=128,  # 32 a head, the smallest that vLLM's attention supports
        intermediate_size=128,
        vocab_size=real_config["vocab_size"],
        max_position_embeddings=2048,
        initializer_range=0.4,
        bos_token_id=real_config.get("bos_token_id"),
        eos_token_id=real_config.get("eos_token_id"),
    )
    for file in real.glob("*token*"):
        shutil.copy(file, folder / file.name)
    return folder


async def bench(case: Case, suite: RunningSuite, model: str, *, guided: bool) -> dict[str, Any]:
    async with (
        httpx.AsyncClient(base_url=suite.gateway, timeout=120, trust_env=False) as http,
        suite_admins(suite) as (roles, admins),
        suite_admins(suite) as (_, rival_admins),
    ):
        bodies = request_bodies(model, case.kinds, prompt_tokens=60, output_tokens=case.output_tokens, guided=guided)
        loops = [os.getpid(), *_gateways(suite)]
        traffic = SteadyTraffic(http, bodies)
        mover = RoleChanger(admins, roles, lambda worker: sum(map(waited_s, (worker, *loops))))
        await traffic.learn()
        for _ in range(case.idle_moves):
            await mover.move_one()
        idle, mover.moves = mover.moves, []
        await mover.reset(roles)
        clients = round(LOAD * SLOTS * case.decode)
        capacity = await _tokens_s(traffic, SLOTS * case.decode, answers=4 * SLOTS * case.decode)
        start_s, before, under_way = time.perf_counter(), traffic.output_tokens, []
        async with traffic.flowing(clients):
            await until(lambda: traffic.output_tokens > before, timeout_s=WAIT_S)
            for turn in range(case.moves):
                answered = traffic.answered
                await until(partial(_has_answered, traffic, answered + 2), timeout_s=WAIT_S)
                under_way.append(traffic.under_way)
                if int((turn + 1) * RIVALS) > int(turn * RIVALS):
                    await mover.move_against_rival(rival_admins)
                else:  # slow if the new role has no work, so not after each move
                    await mover.move_one(first_step_within_s=0.0 if turn % 4 else 0.5)
            while_s = time.perf_counter() - start_s
        moving = (traffic.output_tokens - before) / (time.perf_counter() - start_s)
        return {
            "engine": case.name,
            "guided": guided,
            "slots_used": round(sum(under_way) / len(under_way) / (SLOTS * case.decode), 2),
            "tokens_s_before": round(capacity),
            "tokens_s_moving": round(moving),
            "moves": len(mover.moves),
            "moves_s": round(len(mover.moves) / while_s, 1),
            "caught_running": sum(moved.move.running > 0 for moved in mover.moves),
            "moves_with_gateways_behind": sum(moved.move.effect_s is None for moved in (*idle, *mover.moves)),
            "rival_rounds": mover.rival_rounds,
            "both_won": mover.both_won,
            "none_won": mover.none_won,
            "sequences_moved": await _moved_sequences(http),
            "answers": traffic.answered,
            "failed": len(traffic.failed),
            "wrong": len(traffic.wrong),
            "effect_idle_ms": spread_ms([moved.move.effect_s for moved in idle]),
            "effect_loaded_ms": spread_ms([moved.move.effect_s for moved in mover.moves]),
            "effect_loaded_without_core_waits_ms": spread_ms([_own_s(moved) for moved in mover.moves]),
            "first_step_ms": spread_ms([s for s in _first_steps(mover.moves) if s is not None]),
            "first_steps_seen": sum(s is not None for s in _first_steps(mover.moves)),
        }


def _gateways(suite: RunningSuite) -> list[int]:
    return [each.pid for each in processes_below(suite.process.pid, {"services.gateway": "gateway"})["gateway"]]


def _own_s(moved: HeldMove) -> float | None:
    # The effect without waits for a core. Overlapping waits are subtracted twice, so the result is bounded at 0.
    effect_s = moved.move.effect_s
    return None if effect_s is None else max(effect_s - moved.waited_s, 0.0)


def _has_answered(traffic: SteadyTraffic, count: int) -> bool:
    return traffic.answered >= count


async def _tokens_s(traffic: SteadyTraffic, clients: int, answers: int) -> float:
    """Return the output tokens a second while every slot is requested and no worker moves."""
    start_s, tokens, answered = time.perf_counter(), traffic.output_tokens, traffic.answered
    async with traffic.flowing(clients):
        await until(lambda: traffic.answered >= answered + answers, timeout_s=WAIT_S)
    return (traffic.output_tokens - tokens) / (time.perf_counter() - start_s)


async def _moved_sequences(http: httpx.AsyncClient) -> int:
    text = (await http.get("/metrics")).text
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    return int(sum(s.value for s in samples if s.name == "fulcrum_gateway_moves_total"))


def _first_steps(moves: Sequence[HeldMove]) -> list[float | None]:
    return [moved.first_step_s for moved in moves if moved.role != "standby"]


def run(case: Case, folder: Path, *, guided: bool = False) -> dict[str, Any]:
    arguments = ["--engine", case.engine, "--prefill", "1", "--decode", str(case.decode)]
    model = "sim"
    if case.engine != "sim":
        path = tiny_model(folder / "tiny") if case.name.endswith("-tiny") else real_model_folder()
        arguments += ["--model", str(path)]
        model = path.name
    env = {"FULCRUM_WORKER_MAX_SEQUENCES": str(SLOTS)}
    if case.engine == "vllm":
        env["FULCRUM_WORKER_VLLM_ARGUMENTS"] = json.dumps({"max_model_len": 1024} | LaunchSettings().vllm_arguments)
        env["FULCRUM_GATEWAY_SILENT_AFTER_MS"] = "10000"  # its engines take the cores that its workers need
    # A collection in this process would visit all objects of torch while a move's answer waits.
    gc.collect()
    gc.freeze()
    with bench_suite(*arguments, env=env, start_s=START_S, folder=folder) as suite:
        return asyncio.run(bench(case, suite, suite.ready["model"] or model, guided=guided))


def main() -> None:
    parser = bench_parser(
        __doc__, moves=(0, "under load; 0: each engine's own number"),
        guided=(False, "answers keep to patterns, schemas and grammars"),
    )  # fmt: skip
    parser.add_argument(
        "--only", choices=[case.name for case in CASES], nargs="*", help="engines; by default all but vllm's"
    )
    options = parser.parse_args()
    results = []
    for case in CASES:
        if case.name not in (options.only or DEFAULT_CASES):
            continue
        print(f"{case.name} ...", file=sys.stderr)
        with tempfile.TemporaryDirectory(prefix="bench-role-") as folder:
            some = replace(case, moves=options.moves or case.moves)
            results.append(run(some, Path(folder), guided=options.guided))
    print(table(results))
    for result in results:
        result["aim_met"] = {name: aim_met(result[f"effect_{name}_ms"]) for name in ("idle", "loaded")}
    print(json.dumps({"bench": "role", "aim_effect_p99_ms": AIM_S * 1e3, "engines": results}, allow_nan=False))
    if bad := [f"{result['engine']}: {fault}" for result in results for fault in faults(result)]:
        sys.exit("\n".join(bad))


if __name__ == "__main__":
    main()
