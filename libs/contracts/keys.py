"""All Redis keys. Every key starts with the cluster's name; commands used exist in Redis 6.2."""


def workers(cluster: str) -> str:
    """Return the key of the set of registered worker ids. An id without a lease key is dead."""
    return f"fulcrum:{cluster}:workers"


def worker(cluster: str, worker_id: str) -> str:
    """Return the key of a worker's lease, which expires unless it is renewed.

    The value is a hash of `worker` (serialised) and `incarnation` (20 digits).
    """
    return f"fulcrum:{cluster}:worker:{worker_id}"


def kept_role(cluster: str, worker_id: str) -> str:
    """Return the key of the role that a person set for a worker; it expires.

    The value is a serialised Worker of id, assignment and change.
    """
    return f"fulcrum:{cluster}:kept-role:{worker_id}"


def worker_changes(cluster: str) -> str:
    """Return the name of the pub/sub channel that carries a worker's id when its registration changes."""
    return f"fulcrum:{cluster}:worker-changes"


def planner_mode(cluster: str) -> str:
    """Return the key that holds the planner's mode as a word; absent until someone sets one."""
    return f"fulcrum:{cluster}:planner-mode"


def planner_limits(cluster: str) -> str:
    """Return the key that holds the planner's limits as JSON; absent until someone sets any."""
    return f"fulcrum:{cluster}:planner-limits"


def planner_memory(cluster: str, what: str) -> str:
    """Return the key of other state of the planner as JSON.

    `scale` has today's GPU time of started workers, `regret` hourly losses.
    """
    return f"fulcrum:{cluster}:planner-{what}"


def planner_term(cluster: str) -> str:
    """Return the key of the number of the last lead, which grows with each planner that begins to lead."""
    return f"fulcrum:{cluster}:planner-term"


def planner_lead(cluster: str) -> str:
    """Return the key of the planner that leads; it expires unless that planner renews it."""
    return f"fulcrum:{cluster}:planner-lead"


def kv_blocks(cluster: str, model: str, worker_id: str) -> str:
    """Return the key of the set of the chained block hashes that a worker holds; it expires with the worker's lease."""
    return f"fulcrum:{cluster}:kv:{model}:{worker_id}"


def step_time(cluster: str, *kind: str) -> str:
    """Return the key of the latest step-time fits of a kind of worker, which is engine, model, device and variant.

    The value is a hash with a serialised StepTime for each kind of step.
    """
    return f"fulcrum:{cluster}:step-time:{':'.join(kind)}"


def step_time_lease(cluster: str, *kind: str) -> str:
    """Return the key of the worker that measures prefill for its kind now; it expires."""
    return f"fulcrum:{cluster}:step-time-lease:{':'.join(kind)}"


def models(cluster: str) -> str:
    """Return the key of the hash of the models that the cluster can serve, an entry as JSON under each name."""
    return f"fulcrum:{cluster}:models"


def model_edits(cluster: str) -> str:
    """Return the key of the number of times that models were put or removed.

    A catalogue without models was emptied on purpose if the key exists, and lost with its Redis otherwise.
    """
    return f"fulcrum:{cluster}:model-edits"


def model_times(cluster: str) -> str:
    """Return the key of the hash of the measured load times of each model, as JSON."""
    return f"fulcrum:{cluster}:model-times"


def model_outlook(cluster: str) -> str:
    """Return the key of the planner's outlook for each model, as JSON; it expires unless the planner renews it."""
    return f"fulcrum:{cluster}:model-outlook"


def model_changes(cluster: str) -> str:
    """Return the name of the pub/sub channel that announces changes of the four keys above."""
    return f"fulcrum:{cluster}:model-changes"


def model_gateways(cluster: str) -> str:
    """Return the key of the set of ids of gateways that report their use of models. A gateway without a use key is
    dead.
    """
    return f"fulcrum:{cluster}:model-gateways"


def model_use(cluster: str, gateway_id: str) -> str:
    """Return the key of a gateway's use of each model, as JSON; it expires unless the gateway renews it."""
    return f"fulcrum:{cluster}:model-use:{gateway_id}"


def model_uses(cluster: str) -> str:
    """Return the name of the pub/sub channel that carries a gateway's id when it has written its use."""
    return f"fulcrum:{cluster}:model-uses"


def api_keys(cluster: str) -> str:
    """Return the key of the hash of `book`, the API keys' hashes and tenants' limits as JSON, and `version`,
    incremented with each change.
    """
    return f"fulcrum:{cluster}:api-keys"


def limit_use(cluster: str, tenant: str, kind: str) -> str:
    """Return the key of the hash of all gateways' use of one kind of a tenant's limit, by Unix second; it lives two
    minutes.
    """
    return f"fulcrum:{cluster}:limit-use:{tenant}:{kind}"


def limit_open(cluster: str, tenant: str) -> str:
    """Return the key of the places for a tenant's concurrent requests.

    The value is a hash of COUNT:UNTIL by the gateway that holds them, UNTIL in Unix ms.
    """
    return f"fulcrum:{cluster}:limit-open:{tenant}"


def limit_gateways(cluster: str) -> str:
    """Return the key of the gateways that share tenants' limits.

    The value is a set sorted by the Unix ms until which each of them counts.
    """
    return f"fulcrum:{cluster}:limit-gateways"


def tenant_places(cluster: str) -> str:
    """Return the key of the hash of the decode places that tenants have and want, by gateway: UNTIL:JSON, in Unix
    ms.
    """
    return f"fulcrum:{cluster}:tenant-places"


def responses(cluster: str, tenant: str, part: str) -> str:
    """Return the keys of a tenant's stored responses: values (a hash by id), ends (a sorted set of ids by Unix ms),
    bytes (all sizes).
    """
    return f"fulcrum:{cluster}:responses:{tenant}:{part}"
