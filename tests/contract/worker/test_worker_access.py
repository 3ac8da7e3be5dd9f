"""Tests of a worker that listens beyond loopback: who may call which of its services."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from struct import pack
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from libs.contracts.errors import Conflict, KvLost, StaleRole, Unauthenticated
from libs.contracts.pb.fulcrum.alerts.v1 import alerts_pb2
from libs.contracts.pb.fulcrum.audit.v1 import audit_pb2
from libs.contracts.pb.fulcrum.batch.v1 import batch_pb2
from libs.contracts.pb.fulcrum.common.v1 import common_pb2
from libs.contracts.pb.fulcrum.demand.v1 import demand_pb2
from libs.contracts.pb.fulcrum.planner.v1 import planner_pb2
from libs.contracts.pb.fulcrum.telemetry.v1 import telemetry_pb2
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2_grpc as pb_grpc
from libs.engine.kv_port import KvHandle
from libs.runtime.net.access import CertificateRole, role_uri
from libs.runtime.net.rpc import make_channel
from libs.runtime.settings import CommonSettings
from libs.runtime.transport import SystemTransport
from libs.testing.workers.hosts import TOKEN, LocalWorker, RecordingRegistry, gateway_probe, local_worker, submit
from libs.worker.admin import actor_from
from libs.worker.admin_client import WorkerAdmin
from libs.worker.kv_client import GrpcKvFetcher, PullStream

BEYOND: dict[str, Any] = {"host": "0.0.0.0", "advertise": "127.0.0.1", "allow_plaintext_token": True}
PROMPT = list(range(100))


@pytest.fixture
async def worker() -> AsyncIterator[LocalWorker]:
    async with local_worker("prefill-0", "prefill", **BEYOND) as worker:
        yield worker


@pytest.fixture
async def stranger(worker: LocalWorker) -> AsyncIterator[grpc.aio.Channel]:
    async with make_channel(CommonSettings(), worker.address) as channel:
        yield channel


def full_names(descriptor: Any) -> set[str]:
    services = descriptor.services_by_name.values()
    return {f"/{each.full_name}/{method.name}" for each in services for method in each.methods}


STREAMS = {"/fulcrum.worker.v1.WorkerService/Serve", "/fulcrum.worker.v1.KvService/Pull"}
ADMIN = {
    f"/fulcrum.worker.v1.WorkerAdminService/{verb}"
    for verb in ("Describe", "SetRole", "AssignModel", "Drain", "TunePrefill", "TuneDecode")
}
REFLECTION = {"/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"}
OPEN = full_names(health_pb2.DESCRIPTOR)
"""The health service, which is open to everyone: whether the process serves."""


async def code_of(channel: grpc.aio.Channel, method: str, token: str) -> grpc.StatusCode:
    """Return the status with which an empty call ends."""
    metadata = (("authorization", f"Bearer {token}"),) if token else None
    call: Any = channel.stream_stream(method)(metadata=metadata, timeout=5)
    with suppress(grpc.aio.AioRpcError):
        await call.done_writing()
        await call.read()
    call.cancel()
    return await call.code()


async def served_by(channel: grpc.aio.Channel) -> set[str]:
    """Return every method, by reflection."""
    call: Any = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(timeout=5)
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    names = [each.name for each in (await call.read()).list_services_response.service]
    methods: set[str] = set()
    for name in names:
        await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol=name))
        for data in (await call.read()).file_descriptor_response.file_descriptor_proto:
            file = FileDescriptorProto.FromString(data)
            methods |= {
                f"/{file.package}.{service.name}/{method.name}"
                for service in file.service
                for method in service.method
                if f"{file.package}.{service.name}" == name
            }
    call.cancel()
    return methods


async def test_every_method_of_every_service_has_a_case() -> None:
    async with local_worker("prefill-0", "prefill") as here, make_channel(CommonSettings(), here.address) as channel:
        assert await served_by(channel) == STREAMS | ADMIN | REFLECTION | OPEN
    # Another proto file with services would escape this test.
    assert full_names(worker_pb2.DESCRIPTOR) == STREAMS | ADMIN
    others = (alerts_pb2, audit_pb2, batch_pb2, common_pb2, demand_pb2, planner_pb2, telemetry_pb2)
    assert not any(each.DESCRIPTOR.services_by_name for each in others)


@pytest.mark.parametrize("token", ["", "wrong"])
@pytest.mark.parametrize("method", sorted(STREAMS | ADMIN | REFLECTION))
async def test_beyond_loopback_a_call_without_the_token_is_refused_before_it_reveals_anything(
    stranger: grpc.aio.Channel, method: str, token: str
) -> None:
    assert await code_of(stranger, method, token) is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("method", sorted(ADMIN))
async def test_on_loopback_an_admin_call_needs_the_token(method: str) -> None:
    async with local_worker("prefill-0", "prefill") as here, make_channel(CommonSettings(), here.address) as channel:
        for token in ("", "wrong"):
            assert await code_of(channel, method, token) is grpc.StatusCode.UNAUTHENTICATED


async def test_a_probe_needs_no_token(stranger: grpc.aio.Channel) -> None:
    answer = await health_pb2_grpc.HealthStub(stranger).Check(health_pb2.HealthCheckRequest())
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_beyond_loopback_reflection_is_refused(stranger: grpc.aio.Channel) -> None:
    (method,) = REFLECTION
    assert await code_of(stranger, method, TOKEN) is grpc.StatusCode.UNIMPLEMENTED


async def test_a_refused_pull_reports_its_reason_even_while_its_stream_is_written_to(worker: LocalWorker) -> None:
    """A write after the end of its stream replaces the stream's status by gRPC's own message."""
    transport = SystemTransport(CommonSettings())
    for round_number in range(100):
        link = PullStream(worker.address, receiver_id="stranger", transport=transport)
        running = asyncio.create_task(link.run())
        pulls = [link.open(pb.PullOpen(), 1)]
        for _ in range(8 + round_number % 8):
            await asyncio.sleep(0)
            link.leave(pulls.pop(), whole=False)
            pulls.append(link.open(pb.PullOpen(), 1))
        with pytest.raises(KvLost, match="token"):
            await pulls[0].next()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_only_a_worker_that_has_the_token_pulls_blocks(worker: LocalWorker) -> None:
    for token, outcome in ((TOKEN, "finished"), ("wrong", "failed")):
        async with (
            local_worker("decode-0", "decode", **BEYOND, token=token) as decode,
            gateway_probe(worker, f"gateway-{outcome}") as to_prefill,
            gateway_probe(decode, f"gateway-{outcome}") as to_decode,
        ):
            await to_prefill.until(lambda: to_prefill.prefill_credits > 0)
            await to_prefill.submit(submit(1, pb.PHASE_PREFILL, PROMPT))
            kv = (await to_prefill.event(1, "prefilled")).kv
            await to_decode.until(lambda: to_decode.decode_credits > 0)
            request = submit(1, pb.PHASE_DECODE, [*PROMPT, *to_prefill.tokens[1]], prompt_tokens=len(PROMPT))
            request.kv.CopyFrom(kv)
            await to_decode.submit(request)
            ended = await to_decode.event(1, outcome)
            if outcome == "failed":
                assert ended.code == pb.FAILURE_CODE_KV_LOST and "token" in ended.detail, ended


async def test_a_worker_without_the_handle_cannot_pull_blocks() -> None:
    """Neither guessing handles nor the worker's incarnation from the registry suffices."""
    async with local_worker("prefill-0", "prefill") as worker, gateway_probe(worker) as gateway:
        await gateway.until(lambda: gateway.prefill_credits > 0)
        await gateway.submit(submit(1, pb.PHASE_PREFILL, PROMPT))
        kv = (await gateway.event(1, "prefilled")).kv
        handle = KvHandle(kv.worker_id, kv.incarnation, kv.address, kv.handle, kv.tokens, kv.blocks, kv.kv_layout)
        fetcher = GrpcKvFetcher(SystemTransport(worker.settings), "stranger")
        for guess in (pack("<QQ", kv.incarnation, 1), pack("<QQ", kv.incarnation, 2), bytes(16), b""):
            with pytest.raises(KvLost):
                async for _ in fetcher.fetch(replace(handle, opaque=guess), kv.kv_layout, 0):
                    pass
        assert [chunk async for chunk in fetcher.fetch(handle, kv.kv_layout, 0)]
        await fetcher.close()


