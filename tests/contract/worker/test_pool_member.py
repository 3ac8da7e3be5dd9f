"""Tests over real gRPC of a pool worker that is assigned models in turn and keeps earlier ones asleep."""

import grpc.aio
import pytest

from libs.contracts.errors import InvalidRequest, QueueFull, StaleRole
from libs.contracts.pb.fulcrum.audit.v1.audit_pb2 import AuditEvent
from libs.contracts.pb.fulcrum.common.v1.common_pb2 import (
    ROLE_MIXED,
    ROLE_STANDBY,
    WORKER_STATE_ASLEEP,
    WORKER_STATE_LOADING,
    WORKER_STATE_READY,
    Worker,
)
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.model.info import BUILTIN_SIM
from libs.runtime.clock import SystemClock
from libs.testing.engines.gpu import FakeGpu
from libs.testing.memory.store import MemoryStore
from libs.testing.workers.hosts import RecordingBus
from libs.testing.workers.pool import GB, LocalPoolMember, local_pool_member
from libs.worker.admin import audit_changes
from libs.worker.service import PoolAdminServicer


def asleep(worker: Worker) -> list[str]:
    return [each.model for each in worker.pool.asleep]


async def hold(local: LocalPoolMember, model: str, **fields: int) -> Worker:
    local.assign(model, **fields)
    return await local.until(WORKER_STATE_READY, model)


async def test_a_member_starts_without_a_model_and_serves_the_assigned_one() -> None:
    async with local_pool_member("w", MemoryStore()) as local:
        empty = await local.registered()
        assert (empty.state, empty.assignment.model, empty.assignment.role) == (WORKER_STATE_ASLEEP, "", ROLE_STANDBY)
        reported = local.assign("a")
        assert reported.assignment.epoch == empty.assignment.epoch + 1
        # 16 GB at 4 GB/s and half a second, a hundred times as fast.
        assert reported.expected_ns == pytest.approx(45e6)
        loading = await local.until(WORKER_STATE_LOADING, "a")
        assert loading.pool.expected_ns == pytest.approx(45e6)
        ready = await local.until(WORKER_STATE_READY, "a")
        assert ready.assignment.role == ROLE_MIXED and ready.assignment.budget_tokens > 0
        assert ready.assignment.epoch == reported.assignment.epoch
        assert ready.incarnation > loading.incarnation > empty.incarnation
        assert (ready.pool.last.model, ready.pool.last.from_host) == ("a", False)
        assert ready.pool.last.took_ns >= 45e6


async def test_a_replaced_model_sleeps_and_wakes_faster_than_it_loaded() -> None:
    async with local_pool_member("w", MemoryStore()) as local:
        await hold(local, "a")
        second = await hold(local, "b")
        assert asleep(second) == ["a"]
        assert local.assign("a").expected_ns < 20e6
        again = await local.until(WORKER_STATE_READY, "a")
        assert (again.pool.last.from_host, asleep(again)) == (True, ["b"])
        assert len(local.engines) == 2
        assert again.assignment.epoch == 4


async def test_a_member_assigned_no_model_holds_none_and_its_last_model_sleeps() -> None:
    async with local_pool_member("w", MemoryStore()) as local:
        await hold(local, "a")
        local.assign("")
        assert asleep(await local.until(WORKER_STATE_ASLEEP, "")) == ["a"]


async def test_host_memory_is_bounded_and_the_model_left_longest_ago_is_evicted_first() -> None:
    async with local_pool_member("w", MemoryStore(), host_memory_mb=40_000) as local:
        for model in ("a", "b", "c"):
            await hold(local, model)
        assert asleep(await hold(local, "d")) == ["b", "c"]
        assert asleep(await hold(local, "e", size_bytes=70 * GB)) == ["c", "d"]
        # The largest one does not fit: it is unloaded, and the others stay.
        assert asleep(await hold(local, "c")) == ["d"]


async def test_a_model_that_should_not_be_retained_is_unloaded() -> None:
    async with local_pool_member("w", MemoryStore()) as local:
        await hold(local, "a")
        local.assign("", forget=True)
        assert asleep(await local.until(WORKER_STATE_ASLEEP, "")) == []


async def test_sleeping_models_stay_within_their_share_of_gpu_memory() -> None:
    gpu = FakeGpu(residue_bytes=2 * GB)
    async with local_pool_member("w", MemoryStore(), gpu=gpu, asleep_gpu_memory_mb=4096) as local:
        for model in ("a", "b", "c"):
            await hold(local, model)
        fourth = await hold(local, "d")
        assert asleep(fourth) == ["b", "c"], "three would occupy 6 GB of the 4.3"
        assert local.engine(0).calls == ["start", "sleep", "close"]
        assert gpu.most_used_bytes <= gpu.total_bytes, "the serving engine leaves them their part"
        assert fourth.pool.memory_bytes == gpu.total_bytes - 4096 * 1024 * 1024, "and placements do not count on it"


async def test_a_model_larger_than_host_memory_sleeps_without_its_weights() -> None:
    async with local_pool_member("w", MemoryStore(), gpu=FakeGpu(), host_memory_mb=40_000) as local:
        await hold(local, "small")
        await hold(local, "large", size_bytes=60 * GB)
        third = await hold(local, "other")
        assert asleep(third) == ["small", "large"]
        assert [each.size_bytes for each in third.pool.asleep] == [16 * GB, 0], "of host memory"
        assert local.engine(0).calls[-1] == "sleep" and local.engine(1).calls[-1] == "sleep without weights"
        woken = await hold(local, "large", size_bytes=60 * GB)
        assert woken.pool.last.from_host and local.engine(1).calls[-1] == "wake"


