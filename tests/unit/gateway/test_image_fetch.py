"""Tests of images named by URL: allowed hosts, bounds, and the error for each that is refused."""

import asyncio
import datetime
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from httpx import URL
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from libs.contracts.errors import InvalidRequest, QueueFull, UnsupportedField
from libs.runtime.net.authority import issue
from libs.testing.servers.image_host import ImageHost, image_host, reply
from libs.testing.wait import until
from services.gateway.images import files
from services.gateway.images.fetch import FetchBounds, ImageFetcher
from services.gateway.images.files import SentImage
from services.gateway.images.hosts import SETTING, ImageHosts, RefusedUrl, read_url
from services.gateway.metrics import ImageFetchMetrics
from services.gateway.settings import GatewaySettings

FIELD = "messages[0].content[0].image_url.url"
FILE = bytes(range(256)) * 8
PUBLIC = "93.184.216.34"


def hosts(text: str) -> ImageHosts:
    return ImageHosts.parse(text)


@pytest.mark.parametrize(
    ("listed", "url"),
    [
        ("example.com", "https://Example.com/a.png?x=1#y"),
        ("example.com", "http://example.com:80/"),
        ("other, example.com:8443", "https://example.com:8443/"),
        ("example.com:443", "https://example.com/"),
        ("bücher.example", "https://xn--bcher-kva.example/"),
        ("10.0.0.7", "http://10.0.0.7/"),
        ("10.0.0.0/8", "http://10.0.0.7/"),
        ("::1", "http://[::1]/"),
        ("[::1]:9000", "http://[::1]:9000/"),
    ],
)
def test_urls_of_listed_hosts_are_fetched(listed: str, url: str) -> None:
    hosts(listed).check(read_url(url))


@pytest.mark.parametrize(
    ("listed", "url", "reason"),
    [
        ("", "https://example.com/", "and it names none"),
        ("example.com", "https://www.example.com/", r"www\.example\.com is none of them"),
        ("example.com", "https://example.com.evil.test/", "is none of them"),
        ("example.com", "https://evil.test/example.com", "is none of them"),
        ("example.com", "https://example.com@evil.test/", "user or password"),
        ("example.com", "https://me:pass@example.com/", "user or password"),
        ("example.com", "https://example.com:8443/", r"example\.com:8443 is none of them"),
        ("example.com:443", "http://example.com/", "is none of them"),
        ("10.0.0.7:9000", "http://10.0.0.7/", "is none of them"),
        ("10.0.0.0/8", "http://10.0.0.7:9000/", "is none of them"),
        ("10.0.0.0/8", "http://167772167/", "is none of them"),
    ],
)
def test_other_hosts_and_ports_are_refused_with_the_setting_that_would_allow_them(
    listed: str, url: str, reason: str
) -> None:
    with pytest.raises(RefusedUrl, match=reason):
        hosts(listed).check(read_url(url))


@pytest.mark.parametrize("url", ["ftp://example.com/a", "http:///a", "http://[::1/", "https://a/" + "x" * 9000])
def test_an_invalid_http_url_is_refused(url: str) -> None:
    with pytest.raises(RefusedUrl):
        read_url(url)


@pytest.mark.parametrize(
    ("address", "allowed"),
    [
        (PUBLIC, True), ("2606:2800:220:1::1", True), ("::ffff:93.184.216.34", True), ("64:ff9b::5db8:d822", True),
        ("127.0.0.1", False), ("10.1.2.3", False), ("169.254.169.254", False), ("0.0.0.0", False),
        ("100.64.0.1", False), ("224.0.0.1", False), ("::1", False), ("fe80::1%eth0", False), ("fd00::1", False),
        ("::ffff:127.0.0.1", False), ("64:ff9b::7f00:1", False), ("2002:7f00:1::1", False), ("ff02::1", False),
        ("::127.0.0.1", False), ("fec0::1", False), ("64:ff9b:1::a00:1", False), ("2001:0:7f00:1::", False),
    ],
)  # fmt: skip
def test_names_may_resolve_only_to_public_addresses(address: str, allowed: bool) -> None:
    assert hosts("example.com").allows_target(address) is allowed


