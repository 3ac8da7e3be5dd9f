"""A client's topic of lines into a file of the store, which from then on is a job's input as any other."""

from libs.bus.work import WorkBus
from libs.filestore.port import FileStore
from services.gateway.batch.upload import PURPOSES

WRITE_BYTES = 256 * 1024


async def spool(bus: WorkBus, files: FileStore, topic: str, file_id: str, *, max_bytes: int) -> None:
    """One line a record, in the order of partitions and offsets.

    Raises TopicNotFound, FileTooLarge; StoreFull and BrokerUnavailable, after which it may be tried again.
    """
    async with files.draft(file_id, max_bytes=max_bytes) as draft:
        buffer = bytearray()
        async for value in bus.values(topic):
            # JSON has line ends only between its tokens, where a blank says the same.
            buffer += value.replace(b"\n", b" ") + b"\n"
            if len(buffer) >= WRITE_BYTES:
                await draft.write(bytes(buffer))
                buffer.clear()
        await draft.write(bytes(buffer))
        await draft.keep(name=f"{topic}.jsonl", purpose=PURPOSES[0])
