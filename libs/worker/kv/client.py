"""Fetching of KV blocks for engines that do not move bytes themselves: over gRPC, or from the sender's mapped memory.

The stream is the same either way. It opens pulls, reports which blocks are ready while the prompt is computed, and
carries the acks. If sender and receiver share memory, chunks name blocks instead of carrying them. The receiver
proves that they do: it opens the file that the sender's pool would have here and sends the nonce found in it.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator
from pathlib import Path

import structlog

from libs.contracts.errors import KvLost
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.engine.kv.pool_file import sweep
from libs.engine.kv.pool_map import PoolMap, PoolMaps
from libs.engine.kv_port import KvChunk, KvHandle
from libs.runtime.tasks import OnFailure, TaskOwner
from libs.runtime.transport import Transport
from libs.worker.kv import wire as kv_wire
from libs.worker.kv.link import KvLink

log = structlog.get_logger()

# Bounds how long a killed worker's pool takes up memory while another worker runs on its host.
SWEEP_S = 5.0


class SharedMemory:
    """The pools of other workers that this one has mapped, and the sweep of ownerless files."""

    def __init__(self, folder: Path | None) -> None:
        """Sweep at once, so that a pool that starts now finds room. Without a folder, nothing is shared."""
        self._folder = folder
        self.maps = PoolMaps(folder) if folder else None
        self._sweep()

    async def run(self) -> None:
        """Sweep every `SWEEP_S` until cancelled, if a folder is shared."""
        while True:
            await asyncio.sleep(SWEEP_S)
            self._sweep()

    def close(self) -> None:
        if self.maps is not None:
            self.maps.close()

    def _sweep(self) -> None:
        if self._folder is None or self.maps is None:
            return
        self.maps.drop_unowned()
        if removed := sweep(self._folder):
            log.info("removed KV pools of workers that have ended", files=removed)


# Senders whose streams stay open. Streams in use are never closed for it.
MAX_LINKS = 64


class GrpcKvFetcher:
    def __init__(
        self,
        transport: Transport,
        receiver_id: str,
        maps: PoolMaps | None = None,
        *,
        on_failure: OnFailure | None = None,
    ) -> None:
        """Without `maps`, all bytes are sent over gRPC."""
        self._transport = transport
        self._receiver_id = receiver_id
        self._maps = maps
        self._tasks = TaskOwner(on_failure)
        self._links: OrderedDict[str, tuple[KvLink, asyncio.Task[None]]] = OrderedDict()

    async def fetch(self, handle: KvHandle, kv_layout: str, from_block: int) -> AsyncGenerator[KvChunk, None]:
        """Yield chunks in order from block `from_block` on. Reaching the end acknowledges them.

        Raise KvLost if the source is gone or breaks the protocol, and KvMismatch if layouts differ.
        """
        pool = self._maps.get(handle.worker_id, handle.incarnation) if self._maps is not None else None
        request = pb.PullOpen(
            handle=handle.opaque,
            incarnation=handle.incarnation,
            kv_layout=kv_layout,
            from_block=from_block,
            shared_nonce=pool.nonce if pool else b"",
        )
        link = self._link(handle.address)
        pull = link.open(request, handle.blocks - from_block)
        whole = False
        try:
            while not whole:
                message, data = await pull.next()
                if message.blocks or message.ready_blocks:
                    yield _chunk(message, data, pool)
                    link.taken(pull)
                whole = message.last
        except KvLost as error:
            raise KvLost(f"{handle.worker_id} at {handle.address}: {error.message}") from None
        finally:
            link.leave(pull, whole=whole)

    async def close(self) -> None:
        self._links.clear()
        await self._tasks.close()

    def _link(self, address: str) -> KvLink:
        if address in self._links:
            self._links.move_to_end(address)
            return self._links[address][0]
        if len(self._links) >= MAX_LINKS:
            spare = next((key for key, (link, _) in self._links.items() if link.idle), None)
            if spare is not None:
                self._links.pop(spare)[1].cancel()
        link = KvLink(address, receiver_id=self._receiver_id, transport=self._transport)
        self._links[address] = link, self._tasks.spawn(f"KV from {address}", link.run())
        return link


def _chunk(message: pb.KvChunk, data: memoryview, pool: PoolMap | None) -> KvChunk:
    """Convert a chunk without a copy: its bytes stay in the message, or in the sender's pool."""
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
        ready_blocks=message.ready_blocks,
        shared=shared,
    )
