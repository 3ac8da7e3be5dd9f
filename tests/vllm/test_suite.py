"""Tests of a whole suite of vLLM workers: its answers, and what remains when one is killed."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from libs.runtime.service import EXIT_CANNOT_START
from libs.testing.engines.real_model import real_model_folder
from libs.testing.suites.processes import is_whole, pid_of
from libs.testing.suites.role_moves import SteadyTraffic, request_bodies, role_changer
from libs.testing.suites.steady_load import Streamed, stream
from libs.testing.suites.suite import RunningSuite, joining, kv_transfers, running_suite
from libs.testing.wait import until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

MODEL = "SmolLM2-135M-Instruct"
REQUESTS = 6
MOVES = 50
CLIENTS = 6
BLOCK_TOKENS = 32
LONG_LENGTHS = (199, 231, 263, 295)
"""Lengths of prompts that are sent twice; no other test's prompts are so long."""
GONE_S = 30.0
"""A bound for a process that is never killed. Linux kills at once, but on two cores with other engines the memory of
two vLLM processes has taken over a second to be freed."""
ENGINE_PROCESSES = 6
"""EngineCore and the computing process of three workers."""
AFTER_S, MAX_AFTER_SHARE = 0.8, 0.5
"""Of one core, after an answer. Of vLLM's own accord four processes would take a core each."""
START_S = 400.0


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningSuite]:
    folder = tmp_path_factory.mktemp("suite")
    arguments = ("--engine", "vllm", "--prefill", "1", "--decode", "2")
    settings = {"FULCRUM_WORKER_VLLM_ARGUMENTS": '{"max_model_len": 512}', "FULCRUM_WORKER_KV_MEMORY_MB": "128"}
    settings["FULCRUM_GATEWAY_SILENT_AFTER_MS"] = "10000"  # three engines compute on the cores that their workers need
    with running_suite(folder, *arguments, env=settings, start_s=START_S) as found:
        yield found


def http_to(suite: RunningSuite) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=suite.gateway, timeout=120, trust_env=False)


def test_the_suite_answers_paris(suite: RunningSuite) -> None:
    said = suite.fulcrum("chat", "What is the capital of France?")
    assert said.returncode == 0 and "Paris" in said.stdout, said.stdout + said.stderr


def engine_processes(suite: RunningSuite) -> list[psutil.Process]:
    """Return vLLM's own processes, of all workers."""
    children = psutil.Process(suite.process.pid).children(recursive=True)
    return [child for child in children if child.name().startswith("VLLM")]


def test_engines_use_every_core(suite: RunningSuite) -> None:
    cores = psutil.Process().cpu_affinity()
    assert [process.cpu_affinity() for process in engine_processes(suite)] == [cores] * ENGINE_PROCESSES


def test_engines_release_the_cores_as_soon_as_they_have_answered(suite: RunningSuite) -> None:
    def cpu_s() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in engine_processes(suite))

    suite.fulcrum("chat", "What is the capital of Italy?")
    before_s = cpu_s()
    time.sleep(AFTER_S)
    assert cpu_s() - before_s < MAX_AFTER_SHARE * AFTER_S


