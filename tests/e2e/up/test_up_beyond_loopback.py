"""Tests of a suite whose processes listen on every address: its parts present the token, strangers get nothing."""

from collections.abc import Iterator

import grpc
import httpx
import pytest

from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2_grpc as pb_grpc
from libs.runtime.net.rpc import make_channel
from libs.runtime.settings import CommonSettings
from libs.testing.suites.suite import RunningSuite, running_suite

pytestmark = pytest.mark.suite
BEYOND = {"FULCRUM_HOST": "0.0.0.0", "FULCRUM_ALLOW_PLAINTEXT_TOKEN": "1", "FULCRUM_WORKER_KV_SHARED_DIR": ""}


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningSuite]:
    folder = tmp_path_factory.mktemp("beyond")
    with running_suite(folder, "--engine", "sim", env={**BEYOND, "FULCRUM_CACHE": str(folder / "cache")}) as found:
        yield found


def addresses(suite: RunningSuite) -> list[str]:
    workers = httpx.get(f"{suite.ready['planner']}/v1/workers").json()
    return [str(worker["address"]) for worker in workers]


def test_a_request_passes_from_gateway_over_prefill_to_decode(suite: RunningSuite) -> None:
    body = {"model": "sim", "prompt": "Hello " * 40, "max_tokens": 8, "ignore_eos": True}
    answer = httpx.post(f"{suite.gateway}/v1/completions", json=body, timeout=30)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 8


def test_the_command_line_sends_the_token_in_plain_text_only_if_that_is_allowed(suite: RunningSuite) -> None:
    assert not any(address.startswith("127.") for address in addresses(suite))
    arguments = ("role", "decode-1", "mixed", "--json")
    done = suite.fulcrum(*arguments)
    assert done.returncode == 0, done.stderr
    del suite.env["FULCRUM_ALLOW_PLAINTEXT_TOKEN"]
    refused = suite.fulcrum(*arguments)
    suite.env.update(BEYOND)
    assert refused.returncode == 1 and "FULCRUM_ALLOW_PLAINTEXT_TOKEN" in refused.stderr, refused.stderr
    assert "Traceback" not in refused.stderr


async def test_a_stranger_gets_nothing_from_a_worker(suite: RunningSuite) -> None:
    for address in addresses(suite):
        async with make_channel(CommonSettings(), address) as channel:
            call = pb_grpc.WorkerServiceStub(channel).Serve(timeout=10)  # type: ignore[no-untyped-call]
            # The call sends nothing: a write that meets the refusal can replace the refusal's code by its own.
            with pytest.raises(grpc.aio.AioRpcError):
                await call.read()
            assert await call.code() is grpc.StatusCode.UNAUTHENTICATED


def test_a_job_may_not_read_a_topic_that_is_not_allowed(suite: RunningSuite) -> None:
    body = {"endpoint": "/v1/completions", "input_topic": "batch.lines"}
    answer = httpx.post(f"{suite.gateway}/v1/batches", json=body, timeout=30)
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "topic_not_allowed")
