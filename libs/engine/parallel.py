"""How many GPUs, on how many nodes, one engine of vLLM's spans by its arguments. Pure, without vLLM.

A worker is one replica: its tensor and pipeline parallel group, with a scheduler and KV of its own. Of a data-parallel
group, which vLLM has for models with experts, each rank is a process of its own and registers as a worker with the
group's name: their steps are in lockstep, and the planner takes a group for one worker.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any, Final

SETTING: Final = "FULCRUM_WORKER_VLLM_ARGUMENTS"
PORT: Final = "data_parallel_rpc_port"
RENDEZVOUS_PORT: Final = 29_550
"""vLLM's default."""


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
    group: str = ""
    """Name of its data-parallel group: where its ranks meet, which no other group's do. Empty: alone."""

    @property
    def gpus(self) -> int:
        """On all its nodes."""
        return self.tensor * self.pipeline

    @property
    def gpus_here(self) -> int:
        """On each of them."""
        return self.gpus // self.nodes


def parallel_of(arguments: Mapping[str, Any], node: str = "") -> Parallel:
    """What the arguments of vLLM's engine say; `node`: of the worker. Raises ValueError for what no worker can be."""
    data = _number(arguments, "data_parallel_size", 1)
    found = Parallel(
        tensor=_number(arguments, "tensor_parallel_size", 1),
        pipeline=_number(arguments, "pipeline_parallel_size", 1),
        data=data,
        data_rank=_number(arguments, "data_parallel_rank", 0, least=0),
        nodes=_number(arguments, "nnodes", 1),
        node_rank=_number(arguments, "node_rank", 0, least=0),
        group=_group(arguments, node) if data > 1 else "",
    )
    if found.data > 1:
        _check_data(arguments, found)
    if found.nodes > 1:
        _check_nodes(arguments, found)
    return found


def rendezvous_port(arguments: Mapping[str, Any]) -> int:
    """The one at which ranks of a data-parallel group find their first; all others they choose free ones of."""
    return _number(arguments, PORT, RENDEZVOUS_PORT)


def _group(arguments: Mapping[str, Any], node: str) -> str:
    """A loopback address is another place on each node, so the node is part of the name."""
    address = str(arguments.get("data_parallel_address", ""))
    meeting = f"{address}:{rendezvous_port(arguments)}"
    return f"{node}/{meeting}" if _is_loopback(address) else meeting


def _is_loopback(address: str) -> bool:
    try:
        return address == "localhost" or ip_address(address.strip("[]")).is_loopback
    except ValueError:
        return False


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
