"""Test that a watch whose event exceeds the client's buffer continues with a new list."""

import asyncio
from types import SimpleNamespace
from unittest import mock

import pytest
from aiohttp import StreamReader
from aiohttp.base_protocol import BaseProtocol

from libs.actuators.kubernetes_client import TooOld, failures, watch_lines


async def test_an_event_too_long_to_buffer_requests_a_new_list() -> None:
    content = StreamReader(mock.create_autospec(BaseProtocol), limit=16, loop=asyncio.get_running_loop())
    content.feed_data(b"short\n")
    content.feed_data(b"x" * 100)
    lines = watch_lines(SimpleNamespace(content=content))
    assert await anext(lines) == b"short\n"
    with pytest.raises(TooOld, match="too long"), failures():
        await anext(lines)
