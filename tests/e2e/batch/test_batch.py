"""Tests of files and batches with the official `openai` client, on a suite with an embedded broker."""

import io
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types import Batch

from libs.testing.suites.suite import RunningSuite, running_suite

pytestmark = pytest.mark.suite

CHAT = "/v1/chat/completions"
ENDED = ("completed", "failed", "cancelled", "expired")
MAX_FILE_BYTES = 300_000
MAX_BODY_BYTES = 20_000


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningSuite]:
    folder = tmp_path_factory.mktemp("suite")
    env = {
        "FULCRUM_GATEWAY_FILES_FOLDER": str(folder / "files"),
        "FULCRUM_GATEWAY_FILE_MAX_BYTES": str(MAX_FILE_BYTES),
        "FULCRUM_GATEWAY_FILES_MAX_BYTES": str(6 * MAX_FILE_BYTES),
        "FULCRUM_GATEWAY_MAX_BODY_BYTES": str(MAX_BODY_BYTES),
        "FULCRUM_GATEWAY_BATCH_MAX_LINES": "2000",
    }
    with running_suite(folder, "--engine", "sim", "--prefill", "1", "--decode", "1", env=env) as found:
        yield found


def line(custom_id: str, **change: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"Question {custom_id}"}]
    body = {"model": "sim", "messages": messages, "max_tokens": 6, "temperature": 0, **change.pop("body", {})}
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body, **change}


def upload(client: openai.OpenAI, lines: Sequence[dict[str, Any] | str]) -> str:
    text = "\n".join(item if isinstance(item, str) else json.dumps(item) for item in lines)
    return client.files.create(file=("lines.jsonl", text.encode()), purpose="batch").id


def run(client: openai.OpenAI, file_id: str, *, window: Any = "24h") -> Batch:
    batch = client.batches.create(input_file_id=file_id, endpoint=CHAT, completion_window=window)
    return wait(client, batch)


def wait(client: openai.OpenAI, batch: Batch) -> Batch:
    deadline_s = time.monotonic() + 60
    while batch.status not in ENDED:
        assert time.monotonic() < deadline_s, batch
        time.sleep(0.05)
        batch = client.batches.retrieve(batch.id)
    return batch


def read(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    return [json.loads(text) for text in client.files.content(file_id).text.splitlines()] if file_id else []


def test_every_line_of_a_job_is_answered_as_if_it_were_a_single_request(client: openai.OpenAI) -> None:
    batch = run(client, upload(client, [line(f"line-{number}") for number in range(300)]))
    assert (batch.status, batch.error_file_id) == ("completed", None)
    assert batch.request_counts is not None
    assert batch.request_counts.model_dump() == {"total": 300, "completed": 300, "failed": 0}
    found = read(client, batch.output_file_id)
    assert sorted(entry["custom_id"] for entry in found) == sorted(f"line-{number}" for number in range(300))
    one = next(entry for entry in found if entry["custom_id"] == "line-7")
    alone = client.chat.completions.create(**line("line-7")["body"])
    assert one["response"]["status_code"] == 200
    assert one["response"]["body"]["choices"][0]["message"]["content"] == alone.choices[0].message.content
    assert one["error"] is None
    assert read(client, batch.output_file_id) == found, "a second retrieval returns the same"
    client.files.delete(batch.output_file_id or "")
    with pytest.raises(openai.NotFoundError):
        client.files.content(batch.output_file_id or "")


def test_a_job_of_embeddings_has_the_same_vectors_as_requests(client: openai.OpenAI) -> None:
    lines = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/embeddings", "body": {"model": "sim", "input": [text]}}
        for number, text in enumerate(("a red fox", "a slow dog", ""))
    ]
    job = client.batches.create(input_file_id=upload(client, lines), endpoint="/v1/embeddings", completion_window="24h")
    job = wait(client, job)
    assert job.request_counts is not None
    assert (job.request_counts.completed, job.request_counts.failed) == (2, 1)
    answers = {each["custom_id"]: each["response"]["body"] for each in read(client, job.output_file_id)}
    for number, text in enumerate(("a red fox", "a slow dog")):
        alone = client.embeddings.create(model="sim", input=text, encoding_format="float")
        assert answers[str(number)]["data"][0]["embedding"] == pytest.approx(alone.data[0].embedding)
    (fault,) = read(client, job.error_file_id)
    assert fault["response"]["body"]["error"]["param"] == "input"


