"""Opens the streams to workers and counts their frames and bytes."""

from typing import Any

import grpc.aio

from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.runtime.net.access import Metadata
from services.gateway.metrics import GatewayMetrics

SERVE = f"/{pb.DESCRIPTOR.services_by_name['WorkerService'].full_name}/Serve"


class StreamTraffic:
    """The traffic counters that all links of a gateway share."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        self._sent, self._sent_bytes = (m.labels("sent") for m in (metrics.frames, metrics.frame_bytes))
        self._received, self._received_bytes = (m.labels("received") for m in (metrics.frames, metrics.frame_bytes))

    def open(self, channel: grpc.aio.Channel, metadata: Metadata) -> Any:
        """Open WorkerService.Serve on a channel. Its serializers are the only place that sees a frame's bytes."""
        serve = channel.stream_stream(SERVE, request_serializer=self._pack, response_deserializer=self._unpack)
        return serve(metadata=metadata)

    def _pack(self, frame: pb.GatewayFrame) -> bytes:
        data = frame.SerializeToString()
        self._sent.inc()
        self._sent_bytes.inc(len(data))
        return data

    def _unpack(self, data: bytes) -> pb.WorkerFrame:
        self._received.inc()
        self._received_bytes.inc(len(data))
        return pb.WorkerFrame.FromString(data)
