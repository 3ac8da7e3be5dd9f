"""All Kafka topics: names, keys, partitions, retention and value types."""

from dataclasses import dataclass
from zlib import crc32

from google.protobuf.message import Message

from libs.contracts.pb.fulcrum.alerts.v1.alerts_pb2 import AlertEvent, AlertSilence
from libs.contracts.pb.fulcrum.audit.v1.audit_pb2 import AuditEvent
from libs.contracts.pb.fulcrum.batch.v1.batch_pb2 import JobEvent, Result, Share, Submission
from libs.contracts.pb.fulcrum.demand.v1.demand_pb2 import CapacityPlan, DemandTotals
from libs.contracts.pb.fulcrum.planner.v1.planner_pb2 import Decision
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import (
    FleetLoads,
    GatewayQueues,
    RequestEvent,
    SharedWindows,
    StepBatch,
)

HOUR_MS = 3_600_000
# Segment size of each partition's log. A broker that was killed rereads the segment it was writing; at Kafka's default
# of a gigabyte, that takes long.
SEGMENT_BYTES = 32 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Topic:
    """One topic. The version in `stem` names the schema of its values; an incompatible change is a new topic."""

    stem: str
    value: type[Message]
    key: str
    """The field of the value whose text is the record's key, which fixes the order of records."""
    partitions: int
    retention_ms: int
    wraps: str = ""
    """The field of the value with a record's bytes, if clients may write records without Fulcrum's header."""
    spread_by: tuple[str, str] | None = None
    """The fields of a group and of a record's number in it, if the records of a transaction go to the partitions in
    turn. Otherwise the key's hash decides, which gives some partitions more than twice the mean.
    """

    def name(self, cluster: str) -> str:
        """Return the topic's name on the broker, e.g. "fulcrum.local.steps.v2"."""
        return f"fulcrum.{cluster}.{self.stem}"

    def turn(self, value: Message) -> int:
        """Return the number that decides the partition of a record of a topic with `spread_by`."""
        assert self.spread_by is not None
        group, number = (getattr(value, field) for field in self.spread_by)
        return crc32(str(group).encode()) + int(number)


STEPS = Topic("steps.v2", StepBatch, key="worker_id", partitions=4, retention_ms=HOUR_MS)
REQUESTS = Topic("requests.v1", RequestEvent, key="request_id", partitions=4, retention_ms=24 * HOUR_MS)
DECISIONS = Topic("decisions.v1", Decision, key="planner_id", partitions=1, retention_ms=7 * 24 * HOUR_MS)
WINDOWS = Topic("windows.v2", SharedWindows, key="metrics_id", partitions=1, retention_ms=HOUR_MS // 6)
QUEUES = Topic("queues.v1", GatewayQueues, key="gateway_id", partitions=1, retention_ms=HOUR_MS // 6)
LOADS = Topic("loads.v1", FleetLoads, key="metrics_id", partitions=1, retention_ms=HOUR_MS // 6)
DEMAND = Topic("demand.v1", DemandTotals, key="gateway_id", partitions=1, retention_ms=24 * HOUR_MS)
CAPACITY = Topic("capacity.v1", CapacityPlan, key="model", partitions=1, retention_ms=HOUR_MS)
ALERTS = Topic("alerts.v1", AlertEvent, key="alert_id", partitions=1, retention_ms=7 * 24 * HOUR_MS)
# Kept longer than any silence lasts.
SILENCES = Topic("silences.v1", AlertSilence, key="silence_id", partitions=1, retention_ms=8 * 24 * HOUR_MS)
AUDIT = Topic("audit.v1", AuditEvent, key="actor", partitions=1, retention_ms=90 * 24 * HOUR_MS)

BATCH_JOBS = Topic("batch-jobs.v2", JobEvent, key="job_id", partitions=4, retention_ms=30 * 24 * HOUR_MS)
BATCH_SHARES = Topic(
    "batch-shares.v2",
    Share,
    key="share_id",
    partitions=8,
    retention_ms=14 * 24 * HOUR_MS,
    spread_by=("job_id", "number"),
)
BATCH_RESULTS = Topic("batch-results.v2", Result, key="job_id", partitions=8, retention_ms=14 * 24 * HOUR_MS)
BATCH_SUBMIT = Topic(
    "batch-submit.v1", Submission, key="body", partitions=1, retention_ms=14 * 24 * HOUR_MS, wraps="body"
)

# Created at start if the broker allows it. The embedded one creates topics on first use, with 4 partitions each.
ALL = (
    STEPS,
    REQUESTS,
    DECISIONS,
    WINDOWS,
    QUEUES,
    LOADS,
    DEMAND,
    CAPACITY,
    ALERTS,
    SILENCES,
    AUDIT,
    BATCH_JOBS,
    BATCH_SHARES,
    BATCH_RESULTS,
    BATCH_SUBMIT,
)