def test_a_line_obeys_min_tokens_and_stop_as_a_request_does(client: openai.OpenAI) -> None:
    text = client.chat.completions.create(**line("it")["body"] | {"max_tokens": 12}).choices[0].message.content
    assert text
    bodies: list[dict[str, Any]] = [
        {"max_tokens": 12, "stop": [text[0]]},
        {"max_tokens": 12, "stop": [text[0]], "min_tokens": 12},
        {"max_tokens": 12, "stop": [text[-1]], "min_tokens": 3},
    ]
    lines = [line("it", body=body) | {"custom_id": str(number)} for number, body in enumerate(bodies)]
    batch = run(client, upload(client, lines))
    answers = {entry["custom_id"]: entry["response"]["body"] for entry in read(client, batch.output_file_id)}
    for entry in lines:
        body = dict(entry["body"])
        extra = {"min_tokens": body.pop("min_tokens")} if "min_tokens" in body else None
        alone = client.chat.completions.create(**body, extra_body=extra)
        found = answers[entry["custom_id"]]
        assert found["choices"][0]["message"]["content"] == alone.choices[0].message.content
        assert found["choices"][0]["finish_reason"] == alone.choices[0].finish_reason
        assert alone.usage is not None
        assert found["usage"]["completion_tokens"] == alone.usage.completion_tokens
    assert [answers[str(number)]["choices"][0]["message"]["content"] for number in range(2)] == ["", text]


def test_each_line_that_cannot_run_has_an_error_of_its_own(client: openai.OpenAI) -> None:
    lines = [
        line("good"),
        "{not json",
        line("good"),
        line("elsewhere", url="/v1/images"),
        line("unknown", body={"model": "nope"}),
        line("get", method="GET"),
        line("hot", body={"temperature": 9}),
        "",
        line("long", body={"max_tokens": 10**8}),
        line("last"),
        {**line("x"), "custom_id": 7},
    ]
    batch = run(client, upload(client, lines))
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert batch.request_counts.model_dump() == {"total": 10, "completed": 2, "failed": 8}
    assert {entry["custom_id"] for entry in read(client, batch.output_file_id)} == {"good", "last"}
    errors = {entry["error"]["line"]: entry for entry in read(client, batch.error_file_id)}
    codes = {number: entry["error"]["code"] for number, entry in errors.items()}
    assert codes == {
        2: "invalid_json_line",
        3: "duplicate_custom_id",
        4: "mismatched_url",
        5: "model_not_found",
        6: "invalid_line",
        7: "invalid_request",
        9: "context_length_exceeded",
        11: "invalid_line",
    }
    assert errors[2]["custom_id"] is None
    assert errors[3]["response"] is None
    assert errors[5]["response"]["status_code"] == 404
    assert errors[5]["response"]["body"]["error"]["code"] == "model_not_found"


def test_a_job_cancelled_half_way_has_an_answer_for_every_line(client: openai.OpenAI) -> None:
    file_id = upload(client, [line(str(number), body={"max_tokens": 200}) for number in range(900)])
    batch = client.batches.create(input_file_id=file_id, endpoint=CHAT, completion_window="24h")
    with pytest.raises(openai.ConflictError):
        client.files.delete(file_id)
    while not (batch.request_counts and batch.request_counts.completed):
        batch = client.batches.retrieve(batch.id)
    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    batch = wait(client, batch)
    assert batch.status == "cancelled"
    good, bad = read(client, batch.output_file_id), read(client, batch.error_file_id)
    assert good
    assert {entry["error"]["code"] for entry in bad} == {"batch_cancelled"}
    assert sorted(int(entry["custom_id"]) for entry in good + bad) == list(range(900))
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch.id)
    client.files.delete(file_id)


def test_a_job_whose_window_ends_names_the_lines_that_did_not_run(client: openai.OpenAI) -> None:
    file_id = upload(client, [line(str(number), body={"max_tokens": 400}) for number in range(600)])
    batch = run(client, file_id, window="1s")
    good, bad = read(client, batch.output_file_id), read(client, batch.error_file_id)
    assert batch.status == "expired"
    assert {entry["error"]["code"] for entry in bad} == {"batch_expired"}
    assert sorted(int(entry["custom_id"]) for entry in good + bad) == list(range(600))


def test_a_job_that_will_be_late_reports_it_before_its_window_ends(client: openai.OpenAI, suite: RunningSuite) -> None:
    file_id = upload(client, [line(str(number), body={"max_tokens": 400}) for number in range(1200)])
    window: Any = "10s"
    late = client.batches.create(input_file_id=file_id, endpoint=CHAT, completion_window=window)
    deadline_s = time.monotonic() + 9.5
    while not (found := client.batches.retrieve(late.id).model_dump()["fulcrum"])["late"]:
        assert time.monotonic() < deadline_s, "it was reported before the window ended"
        time.sleep(0.05)
    assert found["expected_end_at"] is None or found["expected_end_at"] > (late.expires_at or 0)
    assert "later than its window" in suite.fulcrum("batch", "status", late.id).stdout
    wait(client, client.batches.cancel(late.id))


@pytest.mark.parametrize(
    ("lines", "code"), [(["", "  "], "empty_file"), ([line(str(number)) for number in range(2001)], "too_many_lines")]
)
def test_a_file_that_is_no_job_fails_the_batch(client: openai.OpenAI, lines: list[Any], code: str) -> None:
    compact = [item if isinstance(item, str) else '{"custom_id":"x"}' for item in lines]
    batch = run(client, upload(client, compact))
    assert batch.status == "failed"
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert [error.code for error in batch.errors.data] == [code]


