"""Tests of logs of other systems and results of load generators read as traces."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from libs.contracts.errors import InvalidRequest
from libs.lab.traces.columns import WORKING_HEADER
from libs.lab.traces.read import read_trace
from libs.lab.traces.request import Trace

SECOND_NS = 1_000_000_000
BEGAN_S = 1_795_980_650


def guidellm(*starts_s: float, benchmarks: int = 1) -> dict[str, Any]:
    """Return what guidellm 0.8.1 writes, without the keys that no trace needs."""
    rows = [
        {
            "type_": "generative_request_stats",
            "request_id": str(at),
            "request_start_time": BEGAN_S + at,
            "prompt_tokens": 10,
            "output_tokens": 8,
        }
        for at in starts_s
    ]
    requests = {"successful": rows, "errored": [rows[0]], "incomplete": [], "total": None}
    return {
        "metadata": {"version": 2, "guidellm_version": "0.8.1"},
        "config": {},
        "benchmarks": [{"type_": "generative_benchmark", "requests": requests}] * benchmarks,
        "conclusions": [],
    }


def aiperf(at_ns: int, **changes: Any) -> dict[str, Any]:
    """Return a record of aiperf 0.13.0, without the keys that no trace needs."""
    metadata = {
        "session_num": 0,
        "request_start_ns": at_ns,
        "request_end_ns": at_ns + SECOND_NS,
        "worker_id": "worker_1",
        "record_processor_id": "processor_1",
        "benchmark_phase": "profiling",
    }
    metrics = {
        "input_sequence_length": {"value": 550, "unit": "tokens"},
        "output_sequence_length": {"value": 120, "unit": "tokens"},
    }
    return {"metadata": {**metadata, **changes.pop("metadata", {})}, "metrics": metrics, **changes}


def dynamo(at_ms: int, *, wrapped: bool = False, block: int = 64, **changes: Any) -> dict[str, Any]:
    """Return a line of a request trace, as in the tests of ai-dynamo 1.6.1."""
    event = {
        "schema": "dynamo.request.trace.v1",
        "event_type": "request_end",
        "event_time_unix_ms": at_ms + 1_000,
        "request": {
            "request_id": f"request-{at_ms}",
            "request_received_ms": at_ms,
            "output_tokens": 7,
            "replay": {"trace_block_size": block, "input_length": 100, "input_sequence_hashes": [1, (1 << 64) - 1]},
        },
        **changes,
    }
    return {"timestamp": at_ms + 1_000, "event": event} if wrapped else event


def vllm_bench(**changes: Any) -> dict[str, Any]:
    """Return what vllm 0.32.0 writes with --save-detailed, without the keys that no trace needs."""
    return {
        "date": "20261129-192311",
        "endpoint_type": "vllm",
        "backend": "vllm",
        "model_id": "m",
        "tokenizer_id": "m",
        "num_prompts": 3,
        "input_lens": [100, 200, 300],
        "output_lens": [10, 0, 30],
        "start_times": [5.5, 5.25, 5.0],
        "errors": ["", "refused", ""],
        **changes,
    }


def write(folder: Path, *rows: dict[str, Any], indent: int | None = None) -> Path:
    path = folder / "trace.json"
    path.write_text("\n".join(json.dumps(row, indent=indent) for row in rows) + "\n")
    return path


def lengths(trace: Trace) -> list[tuple[int, int, int]]:
    return [(each.arrival_ns, each.input_tokens, each.output_tokens) for each in trace.requests]


@pytest.mark.parametrize("indent", [None, 1])
def test_guidellm_output_is_read_in_order_of_arrival_without_failed_requests(tmp_path: Path, indent: int) -> None:
    found = read_trace(write(tmp_path, guidellm(1.5, 0.5), indent=indent), seed=1)
    assert lengths(found) == [(0, 10, 8), (SECOND_NS, 10, 8)]
    assert any("1 requests that failed" in note for note in found.notes)
    assert any("not of users" in note for note in found.notes)


def test_a_compressed_document_is_read_and_cut_by_its_window(tmp_path: Path) -> None:
    path = tmp_path / "report.json.gz"
    path.write_bytes(gzip.compress(json.dumps(guidellm(0.5, 1.5, 2.5)).encode()))
    assert [each.arrival_ns for each in read_trace(path, seed=1, start_s=1, seconds=1).requests] == [0]


def test_several_benchmarks_of_a_guidellm_sweep_become_one_trace_that_says_so(tmp_path: Path) -> None:
    found = read_trace(write(tmp_path, guidellm(0.5, 1.5, benchmarks=2)), seed=1)
    assert len(found.requests) == 4 and any("2 benchmarks" in note for note in found.notes)


def test_aiperf_records_are_read_without_warm_up_errors_and_requests_without_lengths(tmp_path: Path) -> None:
    rows = (
        aiperf(9 * SECOND_NS),
        aiperf(8 * SECOND_NS),
        aiperf(1, metadata={"benchmark_phase": "warmup"}),
        aiperf(2, error={"code": 500, "message": "no"}, metrics={}),
        aiperf(3, metadata={"was_cancelled": True}),
    )
    found = read_trace(write(tmp_path, *rows), seed=1)
    assert lengths(found) == [(0, 550, 120), (SECOND_NS, 550, 120)]
    assert any("3 requests" in note for note in found.notes)


def test_a_dynamo_trace_preserves_its_blocks_and_skips_other_events(tmp_path: Path) -> None:
    tool = {"schema": "dynamo.request.trace.v1", "event_type": "tool_end", "event_time_unix_ms": 1}
    found = read_trace(write(tmp_path, tool, dynamo(2_000, wrapped=True), dynamo(1_000)), seed=1)
    assert lengths(found) == [(0, 100, 7), (SECOND_NS, 100, 7)]
    assert found.block_tokens == 64 and found.requests[0].hash_ids == (1, (1 << 64) - 1)


def test_blocks_of_two_sizes_in_one_dynamo_trace_are_refused_by_line(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r":2: trace_block_size is 128, and 64"):
        read_trace(write(tmp_path, dynamo(1), dynamo(2, block=128)), seed=1)


def test_a_result_of_vllm_bench_is_read_with_the_times_of_its_requests(tmp_path: Path) -> None:
    found = read_trace(write(tmp_path, vllm_bench()), seed=1)
    assert lengths(found) == [(0, 300, 30), (SECOND_NS // 2, 100, 10)]


@pytest.mark.parametrize(
    ("rows", "what"),
    [
        ([vllm_bench(start_times=None)], "--save-detailed"),
        ([vllm_bench(start_times=[1.0])], "differ in length"),
        ([vllm_bench(), vllm_bench()], "cut into its lines"),
        ([{**guidellm(1.0), "benchmarks": [3]}], "not a list of JSON objects"),
        ([{**guidellm(1.0), "benchmarks": [{}]}], "requests is not a JSON object"),
        ([{**guidellm(1.0), "benchmarks": []}], "no request with times and lengths"),
        ([aiperf(1), {"metadata": 3}], ":2: metadata is not a JSON object"),
        ([aiperf(-1)], "request_start_ns is -1"),
        ([dynamo(1), dynamo(2, schema="other")], ":2: its schema is not"),
        ([dynamo(1, request={})], ":1: replay is not a JSON object"),
    ],
)
def test_an_invalid_log_is_one_line(tmp_path: Path, rows: list[dict[str, Any]], what: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_trace(write(tmp_path, *rows), seed=1)
    assert what in caught.value.message and "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("header", "first", "second", "gap_ns"),
    [
        ("time_s,input_tokens,output_tokens", "0.5,10,3", "2,10,3", 1_500_000_000),
        ("Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type", "5,m,10,3,13,x", "45,m,10,3,13,x",
         40 * SECOND_NS),
        ("arrival_ms,isl,osl", "100,10,3", "350.5,10,3", 250_500_000),
        ("arrived_at,prompt_tokens,completion_tokens", "1795980650000,10,3", "1795980650250,10,3", 250_000_000),
        ("start time (ns),num_prompt_tokens,num_completion_tokens", "1795980650000000001,10,3",
         "1795980650000000003,10,3", 2),
        ("created_at,PromptTokens,GeneratedTokens", "2026-11-29T19:00:00Z,10,3", "2026-11-29 19:00:00.25+00:00,10,3",
         250_000_000),
    ],
)  # fmt: skip
def test_a_csv_is_read_by_common_column_names_of_times_and_lengths(
    tmp_path: Path, header: str, first: str, second: str, gap_ns: int
) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(f"{header}\n{second}\n{first}\n")
    assert lengths(read_trace(path, seed=1)) == [(0, 10, 3), (gap_ns, 10, 3)]


def test_limits_and_models_of_a_csv_are_preserved_and_requests_without_tokens_omitted(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("time,input_tokens,output_tokens,max_tokens,model\n1,10,3,64,m\n2,10,0,64,m\n3,10,4,,n\n")
    found = read_trace(path, seed=1)
    assert [(each.max_output_tokens, each.model) for each in found.requests] == [(64, "m"), (0, "n")]
    assert any("1 requests that failed" in note for note in found.notes)
    assert any("times are in s" in note for note in found.notes)


def test_two_columns_of_one_meaning_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("time,arrival,input_tokens,output_tokens\n1,1,1,1\n")
    with pytest.raises(InvalidRequest, match="time and arrival are both columns of time"):
        read_trace(path, seed=1)


@pytest.mark.parametrize("column", ["requests", "num_requests", "requests_per_s", "RPS"])
def test_bins_of_many_requests_are_not_read_as_requests(tmp_path: Path, column: str) -> None:
    path = tmp_path / "hours.csv"
    path.write_text(f"time,{column},prompt_tokens,completion_tokens\n2026-11-09T00:00:00,2004,2805600,360720\n")
    with pytest.raises(InvalidRequest, match=f"{column} counts requests, so a row is a bin: .* t_s,requests_per_s,"):
        read_trace(path, seed=1)


@pytest.mark.parametrize("text", ["time,tokens\n1,2\n", "1,2,3\n", '{"a": 1}\n', "[1]\n", "hello\n"])
def test_a_file_of_unknown_format_is_refused_with_an_example_header(tmp_path: Path, text: str) -> None:
    path = tmp_path / "mine.txt"
    path.write_text(text)
    with pytest.raises(InvalidRequest) as caught:
        read_trace(path, seed=1)
    assert f"this header works: {','.join(WORKING_HEADER)}" in caught.value.message
    for name in ("GuideLLM", "AIPerf", "vllm bench", "Dynamo", "Mooncake"):
        assert name in caught.value.message
    assert "`fulcrum lab traces`" in caught.value.message
    assert "ContextTokens" not in caught.value.message, "columns of other formats would hide the header that works"
    assert len(caught.value.message) < 500


def test_a_trace_with_the_columns_of_vidur_is_read(tmp_path: Path) -> None:
    path = tmp_path / "vidur.csv"
    path.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n5,10,5\n1.5,30,6\n")
    found = read_trace(path, seed=1)
    assert [(each.arrival_ns, each.input_tokens, each.output_tokens) for each in found.requests] == [
        (0, 30, 6),
        (3_500_000_000, 10, 5),
    ]
