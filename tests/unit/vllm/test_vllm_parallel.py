"""Tests of the ranks of one vllm worker by its engine arguments, and of impossible arguments."""

from typing import Any

import pytest
from pydantic import ValidationError

from libs.engine.config import Parallel, parallel_of
from libs.worker.settings import WorkerSettings

NODES = {"tensor_parallel_size": 16, "nnodes": 2, "master_addr": "10.0.0.1"}


@pytest.mark.parametrize(
    ("arguments", "gpus", "gpus_here", "nodes"),
    [
        ({}, 1, 1, 1),
        ({"tensor_parallel_size": 4}, 4, 4, 1),
        ({"tensor_parallel_size": 4, "pipeline_parallel_size": 2}, 8, 8, 1),
        (NODES, 16, 8, 2),
        (NODES | {"node_rank": 1}, 16, 8, 2),
        ({"data_parallel_size": 8, "data_parallel_rank": 3, "data_parallel_address": "10.0.0.1"}, 1, 1, 1),
    ],
)
def test_a_worker_spans_its_tensor_and_pipeline_group(
    arguments: dict[str, Any], gpus: int, gpus_here: int, nodes: int
) -> None:
    found = parallel_of(arguments)
    assert (found.gpus, found.gpus_here, found.nodes) == (gpus, gpus_here, nodes)


def test_ranks_belong_to_one_group_by_their_meeting_address() -> None:
    ranks = [{"data_parallel_size": 2, "data_parallel_rank": rank, "data_parallel_address": "n1"} for rank in range(2)]
    assert {parallel_of(each).group for each in ranks} == {"n1:29550"}
    assert parallel_of(ranks[0] | {"data_parallel_rpc_port": 29551}).group == "n1:29551"
    assert parallel_of({"tensor_parallel_size": 2}).group == ""
    settings = WorkerSettings(engine="vllm", model_path="/models/m", vllm_arguments=ranks[1])
    assert settings.parallel.group == "n1:29550"


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.1.1", "localhost", "::1", "[::1]"])
def test_groups_that_meet_on_loopback_are_separate_on_each_node(address: str) -> None:
    arguments = {"data_parallel_size": 2, "data_parallel_rank": 0, "data_parallel_address": address}
    found = {
        WorkerSettings(
            engine="vllm", model_path="/models/m", vllm_arguments=arguments | {"data_parallel_rank": rank}, node=node
        ).parallel.group
        for node in ("n1", "n2")
        for rank in (0, 1)
    }
    assert found == {f"n1/{address}:29550", f"n2/{address}:29550"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size is 0"),
        ({"tensor_parallel_size": "4"}, "not a whole number"),
        ({"data_parallel_size": 2}, "start a worker for each, with its data_parallel_rank, 0 to 1"),
        ({"data_parallel_size": 2, "data_parallel_rank": 2}, "a worker is one rank"),
        ({"data_parallel_size": 2, "data_parallel_rank": 0}, "needs data_parallel_address"),
        (NODES | {"tensor_parallel_size": 3}, "3 GPUs do not spread evenly over nnodes 2"),
        (NODES | {"node_rank": 2}, "node_rank 2 is none of nnodes 2"),
        (NODES | {"master_addr": ""}, "needs master_addr"),
        (NODES | {"data_parallel_size": 2, "data_parallel_rank": 0, "data_parallel_address": "x"}, "go together"),
    ],
)
def test_an_impossible_worker_is_refused_before_anything_starts(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match="FULCRUM_WORKER_VLLM_ARGUMENTS") as caught:
        parallel_of(arguments)
    assert says in str(caught.value)
    with pytest.raises(ValidationError, match="FULCRUM_WORKER_VLLM_ARGUMENTS"):
        WorkerSettings(engine="vllm", model_path="/models/m", vllm_arguments=arguments)


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("max_num_seqs", "set FULCRUM_WORKER_MAX_SEQUENCES in its place"),
        ("kv_transfer_config", "FULCRUM_WORKER_VLLM_CONNECTOR"),
        ("enable_chunked_prefill", "FULCRUM_WORKER_PREFILL_CHUNK_TOKENS"),
        ("additional_config", "rest on what it is"),
    ],
)
def test_an_argument_owned_by_the_worker_is_refused_with_the_setting_for_it(name: str, instead: str) -> None:
    with pytest.raises(ValidationError, match=f"FULCRUM_WORKER_VLLM_ARGUMENTS cannot have {name}: .*{instead}"):
        WorkerSettings(engine="vllm", model_path="/models/m", vllm_arguments={"max_model_len": 512, name: None})
    assert WorkerSettings(engine="sim", vllm_arguments={name: None}).parallel == Parallel()


def test_gpus_and_nodes_are_registered_as_the_arguments_say() -> None:
    settings = WorkerSettings(engine="vllm", model_path="/models/m", vllm_arguments=NODES)
    assert (settings.gpus, settings.parallel.nodes) == (16, 2)
    assert WorkerSettings(engine="sim", vllm_arguments=NODES).parallel == Parallel()
