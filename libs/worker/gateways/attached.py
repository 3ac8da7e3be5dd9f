"""The gateways attached to a worker: their streams, their credits, and what waits to be sent to each.

Sync; gRPC is around it.
"""

import asyncio
from collections.abc import Callable, Iterator
from itertools import count

import structlog

from libs.contracts.errors import InvalidRequest, QueueFull
from libs.contracts.liveness import RESTING_SIGN_OF_LIFE_MS, SIGN_OF_LIFE_MS
from libs.contracts.pb.fulcrum.common.v1 import common_pb2 as common
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.contracts.protocol import check_protocol
from libs.engine.port import Engine
from libs.policy.worker.credits import CreditPool, Credits, GatewayDemand
from libs.worker.gateways.attached_gateway import AttachedGateway
from libs.worker.speed import WorkerSpeed
from libs.worker.wire import load_message

log = structlog.get_logger()

MAX_GATEWAYS = 64
BEAT_S = SIGN_OF_LIFE_MS / 1000
RESTING_BEAT_S = RESTING_SIGN_OF_LIFE_MS / 1000
TIMER_S = 0.002
"""A loop's timers are as exact: what is due so soon is due now, and wakes nobody once more."""


class AttachedGateways:
    """All attached gateways. News for a gateway leaves as one frame whenever its stream can write."""

    def __init__(self, engine: Engine, speed: WorkerSpeed, cluster: str, describe: Callable[[], common.Worker]) -> None:
        """`describe` returns the worker's present description."""
        self._engine = engine
        self._speed = speed
        self._cluster = cluster
        self._describe = describe
        self._links: dict[int, AttachedGateway] = {}
        self._link_ids = count(1)
        self.credits = Credits()
        self._epoch_reported = asyncio.Event()
        self.stirred = asyncio.Event()
        """Set when a gateway that the worker had no work of submits some: it is owed a sign of life sooner now."""

    def __len__(self) -> int:
        return len(self._links)

    def __iter__(self) -> Iterator[AttachedGateway]:
        return iter(self._links.values())

    def attach(self, hello: pb.Hello) -> AttachedGateway:
        """Take a gateway in; raises InvalidRequest for one of another cluster, VersionMismatch, QueueFull at the
        bound."""
        if hello.cluster != self._cluster:
            raise InvalidRequest(f"this worker serves cluster {self._cluster!r}, not {hello.cluster!r}")
        check_protocol(f"gateway {hello.gateway_id}", hello.protocol, hello.oldest_protocol)
        if len(self._links) >= MAX_GATEWAYS:
            raise QueueFull(f"{MAX_GATEWAYS} gateways are attached already")
        gateway = AttachedGateway(next(self._link_ids), GatewayDemand(hello.gateway_id))
        self._links[gateway.id] = gateway
        self.credits.attach(gateway.id)
        self.settle()
        return gateway

    def detach(self, gateway: AttachedGateway) -> None:
        """The gateway has gone: its credits are free."""
        gateway.close()
        del self._links[gateway.id]
        self.credits.detach(gateway.id)
        self._epoch_reported.set()

    # ------------------------------------------------------------ epochs

    def report_epoch(self, gateway: AttachedGateway, epoch: int) -> None:
        """The gateway routes by the assignment of `epoch`."""
        gateway.epoch = epoch
        self._epoch_reported.set()

    def behind(self, epoch: int) -> int:
        """Gateways that have not said that they route by the assignment of `epoch`, or a later one."""
        return sum(gateway.epoch < epoch for gateway in self)

    async def wait_for_epoch(self, epoch: int) -> None:
        """Until no gateway is behind."""
        while self.behind(epoch):
            self._epoch_reported.clear()
            await self._epoch_reported.wait()

    # ------------------------------------------------------------ credits

    def pool(self, phase: pb.Phase) -> CreditPool:
        """The slots of a phase."""
        return self.credits.prefill if phase == pb.PHASE_PREFILL else self.credits.decode

    def returned(self, gateway: AttachedGateway, frame: pb.GatewayFrame) -> None:
        """Take in what waits at the gateway, and the credits that it gives back."""
        if frame.HasField("demand"):
            demand = frame.demand
            gateway.demand = GatewayDemand(gateway.demand.gateway_id, demand.waiting, demand.head_deadline_unix_ns)
        self.credits.prefill.returned(gateway.id, frame.returned_prefill)
        self.credits.decode.returned(gateway.id, frame.returned_decode)
        self.credits.prefill.spent(gateway.id, frame.spent_prefill)
        self.credits.decode.spent(gateway.id, frame.spent_decode)

    def resize(self, prefill: int, decode: int) -> None:
        """Set the number of prefill and decode slots."""
        self.credits.resize(prefill, decode)

    def settle(self) -> None:
        """Hand out what is free."""
        for link_id in self.credits.settle({gateway.id: gateway.demand for gateway in self}):
            self._links[link_id].wake.set()

    # ------------------------------------------------------------ frames to gateways

    def has_news(self, gateway: AttachedGateway) -> bool:
        """Whether `take_frame` would say more than the load."""
        return self.credits.has_news(gateway.id) or gateway.assignment_news or gateway.load_news or bool(gateway.outbox)

    def take_frame(self, gateway: AttachedGateway) -> pb.WorkerFrame:
        """Everything that waits to be sent on `gateway`, as far as it fits one frame."""
        frame = pb.WorkerFrame(load=load_message(self._engine.load()), submits_taken=gateway.submits)
        if gateway.assignment_news:
            frame.worker.CopyFrom(self._describe())
        if self.credits.has_news(gateway.id):
            prefill_grant, prefill_recall, decode_grant, decode_recall = self.credits.take(gateway.id)
            frame.credit.CopyFrom(
                pb.Credit(
                    prefill_grant=prefill_grant,
                    prefill_recall=prefill_recall,
                    decode_grant=decode_grant,
                    decode_recall=decode_recall,
                )
            )
        gateway.sent_speed = self._speed.report(frame, gateway.sent_speed)
        gateway.outbox.take(frame)
        gateway.assignment_news = gateway.load_news = False
        gateway.sent_s = asyncio.get_running_loop().time()
        gateway.sent_load = frame.load
        return frame

    def tell_assignment(self) -> None:
        """The worker is another than they know."""
        for gateway in self:
            gateway.assignment_news = True
            gateway.wake.set()

    def tell_load(self) -> None:
        """Tell those whose load has changed."""
        load = load_message(self._engine.load())
        for gateway in self:
            if gateway.sent_load != load:
                gateway.load_news = True
                gateway.wake.set()

    def beat(self, now_s: float) -> float:
        """Send the load to gateways whose last frame is too old: silence would look like death. Returns when the next
        beat is due, in the loop's time, if nothing else is sent until then.

        Blocks that wait to be pulled count as work: their gateway would have them computed again elsewhere.
        """
        due_s = now_s + RESTING_BEAT_S
        holds_blocks = self._engine.integrity().leased_handles > 0
        for gateway in self:
            beat_s = BEAT_S if gateway.living or holds_blocks else RESTING_BEAT_S
            if gateway.sent_s + beat_s - now_s < TIMER_S:
                gateway.load_news = True
                gateway.wake.set()
                due_s = min(due_s, now_s + beat_s)
            else:
                due_s = min(due_s, gateway.sent_s + beat_s)
        return due_s

    def close_if_unread(self, gateway: AttachedGateway) -> None:
        """End the stream of one that does not read."""
        if gateway.outbox.overflowed and not gateway.closed.is_set():
            log.warning("gateway does not read its stream", gateway=gateway.demand.gateway_id)
            gateway.close(QueueFull("the stream is not read fast enough"))

    def hang_up(self) -> None:
        """End every gateway's stream once everything pending is sent."""
        for gateway in self:
            gateway.leaving = True
            gateway.wake.set()
