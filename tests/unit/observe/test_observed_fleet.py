"""Tests of the list of servers to observe, from addresses and from a file."""

from pathlib import Path

import pytest

from libs.contracts.errors import InvalidRequest
from libs.observe.fleet import MOST_SERVERS, ObservedTarget, read_fleet, targets_of, token_of


def fleet(tmp_path: Path, text: str) -> list[ObservedTarget]:
    file = tmp_path / "fleet.toml"
    file.write_text(text)
    return read_fleet(file)


def test_a_server_is_named_by_its_address_and_does_both_phases_by_default(tmp_path: Path) -> None:
    plain, reported = fleet(
        tmp_path,
        '[[server]]\nurl = "http://10.0.0.5:8000/metrics"\n'
        '[[server]]\nurl = "https://b/vllm"\nname = "p0"\nrole = "prefill"\nmodel = "m"\ngpus = 8\ntoken_env = "T"\n',
    )
    assert (plain.url, plain.name, plain.role, plain.node) == (
        "http://10.0.0.5:8000",
        "10.0.0.5:8000",
        "mixed",
        "10.0.0.5",
    )
    assert (reported.url, reported.name, reported.role, reported.model, reported.gpus) == (
        "https://b/vllm",
        "p0",
        "prefill",
        "m",
        8,
    )
    assert targets_of(["http://10.0.0.5:8000/"])[0] == plain


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[[server", "not TOML"),
        ('url = "http://a"', "only tables"),
        ("server = 3", "only tables"),
        ("[[server]]\n", "not the address"),
        ('[[server]]\nurl = "10.0.0.5:8000"', "http://host:port"),
        ('[[server]]\nurl = "http://a:99999"', "not the address"),
        ('[[server]]\nurl = "http://user:password@a"', "not the address"),
        ('[[server]]\nurl = "http://a\\r\\nx: y"', "control characters"),
        ('[[server]]\nurl = "http://a"\nrole = "both"', "none of prefill, decode, mixed"),
        ('[[server]]\nurl = "http://a"\ngpus = 0', "gpus must be 1"),
        ('[[server]]\nurl = "http://a"\ngpus = true', "gpus"),
        ('[[server]]\nurl = "http://a"\nnam = "b"', "'nam' is none of"),
        ('[[server]]\nurl = "http://a"\n[[server]]\nurl = "http://a/"', "there twice"),
        ('[[server]]\nurl = "http://a"\nname="n"\n[[server]]\nurl = "http://b"\nname="n"', "'n' is there twice"),
    ],
)
def test_an_invalid_file_is_refused_with_the_error(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        fleet(tmp_path, text)


def test_the_number_of_servers_is_bounded() -> None:
    with pytest.raises(InvalidRequest, match=f"{MOST_SERVERS} at most"):
        targets_of([f"http://h:{number + 1}" for number in range(MOST_SERVERS + 1)])


def test_a_token_is_read_from_its_variable_or_the_missing_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    target = ObservedTarget("http://a", "a", token_env="VLLM_TOKEN_OF_A")
    with pytest.raises(InvalidRequest, match="VLLM_TOKEN_OF_A"):
        token_of(target)
    monkeypatch.setenv("VLLM_TOKEN_OF_A", "secret")
    assert token_of(target) == "secret"
    assert token_of(ObservedTarget("http://a", "a")) == ""
