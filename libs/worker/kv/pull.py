"""One transfer on the receiver's side. Synchronous except for `next`."""

import asyncio
from collections import deque

from libs.contracts.errors import FulcrumError, KvLost
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.worker.kv.wire import WINDOW_BYTES

MAX_SILENT_TICKS = 5


class Pull:
    """Received chunks that the engine has not read. The sender's window bounds them; exceeding it fails the pull."""

    def __init__(self, number: int, awaited_blocks: int) -> None:
        self.number = number
        self._silent_ticks = 0
        self._awaited_blocks = awaited_blocks
        self._chunks: deque[tuple[pb.KvChunk, memoryview]] = deque()
        self._unread_bytes = 0
        self._taken_bytes = 0
        """Bytes read and not yet reported to the sender."""
        self._last = False
        self._error: FulcrumError | None = None
        self._news = asyncio.Event()

    async def next(self) -> tuple[pb.KvChunk, memoryview]:
        """Return the next chunk with its data. Raise the error that ended the pull."""
        while not self._chunks:
            if self._error is not None:
                raise self._error
            self._news.clear()
            await self._news.wait()
        chunk, data = self._chunks.popleft()
        self._unread_bytes -= data.nbytes
        self._taken_bytes += data.nbytes
        return chunk, data

    def put(self, chunk: pb.KvChunk, data: memoryview) -> None:
        """Queue a received chunk. The engine checks its blocks and their order."""
        self._silent_ticks = 0
        if self._last or self._error is not None:
            return
        self._awaited_blocks -= chunk.blocks
        if self._unread_bytes >= WINDOW_BYTES or self._awaited_blocks < 0 or not (chunk.blocks or chunk.last):
            self.fail(KvLost("the sender sends more than was asked for"))
        elif chunk.last and self._awaited_blocks:
            self.fail(KvLost(f"the sender ended the pull {self._awaited_blocks} blocks too early"))
        else:
            self._unread_bytes += data.nbytes
            self._last = chunk.last
            self._chunks.append((chunk, data))
            self._news.set()

    def ready(self, blocks: int) -> None:
        """Record that the sender has more blocks ready. At most one such notice is queued."""
        self._silent_ticks = 0
        reported = bool(self._chunks) and not self._chunks[-1][0].blocks
        if not (self._last or self._error is not None or reported):
            self._chunks.append((pb.KvChunk(pull=self.number, ready_blocks=blocks), memoryview(b"")))
            self._news.set()

    def alive(self) -> None:
        """Record a keep-alive of the sender."""
        self._silent_ticks = 0

    def tick(self) -> None:
        """Advance time by one tick. Fail if the queue is empty and the sender has been silent for too long."""
        self._silent_ticks = 0 if self._chunks else self._silent_ticks + 1
        if self._silent_ticks > MAX_SILENT_TICKS:
            self.fail(KvLost("the sender does not answer"))

    def fail(self, error: FulcrumError) -> None:
        """End the pull with an error, unless the last chunk has arrived."""
        if not self._last and self._error is None:
            self._error = error
            self._news.set()

    def take_report(self) -> int:
        """Return the bytes read since the last report if they are half a window or more, else 0."""
        taken_bytes = self._taken_bytes
        if taken_bytes < WINDOW_BYTES // 2:
            return 0
        self._taken_bytes = 0
        return taken_bytes
