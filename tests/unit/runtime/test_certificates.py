"""Tests of certificates made by `fulcrum tls`: their roles, the calls of each role, and rotation under load."""

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from stat import S_IMODE
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from pydantic import SecretStr

from libs.contracts.errors import PermissionDenied, StartupError
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2, worker_pb2_grpc
from libs.runtime.net.access import CERTIFICATE_ROLES, CertifiedPeer, certified, check_peer, role_uri
from libs.runtime.net.authority import CredentialFiles, describe, issue
from libs.runtime.net.rpc import make_channel, make_server
from libs.runtime.settings import CommonSettings

NAMES = ("127.0.0.1", "localhost")
TOKEN = (("authorization", "Bearer right"),)
SERVE, PULL = "/fulcrum.worker.v1.WorkerService/Serve", "/fulcrum.worker.v1.KvService/Pull"
SET_ROLE = "/fulcrum.worker.v1.WorkerAdminService/SetRole"
HEALTH = "/grpc.health.v1.Health/Check"
ALLOWED = {
    SERVE: {"gateway"},
    PULL: {"worker"},
    SET_ROLE: {"planner", "operator"},
    HEALTH: set(CERTIFICATE_ROLES),
}


def now() -> datetime:
    return datetime.now(UTC)


def settings_of(folder: Path, role: str) -> CommonSettings:
    held = str(folder / f"{role}.pem")
    files = {"tls_cert": held, "tls_key": held, "tls_ca": str(folder / "ca.pem")}
    return CommonSettings.model_validate({**files, "token": SecretStr("right")})


class Admin(worker_pb2_grpc.WorkerAdminServiceServicer):
    async def SetRole(self, request: object, context: object) -> worker_pb2.SetRoleResponse:  # noqa: N802
        return worker_pb2.SetRoleResponse(running=7)


class Worker(worker_pb2_grpc.WorkerServiceServicer):
    async def Serve(self, _frames: object, context: Any) -> None:  # noqa: N802
        await context.write(worker_pb2.WorkerFrame())


class Kv(worker_pb2_grpc.KvServiceServicer):
    async def Pull(self, _frames: Any, _context: Any) -> AsyncIterator[worker_pb2.KvFrame]:  # noqa: N802
        yield worker_pb2.KvFrame()


@asynccontextmanager
async def served(settings: CommonSettings) -> AsyncIterator[str]:
    server, port = make_server(settings, "127.0.0.1:0")
    worker_pb2_grpc.add_WorkerAdminServiceServicer_to_server(Admin(), server)
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(Worker(), server)
    worker_pb2_grpc.add_KvServiceServicer_to_server(Kv(), server)
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def call(address: str, client: CommonSettings, method: str) -> grpc.StatusCode:
    """Return the outcome of one call by that client."""
    async with make_channel(client, address) as channel:
        try:
            if method == SET_ROLE:
                stub = worker_pb2_grpc.WorkerAdminServiceStub(channel)
                answer = await stub.SetRole(worker_pb2.SetRoleRequest(), metadata=TOKEN, timeout=5)
                assert answer.running == 7
            elif method == HEALTH:
                await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
            elif method == SERVE:
                assert await worker_pb2_grpc.WorkerServiceStub(channel).Serve(timeout=5).read() is not grpc.aio.EOF
            else:
                assert await worker_pb2_grpc.KvServiceStub(channel).Pull(timeout=5).read() is not grpc.aio.EOF
        except grpc.aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK


@pytest.mark.system
async def test_each_role_can_make_its_own_calls_and_no_others(tmp_path: Path) -> None:
    issue(tmp_path, "local", now=now(), names=NAMES)
    async with served(settings_of(tmp_path, "worker")) as address:
        for method, allowed in ALLOWED.items():
            for role in CERTIFICATE_ROLES:
                code = await call(address, settings_of(tmp_path, role), method)
                wanted = grpc.StatusCode.OK if role in allowed else grpc.StatusCode.PERMISSION_DENIED
                assert code is wanted, (method, role)