def test_names_may_resolve_to_listed_private_addresses_and_networks() -> None:
    listed = hosts("files.internal, 10.1.2.3, 192.168.0.0/16, 127.0.0.1:9000")
    for address in ("10.1.2.3", "192.168.4.4", "127.0.0.1", "::ffff:10.1.2.3"):
        assert listed.allows_target(address), address
    assert not listed.allows_target("10.1.2.4")


@given(st.ip_addresses(v=4))
def test_an_ipv4_mapped_ipv6_address_is_judged_as_ipv4(address: Any) -> None:
    listed = hosts("example.com, 10.0.0.0/9")
    allowed = listed.allows_target(str(address))
    assert listed.allows_target(f"::ffff:{address}") is allowed
    assert listed.allows_target(f"64:ff9b::{address}") is allowed


@pytest.mark.parametrize("text", ["*.example.com", "a b", "https://example.com", "me@example.com", "10.0.0.1/8"])
def test_a_malformed_list_is_an_error_at_the_start(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a (host|network)"):
        GatewaySettings.model_validate({"image_hosts": text})


class Rig:
    """A fetcher of one real server's images, with what it counted."""

    def __init__(self, host: ImageHost, listed: str = "", **bounds: Any) -> None:
        self.registry = CollectorRegistry()
        own: dict[str, Any] = {"max_bytes": 4096, "max_s": 300.0, "max_redirects": 2, "max_fetches": 2}
        self.held: list[int] = []
        self.addresses: dict[str, list[str]] = {}
        self.fetcher = ImageFetcher(
            hosts(listed or f"127.0.0.1:{host.port}"), FetchBounds(**(own | bounds)), ImageFetchMetrics(self.registry),
            resolve=self._resolve,
        )  # fmt: skip

    async def _resolve(self, name: str, _port: int) -> list[str]:
        return self.addresses.get(name, [name])

    async def fetch(self, *urls: str) -> list[bytes]:
        found = await self.fetcher.fetch([SentImage(url, FIELD) for url in urls], "t", self.held.append)
        return [image.file for image in found]

    def counted(self, outcome: str) -> float:
        return self.registry.get_sample_value("fulcrum_gateway_image_fetches_total", {"outcome": outcome}) or 0.0

    async def fails(self, url: str, reason: str, outcome: str, error: type[InvalidRequest] = InvalidRequest) -> None:
        with pytest.raises(error, match=reason) as caught:
            await self.fetch(url)
        assert caught.value.param == FIELD
        assert (caught.value.http_status, self.counted(outcome)) == (400, 1.0)
        assert "send the file itself" in caught.value.message


@pytest_asyncio.fixture
async def host() -> AsyncIterator[ImageHost]:
    async with image_host() as found:
        found.answers["/a.png"] = reply(FILE)
        yield found


pytestmark = pytest.mark.system


async def test_files_are_unchanged_and_each_url_is_fetched_once(host: ImageHost) -> None:
    host.answers["/chunked"] = reply(b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n", "Transfer-Encoding: chunked")
    host.answers["/closed"] = reply(b"to the end", "Connection: close")
    rig, a = Rig(host), host.url("/a.png")
    inline = "data:image/png;base64,AAAA"
    found = await rig.fetch(a, inline, host.url("/chunked"), a, host.url("/closed"))
    assert found == [FILE, b"", b"abcde", FILE, b"to the end"]
    assert sorted(path for path, _ in host.requests) == ["/a.png", "/chunked", "/closed"]
    assert sum(rig.held) == len(FILE) + 15
    assert rig.counted("ok") == 3
    assert rig.registry.get_sample_value("fulcrum_gateway_image_fetch_bytes_total") == len(FILE) + 15


async def test_a_url_named_twice_fails_in_the_field_that_names_it_first(host: ImageHost) -> None:
    url = host.url("/missing")
    with pytest.raises(InvalidRequest) as caught:
        await Rig(host).fetcher.fetch([SentImage(url, "first"), SentImage(url, "second")], "t", lambda _: None)
    assert caught.value.param == "first"


async def test_without_listed_hosts_nothing_is_fetched_and_the_error_names_the_setting(host: ImageHost) -> None:
    rig = Rig(host, "10.9.9.9")
    await rig.fails(host.url("/a.png"), f"hosts in {SETTING} of the gateway", "refused", UnsupportedField)
    with pytest.raises(UnsupportedField, match="and it names none"):
        await ImageFetcher(ImageHosts(), FetchBounds(1, 1, 1, 1), ImageFetchMetrics(CollectorRegistry())).fetch(
            [SentImage(host.url("/a.png"), FIELD)], "t", lambda _: None
        )
    assert not host.requests


async def test_the_host_name_is_sent_to_the_address_that_was_checked(host: ImageHost) -> None:
    rig = Rig(host, f"images.test:{host.port}, 127.0.0.1")
    rig.addresses["images.test"] = ["10.0.0.1", "127.0.0.1"]
    assert await rig.fetch(host.url("/a.png", "images.test")) == [FILE]
    ((_, headers),) = host.requests
    assert headers["host"] == f"images.test:{host.port}"
    assert "cookie" not in headers
    assert "authorization" not in headers


async def test_a_listed_name_that_resolves_to_loopback_is_refused(host: ImageHost) -> None:
    rig = Rig(host, f"images.test:{host.port}")
    rig.addresses["images.test"] = ["127.0.0.1", "::1"]
    await rig.fails(host.url("/a.png", "images.test"), "only private addresses", "refused", UnsupportedField)
    assert not host.requests


async def test_the_next_address_is_tried_if_one_does_not_connect(host: ImageHost) -> None:
    rig = Rig(host, f"images.test:{host.port}, 127.0.0.0/8")
    rig.addresses["images.test"] = ["127.0.0.77", "127.0.0.1"]
    assert await rig.fetch(host.url("/a.png", "images.test")) == [FILE]


@pytest.mark.parametrize(
    ("answer", "reason", "outcome"),
    [
        (reply(status="404 Not Found"), "answered 404", "status"),
        (reply(FILE, status="206 Partial Content"), "answered 206", "status"),
        (reply(), "came without a byte", "status"),
        (reply(bytes(4097)), "over 4096 bytes", "too_large"),
        (reply(b"", "Content-Length: 9999999999999"), "over 4096 bytes", "too_large"),
        (reply(bytes(5000), "Connection: close"), "over 4096 bytes", "too_large"),
        (reply(b"abc", "Content-Length: 10"), "broke off", "unreachable"),
        (reply(b"abc", "Content-Encoding: gzip"), "came compressed", "refused"),
        (b"no HTTP at all\r\n\r\n", "cannot be fetched", "unreachable"),
        (b"", "cannot be fetched", "unreachable"),
        (reply(status="302 Found"), "answered 302 without an address", "status"),
    ],
)
async def test_an_answer_that_is_no_image_within_bounds_is_a_400_with_the_reason(
    host: ImageHost, answer: bytes, reason: str, outcome: str
) -> None:
    host.answers["/b"] = answer
    await Rig(host).fails(host.url("/b"), reason, outcome)


async def test_redirects_stay_within_the_list_the_scheme_and_their_bound(host: ImageHost) -> None:
    def to(location: str, status: str = "302 Found") -> bytes:
        return reply(b"", f"Location: {location}", status=status)

    host.answers |= {
        "/1": to("/2", "308 Permanent Redirect"),
        "/2": to(host.url("/a.png"), "307 Temporary Redirect"),
        "/0": to("/1"),
        "/out": to("http://example.com/a.png"),
        "/tls": to(host.url("/a.png", scheme="https")),
        "/file": to("file:///etc/passwd"),
    }
    rig = Rig(host)
    assert await rig.fetch(host.url("/1")) == [FILE]
    await Rig(host).fails(host.url("/0"), "redirects over 2 times", "refused")
    await Rig(host).fails(host.url("/out"), "example.com is none of them", "refused", UnsupportedField)
    await Rig(host).fails(host.url("/tls"), "redirects to https, which is not followed", "refused")
    await Rig(host).fails(host.url("/file"), "http:// or https://", "refused", UnsupportedField)
    assert await Rig(host, max_redirects=0).fetch(host.url("/a.png")) == [FILE]


async def test_a_server_that_does_not_finish_times_out(host: ImageHost) -> None:
    host.answers["/slow"] = reply(b"abc", "Content-Length: 10")
    host.stalls.add("/slow")
    await Rig(host, max_s=0.2).fails(host.url("/slow"), r"did not come within 0\.2 s", "timeout")
    await until(lambda: host.open == 0, what="the connection to be closed")


async def test_a_closed_port_is_a_400(host: ImageHost) -> None:
    rig = Rig(host, "127.0.0.1:1")
    await rig.fails("http://127.0.0.1:1/a.png", "cannot be fetched", "unreachable")


async def test_concurrent_fetches_are_bounded_and_a_cancelled_one_makes_room(host: ImageHost) -> None:
    paths = [f"/{place}" for place in range(5)]
    host.answers |= dict.fromkeys(paths, reply(b"abc", "Content-Length: 10"))
    host.stalls |= set(paths)
    rig = Rig(host)
    fetching = asyncio.create_task(rig.fetch(*map(host.url, paths)))
    await until(lambda: host.open == 2 and len(rig.fetcher.slots) == 3, what="two fetches, three that wait")
    fetching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetching
    await until(lambda: host.open == 0, what="the connections to be closed")
    assert (rig.fetcher.slots.held, len(rig.fetcher.slots), host.most_open) == (0, 0, 2)
    assert rig.counted("cancelled") == 2
    assert await rig.fetch(host.url("/a.png")) == [FILE]


async def test_bytes_are_bounded_per_request_and_per_gateway(host: ImageHost, monkeypatch: pytest.MonkeyPatch) -> None:
    host.answers["/b.png"] = reply(FILE)
    monkeypatch.setattr(files, "MAX_TOTAL_BYTES", len(FILE) * 2 - 1)
    monkeypatch.setattr("services.gateway.images.fetch.MAX_TOTAL_BYTES", len(FILE) * 2 - 1)
    with pytest.raises(InvalidRequest, match="bytes in all"):
        await Rig(host).fetch(host.url("/a.png"), host.url("/b.png"))

    def full(_size_bytes: int) -> None:
        raise QueueFull("too many bytes", retry_after_s=1)

    rig = Rig(host)
    with pytest.raises(QueueFull):
        await rig.fetcher.fetch([SentImage(host.url("/a.png"), FIELD)], "t", full)
    assert (rig.counted("full"), rig.counted("cancelled")) == (1, 0)
    await until(lambda: host.open == 0, what="the connections to be closed")


async def test_a_certificate_is_checked_against_the_name_in_the_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = datetime.datetime.now(datetime.UTC)
    (issued,) = issue(tmp_path / "tls", "c", now=now, names=["images.test"], roles=["gateway"])
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(issued.file)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "tls" / "ca.pem"))
    async with image_host(tls) as host:
        host.answers["/a.png"] = reply(FILE)
        rig = Rig(host, f"images.test:{host.port}, other.test:{host.port}, 127.0.0.1")
        rig.addresses = {"images.test": ["127.0.0.1"], "other.test": ["127.0.0.1"]}
        assert await rig.fetch(host.url("/a.png", "images.test", "https")) == [FILE]
        await rig.fails(host.url("/a.png", "other.test", "https"), "cannot be fetched", "unreachable")
    assert URL(host.url("/a.png", "images.test", "https")).port == host.port