async def test_a_model_that_cannot_sleep_is_unloaded_and_the_next_one_is_served() -> None:
    async with local_pool_member("w", MemoryStore(), gpu=FakeGpu()) as local:
        await hold(local, "a")
        local.engine(0).fails = "sleep"
        assert asleep(await hold(local, "b")) == []
        assert local.engine(0).calls == ["start", "sleep", "close"]


@pytest.mark.parametrize("failure", ["wake", "weights", "step"])
async def test_a_model_that_cannot_be_woken_or_answers_differently_is_loaded_again(failure: str) -> None:
    async with local_pool_member("w", MemoryStore(), gpu=FakeGpu()) as local:
        await hold(local, "a")
        await hold(local, "b")
        local.engine(0).fails = failure
        again = await hold(local, "a")
        assert (again.pool.last.from_host, again.pool.last.error) == (False, "")
        assert local.engine(0).calls == ["start", "sleep", "wake", "close"]
        assert local.engine(2).calls == ["start"]


async def test_the_model_to_wake_is_not_evicted_for_the_model_it_replaces() -> None:
    async with local_pool_member("w", MemoryStore(), host_memory_mb=40_000) as local:
        for model in ("a", "b", "c"):
            await hold(local, model)
        again = await hold(local, "a")
        assert (again.pool.last.from_host, asleep(again)) == (True, ["c"])


async def test_the_previous_model_is_cleared_from_the_device_before_the_next_one_wakes() -> None:
    gpu = FakeGpu(residue_bytes=3 * GB)
    async with local_pool_member("w", MemoryStore(), gpu=gpu, asleep_gpu_memory_mb=4096) as local:
        await hold(local, "a")
        await hold(local, "b")
        again = await hold(local, "a")
        assert (again.pool.last.from_host, asleep(again)) == (True, []), "two would occupy 6 GB of the 4.3"
        assert local.engine(0).calls == ["start", "sleep", "wake"]
        assert local.engine(1).calls == ["start", "sleep", "close"]


async def test_the_device_is_cleared_even_if_the_engine_to_wake_has_died_asleep() -> None:
    gpu = FakeGpu(residue_bytes=3 * GB)
    async with local_pool_member("w", MemoryStore(), gpu=gpu, asleep_gpu_memory_mb=4096) as local:
        await hold(local, "a")
        await hold(local, "b")
        local.engine(0).fails = "memory"
        await hold(local, "a")
        assert local.engine(1).calls == ["start", "sleep", "close"], "the memory it occupied is free again"


async def test_a_model_larger_than_the_device_is_refused_with_a_message_and_the_member_continues() -> None:
    async with local_pool_member("w", MemoryStore()) as local:
        local.assign("huge", 141 * GB)
        failed = await local.failed("huge")
        assert failed.pool.last.model == "huge"
        assert "141.0 GB of weights, the device 80.0 GB" in failed.pool.last.error
        assert (await hold(local, "a")).pool.last.error == ""


async def test_a_model_whose_files_are_missing_is_refused_with_a_message() -> None:
    async with local_pool_member("w", MemoryStore()) as local:
        local.assign("gone", source="/there/is/no/such/folder")
        failed = await local.failed("gone")
        assert "/there/is/no/such/folder does not exist" in failed.pool.last.error


async def test_assignments_are_compare_and_set_and_run_one_at_a_time() -> None:
    async with local_pool_member("w", MemoryStore()) as local:
        with pytest.raises(StaleRole, match="epoch"):
            local.assign("a", expected_epoch=7)
        with pytest.raises(StaleRole):
            local.assign("a", incarnation=1)
        local.assign("a")
        with pytest.raises(QueueFull):
            local.assign("b")
        await local.until(WORKER_STATE_READY, "a")
        with pytest.raises(InvalidRequest, match="already"):
            local.assign("a")


class _Context:
    """The parts of a call without TLS that an error and its actor need."""

    def auth_context(self) -> dict[str, list[bytes]]:
        return {}

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: object = ()) -> None:
        raise grpc.aio.AbortError(code, details)


async def test_the_audit_trail_names_who_assigned_which_model_and_includes_refused_attempts() -> None:
    bus = RecordingBus()
    async with local_pool_member("w", MemoryStore()) as local:
        servicer = PoolAdminServicer(local.member, audit_changes(bus, SystemClock(), "w"))
        request = pb.AssignModelRequest(
            expected_epoch=local.member.epoch,
            model="a",
            source=BUILTIN_SIM,
            size_bytes=GB,
            actor="key_1",
            reason="busy",
        )
        await servicer.AssignModel(request, _Context())  # type: ignore[arg-type]
        with pytest.raises(grpc.aio.AbortError):
            await servicer.AssignModel(request, _Context())  # type: ignore[arg-type]
    events = [each for each in bus.published if isinstance(each, AuditEvent)]
    assert [(each.actor, each.action, each.status) for each in events] == [
        ("key_1", "AssignModel w", 200),
        ("key_1", "AssignModel w", StaleRole("").http_status),
    ]
    assert events[0].detail == f"a at epoch {request.expected_epoch}: busy"
