"""Tests of inputs that end too soon, disappear or cannot be read while their lines are dealt."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from libs.contracts.errors import FileNotFound, StoreUnavailable
from libs.contracts.pb.fulcrum.batch.v1 import batch_pb2 as pb
from libs.filestore.local import LocalFiles
from libs.policy.batch import SHARE_LINES
from services.gateway.batch.job import Job
from services.gateway.batch.shares import Dealer, ShareSpan


async def test_an_input_that_ends_too_soon_is_dealt_as_missing(tmp_path: Path) -> None:
    files = LocalFiles(tmp_path / "files", max_bytes=10**6)
    async with files.draft("file-1", max_bytes=10**6) as draft:
        await draft.write(b"{}\n" * SHARE_LINES)
        await draft.keep(name="f", purpose="batch")
    job = Job("job", pb.Created(input_file_id="file-1"), 1, started=pb.Started(lines=2 * SHARE_LINES + 7))
    spans: list[ShareSpan] = []
    async with asyncio.timeout(5):
        while job.dealt.lines < job.lines:
            dealer = Dealer(job, files, ())  # each time another keeper's
            spans += await dealer.next(1)
            job.dealt = dealer.dealt(spans[-1:])
    assert [(span.first_place, span.lines) for span in spans] == [(0, 256), (256, 256), (512, 7)]
    assert [span.bytes for span in spans] == [3 * SHARE_LINES, 0, 0]


async def test_no_lines_follow_those_dealt_as_missing_even_if_the_file_returns(tmp_path: Path) -> None:
    files = LocalFiles(tmp_path / "files", max_bytes=10**6)
    job = Job("job", pb.Created(input_file_id="file-1"), 1, started=pb.Started(lines=3 * SHARE_LINES))
    dealer = Dealer(job, files, ())
    job.dealt = dealer.dealt(await dealer.next(1))
    async with files.draft("file-1", max_bytes=10**6) as draft:
        await draft.write(b"{}\n" * 3 * SHARE_LINES)
        await draft.keep(name="f", purpose="batch")
    spans = await Dealer(job, files, ()).next(3)
    assert [(span.first_place, span.bytes) for span in spans] == [(256, 0), (512, 0)]


@pytest.mark.parametrize("reported", [b"", b"{}\n"])
async def test_a_file_that_the_store_fails_to_read_is_not_dealt_as_missing(tmp_path: Path, reported: bytes) -> None:
    class Faulty(LocalFiles):
        well = False

        async def read(self, file_id: str, first_byte: int = 0, length: int | None = None) -> AsyncIterator[bytes]:
            if self.well:
                async for part in super().read(file_id, first_byte, length):
                    yield part
            elif reported:
                yield reported
            else:
                raise FileNotFound("no such file")

    files = Faulty(tmp_path / "files", max_bytes=10**6)
    async with files.draft("file-1", max_bytes=10**6) as draft:
        await draft.write(b"{}\n" * SHARE_LINES)
        await draft.keep(name="f", purpose="batch")
    job = Job("job", pb.Created(input_file_id="file-1"), 1, started=pb.Started(lines=SHARE_LINES))
    dealer = Dealer(job, files, ())
    with pytest.raises(StoreUnavailable):
        await dealer.next(1)
    files.well = True
    assert [span.bytes for span in await dealer.next(1)] == [3 * SHARE_LINES]
