"""Tests of gRPC under TLS: both sides present a certificate, and strangers are refused."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import grpc
import pytest
from pydantic import SecretStr

from libs.contracts.errors import StartupError
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2, worker_pb2_grpc
from libs.runtime.net.rpc import make_channel, make_server
from libs.runtime.settings import CommonSettings

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")

TOKEN = (("authorization", "Bearer right"),)


class Admin(worker_pb2_grpc.WorkerAdminServiceServicer):
    """A service that answers."""

    async def Describe(self, request: object, context: object) -> worker_pb2.DescribeResponse:  # noqa: N802
        return worker_pb2.DescribeResponse()


def make_certificate(folder: Path, name: str) -> CommonSettings:
    """An authority and a certificate of its making for 127.0.0.1, as settings."""
    ca, ca_key = folder / f"{name}-ca.pem", folder / f"{name}-ca.key"
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1")
    subprocess.run(
        ["openssl", "req", "-x509", *new_key, "-subj", f"/CN={name} authority", "-keyout", ca_key, "-out", ca],
        check=True,
        capture_output=True,
    )
    subprocess.run(
        ["openssl", "req", "-x509", *new_key, "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1",
         "-CA", ca, "-CAkey", ca_key, "-keyout", key, "-out", cert],
        check=True,
        capture_output=True,
    )  # fmt: skip
    return CommonSettings(tls_cert=str(cert), tls_key=str(key), tls_ca=str(ca))


async def describe(server: CommonSettings, client: CommonSettings) -> None:
    """Make one call between two processes with these settings. Raise AioRpcError if they cannot connect."""
    serving, port = make_server(server.model_copy(update={"token": SecretStr("right")}), "127.0.0.1:0")
    worker_pb2_grpc.add_WorkerAdminServiceServicer_to_server(Admin(), serving)
    await serving.start()
    try:
        async with make_channel(client, f"127.0.0.1:{port}") as channel:
            stub = worker_pb2_grpc.WorkerAdminServiceStub(channel)
            await stub.Describe(worker_pb2.DescribeRequest(), metadata=TOKEN, timeout=5)
    finally:
        await serving.stop(None)


@pytest.mark.system
async def test_two_processes_of_one_authority_can_talk(tmp_path: Path) -> None:
    settings = make_certificate(tmp_path, "ours")
    await describe(settings, settings)


@pytest.mark.system
async def test_a_stranger_and_a_plaintext_client_are_refused(tmp_path: Path) -> None:
    ours, theirs = make_certificate(tmp_path, "ours"), make_certificate(tmp_path, "theirs")
    trusting_stranger = CommonSettings(tls_cert=theirs.tls_cert, tls_key=theirs.tls_key, tls_ca=ours.tls_ca)
    for client in (trusting_stranger, CommonSettings()):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await describe(ours, client)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_missing_file_is_one_line_that_names_the_variable(tmp_path: Path) -> None:
    none = {f"tls_{name}": str(tmp_path / f"none.{name}") for name in ("cert", "key", "ca")}
    settings = CommonSettings.model_validate(none)
    with pytest.raises(StartupError, match="FULCRUM_TLS_CERT"):
        make_server(settings, "127.0.0.1:0")


@pytest.mark.system
async def test_beyond_loopback_a_certificate_suffices_for_calls_that_are_not_admin_calls(tmp_path: Path) -> None:
    class Worker(worker_pb2_grpc.WorkerServiceServicer):
        async def Serve(self, _frames: object, context: Any) -> None:  # noqa: N802
            await context.write(worker_pb2.WorkerFrame())

    ours, theirs = make_certificate(tmp_path, "ours"), make_certificate(tmp_path, "theirs")
    stranger = theirs.model_copy(update={"tls_ca": ours.tls_ca})
    serving, port = make_server(ours, "0.0.0.0:0")
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(Worker(), serving)
    await serving.start()
    try:
        for client, served in ((ours, True), (stranger, False), (CommonSettings(), False)):
            async with make_channel(client, f"127.0.0.1:{port}") as channel:
                call = worker_pb2_grpc.WorkerServiceStub(channel).Serve(timeout=5)
                if served:
                    assert await call.read() == worker_pb2.WorkerFrame()
                else:
                    with pytest.raises(grpc.aio.AioRpcError):
                        await call.read()
    finally:
        await serving.stop(None)
