"""Tests of `fulcrum request`: the output for a recorded answer."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from libs.cli.main import app
from libs.contracts.errors import StartupError
from tests.unit.cli.test_status import a_service

MS = 1_000_000
# As `GET /v1/requests/ID` of a live suite answered it.
RECORDED: dict[str, Any] = {
    "id": "3f2a9c1e", "prefill_worker": "gpu-0", "decode_worker": "gpu-1", "end_unix_ns": 1_764_332_000_312_000_000,
    "model": "sim", "outcome": "ok", "prompt_tokens": 1500, "cached_tokens": 16, "output_tokens": 11,
    "queue_ns": 5 * MS, "ttft_ns": 100 * MS, "tpot_ns": 20 * MS, "ttft_target_ns": 50 * MS, "tpot_target_ns": 30 * MS,
    "ttft_missed": True, "tpot_missed": False, "gateway": "gateway-0", "tenant": "default", "service_class": "online",
    "arrival_unix_ns": 1_764_332_000_000_000_000, "finish_reason": "length", "error_code": "", "max_output_tokens": 64,
    "predicted_ttft_ns": 90 * MS, "reroutes": 1, "moves": 0, "recomputes": 0, "traceparent": "",
    "stages": [
        {"name": "queue", "at": "gateway-0", "start_ns": 0, "duration_ns": 5 * MS},
        {"name": "prefill", "at": "gpu-0", "start_ns": 5 * MS, "duration_ns": 95 * MS},
        {"name": "hand_off", "at": "gpu-1", "start_ns": 100 * MS, "duration_ns": 30 * MS},
        {"name": "decode", "at": "gpu-1", "start_ns": 130 * MS, "duration_ns": 170 * MS},
    ],
}  # fmt: skip


def run(tmp_path: Path, answers: dict[str, Any], *words: str) -> Any:
    with a_service(answers, tmp_path) as ready:
        return CliRunner().invoke(app, ["request", *words, *ready])


def printed(tmp_path: Path, answers: dict[str, Any], *words: str) -> str:
    done = run(tmp_path, answers, *words)
    assert done.exit_code == 0, done.output
    return str(done.stdout)


@pytest.mark.system
def test_one_request_is_printed_as_a_sentence_a_table_of_stages_and_the_targets(tmp_path: Path) -> None:
    first, *rest = printed(tmp_path, {"/v1/requests/3f2a9c": RECORDED}, "3f2a9c").splitlines()
    assert first == "3f2a9c1e: finished (length) after 300 ms, of which 57%, 170 ms, went to decoding (gpu-1)."
    assert [" ".join(line.split()[:6]) for line in rest[:5]] == [
        "stage at begins after takes share",
        "queue gateway-0 0.0 ms 5.0 ms",
        "prefill gpu-0 5.0 ms 95 ms",
        "hand-off gpu-1 100 ms 30 ms",
        "decode gpu-1 130 ms 170 ms",
    ]
    text = "\n".join(rest)
    for part in (
        "TTFT 100 ms of 50 ms: missed, predicted 90 ms", "TPOT 20 ms of 30 ms: met",
        "1,500 prompt tokens, 16 of them cached; 11 of at most 64 output tokens",
        "tenant default, class online, gateway gateway-0", "sent to another worker once",
    ):  # fmt: skip
        assert part in text


@pytest.mark.system
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"outcome": "rejected", "finish_reason": "", "error_code": "queue_full", "ttft_ns": None, "stages": []},
            "refused (queue_full) before it was bound to a worker; how long it waited is not recorded.",
        ),
        (
            {"outcome": "client_gone", "finish_reason": "", "ttft_ns": None, "stages": RECORDED["stages"][:1]},
            "ended when its client left without a token after 5.0 ms at the gateway; "
            "its time at gpu-0 is not recorded.",
        ),
    ],
)
def test_unknown_facts_of_a_request_are_named_as_unknown(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    first, *_ = printed(tmp_path, {"/v1/requests/x": RECORDED | changes}, "x").splitlines()
    assert first == f"3f2a9c1e: {said}"


@pytest.mark.system
def test_the_slowest_requests_have_a_row_each_and_json_is_the_answer_itself(tmp_path: Path) -> None:
    answers = {"/v1/requests": [RECORDED], "/v1/requests/a%2Fb": RECORDED}
    row = printed(tmp_path, answers, "--slowest").splitlines()[1].split()
    assert (row[0], row[-1]) == ("3f2a9c1e", "ok")
    assert printed(tmp_path, answers, "--slowest", "3").splitlines()[1].startswith("3f2a9c1e")
    assert json.loads(printed(tmp_path, answers, "--slowest", "--json")) == [RECORDED]
    assert json.loads(printed(tmp_path, answers, "a/b", "--json")) == RECORDED
    nothing = printed(tmp_path, {"/v1/requests": []}, "--slowest")
    assert nothing == "No request that ended in the last ten minutes has had a token.\n"


@pytest.mark.system
def test_mistakes_are_refused_with_a_sentence(tmp_path: Path) -> None:
    assert "name a request" in run(tmp_path, {}).output
    assert "--slowest takes the number to list" in run(tmp_path, {}, "--slowest", "3f2a9c").output
    unknown = run(tmp_path, {}, "3f2a9c").exception
    assert isinstance(unknown, StartupError) and "there is no such thing" in unknown.message
    older = run(tmp_path, {"/v1/requests/x": {"id": "x"}}, "x").exception
    assert isinstance(older, StartupError) and "unknown form" in older.message