async def test_grpc_changes_are_audited_including_refused_ones_and_strangers_cannot_write_there() -> None:
    async with local_worker("decode-0", "decode") as worker, make_channel(CommonSettings(), worker.address) as channel:

        def trail() -> list[tuple[str, str, str, int]]:
            events = [each for each in worker.bus.published if isinstance(each, audit_pb2.AuditEvent)]
            assert len({each.event_id for each in events}) == len(events)
            return [(each.actor, each.action, each.detail, each.status) for each in events]

        stranger = WorkerAdmin(channel, "decode-0", "wrong")
        with pytest.raises(Unauthenticated):
            await stranger.set_role(common_pb2.ROLE_PREFILL, 0, expected_epoch=1, actor="eve", reason="mine now")
        assert trail() == []
        admin = WorkerAdmin(channel, "decode-0", TOKEN)
        moved = await admin.set_role(common_pb2.ROLE_PREFILL, 0, expected_epoch=1, actor="ada", reason="by hand")
        with pytest.raises(StaleRole):
            await admin.set_role(common_pb2.ROLE_STANDBY, 0, expected_epoch=1, actor="bob", reason="late")
        assert moved.assignment.epoch == 2
        assert trail() == [
            ("ada", "SetRole decode-0", "prefill at epoch 1: by hand", 200),
            ("bob", "SetRole decode-0", "standby at epoch 1: late", StaleRole.http_status),
        ]


