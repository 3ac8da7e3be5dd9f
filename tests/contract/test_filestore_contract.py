"""What a file store keeps to."""

from pathlib import Path

import pytest

from libs.contracts.errors import FileNotFound, FileTooLarge, StoreFull
from libs.filestore.local import LocalFiles
from libs.filestore.port import FileInfo, FileStore

ROOM_BYTES = 1_000_000


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return LocalFiles(tmp_path / "files", max_bytes=ROOM_BYTES)


async def put(store: FileStore, file_id: str, content: bytes, *, max_bytes: int = ROOM_BYTES) -> FileInfo:
    async with store.draft(file_id, max_bytes=max_bytes) as draft:
        for start in range(0, len(content), 1000):
            await draft.write(content[start : start + 1000])
        return await draft.keep(name="lines.jsonl", purpose="batch")


async def get(store: FileStore, file_id: str, first_byte: int = 0, length: int | None = None) -> bytes:
    return b"".join([part async for part in store.read(file_id, first_byte, length)])


async def test_a_kept_file_is_read_whole_and_in_ranges(store: FileStore) -> None:
    content = bytes(range(256)) * 2000
    info = await put(store, "file-1", content)
    assert (info.id, info.name, info.purpose, info.bytes) == ("file-1", "lines.jsonl", "batch", len(content))
    assert await store.info("file-1") == info
    assert await get(store, "file-1") == content
    assert await get(store, "file-1", 1000, 300_000) == content[1000:301_000]


async def test_what_is_not_kept_was_never_there(store: FileStore, tmp_path: Path) -> None:
    async with store.draft("file-1", max_bytes=10) as draft:
        await draft.write(b"half")
    with pytest.raises(FileNotFound):
        await store.info("file-1")
    assert await store.infos() == []
    assert not list((tmp_path / "files" / ".drafts").iterdir())


async def test_a_file_of_the_same_id_is_replaced(store: FileStore) -> None:
    await put(store, "file-1", b"one")
    await put(store, "file-1", b"another")
    assert await get(store, "file-1") == b"another"
    assert [info.bytes for info in await store.infos()] == [7]


async def test_bounds_of_a_file_and_of_the_store_are_told_apart(store: FileStore) -> None:
    with pytest.raises(FileTooLarge):
        await put(store, "file-1", b"x" * 101, max_bytes=100)
    await put(store, "file-1", b"x" * (ROOM_BYTES - 10))
    with pytest.raises(StoreFull):
        await put(store, "file-2", b"x" * 11)
    await store.delete("file-1")
    assert (await put(store, "file-2", b"x" * 11)).bytes == 11


@pytest.mark.parametrize("file_id", ["file-1", "../file-1", "", ".drafts", "a/b"])
async def test_an_unknown_id_is_an_error_everywhere(store: FileStore, file_id: str) -> None:
    with pytest.raises(FileNotFound):
        await store.info(file_id)
    with pytest.raises(FileNotFound):
        await store.delete(file_id)
    with pytest.raises(FileNotFound):
        await get(store, file_id)
