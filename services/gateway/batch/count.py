"""What a job is: its lines, and whether a custom_id comes again; a pass over its file, or two."""

import asyncio
from array import array
from dataclasses import dataclass

from libs.filestore.port import FileStore
from services.gateway.batch.repeats import IdHashes
from services.gateway.batch.shares import Cutter


@dataclass(frozen=True, slots=True)
class Counted:
    """A whole file."""

    lines: int
    repeats: "array[int]"
    """Places of lines whose custom_id an earlier line has, in order."""


async def count(files: FileStore, file_id: str) -> Counted:
    """Read the file; raises FileNotFound."""
    hashes = IdHashes()
    cutter = Cutter(on_line=hashes.add)
    await _read(files, file_id, cutter)
    finder = await asyncio.to_thread(hashes.finder)
    if finder.needed:
        await _read(files, file_id, Cutter(on_line=finder.add))
    return Counted(cutter.lines, finder.places)


async def _read(files: FileStore, file_id: str, cutter: Cutter) -> None:
    async for part in files.read(file_id):
        await asyncio.to_thread(cutter.push, part)
    cutter.flush()
