"""SmolLM2 and two small models with random weights take turns on one CPU worker: wrong tokens, memory, waits.

Each answer is greedy and held against the model's first one. The worker's resident memory is read after each round. At
the end one JSON line.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from libs.testing.engines.real_model import random_model_folder, real_model_folder
from libs.testing.suites.suite import RunningSuite, running_suite

WAIT_S = 900.0
"""Of a client: this counts wrong tokens, lost answers and memory, on machines however busy."""
ASKERS = 2
"""Of each round, at the model to come; the one before is still answering somebody."""
TOKENS = 12


def main() -> None:
    """Print the JSON line; 1 where a token was wrong or a request lost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--switches", type=int, default=200)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = run(folder, options.switches)
    print(json.dumps({"bench": "models-torch", **found}))
    sys.exit(bool(found["wrong"] or found["lost"]))


def run(folder: Path, switches: int) -> dict[str, Any]:
    """What came of `switches` switches between three models."""
    random = (random_model_folder(folder / f"random-{layers}", num_hidden_layers=layers) for layers in (2, 3))
    sources = [real_model_folder(), *random]
    env = {
        "FULCRUM_CACHE": str(folder / "cache"),
        "FULCRUM_PLANNER_MODE": "auto",
        "FULCRUM_PLANNER_MODELS_TURN_S": "0.5",
        "FULCRUM_GATEWAY_MAX_MODEL_WAIT_MS": str(round(WAIT_S * 900)),
        "FULCRUM_WORKER_PREFILL_CHUNK_TOKENS": "64",
    }
    models = [word for source in sources for word in ("--model", str(source))]
    with running_suite(folder, "--engine", "torch", "--pool", "1", *models, env=env) as suite:
        return asyncio.run(_switch(suite, [source.name for source in sources], switches))


async def _switch(suite: RunningSuite, names: list[str], switches: int) -> dict[str, Any]:
    async with httpx.AsyncClient(timeout=WAIT_S) as http:
        whole: dict[str, str] = {}
        for name in names:
            first = await _ask(http, suite, name)
            if first.status_code != 200:
                raise SystemExit(f"{name}: {first.text}")
            whole[name] = first.json()["choices"][0]["text"]
        moved = wrong = lost = 0
        waits_s: list[float] = []
        memory_mb: list[float] = []
        asked: list[tuple[str, asyncio.Task[httpx.Response]]] = []
        while moved < switches:
            name = names[moved % len(names)]
            began_s = time.monotonic()
            coming = [(name, asyncio.create_task(_ask(http, suite, name))) for _ in range(ASKERS)]
            await coming[0][1]
            waits_s.append(time.monotonic() - began_s)
            for model, task in asked:
                answer = await task
                lost += answer.status_code != 200
                wrong += answer.status_code == 200 and answer.json()["choices"][0]["text"] != whole[model]
            asked = coming
            moved += 1
            if moved % len(names) == 0:
                memory_mb.append(_resident_mb(await _pids(http, suite)))
                print(f"{moved} switches, {wrong} wrong, {lost} lost, {memory_mb[-1]:.0f} MB", file=sys.stderr)
        for _, task in asked:
            lost += (await task).status_code != 200
    third = max(len(memory_mb) // 3, 1)
    return {
        "switches": moved,
        "requests": moved * ASKERS + len(names),
        "wrong": wrong,
        "lost": lost,
        "wait_s": {"p50": round(median(waits_s), 3), "max": round(max(waits_s), 3)},
        "resident_mb": {
            "first_third": round(median(memory_mb[:third])),
            "last_third": round(median(memory_mb[-third:])),
        },
    }


async def _ask(http: httpx.AsyncClient, suite: RunningSuite, model: str) -> httpx.Response:
    body = {"model": model, "prompt": "The capital of France is", "max_tokens": TOKENS, "temperature": 0}
    return await http.post(f"{suite.gateway}/v1/completions", json=body)


async def _pids(http: httpx.AsyncClient, suite: RunningSuite) -> set[int]:
    return {each["pid"] for each in (await http.get(f"{suite.ready['planner']}/v1/workers")).json()}


def _resident_mb(pids: set[int]) -> float:
    found = 0.0
    for pid in pids:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        found += next(float(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024
    return found


if __name__ == "__main__":
    main()
