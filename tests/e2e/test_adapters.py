"""Tests of LoRA adapters on a whole suite: listed, served under their own names and separate from their model."""

import json
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import openai
import pytest

from libs.testing.suites.suite import RunningSuite, running_suite

pytestmark = pytest.mark.suite

T = TypeVar("T")
WAIT_S = 30.0
ADAPTERS = {"sql": "sim", "lost": "sim"}
PROMPT = "Once upon a time there was a model with many adapters. " * 3


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningSuite]:
    env = {
        "FULCRUM_GATEWAY_ADAPTERS": json.dumps(ADAPTERS),
        "FULCRUM_WORKER_ADAPTERS": json.dumps({"sql": "/adapters/sql"}),
        "FULCRUM_GATEWAY_MODEL_CATALOGUE": "1",
        "FULCRUM_PLANNER_MODEL_CATALOGUE": "1",
    }
    with running_suite(tmp_path_factory.mktemp("suite"), "--engine", "sim", "--prefill", "2", env=env) as found:
        yield found


def answer(client: openai.OpenAI, model: str) -> tuple[str, int]:
    """Return (text, prompt tokens that were cached)."""
    found = client.completions.create(model=model, prompt=PROMPT, max_tokens=12, temperature=0)
    assert found.usage is not None and found.usage.prompt_tokens_details is not None
    assert found.model == model
    return found.choices[0].text, found.usage.prompt_tokens_details.cached_tokens or 0


def test_adapters_are_listed_with_their_model(client: openai.OpenAI) -> None:
    models = {model.id: model.model_dump().get("parent") for model in client.models.list()}
    assert models == {"sim": None, **ADAPTERS}


def test_an_adapter_gives_its_own_answers_from_its_own_kv(client: openai.OpenAI) -> None:
    own, adapted = answer(client, "sim"), answer(client, "sql")
    assert own[0] != adapted[0]
    assert adapted[1] == 0, "the model's own KV of the same prompt is not the adapter's"
    again = {model: answer(client, model) for model in ("sim", "sql")}
    assert (again["sim"][0], again["sql"][0]) == (own[0], adapted[0])
    assert again["sim"][1] and again["sql"][1]


def test_an_adapter_that_no_worker_knows_is_named_in_the_error(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="adapter 'lost'"):
        answer(client, "lost")


def test_an_adapter_is_loaded_and_unloaded_while_workers_run(suite: RunningSuite, client: openai.OpenAI) -> None:
    added = suite.fulcrum("models", "add", "chat", "--adapter-of", "sim", "--source", "/adapters/chat")
    assert added.returncode == 0, added.stderr
    found = eventually(lambda: answer(client, "chat"))
    assert found[0] not in (answer(client, "sim")[0], answer(client, "sql")[0])
    assert answer(client, "chat")[0] == found[0]
    (listed,) = json.loads(suite.fulcrum("models", "list", "--json").stdout)
    assert (listed["name"], listed["parent"], listed["state"]) == ("chat", "sim", "serving")
    assert suite.fulcrum("models", "remove", "chat").returncode == 0
    eventually(lambda: refused(client, "chat"))


def refused(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.NotFoundError):
        answer(client, model)


def eventually(look: Callable[[], T]) -> T:
    """Return the result once the call raises no more."""
    ends_s = time.monotonic() + WAIT_S
    while True:
        try:
            return look()
        except (openai.NotFoundError, pytest.fail.Exception):
            if time.monotonic() > ends_s:
                raise
        time.sleep(0.05)
