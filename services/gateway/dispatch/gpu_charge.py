"""Charges tenants whose GPU time is limited for each of their choices, including batch lines."""

from libs.dispatch.generation import Ending, Generation
from libs.policy.limits.usage import decode_gpu_ns, prompt_gpu_ns
from services.gateway.dispatch.tenant_limits import TenantLimiter
from services.gateway.workers.fleet import WorkerLinks
from services.gateway.workers.link import WorkerLink


class GpuCharge:
    """A callback that runs once for every choice that has ended, for whatever reason."""

    def __init__(self, limiter: TenantLimiter, fleet: WorkerLinks) -> None:
        self._limiter = limiter
        self._fleet = fleet

    def ended(self, generation: Generation, _outcome: Ending) -> None:
        """Charge the choice's GPU time at its workers' current speed; charge nothing if no worker computed for it."""
        tenant = generation.context.tenant
        if not self._limiter.limits_gpu_time(tenant) or not generation.output:
            return
        links, placement, spent_ns = self._fleet.serving(), generation.placement, 0.0
        if (link := links.get(placement.prefill_worker)) is not None and (view := link.view()) is not None:
            spent_ns += prompt_gpu_ns(view.speed, _gpus(link), generation.prompt_tokens, generation.cached_tokens)
        decoded = links.get(placement.decode_worker or placement.prefill_worker)
        if decoded is not None and (view := decoded.view()) is not None:
            tokens = len(generation.output) - 1
            spent_ns += decode_gpu_ns(view.speed, _gpus(decoded), tokens, view.decode_sequences, view.kv_tokens)
        self._limiter.spent_gpu_ms(tenant, round(spent_ns / 1e6))


def _gpus(link: WorkerLink) -> int:
    return link.worker.gpus if link.worker is not None else 1
