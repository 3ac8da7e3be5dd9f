"""Whether a model can be served at all, by the workers at hand. Pure."""

from collections.abc import Iterable

from libs.policy.gateway.view import WorkerView


def serves_decode(workers: Iterable[WorkerView], model: str, kv_kind: str) -> bool:
    """Whether some worker could take over blocks of this kind, credits aside."""
    return any(view.model == model and view.takes_decode and view.kv_kind == kv_kind for view in workers)


def why_not(workers: Iterable[WorkerView], model: str) -> str:
    """What keeps a model that has workers from being served, to be added to a sentence; empty where it has none."""
    views = [view for view in workers if view.model == model]
    if any(view.takes_prefill for view in views) and any(view.takes_decode for view in views):
        return ": its prefill and decode workers have different kinds of KV, `fulcrum workers` tells in what"
    return ""


def serves(workers: Iterable[WorkerView], model: str) -> bool:
    """Whether both phases of the model have a worker, credits aside."""
    views = [view for view in workers if view.model == model]
    if any(view.takes_both for view in views):
        return True
    return any(view.takes_prefill and serves_decode(views, model, view.kv_kind) for view in views)
