"""Test of a batch job whose files are in an S3 bucket."""

from collections.abc import Iterator
from pathlib import Path

import boto3
import httpx
import pytest
from moto.server import ThreadedMotoServer

from libs.testing.batch.jobs import ENDED, answered, done, submit, unanswered, until_answered, write_lines
from libs.testing.suites.processes import kill
from libs.testing.suites.suite import running_suite

pytestmark = pytest.mark.suite

LINES = 300
BUCKET, PREFIX = "batches", "here/"


@pytest.fixture
def endpoint() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


async def test_a_job_whose_files_are_in_a_bucket_survives_its_gateway(endpoint: str, tmp_path: Path) -> None:
    keys = {"aws_access_key_id": "any", "aws_secret_access_key": "any", "region_name": "us-east-1"}
    bucket = boto3.resource("s3", endpoint_url=endpoint, **keys).create_bucket(Bucket=BUCKET)
    env = {
        "FULCRUM_GATEWAY_FILES_S3_BUCKET": BUCKET,
        "FULCRUM_GATEWAY_FILES_S3_PREFIX": PREFIX,
        "FULCRUM_GATEWAY_FILES_S3_ENDPOINT": endpoint,
        "FULCRUM_GATEWAY_FILES_S3_REGION": keys["region_name"],
        "FULCRUM_GATEWAY_FILES_S3_ACCESS_KEY": "any",
        "FULCRUM_GATEWAY_FILES_S3_SECRET_KEY": "any",
    }
    write_lines(tmp_path / "lines.jsonl", LINES, max_tokens=64)
    with running_suite(tmp_path, "--engine", "sim", "--prefill", "1", "--decode", "1", env=env) as suite:
        async with httpx.AsyncClient(timeout=30) as http:
            batch_id = await submit(http, suite.gateway, tmp_path / "lines.jsonl")
            batch = await until_answered(http, [suite.gateway], batch_id, lines=LINES // 4)
            assert batch["status"] not in ENDED
            await kill(suite, "gateway-1")
            batch = await until_answered(http, [suite.gateway], batch_id)
            assert (batch["status"], done(batch)) == ("completed", LINES)
            assert not list(unanswered(await answered(http, suite.gateway, batch), LINES))
    kept = {item.key for item in bucket.objects.all()}
    assert kept
    assert all(key.startswith(PREFIX) for key in kept)
    assert any(batch["output_file_id"] in key for key in kept)