@pytest.mark.system
async def test_another_clusters_certificate_and_an_expired_one_are_refused(tmp_path: Path) -> None:
    issue(tmp_path, "local", now=now(), names=NAMES)
    other = tmp_path / "other"
    other.mkdir()
    for name in ("ca.pem", "ca-key.pem"):  # even where two clusters share an authority
        (other / name).write_bytes((tmp_path / name).read_bytes())
    issue(other, "west", now=now(), names=NAMES)
    ended = tmp_path / "ended"
    ended.mkdir()
    for name in ("ca.pem", "ca-key.pem"):
        (ended / name).write_bytes((tmp_path / name).read_bytes())
    issue(ended, "local", now=now() - timedelta(days=2), names=NAMES, days=1)
    async with served(settings_of(tmp_path, "worker")) as address:
        assert await call(address, settings_of(other, "gateway"), SERVE) is grpc.StatusCode.PERMISSION_DENIED
        assert await call(address, settings_of(ended, "gateway"), SERVE) is grpc.StatusCode.UNAVAILABLE
        assert await call(address, settings_of(tmp_path, "gateway"), SERVE) is grpc.StatusCode.OK


def held(settings: CommonSettings) -> tuple[bytes, bytes]:
    return Path(settings.tls_cert).read_bytes(), Path(settings.tls_ca).read_bytes()


@pytest.mark.system
async def test_a_rotation_fails_no_call(tmp_path: Path) -> None:
    issue(tmp_path, "local", now=now(), names=NAMES)
    gateway, outcomes, ending = settings_of(tmp_path, "gateway"), [], asyncio.Event()

    async def calls(address: str) -> None:
        while not ending.is_set():
            before, outcome = held(gateway), await call(address, gateway, SERVE)
            # Who read its files before a rotation and shakes hands after it connects anew, as links do.
            while outcome is not grpc.StatusCode.OK and held(gateway) != before:
                before, outcome = held(gateway), await call(address, gateway, SERVE)
            outcomes.append(outcome)

    async with served(settings_of(tmp_path, "worker")) as address:
        calling = asyncio.create_task(calls(address))
        for authority in (False, True, False, True):
            seen = len(outcomes)
            await asyncio.to_thread(issue, tmp_path, "local", now=now(), names=NAMES, new_authority=authority)
            while len(outcomes) < seen + 5:
                await asyncio.sleep(0.01)
        ending.set()
        await calling
        assert set(outcomes) == {grpc.StatusCode.OK}


@pytest.mark.system
@pytest.mark.parametrize("first", ["tls_key", "tls_cert"])
def test_key_and_certificate_are_never_of_two_rotations(tmp_path: Path, first: str) -> None:
    """Certificates that others make lie in two files, of which one is replaced first."""
    issue(tmp_path, "local", now=now(), names=NAMES)
    made = settings_of(tmp_path, "worker")
    names = {"tls_key": str(tmp_path / "tls.key"), "tls_cert": str(tmp_path / "tls.crt")}
    apart = CredentialFiles(names["tls_cert"], names["tls_key"], made.tls_ca)
    files = [Path(names[first]), *(Path(file) for name, file in names.items() if name != first)]
    pairs = []
    for _ in range(4):
        issue(tmp_path, "local", now=now(), names=NAMES, roles=("worker",))
        pairs.append(Path(made.tls_cert).read_bytes())
    for file in files:
        file.write_bytes(pairs[0])
    ending = threading.Event()

    def rotate() -> None:
        for pair in itertools.cycle(pairs):
            for file in files:
                part = file.with_suffix(".part")
                part.write_bytes(pair)
                part.replace(file)
            if ending.wait(0.001):
                return

    rotating = threading.Thread(target=rotate)
    rotating.start()
    try:
        for _ in range(300):
            read = apart.read()
            assert read.key == read.cert
    finally:
        ending.set()
        rotating.join()


@pytest.mark.system
async def test_a_channel_uses_the_last_certificate_while_its_file_is_written(tmp_path: Path) -> None:
    """A client that connects meanwhile is no reason to stop a service."""
    issue(tmp_path, "local", now=now(), names=NAMES)
    gateway = settings_of(tmp_path, "gateway")
    async with served(settings_of(tmp_path, "worker")) as address:
        assert await call(address, gateway, SERVE) is grpc.StatusCode.OK
        whole = Path(gateway.tls_cert).read_bytes()
        for broken in (whole[:200], whole[:-40], b""):
            Path(gateway.tls_cert).write_bytes(broken)
            assert await call(address, gateway, SERVE) is grpc.StatusCode.OK
        Path(gateway.tls_cert).unlink()
        assert await call(address, gateway, SERVE) is grpc.StatusCode.OK


