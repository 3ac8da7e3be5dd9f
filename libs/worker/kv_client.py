"""Fetching KV blocks for engines that do not move bytes themselves: over gRPC, or out of the sender's mapped memory.

The stream is the same either way: it opens the transfer, tells which blocks are ready while the prompt is computed, and
ends with the ack. Where sender and receiver share memory its chunks name blocks in place of carrying them. Nobody
assumes that: the receiver opens the file that the sender's pool would have here and says what nonce is in it.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from libs.contracts.errors import KvLost, KvMismatch
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.engine.pool_map import PoolMap, PoolMaps
from libs.engine.port import KvChunk, KvHandle
from libs.worker import kv_wire

CHUNK_TIMEOUT_S = 5.0
"""A sender that is silent for so long is given up."""
ACK_TIMEOUT_S = 1.0
MAX_CHANNELS = 64
"""Channels kept open; those in use are never closed for it."""


@dataclass(eq=False, slots=True)
class _Channel:
    channel: grpc.aio.Channel
    users: int = 0


class GrpcKvFetcher:
    """KvFetcher over KvService.Pull."""

    def __init__(
        self, open_channel: Callable[[str], grpc.aio.Channel], receiver_id: str, maps: PoolMaps | None = None
    ) -> None:
        """Without `maps` all bytes are sent."""
        self._open_channel = open_channel
        self._receiver_id = receiver_id
        self._maps = maps
        self._channels: OrderedDict[str, _Channel] = OrderedDict()

    async def fetch(self, handle: KvHandle, kv_layout: str, from_block: int) -> AsyncGenerator[KvChunk, None]:
        """Chunks in order, from a block on; the end acknowledges.

        Raises KvLost when the source is gone or speaks nonsense, KvMismatch when layouts differ.
        """
        pool = self._maps.get(handle.worker_id, handle.incarnation) if self._maps is not None else None
        pull = pb.PullOpen(
            handle=handle.opaque,
            incarnation=handle.incarnation,
            receiver_id=self._receiver_id,
            kv_layout=kv_layout,
            from_block=from_block,
            shared_nonce=pool.nonce if pool else b"",
        )
        async with self._channel(handle.address) as channel:
            call: Any = _pull_method(channel)()
            try:
                await _within(CHUNK_TIMEOUT_S, call.write(pb.PullFrame(open=pull)))
                blocks = from_block
                last = False
                while not last:
                    raw: Any = await _within(CHUNK_TIMEOUT_S, call.read())
                    if raw is grpc.aio.EOF:
                        raise KvLost(f"{handle.worker_id} ended the transfer after {blocks} of {handle.blocks} blocks")
                    message, data = kv_wire.decode(raw)
                    last = message.last
                    blocks += message.blocks
                    if message.blocks:
                        yield _chunk(message, data, pool)
                if blocks != handle.blocks:
                    raise KvLost(f"{handle.worker_id} sent {blocks} of {handle.blocks} blocks")
                await _acknowledge(call)
            except grpc.aio.AioRpcError as error:
                raise _typed(error, handle) from None
            except (asyncio.InvalidStateError, TimeoutError) as error:
                raise KvLost(f"{handle.worker_id} does not answer: {error!r}") from None
            finally:
                call.cancel()

    async def close(self) -> None:
        """Close every channel. Idempotent."""
        while self._channels:
            _, cached = self._channels.popitem()
            await cached.channel.close()

    @asynccontextmanager
    async def _channel(self, address: str) -> AsyncIterator[grpc.aio.Channel]:
        cached = self._channels.get(address)
        if cached is None:
            cached = self._channels[address] = _Channel(self._open_channel(address))
        self._channels.move_to_end(address)
        cached.users += 1
        try:
            yield cached.channel
        except KvLost:
            # A source that failed may come back elsewhere, or here behind a fresh connection without back-off.
            if self._channels.get(address) is cached:
                del self._channels[address]
            raise
        finally:
            cached.users -= 1
            await self._close_spare(address, cached)

    async def _close_spare(self, address: str, used: _Channel) -> None:
        if not used.users and self._channels.get(address) is not used:
            await used.channel.close()
        if len(self._channels) > MAX_CHANNELS:
            idle = next((key for key, cached in self._channels.items() if not cached.users), None)
            if idle is not None:
                await self._channels.pop(idle).channel.close()


async def _within(timeout_s: float, work: Any) -> Any:
    async with asyncio.timeout(timeout_s):
        return await work


async def _acknowledge(call: Any) -> None:
    """Tell the sender that all is here. Should that fail the blocks are here all the same; its lease will end."""
    try:
        async with asyncio.timeout(ACK_TIMEOUT_S):
            await call.write(pb.PullFrame(ack=pb.PullAck()))
            await call.done_writing()
            await call.read()
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError):
        return


def _pull_method(channel: grpc.aio.Channel) -> Any:
    """KvService.Pull with chunks as raw bytes, for `kv_wire`."""
    method = pb.DESCRIPTOR.services_by_name["KvService"].methods_by_name["Pull"]
    return channel.stream_stream(
        f"/{method.containing_service.full_name}/{method.name}",
        request_serializer=pb.PullFrame.SerializeToString,
        response_deserializer=None,
    )


def _chunk(message: pb.KvChunk, data: memoryview, pool: PoolMap | None) -> KvChunk:
    """The chunk with its bytes where they are: in the message, or in the sender's pool."""
    shared = bool(message.pool_blocks)
    if shared and pool is None:
        raise KvLost("the sender names blocks of a pool that is not mapped here")
    views = tuple(map(pool.block, message.pool_blocks)) if pool and shared else kv_wire.split(data, message.blocks)
    return KvChunk(
        first_block=message.first_block,
        blocks=message.blocks,
        data=views,
        data_bytes=message.data_bytes,
        checksums=tuple(message.checksums),
        pool_blocks=tuple(message.pool_blocks),
        shared=shared,
    )


def _typed(error: grpc.aio.AioRpcError, handle: KvHandle) -> KvLost | KvMismatch:
    details = error.details() or error.code().name
    if details.startswith(KvMismatch.code):
        return KvMismatch(details)
    return KvLost(f"{handle.worker_id} at {handle.address}: {details}")
