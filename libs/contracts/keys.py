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


def planner_memory(cluster: str, what: str) -> str:
    """What the planner remembers beside its mode and limits, as JSON: the GPU time that started workers took today
    (scale), and what was lost by the hour (regret)."""
    return f"fulcrum:{cluster}:planner-{what}"


def planner_lead(cluster: str) -> str:
    """Which planner decides; it expires unless that planner goes on."""
    return f"fulcrum:{cluster}:planner-lead"


def kv_blocks(cluster: str, model: str, worker_id: str) -> str:
    """Set of the chained block hashes that a worker holds; it lives by the worker's lease."""
    return f"fulcrum:{cluster}:kv:{model}:{worker_id}"


def step_time(cluster: str, *kind: str) -> str:
    """Hash of the latest fits of how long steps of a kind of worker take, one serialized StepTime for each kind of
    step. A kind is engine, model, device and variant."""
    return f"fulcrum:{cluster}:step-time:{':'.join(kind)}"


def step_time_lease(cluster: str, *kind: str) -> str:
    """Who measures prefill for a kind of worker now; it expires."""
    return f"fulcrum:{cluster}:step-time-lease:{':'.join(kind)}"


def models(cluster: str) -> str:
    """Hash of the models that the cluster can serve, an entry as JSON under each name."""
    return f"fulcrum:{cluster}:models"


def model_times(cluster: str) -> str:
    """Hash of how long bringing each model up took, as JSON."""
    return f"fulcrum:{cluster}:model-times"


def model_outlook(cluster: str) -> str:
    """What the planner expects of each model, as JSON; it expires unless the planner goes on."""
    return f"fulcrum:{cluster}:model-outlook"


def model_changes(cluster: str) -> str:
    """Pub/sub channel that announces changes of the three above."""
    return f"fulcrum:{cluster}:model-changes"


def model_gateways(cluster: str) -> str:
    """Set of ids of gateways that tell how they use models; one whose use key is gone is dead."""
    return f"fulcrum:{cluster}:model-gateways"


def model_use(cluster: str, gateway_id: str) -> str:
    """What a gateway has of each model, as JSON; it expires unless the gateway goes on."""
    return f"fulcrum:{cluster}:model-use:{gateway_id}"


def model_uses(cluster: str) -> str:
    """Pub/sub channel that carries a gateway's id when it has written its use."""
    return f"fulcrum:{cluster}:model-uses"


def api_keys(cluster: str) -> str:
    """Hash of `book`, the API keys' hashes and tenants' limits as JSON, and `version`, counted up with each change."""
    return f"fulcrum:{cluster}:api-keys"


def limit_use(cluster: str, tenant: str, kind: str) -> str:
    """Hash of what all gateways have used of a tenant's limit of a kind, by Unix second; it lives two minutes."""
    return f"fulcrum:{cluster}:limit-use:{tenant}:{kind}"


def limit_open(cluster: str, tenant: str) -> str:
    """Hash of places for a tenant's requests at once, by the gateway that holds them: COUNT:UNTIL, in Unix ms."""
    return f"fulcrum:{cluster}:limit-open:{tenant}"


def limit_gateways(cluster: str) -> str:
    """Sorted set of gateways that share tenants' limits, by the Unix ms until which they count."""
    return f"fulcrum:{cluster}:limit-gateways"


def tenant_places(cluster: str) -> str:
    """Hash of what tenants have and want of places to decode, by gateway: UNTIL:JSON, in Unix ms."""
    return f"fulcrum:{cluster}:tenant-places"


def responses(cluster: str, tenant: str, part: str) -> str:
    """Of a tenant's kept responses: values (a hash by id), ends (a sorted set of ids by Unix ms), bytes (all sizes)."""
    return f"fulcrum:{cluster}:responses:{tenant}:{part}"