async def test_repeated_prompts_are_served_by_the_worker_that_has_their_blocks(suite: RunningSuite) -> None:
    bodies = [
        {"model": MODEL, "prompt": [1000 + tokens, *range(300, 299 + tokens)], "max_tokens": 4, "temperature": 0}
        for tokens in LONG_LENGTHS
    ]
    async with http_to(suite) as http, role_changer(suite) as moving:
        await moving.move("decode-2", "prefill")
        first = await asyncio.gather(*(http.post("/v1/completions", json=body) for body in bodies))
        again = [await http.post("/v1/completions", json=body) for body in bodies]
    assert [answer.json()["choices"] for answer in again] == [answer.json()["choices"] for answer in first]
    cached = [answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in (*first, *again)]
    assert cached == [0] * len(bodies) + [(tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS for tokens in LONG_LENGTHS]
    sources: dict[int, list[str]] = {}
    for transfer in await kv_transfers(suite, dict.fromkeys(LONG_LENGTHS, 2)):
        sources.setdefault(transfer.prompt_tokens, []).append(transfer.from_worker_id)
    assert all(one == other for one, other in sources.values())
    assert len({workers[0] for workers in sources.values()}) == 2, "they were spread over both workers the first time"


def test_prefill_is_tuned_with_separate_steps(suite: RunningSuite) -> None:
    arguments = ("tune", "prefill", "prefill-1", "--most-tokens", "256", "--limit", "60", "--measure-only", "--json")
    said = suite.fulcrum(*arguments, timeout_s=120)
    assert said.returncode == 0, said.stdout + said.stderr
    (found,) = json.loads(said.stdout)
    assert found["plateau_tokens_per_s"] > 0 and found["chunk_tokens"] <= 256


async def test_roles_move_under_load_without_changing_any_answer(suite: RunningSuite) -> None:
    async with http_to(suite) as http:
        traffic = SteadyTraffic(http, request_bodies(MODEL, 4, prompt_tokens=40, output_tokens=12))
        await traffic.learn()
        async with role_changer(suite) as moving, traffic.flowing(CLIENTS):
            for _ in range(MOVES):
                answered = traffic.answered
                await until(lambda so_far=answered: traffic.answered > so_far, timeout_s=120)
                await moving.move_one()
    assert (traffic.failed, traffic.wrong) == ([], [])
    assert any(moved.move.running for moved in moving.moves), "some were caught decoding"


async def test_workers_that_fail_or_have_other_kv_report_it_and_the_others_keep_serving(
    suite: RunningSuite, tmp_path: Path
) -> None:
    async with http_to(suite) as http:
        traffic = SteadyTraffic(http, request_bodies(MODEL, 4, prompt_tokens=60, output_tokens=24))
        await traffic.learn()
        model = {"FULCRUM_WORKER_MODEL": MODEL, "FULCRUM_WORKER_MODEL_PATH": str(real_model_folder())}
        vllm, sim = (model | {"FULCRUM_WORKER_ENGINE": engine} for engine in ("vllm", "sim"))
        with (
            joining(suite, tmp_path, "pigeon", **vllm, FULCRUM_WORKER_VLLM_CONNECTOR="Pigeon") as pigeon,
            joining(suite, tmp_path, "other", **sim) as other,
        ):
            async with traffic.flowing(2):
                left = pigeon.process
                await until(lambda: left.poll() is not None, timeout_s=120, what="a worker that cannot start")
                await until(lambda: other.ready, timeout_s=120, what="a worker")
                answered = traffic.answered
                await until(lambda: traffic.answered >= answered + 4, timeout_s=120, what="answers")
            assert other.process.poll() is None and left.returncode == EXIT_CANNOT_START
            workers = (await http.get(f"{suite.ready['planner']}/v1/workers")).json()
            logged = other.err.read_text()
    assert "there is no KV connector 'Pigeon' here" in pigeon.err.read_text().splitlines()[-1]
    reported = {worker["id"]: worker["unpaired"] for worker in workers if worker["unpaired"]}
    assert reported.keys() == {"other"} and "sim here, vllm there" in reported["other"] and reported["other"] in logged
    assert (traffic.failed, traffic.wrong) == ([], [])


@asynccontextmanager
async def streams(suite: RunningSuite) -> AsyncIterator[None]:
    """Keep streams open during the context; they must end as undisturbed ones do."""
    async with httpx.AsyncClient(timeout=300) as http:

        async def ask(into: Streamed, number: int) -> None:
            body = {"model": MODEL, "prompt": f"Count from {number}: {number}," * 3, "max_tokens": 60, "temperature": 0}
            await stream(http, suite.gateway, into=into, tenant="tests", ignore_eos=True, **body)

        expected, found = ([Streamed(0.0) for _ in range(REQUESTS)] for _ in range(2))
        await asyncio.gather(*(ask(each, number) for number, each in enumerate(expected)))
        asking = asyncio.gather(*(ask(each, number) for number, each in enumerate(found)))
        await until(lambda: all(each.text for each in found), timeout_s=120, what="streams")
        yield
        await asking
    for answer, unbroken in zip(found, expected, strict=True):
        assert (answer.text, answer.finish_reason, answer.error) == (unbroken.text, "length", None)


def processes_of(suite: RunningSuite, name: str) -> tuple[psutil.Process, list[psutil.Process]]:
    """Return a worker and vLLM's processes below it, EngineCore first."""
    pid = pid_of(suite, name)
    assert pid is not None
    below = [each for each in psutil.Process(pid).children(recursive=True) if each.name().startswith("VLLM")]
    below.sort(key=lambda each: "EngineCor" not in each.name())
    assert below and "EngineCor" in below[0].name(), f"no EngineCore below {name}: {below}"
    return psutil.Process(pid), below


def has_ended(process: psutil.Process) -> bool:
    """A zombie has ended too: its parent has yet to wait for it."""
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


async def gone(processes: list[psutil.Process]) -> None:
    await until(lambda: all(map(has_ended, processes)), timeout_s=GONE_S, what="vLLM's processes to end")


async def test_a_worker_whose_engine_core_is_killed_ends_and_returns_while_streams_continue(
    suite: RunningSuite,
) -> None:
    worker, below = processes_of(suite, "decode-2")
    async with streams(suite):
        below[0].kill()
        await gone(below)
        await gone([worker])
    async with httpx.AsyncClient(timeout=30) as http:
        until_s = time.monotonic() + START_S
        while not await is_whole(http, suite):
            assert time.monotonic() < until_s
            await asyncio.sleep(0.1)


async def test_streams_continue_when_a_worker_is_killed_and_nothing_of_it_remains(suite: RunningSuite) -> None:
    worker, below = processes_of(suite, "decode-1")
    async with streams(suite):
        worker.kill()
        await gone(below)
