"""Choices of tenants as a gateway's TenantPlaces sees them."""

from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.dispatch.generation import Generation, RequestTimes
from libs.dispatch.places import TenantPlaces
from libs.dispatch.ports import OneForAll
from libs.policy.gateway.placement import Attempt
from libs.policy.roles import Phase


class Known(OneForAll):
    """Separated tenants; `heavy` has three times the weight of others."""

    are_distinct = True

    def weight(self, tenant: str) -> int:
        return 3 if tenant == "heavy" else 1


def choice(tenant: str, arrival_ns: int = 0, *, batch: bool = False) -> Generation:
    found = Generation(
        request_id=tenant, model="m", prompt=b"\1\0\0\0", prompt_tokens=1, max_output_tokens=9,
        sampling=pb.Sampling(), context=pb.RequestContext(tenant=tenant), end_token_ids=frozenset(),
        sink=None, timeline=RequestTimes(arrival_ns), batch=batch,  # type: ignore[arg-type]
    )  # fmt: skip
    found.placement.queued(arrival_ns)
    return found


def run(places: TenantPlaces, each: Generation, tokens: int = 1) -> Generation:
    """Mark it as decoding from now on."""
    each.placement.waiting = False
    each.placement.decode_attempt = Attempt(("w", 1), each.placement.sequence_id, Phase.DECODE, 0, tokens)
    places.bound(each)
    return each
