"""What one line, one client or one topic may cost a batch gateway."""

import asyncio
import json

import pytest
from starlette.requests import Request
from starlette.types import Message

from libs.contracts.errors import InvalidRequest, UnknownModel
from libs.contracts.pb.fulcrum.batch.v1.batch_pb2 import Result
from services.gateway.batch import upload as upload_module
from services.gateway.batch.answers import MAX_RESULT_BYTES, fitting, refused
from services.gateway.batch.line import Line, read_line

SMALL_BYTES = 20_000


def read(**change: object) -> Line:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}, **change}
    return read_line(json.dumps(line).encode(), number=7, place=6, endpoint="/v1/completions", repeated=False)


@pytest.mark.parametrize(
    "change",
    [
        {"custom_id": "x" * 600_000},
        {"custom_id": "x" * 600_000, "body": None, "method": 3},
        {"url": "x" * 1_100_000},
        {"method": "x" * 1_100_000},
    ],
)
def test_a_line_that_is_refused_costs_no_more_than_its_reason(change: dict[str, object]) -> None:
    line = read(**change)
    assert line.refusal is not None
    result = refused("batch_1", line, line.refusal)
    assert result.ByteSize() < SMALL_BYTES
    assert json.loads(result.answer)["error"]["line"] == 7


def test_what_an_error_echoes_is_cut_wherever_it_is_told() -> None:
    name = "m" * 1_100_000
    result = refused("batch_1", read(), UnknownModel(f"model {name} is not served", param=name))
    assert result.ByteSize() < SMALL_BYTES
    assert json.loads(result.answer)["response"]["body"]["error"]["code"] == "model_not_found"


def test_a_result_that_no_record_holds_becomes_an_error_of_its_line() -> None:
    whole = Result(job_id="batch_1", custom_id="a", ok=True, answer=b"{}")
    assert fitting(whole, read()) is whole
    found = fitting(Result(job_id="batch_1", custom_id="a", ok=True, answer=b"x" * MAX_RESULT_BYTES), read())
    assert (found.ok, found.custom_id) == (False, "a")
    assert json.loads(found.answer)["error"]["code"] == "answer_too_large"
    assert found.ByteSize() < SMALL_BYTES


async def test_an_upload_that_drips_is_ended_and_one_that_flows_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload_module, "BODY_TIMEOUT_S", 0.2)

    async def body(part: bytes, count: int) -> int:
        parts = iter([part] * count)

        async def receive() -> Message:
            await asyncio.sleep(0.04)
            found = next(parts, b"")
            return {"type": "http.request", "body": found, "more_body": bool(found)}

        request = Request({"type": "http", "method": "POST", "headers": []}, receive)
        return sum([len(part) async for part in upload_module.chunks(request)])

    assert await body(b"x" * (upload_module.MIN_BYTES_PER_S // 10), 12) > 0
    with pytest.raises(InvalidRequest, match="bytes a second"):
        await body(b"x", 100)
