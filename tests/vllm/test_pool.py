"""Test of two models on one pool worker: each switch ends one EngineCore and starts another."""

from collections.abc import Iterator

import httpx
import psutil
import pytest

from libs.testing.engines.real_model import random_model_folder, real_model_folder
from libs.testing.suites.suite import RunningSuite, running_suite

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

REAL, RANDOM = "SmolLM2-135M-Instruct", "random"
WAIT_S = 800.0
"""Of a client: EngineCore takes a minute or more to start on a CPU, and a turn is four times as long."""
SWITCHES = 3


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningSuite]:
    folder = tmp_path_factory.mktemp("suite")
    # vLLM has no attention on CPUs for heads that are smaller.
    random = random_model_folder(folder / RANDOM, hidden_size=128, num_attention_heads=2)
    models = ("--model", str(real_model_folder()), "--model", str(random))
    settings = {
        "FULCRUM_CACHE": str(folder / "cache"),
        "FULCRUM_WORKER_VLLM_ARGUMENTS": '{"max_model_len": 512}',
        "FULCRUM_WORKER_KV_MEMORY_MB": "64",
        "FULCRUM_GATEWAY_MAX_MODEL_WAIT_MS": str(round(WAIT_S * 1000)),
        "FULCRUM_GATEWAY_SILENT_AFTER_MS": "10000",  # an engine that starts computes on the cores that others need
        "FULCRUM_PLANNER_MODE": "auto",
        "FULCRUM_PLANNER_MODELS_TURN_S": "1",
    }
    with running_suite(folder, "--engine", "vllm", "--pool", "1", *models, env=settings, start_s=WAIT_S) as found:
        yield found


def engine_cores(suite: RunningSuite) -> set[int]:
    """Return those that still run; an ended one may not have been waited for yet."""
    children = psutil.Process(suite.process.pid).children(recursive=True)
    own = (child for child in children if child.name().startswith("VLLM::EngineCor"))
    return {child.pid for child in own if child.status() != psutil.STATUS_ZOMBIE}


async def test_models_alternate_on_one_worker_and_each_repeats_its_answers(suite: RunningSuite) -> None:
    body = {"prompt": "The capital of France is", "max_tokens": 12, "temperature": 0}
    answers: dict[str, set[str]] = {REAL: set(), RANDOM: set()}
    cores: list[set[int]] = []
    async with httpx.AsyncClient(base_url=suite.gateway, timeout=WAIT_S, trust_env=False) as http:
        for place in range(SWITCHES):
            name = (REAL, RANDOM)[place % 2]
            answer = await http.post("/v1/completions", json={**body, "model": name})
            assert answer.status_code == 200, answer.text
            answers[name].add(answer.json()["choices"][0]["text"])
            cores.append(engine_cores(suite))
    assert "Paris" in next(iter(answers[REAL]))
    assert [len(found) for found in answers.values()] == [1, 1]
    assert all(len(each) == 1 for each in cores) and len(set.union(*cores)) == SWITCHES, cores
