"""Tests that a role set by a person survives a restart of the worker's process."""

import pytest

from libs.contracts.pb.fulcrum.common.v1.common_pb2 import ROLE_MIXED, ROLE_PREFILL, ROLE_STANDBY, Worker
from libs.contracts.pb.fulcrum.worker.v1.worker_pb2 import SetRoleRequest
from libs.stores.registry import RegistryDown
from libs.testing.wait import until
from libs.testing.workers.hosts import RecordingRegistry, local_worker
from libs.worker.admin import kept_role

pytestmark = pytest.mark.system


def moved(host, role, actor):
    request = SetRoleRequest(expected_epoch=host.worker().assignment.epoch, role=role, actor=actor, reason="why")
    host.set_role(request)


def announced(registry, role):
    return any(each is not None and each.assignment.role == role for each in registry.seen)


async def test_a_restarted_worker_takes_the_role_set_by_a_person_and_names_that_person():
    registry = RecordingRegistry()
    async with local_worker("gpu-3", "decode", registry=registry) as worker:
        moved(worker.host, ROLE_PREFILL, "jo")
        await until(lambda: "gpu-3" in registry.kept)
    async with local_worker("gpu-3", "decode", registry=registry) as worker:
        again = worker.host.worker()
        assert (again.assignment.role, again.role_change.actor) == (ROLE_PREFILL, "jo")
    async with local_worker("gpu-4", "decode", registry=registry) as worker:
        assert worker.host.worker().assignment.role == ROLE_MIXED


async def test_a_planners_role_is_not_stored_and_replaces_that_of_a_person():
    registry = RecordingRegistry()
    async with local_worker("gpu-3", "decode", registry=registry) as worker:
        moved(worker.host, ROLE_PREFILL, "jo")
        await until(lambda: "gpu-3" in registry.kept)
        moved(worker.host, ROLE_STANDBY, "planner-0")
        await until(lambda: announced(registry, ROLE_STANDBY))
        await until(lambda: "gpu-3" not in registry.kept)
    async with local_worker("gpu-3", "decode", registry=registry) as worker:
        assert worker.host.worker().assignment.role == ROLE_MIXED


class AwayRegistry(RecordingRegistry):
    async def kept_role(self, worker_id: str) -> Worker | None:
        raise RegistryDown("away")


async def test_a_stored_role_of_another_model_or_an_invalid_one_is_ignored():
    registry = RecordingRegistry()
    kept = Worker(id="gpu-3")
    kept.assignment.model, kept.assignment.role = "m", ROLE_PREFILL
    registry.kept["gpu-3"] = kept
    assert await kept_role(registry, "gpu-3", "m") == kept
    assert await kept_role(registry, "gpu-3", "other") is None
    kept.assignment.role = 77
    assert await kept_role(registry, "gpu-3", "m") is None
    assert await kept_role(AwayRegistry(), "gpu-3", "m") is None
