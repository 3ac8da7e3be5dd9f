"""Orders in which a worker computes the prompts that it holds; without one, first come, first served. Pure."""

from libs.lab.rivals.port import QueuedPrompt
from libs.policy.gateway.order import hopeless_from_ns


def late_last(prompt: QueuedPrompt, now_ns: int) -> tuple[float, ...]:
    """Fulcrum's own order of its gateways, in a worker's queue: prompts that can be in time first, what has begun
    before all. The share that gateways leave to late ones (`LATE_SHARE`) is left out, to the advantage of others."""
    late = hopeless_from_ns(prompt, prompt.left_ns) <= now_ns
    return not prompt.resumed, late, prompt.arrival_unix_ns


def deadline_and_work(prompt: QueuedPrompt, now_ns: int) -> tuple[float, ...]:
    """Deadline plus the work that is left, and behind all what can no longer be in time."""
    relegated = now_ns + prompt.left_ns > prompt.ttft_deadline_unix_ns
    return relegated, prompt.ttft_deadline_unix_ns + prompt.left_ns
