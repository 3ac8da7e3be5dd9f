"""Services compiled by `deploy/compile.py --services` answer as services in plain Python do."""

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from deploy.compile import ROOT, SERVICES, SERVICES_BUILD, build, missing
from libs.testing.suites.suite import RunningSuite, running_suite
from tests.compile_jobs import compile_jobs

pytestmark = pytest.mark.timeout(1200)

WORDS = "one two three four five six seven eight nine ten"
CASES: list[dict[str, Any]] = [
    {"max_tokens": 64},
    {"max_tokens": 48, "stream": True, "stream_options": {"include_usage": True}},
    {"max_tokens": 40, "n": 3, "stream": True},
    {"max_tokens": 20, "logprobs": True, "top_logprobs": 3},
    {"max_tokens": 60, "stop": ["e", "a"], "min_tokens": 5},
    {"max_tokens": 0},
]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if lacking := missing():
        pytest.skip(f"cannot compile: {lacking}")
    build(SERVICES_BUILD, globs=SERVICES, jobs=compile_jobs())  # what `make dist` packs too
    return Path(shutil.copytree(SERVICES_BUILD, tmp_path_factory.mktemp("compiled") / "services"))


def answers(suite: RunningSuite) -> list[Any]:
    """Send all requests at once, and return each answer with its status, without fields that always differ."""

    def ask(number: int) -> Any:
        case = CASES[number % len(CASES)]
        message = {"role": "user", "content": f"{number}: {WORDS}"}
        request = {"model": suite.ready["model"], "messages": [message], "seed": 7, **case}
        answer = httpx.post(f"{suite.gateway}/v1/chat/completions", json=request, timeout=60)
        lines = answer.text.splitlines() if case.get("stream") else [answer.text]
        texts: dict[int, str] = {}
        ends: list[Any] = []
        usages: list[Any] = []
        for line in filter(None, lines):
            body = json.loads(line.removeprefix("data: ")) if "[DONE]" not in line else {}
            for choice in body.get("choices", []):  # the number of tokens per event depends on timing
                delta = choice.get("delta") or choice.get("message") or {}
                texts[choice["index"]] = texts.get(choice["index"], "") + (delta.get("content") or "")
                if choice["finish_reason"] or choice.get("logprobs"):
                    ends.append((choice["index"], choice["finish_reason"], choice.get("logprobs")))
            usages.append(body.get("usage"))
        ends.sort(key=lambda each: each[0])  # which of several choices ends first depends on timing too
        return answer.status_code, texts, ends, [each for each in usages if each is not None]

    with ThreadPoolExecutor(12) as threads:
        return list(threads.map(ask, range(36)))


# Tests of the libraries that compiled classes interact with: numpy, protobuf, msgspec.
UNITS = (
    "tests/unit/engine",
    "tests/unit/gateway/test_shared_places.py",
    "tests/contract/worker/test_worker_serving.py",
)


def test_tests_of_plain_modules_pass_for_compiled_ones(compiled: Path) -> None:
    for name in ("tests", "load", "pyproject.toml"):
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, compiled / name)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *UNITS]
    environment = os.environ | {"PYTHONPATH": str(compiled)}
    ran = subprocess.run(command, cwd=compiled, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]


def test_compiled_services_answer_as_plain_ones_do(tmp_path: Path, compiled: Path) -> None:
    found = []
    for name, env in (("plain", {}), ("compiled", {"PYTHONPATH": str(compiled), "PYTHONSAFEPATH": "1"})):
        folder = tmp_path / name
        folder.mkdir()
        with running_suite(folder, "--engine", "sim", env={"FULCRUM_CACHE": str(folder / "cache"), **env}) as suite:
            assert ("compiled" in suite.fulcrum("--version").stdout) == (name == "compiled")
            found.append(answers(suite))
    plain, fast = found
    assert {status for status, *_ in plain} == {200, 400}
    assert fast == plain