class Peers(RecordingRegistry):
    """A registry that lists other workers too."""

    def __init__(self, *others: common_pb2.Worker) -> None:
        super().__init__()
        self.others = others

    async def workers(self) -> list[common_pb2.Worker]:
        """Return the last registration, and the others."""
        return [*await super().workers(), *self.others]


def peer(name: str, role: common_pb2.Role, **fields: Any) -> common_pb2.Worker:
    held = common_pb2.Assignment(model="sim", role=role)
    return common_pb2.Worker(id=name, state=common_pb2.WORKER_STATE_READY, assignment=held, **fields)


@pytest.mark.parametrize("verb", ["SetRole", "Drain"])
async def test_the_last_worker_that_computes_prompts_loses_that_role_only_by_force(verb: str) -> None:
    """Before, such a call succeeded silently and left no worker to compute prompts."""
    registry = Peers(peer("decode-0", common_pb2.ROLE_MIXED))
    async with (
        local_worker("prefill-0", "prefill", registry=registry) as worker,
        make_channel(CommonSettings(), worker.address) as channel,
    ):
        admin, stub = WorkerAdmin(channel, "prefill-0", TOKEN), pb_grpc.WorkerAdminServiceStub(channel)  # type: ignore[no-untyped-call]

        async def ask(*, force: bool) -> None:
            if verb == "SetRole":
                await admin.set_role(
                    common_pb2.ROLE_MIXED, 0, expected_epoch=1, actor="ada", reason="by hand", force=force
                )
            else:
                metadata = (("authorization", f"Bearer {TOKEN}"),)
                await stub.Drain(pb.DrainRequest(deadline_ms=50, actor="ada", force=force), metadata=metadata)

        with pytest.raises((Conflict, grpc.aio.AioRpcError), match="prefill-0 is the last worker of sim that computes"):
            await ask(force=False)
        assert worker.host.assignment.current.epoch == 1 and not worker.host.assignment.draining
        await ask(force=True)
        trail = [each for each in worker.bus.published if isinstance(each, audit_pb2.AuditEvent)]
        assert [(each.actor, each.action, each.status) for each in trail] == [
            ("ada", f"{verb} prefill-0", Conflict.http_status), ("ada", f"{verb} prefill-0", 200),
        ]  # fmt: skip


@pytest.mark.parametrize("other", [
    peer("prefill-1", common_pb2.ROLE_PREFILL),
    peer("mixed-0", common_pb2.ROLE_MIXED, group="")
])  # fmt: skip
async def test_a_worker_that_leaves_another_for_its_role_moves_at_once(other: common_pb2.Worker) -> None:
    if other.assignment.role == common_pb2.ROLE_MIXED:
        other.assignment.budget_tokens = 64
    registry = Peers(other, peer("decode-0", common_pb2.ROLE_MIXED))
    async with (
        local_worker("prefill-0", "prefill", registry=registry) as worker,
        make_channel(CommonSettings(), worker.address) as channel,
    ):
        admin = WorkerAdmin(channel, "prefill-0", TOKEN)
        moved = await admin.set_role(common_pb2.ROLE_MIXED, 0, expected_epoch=1, actor="ada", reason="by hand")
        assert moved.assignment.epoch == 2


class CallOf:
    """A call whose certificate names a role, or without TLS if it is None."""

    def __init__(self, role: CertificateRole | None) -> None:
        self._names = [] if role is None else [role_uri("local", role).encode()]

    def auth_context(self) -> dict[str, list[bytes]]:
        return {"x509_subject_alternative_name": self._names}


@pytest.mark.parametrize(("role", "reported", "recorded"), [
    ("planner", "key_0a1b2c3d4e5f", "key_0a1b2c3d4e5f"),
    (None, "key_0a1b2c3d4e5f", "key_0a1b2c3d4e5f"),
    ("operator", "key_0a1b2c3d4e5f", "token (key_0a1b2c3d4e5f)"),
    ("operator", "planner-0", "token (planner-0)"),
    ("operator", "token (ada)", "token (ada)"),
    ("operator", "", "token"),
    (None, "", "token"),
    (None, "sk-fulcrum-" + "x" * 43, "sk-fulcrum-***"),
])  # fmt: skip
def test_a_claimed_actor_is_accepted_only_from_callers_that_may_act_for_others(
    role: CertificateRole | None, reported: str, recorded: str
) -> None:
    assert actor_from(CallOf(role), reported) == recorded  # type: ignore[arg-type]
