"""Tests of bounded requests for /metrics, whatever the server does."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from libs.observe import scrape
from libs.observe.scrape import ScrapeFailed, Scraper

pytestmark = pytest.mark.system

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n"


@asynccontextmanager
async def answering(answer: Answer) -> AsyncIterator[tuple[Scraper, list[bytes]]]:
    """A scraper of a server that reads a request and then does `answer`, again and again; and the requests."""
    requests: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while not writer.is_closing():
                requests.append(await reader.readuntil(b"\r\n\r\n"))
                await answer(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    scraper = Scraper(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/vllm", timeout_s=0.3)
    try:
        yield scraper, requests
    finally:
        scraper.close()
        server.close()


def says(*parts: bytes, close: bool = False) -> Answer:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
        await writer.drain()
        if close:
            writer.close()

    return answer


async def forever(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
    while True:
        writer.write(b"5\r\nhello\r\n")
        await writer.drain()
        await asyncio.sleep(0)


async def silence(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()


async def test_one_connection_serves_repeated_scrapes_and_sends_the_token() -> None:
    async with answering(says(HEAD % 3, b"abc")) as (scraper, requests):
        assert [await scraper.scrape("t0"), await scraper.scrape("t0")] == [b"abc", b"abc"]
    assert all(each.startswith(b"GET /vllm/metrics HTTP/1.1\r\n") for each in requests)
    assert all(b"authorization: Bearer t0\r\n" in each for each in requests)


async def test_chunks_are_joined() -> None:
    answer = says(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", b"3\r\nabc\r\n", b"2\r\nde\r\n0\r\n\r\n")
    async with answering(answer) as (scraper, _):
        assert await scraper.scrape() == b"abcde"


async def test_a_connection_closed_meanwhile_is_reopened() -> None:
    async with answering(says(HEAD % 3, b"abc", close=True)) as (scraper, requests):
        assert [await scraper.scrape() for _ in range(3)] == [b"abc"] * 3
    assert len(requests) == 3


@pytest.mark.parametrize(
    ("answer", "reason", "message"),
    [
        (says(b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 0\r\n\r\n"), "status", "answers 401"),
        (says(b"SSH-2.0-OpenSSH\r\n"), "garbage", "no HTTP"),
        (says(HEAD % 9, b"abc", close=True), "connect", "away"),
        (silence, "timeout", "no answer in 0.3 s"),
    ],
)
async def test_a_failure_names_its_cause(answer: Answer, reason: str, message: str) -> None:
    async with answering(answer) as (scraper, _):
        with pytest.raises(ScrapeFailed, match=message) as failed:
            await scraper.scrape()
    assert failed.value.reason == reason


async def test_an_endless_answer_is_cut_off_by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrape, "MAX_EXPOSITION_BYTES", 1_000)
    async with answering(forever) as (scraper, _):
        with pytest.raises(ScrapeFailed, match="over 1000 bytes") as failed:
            await scraper.scrape()
    assert failed.value.reason == "size"


async def test_an_unreachable_server_is_away() -> None:
    async with answering(silence) as (scraper, _):
        pass
    with pytest.raises(ScrapeFailed, match="away"):
        await scraper.scrape()
