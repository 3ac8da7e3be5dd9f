"""Contract tests of FileStore over a local folder and an S3 bucket."""

import resource
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from moto.server import ThreadedMotoServer
from structlog.testing import capture_logs

from libs.contracts.errors import FileNotFound, FileTooLarge, StoreFull, StoreUnavailable
from libs.filestore import local, s3
from libs.filestore.local import LocalFiles
from libs.filestore.port import FileInfo, FileStore
from libs.filestore.s3 import PART_BYTES, S3Files, open_s3

ROOM_BYTES = 1_000_000


@pytest.fixture(scope="module")
def s3_endpoint() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@asynccontextmanager
async def bucket(
    endpoint: str, name: str, *, max_bytes: int = ROOM_BYTES, measure_s: float = 0
) -> AsyncIterator[S3Files]:
    async with open_s3(
        name, endpoint=endpoint, region="us-east-1", access_key="a", secret_key="s", max_bytes=max_bytes,
        measure_s=measure_s,
    ) as files:  # fmt: skip
        await files._client.create_bucket(Bucket=name)
        yield files


@pytest.fixture(params=["local", "s3"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[FileStore]:
    if request.param == "local":
        yield LocalFiles(tmp_path / "files", max_bytes=ROOM_BYTES)
        return
    async with bucket(request.getfixturevalue("s3_endpoint"), f"b{abs(hash(request.node.name))}") as files:
        yield files


async def put(
    store: FileStore, file_id: str, content: bytes, *, max_bytes: int = ROOM_BYTES, tenant: str = ""
) -> FileInfo:
    async with store.draft(file_id, max_bytes=max_bytes) as draft:
        for start in range(0, len(content), 1000):
            await draft.write(content[start : start + 1000])
        return await draft.keep(name="lines.jsonl", purpose="batch", tenant=tenant)


async def get(store: FileStore, file_id: str, first_byte: int = 0, length: int | None = None) -> bytes:
    return b"".join([part async for part in store.read(file_id, first_byte, length)])


async def test_a_stored_file_is_read_whole_and_in_ranges(store: FileStore) -> None:
    content = bytes(range(256)) * 2000
    info = await put(store, "file-1", content)
    assert (info.id, info.name, info.purpose, info.bytes) == ("file-1", "lines.jsonl", "batch", len(content))
    assert await store.info("file-1") == info
    assert await get(store, "file-1") == content
    assert await get(store, "file-1", 1000, 300_000) == content[1000:301_000]


async def test_an_abandoned_draft_leaves_no_file(store: FileStore, tmp_path: Path) -> None:
    async with store.draft("file-1", max_bytes=10) as draft:
        await draft.write(b"half")
    with pytest.raises(FileNotFound):
        await store.info("file-1")
    assert await store.infos() == []
    if isinstance(store, LocalFiles):
        assert not list((tmp_path / "files" / ".drafts").iterdir())
    elif isinstance(store, S3Files):
        assert not (await store._client.list_objects_v2(Bucket=store._bucket)).get("Contents")


async def test_a_file_with_the_same_id_is_replaced(store: FileStore) -> None:
    await put(store, "file-1", b"one")
    await put(store, "file-1", b"another")
    assert await get(store, "file-1") == b"another"
    assert [info.bytes for info in await store.infos()] == [7]


async def test_files_are_listed_youngest_first_even_within_one_second(store: FileStore) -> None:
    made = [(await put(store, f"file-{number * 7 % 12:02}", b"x")).id for number in range(12)]
    listed = await store.infos()
    assert [info.id for info in listed] == made[::-1]
    assert [info.created_unix_ns // 10**9 for info in listed] == [info.created_unix_s for info in listed]
    await put(store, made[3], b"again")
    assert [info.id for info in await store.infos()] == [made[3], *(each for each in made[::-1] if each != made[3])]


async def test_files_written_by_older_versions_are_listed_by_their_second(store: FileStore, tmp_path: Path) -> None:
    now = await put(store, "file-now", b"x")
    for file_id, created_s in (("file-b", 5), ("file-a", 5), ("file-c", 6)):
        old = f'{{"id":"{file_id}","name":"f","purpose":"batch","bytes":1,"created_unix_s":{created_s}}}'.encode()
        if isinstance(store, S3Files):
            await store.put(store.known_key(file_id), b'{"info":%s,"content_key":"none"}' % old)
        else:
            (tmp_path / "files" / file_id).mkdir()
            (tmp_path / "files" / file_id / "info.json").write_bytes(old)
    assert [info.id for info in await store.infos()] == [now.id, "file-c", "file-a", "file-b"]


async def test_each_tenants_files_are_listed_separately_and_all_are_counted(store: FileStore) -> None:
    for number, tenant in enumerate(["a", "b", "a", "", "c"]):
        await put(store, f"file-{number}", b"x" * number, tenant=tenant)
    assert [info.id for info in await store.of("a")] == ["file-2", "file-0"]
    assert [info.id for info in await store.of("")] == ["file-3"]
    assert await store.of("nobody") == []
    assert await store.stored() == (5, 10)
    await store.delete("file-2")
    assert [info.id for info in await store.of("a")] == ["file-0"]
    assert await store.stored() == (4, 8)
    await put(store, "file-0", b"longer", tenant="a")
    assert [info.bytes for info in await store.of("a")] == [6]
    assert await store.stored() == (4, 14)


def count_reads(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record the reads of the store's metadata from now on."""
    found: list[Any] = []
    owner, name = (store._client, "get_object") if isinstance(store, S3Files) else (local, "_read_info")
    real = getattr(owner, name)

    def read(*args: Any, **named: Any) -> Any:
        found.append(args or named)
        return real(*args, **named)

    monkeypatch.setattr(owner, name, read)
    return found


async def test_a_listing_or_an_upload_reads_no_metadata_of_another_tenant(
    store: FileStore, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(20):
        await put(store, f"file-{number}", b"x", tenant="many")
    async with AsyncExitStack() as stack:
        fresh: FileStore = LocalFiles(tmp_path / "files", max_bytes=ROOM_BYTES)
        if isinstance(store, S3Files):
            opened = bucket(request.getfixturevalue("s3_endpoint"), store._bucket, measure_s=60)
            fresh = await stack.enter_async_context(opened)
        assert len(await fresh.infos()) == 20
        reads = count_reads(fresh, monkeypatch)
        await put(store, "file-other", b"y", tenant="few")
        assert [info.id for info in await fresh.of("few")] == ["file-other"]
        await put(fresh, "file-own", b"z", tenant="few")
        assert [info.id for info in await fresh.of("few")] == ["file-own", "file-other"]
        assert len(reads) <= 3


async def test_a_file_that_another_process_deletes_or_replaces_is_noticed(
    store: FileStore, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    async with AsyncExitStack() as stack:
        other: FileStore = LocalFiles(tmp_path / "files", max_bytes=ROOM_BYTES)
        if isinstance(store, S3Files):
            opened = bucket(request.getfixturevalue("s3_endpoint"), store._bucket)
            other = await stack.enter_async_context(opened)
        for number in range(3):
            await put(store, f"file-{number}", b"x", tenant="a")
        assert len(await other.of("a")) == 3
        await put(store, "file-0", b"longer", tenant="a")
        await store.delete("file-1")
        assert {info.id: info.bytes for info in await other.of("a")} == {"file-0": 6, "file-2": 1}
        assert await other.stored() == (2, 7)


async def test_a_listing_reads_only_what_has_changed_in_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = (LocalFiles(tmp_path / "files", max_bytes=ROOM_BYTES) for _ in range(2))
    for number in range(10):
        await put(store, f"file-{number}", b"x", tenant="many")
    assert len(await other.of("many")) == 10
    monkeypatch.setattr(LocalFiles, "_scan", None)  # no look at all names
    await put(store, "file-own", b"x", tenant="few")
    assert [info.id for info in await other.of("few")] == ["file-own"]
    await other.delete("file-3")
    assert (len(await store.of("many")), await store.stored()) == (9, (10, 10))


async def test_changes_missing_from_the_journal_are_found_by_the_next_scan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = (LocalFiles(tmp_path / "files", max_bytes=ROOM_BYTES) for _ in range(2))
    await put(store, "file-1", b"x", tenant="a")
    await put(store, "file-2", b"x", tenant="a")
    assert len(await store.of("a")) == 2
    shutil.rmtree(tmp_path / "files" / "file-1")
    monkeypatch.setattr(local, "SCAN_S", -1.0)
    assert [info.id for info in await store.of("a")] == ["file-2"]
    monkeypatch.undo()
    monkeypatch.setattr(local, "MAX_JOURNAL_BYTES", 50)
    for number in range(20):  # a scan of all names starts a new journal
        await put(store, f"file-{number}", b"x", tenant="b")
        assert len(await (other if number % 2 else store).of("b")) == number + 1
        await store.infos()


async def test_inconsistent_copies_of_a_tenants_metadata_are_repaired(
    s3_endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This happens if an older version wrote the file, or a process died between the copy and the original."""
    async with bucket(s3_endpoint, "mended") as store:
        await put(store, "file-1", b"one", tenant="a")
        await store.remove("own/a/file-1.json")
        await store.put("own/a/file-gone.json", b"{}")
        async with bucket(s3_endpoint, "mended") as later:
            assert [info.id for info in await later.of("a")] == ["file-1"]
        assert [item["Key"] for item in await store._list("own/")] == ["own/a/file-1.json", "own/a/file-gone.json"]
        monkeypatch.setattr(s3, "ORPHAN_S", -60.0)
        await store.infos()
        assert [item["Key"] for item in await store._list("own/")] == ["own/a/file-1.json"]


async def test_a_draft_can_be_stored_under_another_id(store: FileStore) -> None:
    async with store.draft("file-1", max_bytes=10) as draft:
        await draft.write(b"half")
        assert (await draft.keep(name="f", purpose="batch", file_id="file-2")).id == "file-2"
    assert await get(store, "file-2") == b"half"
    with pytest.raises(FileNotFound):
        await store.info("file-1")


async def test_the_bounds_of_a_file_and_of_the_store_raise_different_errors(store: FileStore) -> None:
    with pytest.raises(FileTooLarge):
        await put(store, "file-1", b"x" * 101, max_bytes=100)
    await put(store, "file-1", b"x" * (ROOM_BYTES - 10))
    with pytest.raises(StoreFull):
        await put(store, "file-2", b"x" * 11)
    await store.delete("file-1")
    assert (await put(store, "file-2", b"x" * 11)).bytes == 11


async def test_room_can_be_checked_before_the_first_write(store: FileStore) -> None:
    await put(store, "file-1", b"x" * 1000)
    await store.need_room(ROOM_BYTES - 1000)
    async with store.draft("file-2", max_bytes=1000) as draft:
        await draft.write(b"x")
        with pytest.raises(StoreFull):
            await store.need_room(ROOM_BYTES - 1000)


async def test_concurrent_writers_share_the_stores_bound(store: FileStore) -> None:
    async with (
        store.draft("file-1", max_bytes=ROOM_BYTES) as one,
        store.draft("file-2", max_bytes=ROOM_BYTES) as other,
    ):
        await one.write(b"x" * (ROOM_BYTES // 2))
        await other.write(b"x" * (ROOM_BYTES // 2))
        with pytest.raises(StoreFull):
            await one.write(b"x")
        await other.keep(name="f", purpose="batch")
    assert (await put(store, "file-3", b"x" * (ROOM_BYTES // 2))).bytes == ROOM_BYTES // 2
    with pytest.raises(StoreFull):
        await put(store, "file-4", b"x")


async def test_files_that_another_process_stores_during_a_draft_count_against_the_bound(
    store: FileStore, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    async with AsyncExitStack() as stack:
        other: FileStore = LocalFiles(tmp_path / "files", max_bytes=ROOM_BYTES)
        if isinstance(store, S3Files):
            opened = bucket(request.getfixturevalue("s3_endpoint"), store._bucket)
            other = await stack.enter_async_context(opened)
        async with store.draft("file-1", max_bytes=ROOM_BYTES) as draft:
            await draft.write(b"x" * 10)
            await put(other, "file-2", b"x" * (ROOM_BYTES - 20))
            await put(other, "file-3", b"x" * 10)
            await draft.write(b"x")
            with pytest.raises(StoreFull):
                await draft.keep(name="f", purpose="batch")
    assert {info.id for info in await store.infos()} == {"file-2", "file-3"}


async def test_a_disk_that_fills_up_while_a_file_is_closed_raises_store_full(tmp_path: Path) -> None:
    store = LocalFiles(tmp_path / "files", max_bytes=ROOM_BYTES)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with pytest.raises(StoreFull):
        async with store.draft("file-1", max_bytes=1000) as draft:
            await draft.write(b"x" * 500)  # still in memory
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
            try:
                await draft.keep(name="f", purpose="batch")
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert await store.infos() == []
    assert not list((tmp_path / "files" / ".drafts").iterdir())


async def test_a_file_that_cannot_be_opened_is_not_mistaken_for_a_deleted_one(tmp_path: Path) -> None:
    store = LocalFiles(tmp_path / "files", max_bytes=ROOM_BYTES)
    await put(store, "file-1", b"one")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))  # as in a process with too many connections
    try:
        for failing in (store.info("file-1"), get(store, "file-1"), store.infos()):
            with pytest.raises(StoreUnavailable):
                await failing
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert await get(store, "file-1") == b"one"


async def test_a_store_whose_disk_is_gone_keeps_its_files_and_refuses_new_ones(tmp_path: Path) -> None:
    store = LocalFiles(tmp_path / "files", max_bytes=ROOM_BYTES)
    await put(store, "file-1", b"one")
    for left in (False, True):
        (tmp_path / "files").rename(tmp_path / "away")
        if left:  # where it was mounted
            (tmp_path / "files").mkdir()
        for failing in (
            store.info("file-1"),
            get(store, "file-1"),
            store.infos(),
            store.delete("file-1"),
            put(store, "file-2", b""),
        ):
            with pytest.raises(StoreUnavailable):
                await failing
        if left:
            assert not list((tmp_path / "files").iterdir())
            (tmp_path / "files").rmdir()
        (tmp_path / "away").rename(tmp_path / "files")
        assert await get(store, "file-1") == b"one"


async def test_foreign_files_in_the_store_hide_no_stored_file(store: FileStore, tmp_path: Path) -> None:
    await put(store, "file-1", b"one")
    for file_id, text in (("foreign", b"not JSON"), ("other", b"{}"), ("latin", b'{"id": "\xe9"}')):
        if isinstance(store, S3Files):
            await store.put(store.known_key(file_id), text)
        else:
            (tmp_path / "files" / file_id).mkdir()
            (tmp_path / "files" / file_id / "info.json").write_bytes(text)
        with pytest.raises(StoreUnavailable):
            await store.info(file_id)
    with capture_logs() as logs:
        for _ in range(2):
            assert [info.id for info in await store.infos()] == ["file-1"]
    assert len(logs) == (3 if isinstance(store, S3Files) else 1), "each is logged once"
    await put(store, "file-2", b"there is room as before")


async def test_a_read_error_within_a_file_raises_store_unavailable(tmp_path: Path) -> None:
    store = LocalFiles(tmp_path / "files", max_bytes=ROOM_BYTES)
    await put(store, "file-1", b"one")
    content = tmp_path / "files" / "file-1" / "content"
    content.unlink()
    content.symlink_to("/proc/self/mem")  # opening succeeds, and reading fails
    with pytest.raises(StoreUnavailable):
        await get(store, "file-1")


@pytest.mark.parametrize("file_id", ["file-1", "../file-1", "", ".drafts", "a/b"])
async def test_an_unknown_id_is_an_error_in_every_method(store: FileStore, file_id: str) -> None:
    with pytest.raises(FileNotFound):
        await store.info(file_id)
    with pytest.raises(FileNotFound):
        await store.delete(file_id)
    with pytest.raises(FileNotFound):
        await get(store, file_id)


async def test_a_large_file_is_uploaded_in_parts_and_an_abandoned_upload_leaves_none(s3_endpoint: str) -> None:
    async with bucket(s3_endpoint, "parts", max_bytes=10 * PART_BYTES) as store:
        content = bytes(range(251)) * (2 * PART_BYTES // 251 + 1000)
        async with store.draft("file-1", max_bytes=len(content)) as draft:
            await draft.write(content)
            await draft.keep(name="f", purpose="batch")
        assert await get(store, "file-1", PART_BYTES - 5, 10) == content[PART_BYTES - 5 : PART_BYTES + 5]
        async with store.draft("file-2", max_bytes=len(content)) as draft:
            await draft.write(content)
        assert not (await store._client.list_multipart_uploads(Bucket="parts")).get("Uploads")
        await store.delete("file-1")
        assert not (await store._client.list_objects_v2(Bucket="parts")).get("Contents")


async def test_an_upload_aborted_by_the_store_raises_store_unavailable(s3_endpoint: str) -> None:
    async with bucket(s3_endpoint, "ended", max_bytes=10 * PART_BYTES) as store:
        with pytest.raises(StoreUnavailable):
            async with store.draft("file-1", max_bytes=2 * PART_BYTES) as draft:
                await draft.write(b"x" * (PART_BYTES + 1))
                upload = (await store._client.list_multipart_uploads(Bucket=store._bucket))["Uploads"][0]
                await store.abandon(upload["Key"], upload["UploadId"])
                await draft.keep(name="f", purpose="batch")


async def test_an_upload_whose_last_reply_was_lost_leaves_nothing(
    s3_endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bucket(s3_endpoint, "lost", max_bytes=10 * PART_BYTES) as store:
        complete = store.complete

        async def lose(key: str, upload_id: str, parts: list[Any]) -> None:
            await complete(key, upload_id, parts)
            raise StoreUnavailable("no reply")

        monkeypatch.setattr(store, "complete", lose)
        with pytest.raises(StoreUnavailable):
            await put(store, "file-1", b"x" * (PART_BYTES + 1), max_bytes=2 * PART_BYTES)
        assert not (await store._client.list_objects_v2(Bucket=store._bucket)).get("Contents")


async def test_a_store_that_is_away_raises_store_unavailable(s3_endpoint: str) -> None:
    async with open_s3(
        "none-such", endpoint=s3_endpoint, region="us-east-1", access_key="a", secret_key="s", max_bytes=1
    ) as store:
        with pytest.raises(StoreUnavailable):
            await store.infos()
