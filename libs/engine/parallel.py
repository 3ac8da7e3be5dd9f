"""How many GPUs, on how many nodes, one engine of vLLM's spans by its arguments. Pure, without vLLM.

A worker is one replica: its tensor and pipeline parallel group, with a scheduler, KV and steps of its own. Of a
data-parallel group, which vLLM has for models with experts, each rank is a worker.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

SETTING: Final = "FULCRUM_WORKER_VLLM_ARGUMENTS"


@dataclass(frozen=True, slots=True)
class Parallel:
    """Degrees of parallelism of one engine, in vLLM's words."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    """Ranks of the data-parallel group that it belongs to."""
    data_rank: int = 0
    nodes: int = 1
    node_rank: int = 0

    @property
    def gpus(self) -> int:
        """On all its nodes."""
        return self.tensor * self.pipeline

    @property
    def gpus_here(self) -> int:
        """On each of them."""
        return self.gpus // self.nodes


def parallel_of(arguments: Mapping[str, Any]) -> Parallel:
    """What the arguments of vLLM's engine say. Raises ValueError for what no worker can be."""
    found = Parallel(
        tensor=_number(arguments, "tensor_parallel_size", 1),
        pipeline=_number(arguments, "pipeline_parallel_size", 1),
        data=_number(arguments, "data_parallel_size", 1),
        data_rank=_number(arguments, "data_parallel_rank", 0, least=0),
        nodes=_number(arguments, "nnodes", 1),
        node_rank=_number(arguments, "node_rank", 0, least=0),
    )
    if found.data > 1:
        _check_data(arguments, found)
    if found.nodes > 1:
        _check_nodes(arguments, found)
    return found


def _check_data(arguments: Mapping[str, Any], found: Parallel) -> None:
    if "data_parallel_rank" not in arguments or found.data_rank >= found.data:
        raise ValueError(
            f"of data_parallel_size {found.data} a worker is one rank: start a worker for each, with its"
            f" data_parallel_rank, 0 to {found.data - 1}, in {SETTING}"
        )
    if not arguments.get("data_parallel_address"):
        raise ValueError(f"data_parallel_size {found.data} needs data_parallel_address, rank 0's, in {SETTING}")
    if found.nodes > 1:
        raise ValueError(f"data_parallel_size and nnodes do not go together in {SETTING}: a rank has one node")


def _check_nodes(arguments: Mapping[str, Any], found: Parallel) -> None:
    if found.gpus % found.nodes:
        raise ValueError(f"{found.gpus} GPUs do not spread evenly over nnodes {found.nodes}: see {SETTING}")
    if found.node_rank >= found.nodes:
        raise ValueError(f"node_rank {found.node_rank} is none of nnodes {found.nodes}: see {SETTING}")
    if not arguments.get("master_addr"):
        raise ValueError(f"nnodes {found.nodes} needs master_addr, an address of node 0, in {SETTING}")


def _number(arguments: Mapping[str, Any], name: str, default: int, *, least: int = 1) -> int:
    value = arguments.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} is {value!r} in {SETTING}, not a whole number of at least {least}")
    return value
