from dataclasses import replace

import msgspec
from fastapi import APIRouter, Response

from libs.policy.alerts.store import AlertStore
from libs.runtime.clock import Clock
from services.metrics.state import MS_NS, MetricsState
from services.metrics.status.evaluator import VerdictEvaluator
from services.metrics.status.report import ClusterStatus, cluster_status


def status_now(state: MetricsState, verdicts: VerdictEvaluator, book: AlertStore, now_ns: int) -> ClusterStatus:
    """Build the status from the evaluator's last result, with its age."""
    aged_ns, heard = state.age_ns(now_ns), state.gateways.waiting(now_ns)
    waiting, traffic = heard or {}, verdicts.traffic.traffic(now_ns)
    if heard is not None:
        traffic = replace(
            traffic,
            batch_waiting=sum(each.batch_requests for each in heard.values()),
            batch_at_workers=sum(each.batch_bound for each in heard.values()),
        )
    traffic = replace(traffic, too_many_per_s=max(traffic.too_many_per_s, verdicts.refusals.total_per_s(now_ns)))
    return cluster_status(
        verdicts.seen,
        verdicts.planner.status(now_ns),
        traffic,
        now_ns=now_ns,
        age_ms=None if aged_ns is None else aged_ns // MS_NS,
        not_live=state.not_live(now_ns),
        waiting={model: max(each.prefill_requests, 0) for model, each in waiting.items()},
        alerts_firing=len(book.firing()),
    )


def status_router(state: MetricsState, verdicts: VerdictEvaluator, book: AlertStore, clock: Clock) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/status", response_model=ClusterStatus)
    async def status() -> Response:
        """Return whether the cluster is balanced, what holds it up if it is not, what to do, and the figures behind
        it.
        """
        report = status_now(state, verdicts, book, clock.now_ns())
        return Response(msgspec.json.encode(report), media_type="application/json")

    return router
