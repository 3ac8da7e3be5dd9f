"""Tests of bodies of requests that offer an upgrade or a tunnel."""

import re
from collections.abc import Sequence
from itertools import pairwise

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from libs.testing.examples import examples
from tests.unit.runtime.http.http_rig import bodies, echo, exchange, send, web_app

pytestmark = pytest.mark.system
UPGRADES = {
    "h2c": b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n",
    "websocket": b"connection: upgrade\r\nupgrade: websocket\r\n",
    "unknown": b"connection: keep-alive, Upgrade\r\nupgrade: x\r\n",
}


CLOSE = b"host: x\r\nconnection: close\r\n"
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nhost: x\r\n\r\n"
CHUNKED_SMUGGLED = b"%x\r\n%b\r\n0\r\n\r\n" % (len(SMUGGLED), SMUGGLED)


def split_at(cuts: Sequence[int], sent: bytes) -> list[bytes]:
    edges = [0, *sorted({cut % len(sent) for cut in cuts}), len(sent)]
    return [part for first, last in pairwise(edges) if (part := sent[first:last])]


@settings(deadline=None, max_examples=examples(60))
@given(
    upgrade=st.sampled_from(sorted(UPGRADES)),
    chunked=st.booleans(),
    expects=st.booleans(),
    cuts=st.lists(st.integers(0, 1000), max_size=4),
)
def test_a_body_after_an_ignored_upgrade_belongs_to_the_request_however_it_is_cut(
    upgrade: str, chunked: bool, expects: bool, cuts: list[int]
) -> None:
    """The body looks like a request: a server that parses it as one can be smuggled past."""
    framing = b"transfer-encoding: chunked" if chunked else b"content-length: %d" % len(SMUGGLED)
    head = b"POST /first HTTP/1.1\r\nhost: x\r\n" + UPGRADES[upgrade] + framing + b"\r\n\r\n"
    sent = head + (CHUNKED_SMUGGLED if chunked else SMUGGLED) + b"GET /last HTTP/1.1\r\n" + CLOSE + b"\r\n"
    answers = uvloop.run(send(echo, *split_at(cuts, sent)))
    assert bodies(answers) == [b"POST /first " + SMUGGLED + b"\n", b"GET /last \n"]


@pytest.mark.parametrize("upgrade", sorted(UPGRADES))
def test_requests_without_a_body_that_offer_an_upgrade_are_answered_in_turn(upgrade: str) -> None:
    request = b"GET /%d HTTP/1.1\r\nhost: x\r\n" + UPGRADES[upgrade] + b"\r\n"
    sent = b"".join(request % number for number in range(5)) + b"GET /end HTTP/1.1\r\n" + CLOSE + b"\r\n"
    assert bodies(exchange(echo, sent)) == [*(b"GET /%d \n" % number for number in range(5)), b"GET /end \n"]


def test_a_tunnel_is_refused() -> None:
    answer = exchange(web_app(), b"CONNECT x:80 HTTP/1.1\r\nhost: x:80\r\nconnection: close\r\n\r\n" + SMUGGLED)
    assert re.match(rb"HTTP/1.1 4\d\d ", answer)
    assert answer.count(b"HTTP/1.1 ") == 1
