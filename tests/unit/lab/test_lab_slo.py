"""Tests of SLOs, devices and policies of the lab as people write them."""

import pytest

from libs.contracts.errors import InvalidRequest
from libs.lab.hardware import by_name, resolve
from libs.lab.policies import policy_named, split_of, with_split
from libs.lab.slo import parse_slo


@pytest.mark.parametrize(
    ("text", "isolated_s", "ttft_s"),
    [
        ("ttft=max(2s,3x),tpot=50ms", 0.1, 2.0),
        ("ttft=max(2s,3x),tpot=50ms", 1.0, 3.0),
        ("ttft=min(2s,3x),tpot=50ms", 1.0, 2.0),
        ("ttft=3x,tpot=50ms", 0.5, 1.5),
        ("tpot=50ms, ttft=250ms", 9.0, 0.25),
    ],
)
def test_an_slo_gives_the_limit_of_each_prompt(text: str, isolated_s: float, ttft_s: float) -> None:
    slo = parse_slo(text)
    assert slo.ttft_limit_ns(isolated_s * 1e9) == round(ttft_s * 1e9)
    assert slo.tpot_ns == 50_000_000


@pytest.mark.parametrize(
    "text", ["", "ttft=2s", "ttft=2,tpot=50ms", "ttft=2s,tpot=3x", "ttft=0s,tpot=1ms", "ttft=max(2s,tpot=1ms", "a=1s"]
)
def test_a_malformed_slo_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(InvalidRequest, match="write it like ttft="):
        parse_slo(text)


def test_a_model_on_a_device_is_found_in_any_spelling_of_its_name() -> None:
    assert resolve("llama-3.1-8b", "h100").profile.name == "llama3.1-8b-h100-aic"
    assert resolve("Llama3.1-70B", "H100", tp=4).profile.gpus == 4
    assert resolve("llama-3.1-8b", "h100").mixed_measured
    assert not by_name("llama-8b-h100").mixed_measured


@pytest.mark.parametrize(
    ("model", "device", "tp", "says"),
    [
        ("llama-3.1-8b", "h300", 0, "it is there on a100, b200"),
        ("llama-9", "h100", 0, "there are baichuan-7b"),
        ("llama-3.1-70b", "h100", 3, "--tp 4"),
    ],
)
def test_a_model_without_a_profile_is_refused_with_the_existing_ones(
    model: str, device: str, tp: int, says: str
) -> None:
    with pytest.raises(InvalidRequest, match=says):
        resolve(model, device, tp)


def test_policies_are_named_with_their_split_and_guard() -> None:
    assert policy_named("fulcrum:9:7", 16).rival is None
    assert policy_named("fulcrum:9:7", 16).guard
    shipped, guarded = policy_named("static:9:7", 16), policy_named("static:9:7+guard", 16)
    assert (shipped.guard, guarded.guard) == (False, True)
    assert with_split("static+guard", 9, 7) == "static:9:7+guard"
    both = policy_named("dynamo-load:9:7+moves+guard", 16)
    assert both.guard and both.rival is not None and not both.rival.move_cost.restarts


@pytest.mark.parametrize(
    ("name", "workers", "says"),
    [
        ("fulcrum:9:8", 16, "17 workers, and there are 16"),
        ("static:4:4", 16, "8 workers, and there are 16"),
        ("fulcrum:16:0", 16, "at least one of each"),
        ("magic", 16, "there are: static:P:D"),
        ("arrow", 1, "two or more"),
    ],
)
def test_an_unknown_policy_is_refused_with_the_existing_ones(name: str, workers: int, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        policy_named(name, workers)


def test_a_split_is_two_numbers() -> None:
    assert split_of("9:7", 16) == (9, 7)