@pytest.mark.system
def test_a_key_of_another_certificate_is_refused_by_name(tmp_path: Path) -> None:
    issue(tmp_path, "local", now=now(), names=NAMES)
    mixed = settings_of(tmp_path, "worker").model_copy(update={"tls_key": str(tmp_path / "gateway.pem")})
    with pytest.raises(StartupError, match=r"gateway\.pem.* is not that of the certificate in .*worker\.pem"):
        make_server(mixed, "127.0.0.1:0")
    with pytest.raises(StartupError, match="holds no certificate"):
        make_channel(mixed.model_copy(update={"tls_cert": str(tmp_path / "ca-key.pem")}), "127.0.0.1:1")


@pytest.mark.system
async def test_a_certificate_of_a_retired_authority_is_refused_without_a_restart(tmp_path: Path) -> None:
    issue(tmp_path, "local", now=now(), names=NAMES)
    old = tmp_path / "old"
    old.mkdir()
    for name in ("ca.pem", "gateway.pem"):
        (old / name).write_bytes((tmp_path / name).read_bytes())
    async with served(settings_of(tmp_path, "worker")) as address:
        leaked = settings_of(old, "gateway").model_copy(update={"tls_ca": str(tmp_path / "ca.pem")})
        assert await call(address, leaked, SERVE) is grpc.StatusCode.OK
        issue(tmp_path, "local", now=now(), names=NAMES, new_authority=True)
        assert await call(address, leaked, SERVE) is grpc.StatusCode.OK
        issue(tmp_path, "local", now=now(), names=NAMES, new_authority=True)
        assert await call(address, leaked, SERVE) is grpc.StatusCode.UNAVAILABLE


@pytest.mark.system
async def test_unreadable_files_leave_the_last_certificates_in_use(tmp_path: Path) -> None:
    issue(tmp_path, "local", now=now(), names=NAMES)
    async with served(settings_of(tmp_path, "worker")) as address:
        (tmp_path / "worker.pem").rename(tmp_path / "gone.pem")
        assert await call(address, settings_of(tmp_path, "gateway"), SERVE) is grpc.StatusCode.OK


def test_keys_are_private_to_their_owner_and_listed(tmp_path: Path) -> None:
    made = issue(tmp_path, "local", now=now(), names=NAMES)
    assert [each.role for each in made] == list(CERTIFICATE_ROLES)
    assert S_IMODE(tmp_path.stat().st_mode) == 0o700
    for each in (tmp_path / "ca-key.pem", *(each.file for each in made)):
        assert S_IMODE(each.stat().st_mode) == 0o600, each
    assert {name for each in describe(tmp_path) for name in each.names} == set(NAMES)


def test_an_unwritable_folder_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StartupError, match="certificates cannot be made"):
        issue(tmp_path / "file" / "below", "local", now=now(), names=NAMES)


def test_an_authority_without_roles_lets_every_certificate_call() -> None:
    check_peer(None, None, SET_ROLE)
    own = CertifiedPeer("local", "worker")
    for peer in (None, CertifiedPeer("west", "planner"), CertifiedPeer("local", "gateway")):
        with pytest.raises(PermissionDenied):
            check_peer(own, peer, SET_ROLE)
    check_peer(own, None, HEALTH)


def test_a_name_that_only_resembles_a_role_is_not_one() -> None:
    assert certified([role_uri("local", "planner")]) == CertifiedPeer("local", "planner")
    for forged in (
        "spiffe://local.fulcrum.evil/planner",
        "spiffe://x.local.fulcrum/planner",
        "https://local.fulcrum/planner",
        "spiffe://local.fulcrum/planner/../gateway",
        " spiffe://local.fulcrum/planner",
    ):
        assert certified([forged]) is None, forged


def test_one_folder_serves_every_role(tmp_path: Path) -> None:
    class GatewaySettings(CommonSettings):
        tls_role = "gateway"

    found = GatewaySettings.model_validate({"FULCRUM_TLS_FOLDER": str(tmp_path)})
    assert found.tls_cert == found.tls_key == str(tmp_path / "gateway.pem")
    assert found.tls_ca == str(tmp_path / "ca.pem")
