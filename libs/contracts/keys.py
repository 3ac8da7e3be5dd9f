"""Redis keys, all in this one module. Every key starts with the cluster's name; commands used exist in Redis 6.2."""


def workers(cluster: str) -> str:
    """Set of registered worker ids; an id whose lease key is gone is dead."""
    return f"fulcrum:{cluster}:workers"


def worker(cluster: str, worker_id: str) -> str:
    """A worker's lease, a hash of `worker` (serialized) and `incarnation` (20 digits), expiring unless renewed."""
    return f"fulcrum:{cluster}:worker:{worker_id}"


def worker_changes(cluster: str) -> str:
    """Pub/sub channel that carries a worker's id when its registration changed."""
    return f"fulcrum:{cluster}:worker-changes"


def planner_mode(cluster: str) -> str:
    """The mode that the planner was last set to, in words; absent until somebody has."""
    return f"fulcrum:{cluster}:planner-mode"


def planner_limits(cluster: str) -> str:
    """The limits that the planner was last given, as JSON; absent until somebody has."""
    return f"fulcrum:{cluster}:planner-limits"


def planner_lead(cluster: str) -> str:
    """Which planner decides; it expires unless that planner goes on."""
    return f"fulcrum:{cluster}:planner-lead"


def kv_blocks(cluster: str, model: str, worker_id: str) -> str:
    """Set of the chained block hashes that a worker holds; it lives by the worker's lease."""
    return f"fulcrum:{cluster}:kv:{model}:{worker_id}"


def step_time(cluster: str, *kind: str) -> str:
    """Hash of the latest fits of how long steps of a kind of worker take, one serialized StepTime for each kind of
    step. Kinds are told apart by engine, model, device and variant."""
    return f"fulcrum:{cluster}:step-time:{':'.join(kind)}"


def step_time_lease(cluster: str, *kind: str) -> str:
    """Who measures prefill for a kind of worker now; it expires."""
    return f"fulcrum:{cluster}:step-time-lease:{':'.join(kind)}"
