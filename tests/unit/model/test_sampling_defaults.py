"""Tests of sampling defaults: the request's own, then the model's advice, then OpenAI's."""

import json
from pathlib import Path

import pytest

from libs.contracts.errors import StartupError
from libs.model.info import SamplingDefaults, sampling_defaults
from services.gateway.request.parse import parse_chat

FILE = Path("generation_config.json")
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def test_a_model_without_advice_has_openais_defaults() -> None:
    assert sampling_defaults({"eos_token_id": 2, "temperature": None}, FILE) == SamplingDefaults()


def test_advice_is_applied_field_by_field() -> None:
    found = sampling_defaults({"temperature": 0.2, "top_k": 20, "do_sample": True}, FILE)
    assert found == SamplingDefaults(temperature=0.2, top_k=20)


def test_advice_not_to_sample_is_greedy() -> None:
    assert sampling_defaults({"do_sample": False, "temperature": 0.7}, FILE).temperature == 0


@pytest.mark.parametrize(("field", "value"), [("temperature", -1), ("top_p", 2), ("top_k", "many"), ("min_p", True)])
def test_invalid_advice_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(StartupError, match=rf"generation_config.json: {field}"):
        sampling_defaults({field: value}, FILE)


def test_a_value_set_by_the_request_overrides_advice() -> None:
    parsed = parse_chat(json.dumps({**CHAT, "temperature": 1, "top_p": None}).encode())
    assert parsed.unset == {"top_p", "top_k", "min_p", "repetition_penalty"}
    assert parsed.sampling.temperature == 1
