from collections.abc import AsyncGenerator
from contextlib import aclosing

from libs.contracts.errors import FileNotFound
from libs.contracts.pb.fulcrum.batch.v1.batch_pb2 import Share
from libs.filestore.port import FileStore
from services.gateway.batch.jobs.reasons import InputGone
from services.gateway.batch.lines.line import BatchLine, read_line
from services.gateway.batch.lines.shares import LineSplitter


async def read_lines(files: FileStore, share: Share) -> list[BatchLine]:
    """Return all lines of the share; lines that a deleted file no longer holds are refused. Raise StoreUnavailable."""
    repeats = frozenset(share.repeats)
    async with aclosing(_texts(files, share)) as texts:
        found = [await anext(texts) for _ in range(share.lines)]
    return [_line(share, index, number, text, repeated=index in repeats) for index, (number, text) in enumerate(found)]


def _line(share: Share, index: int, number: int, text: bytes | None, *, repeated: bool) -> BatchLine:
    place = share.first_place + index
    if text is None:
        return BatchLine(number, place, "", b"", InputGone("the input file was deleted"))
    return read_line(text, number=number, place=place, endpoint=share.endpoint, repeated=repeated)


async def _texts(files: FileStore, share: Share) -> AsyncGenerator[tuple[int, bytes | None], None]:
    """Yield the share's line numbers and lines, with None for the text once the file is gone."""
    number, splitter = share.first_line, LineSplitter()
    try:
        async for part in files.read(share.input_file_id, share.first_byte, share.bytes):
            for text in splitter.push(part):
                if text.strip():
                    yield number, text
                number += 1
        for text in splitter.flush():
            yield number, text
    except FileNotFound:
        pass
    while True:
        yield number, None
        number += 1
