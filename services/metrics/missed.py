"""Who was there when kept history ended: who had died by then is heard no more, and missed all the same. Pure."""

from collections.abc import Iterator

from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Assignment
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import StepBatch
from libs.contracts.roles import ROLE_NAMES, role_from_name
from libs.telemetry.cells import COVERED
from libs.telemetry.members import Members
from libs.telemetry.ring import NO_ROLE
from libs.telemetry.roll import LISTED_NS
from libs.telemetry.rollups import RollUps


def missed(rollups: RollUps, members: Members, written_to_ns: int) -> Iterator[StepBatch]:
    """Of each worker that has the last window before that moment, whether covered or not, a batch that tells no more
    than when it was last heard, and in which role. One that has left in good order has no such window; of one that left
    right then, and of all that live, the broker's telemetry tells more."""
    length_ns = rollups.tiers[1].window_ns
    end_ns = -(-written_to_ns // length_ns) * length_ns
    ids = rollups.present(length_ns, end_ns - length_ns, end_ns)
    series = rollups.read(length_ns, end_ns - LISTED_NS, end_ns, ids)
    for place, worker_id in enumerate(ids):
        covered_ns = series.times_ns[:, place, COVERED]
        heard, member = covered_ns.nonzero()[0], members.get(worker_id)
        if not len(heard) or member is None:
            continue
        heard_to_ns = int(series.starts_ns[heard[-1]] + covered_ns[heard[-1]])
        role, budget_tokens = role_from_name(ROLE_NAMES[int(series.roles[-1, place]) - NO_ROLE - 1], 1)
        yield StepBatch(
            worker_id=worker_id,
            node=member.node,
            gpus=member.gpus,
            assignment=Assignment(model=member.model, role=role, budget_tokens=budget_tokens),
            covered_from_unix_ns=heard_to_ns - 1,
            covered_to_unix_ns=heard_to_ns,
        )