def test_refused_uploads_leave_nothing(client: openai.OpenAI) -> None:
    before = [item.id for item in client.files.list()]

    def refused(content: bytes, purpose: Any = "batch") -> openai.APIStatusError:
        with pytest.raises(openai.APIStatusError) as caught:
            client.files.create(file=("f", io.BytesIO(content)), purpose=purpose)
        return caught.value

    assert refused(b"").param == "file"
    assert refused(b"{}", purpose="fine-tune").param == "purpose"
    assert refused(b"x" * (MAX_BODY_BYTES + 1)).param == "file"
    assert refused(b"x\n" * (MAX_FILE_BYTES // 2 + 1)).status_code == 413
    assert [item.id for item in client.files.list()] == before


def test_a_full_store_refuses_files_until_one_is_deleted(client: openai.OpenAI) -> None:
    kept: list[str] = []
    with pytest.raises(openai.APIStatusError) as caught:
        for _ in range(12):
            kept.append(client.files.create(file=("f", b"{}\n" * 60_000), purpose="batch").id)  # noqa: PERF401
    assert (caught.value.status_code, caught.value.code) == (507, "store_full")
    for file_id in kept:
        client.files.delete(file_id)
    assert upload(client, [line("a")])


def test_files_and_batches_are_listed_in_pages(client: openai.OpenAI) -> None:
    ids = [upload(client, [line(str(number))]) for number in range(3)]
    assert set(ids) <= {item.id for item in client.files.list(limit=2)}, "the client turns the pages"
    assert client.files.list(limit=1).has_more
    batches = [run(client, file_id).id for file_id in ids]
    assert set(batches) <= {item.id for item in client.batches.list(limit=1)}
    assert client.files.retrieve(ids[0]).filename == "lines.jsonl"


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"input_file_id": "file-none"}, 404, "input_file_id"),
        ({"endpoint": "/v1/images"}, 400, "endpoint"),
        ({"completion_window": "soon"}, 400, "completion_window"),
    ],
)
def test_an_invalid_batch_is_refused_with_the_name_of_its_field(
    client: openai.OpenAI, change: dict[str, Any], status: int, param: str
) -> None:
    body = {"input_file_id": upload(client, [line("a")]), "endpoint": CHAT, "completion_window": "24h"}
    with pytest.raises(openai.APIStatusError) as caught:
        client.batches.create(**{**body, **change})
    assert (caught.value.status_code, caught.value.param) == (status, param)


def test_an_unknown_batch_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.batches.retrieve("batch_none")
    assert caught.value.code == "batch_not_found"


def test_malformed_forms_are_refused(suite: RunningSuite) -> None:
    with httpx.Client(base_url=suite.gateway) as http:
        assert http.post("/v1/files", content=b"{}").status_code == 415
        broken = {"content-type": "multipart/form-data; boundary=x"}
        answer = http.post("/v1/files", content=b"--x\r\nno header", headers=broken)
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "invalid_request_error"
        assert http.post("/v1/files", files={"file": ("f", b"{}")}).json()["error"]["param"] == "purpose"


def test_the_command_line_submits_waits_fetches_lists_and_cancels(suite: RunningSuite, tmp_path: Path) -> None:
    def fulcrum(*arguments: str) -> Any:
        done = suite.fulcrum("batch", *arguments, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    file, good, bad = (tmp_path / name for name in ("in.jsonl", "good.jsonl", "bad.jsonl"))
    file.write_text("\n".join(json.dumps(item) for item in (line("a"), line("b", method="GET"), line("c"))))
    found = fulcrum("submit", str(file), "--output", str(good), "--errors", str(bad))
    assert {key: found[key] for key in ("status", "total", "completed", "failed")} == {
        "status": "completed", "total": 3, "completed": 2, "failed": 1,
    }  # fmt: skip
    assert found["lines_per_s"] > 0
    assert {json.loads(text)["custom_id"] for text in good.read_text().splitlines()} == {"a", "c"}
    assert [json.loads(text)["custom_id"] for text in bad.read_text().splitlines()] == ["b"]
    assert fulcrum("status", found["id"])["status"] == "completed"
    assert found["id"] in {job["id"] for job in fulcrum("list")}
    nowhere = suite.fulcrum("batch", "submit", str(file), "--output", str(tmp_path / "none" / "good.jsonl"))
    assert (nowhere.returncode, "there is no folder" in nowhere.stderr) == (1, True), "printed before the job runs"
    shown = suite.fulcrum("batch", "results", found["id"])
    assert shown.stdout == good.read_text()
    again = suite.fulcrum("batch", "cancel", found["id"])
    assert (again.returncode, "completed already" in again.stderr) == (1, True)
