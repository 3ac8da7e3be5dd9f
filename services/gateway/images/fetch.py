"""Fetching of the images that requests name by URL, from allowed hosts and within limits."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from ssl import SSLContext
from typing import Final

import httpx

from libs.contracts.errors import InvalidRequest, QueueFull, UnsupportedField, one_line
from libs.dispatch.ports import Tenancy
from libs.runtime.release import release
from services.gateway.images.files import MAX_REASON_CHARS, MAX_TOTAL_BYTES, SentImage
from services.gateway.images.hosts import SETTING, ImageHosts, RefusedUrl, host_of, port_of, read_url
from services.gateway.metrics import ImageFetchMetrics
from services.gateway.turns import FairSlots

MAX_WAITING: Final = 256
"""The maximum number of images that wait to be fetched."""
MAX_ADDRESSES: Final = 4
"""The maximum number of addresses of one host that are tried."""
SCHEMES: Final = ("http://", "https://")
_OK, _REDIRECTS = 200, frozenset({301, 302, 303, 307, 308})
_INSTEAD: Final = "send the file itself as data:image/png;base64,"

_HEADERS: Final = {"accept": "image/png, image/jpeg, image/webp, image/gif", "accept-encoding": "identity"}

Resolve = Callable[[str, int], Awaitable[list[str]]]
"""A function that returns the IP addresses of a host. It raises OSError."""


@dataclass(frozen=True, slots=True)
class FetchBounds:
    max_bytes: int
    """The maximum size of one image file."""
    max_s: float
    """The maximum time for one image, including redirects."""
    max_redirects: int
    max_fetches: int
    """The maximum number of concurrent fetches."""


class _Failed(Exception):
    def __init__(self, outcome: str, reason: str) -> None:
        super().__init__(reason)
        self.outcome = outcome


async def resolve(host: str, port: int) -> list[str]:
    """Return the IP addresses of a host from the system's resolver."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in found))


class ImageFetcher:
    def __init__(
        self,
        hosts: ImageHosts,
        bounds: FetchBounds,
        metrics: ImageFetchMetrics,
        *,
        tenants: Tenancy | None = None,
        resolve: Resolve = resolve,
    ) -> None:
        """Create the fetcher. Its slots are shared fairly by `tenants`; with None, all requests are treated alike."""
        self._hosts = hosts
        self._bounds = bounds
        self._metrics = metrics
        self._resolve = resolve
        full = f"{bounds.max_fetches} images are being fetched and too many wait: send the files themselves"
        self.slots = FairSlots(bounds.max_fetches, MAX_WAITING, full, tenants=tenants, max_wait_s=bounds.max_s)
        self._tls: SSLContext | None = None
        # Only connecting has a limit of its own, so that an address that never answers leaves time for the next one.
        self._timeout = httpx.Timeout(None, connect=bounds.max_s / MAX_ADDRESSES)

    async def fetch(
        self, images: Sequence[SentImage], tenant: str, hold: Callable[[int], None]
    ) -> tuple[SentImage, ...]:
        """Return the images with the files of those that have http(s) URLs. Each URL is fetched once.

        `hold` is called with the size of each received part. Raise InvalidRequest, which names the field, for the first
        image that cannot be fetched, and QueueFull.
        """
        urls: dict[str, SentImage] = {}
        for image in images:
            if image.url[:8].lower().startswith(SCHEMES) and image.url not in urls:
                self._check(image)
                urls[image.url] = image
        held = 0

        def hold_all(size_bytes: int) -> None:
            nonlocal held
            held += size_bytes
            if held > MAX_TOTAL_BYTES:
                raise _Failed("too_large", f"the images are over {MAX_TOTAL_BYTES} bytes in all: send smaller ones")
            hold(size_bytes)

        fetching = [asyncio.create_task(self._one(image, tenant, hold_all), name="image") for image in urls.values()]
        try:
            files = dict(zip(urls, await asyncio.gather(*fetching), strict=True))
        finally:
            for each in fetching:
                each.cancel()
            # Cancelled fetches must still close their connections.
            await asyncio.gather(*fetching, return_exceptions=True)
        return tuple(image._replace(file=files.get(image.url, b"")) for image in images)

    def _check(self, image: SentImage) -> None:
        try:
            self._hosts.check(read_url(image.url))
        except RefusedUrl as refused:
            self._metrics.ended("refused", 0, 0.0)
            raise _refusal(image, refused) from None

    async def _one(self, image: SentImage, tenant: str, hold: Callable[[int], None]) -> bytes:
        async with self.slots.slot(tenant):
            began_s, outcome, size_bytes = time.monotonic(), "cancelled", 0
            try:
                async with asyncio.timeout(self._bounds.max_s):
                    file = await self._file(read_url(image.url), hold)
            except RefusedUrl as refused:
                outcome = "refused"
                raise _refusal(image, refused) from None
            except TimeoutError:
                outcome = "timeout"
                raise _fault(image, f"did not come within {self._bounds.max_s:g} s") from None
            except _Failed as failed:
                outcome = failed.outcome
                raise _fault(image, str(failed)) from None
            except QueueFull:
                outcome = "full"
                raise
            else:
                outcome, size_bytes = "ok", len(file)
                return file
            finally:
                self._metrics.ended(outcome, size_bytes, time.monotonic() - began_s)

    async def _file(self, url: httpx.URL, hold: Callable[[int], None]) -> bytes:
        if self._tls is None:  # in a thread, because it reads the certificates of all authorities
            self._tls = await asyncio.to_thread(httpx.create_ssl_context)
        # A reused connection could serve another host name at the same address without a check of its certificate.
        kept = httpx.Limits(max_keepalive_connections=0)
        async with httpx.AsyncClient(verify=self._tls, trust_env=False, timeout=self._timeout, limits=kept) as client:
            for _ in range(self._bounds.max_redirects + 1):
                async with self._opened(client, url) as response:
                    if response.status_code not in _REDIRECTS:
                        return await self._body(response, hold)
                    if "location" not in response.headers:
                        raise _Failed("status", f"answered {response.status_code} without an address to go to")
                    url = self._redirected(url, response.headers["location"])
        raise _Failed("refused", f"redirects over {self._bounds.max_redirects} times: send the last address")

    def _redirected(self, url: httpx.URL, location: str) -> httpx.URL:
        try:
            target = read_url(str(url.join(location)))
        except (httpx.InvalidURL, ValueError):
            raise _Failed("refused", "redirects to an address that cannot be read") from None
        if target.scheme != url.scheme:
            raise _Failed("refused", f"redirects to {target.scheme}, which is not followed: send that address itself")
        self._hosts.check(target)
        return target

    @asynccontextmanager
    async def _opened(self, client: httpx.AsyncClient, url: httpx.URL) -> AsyncIterator[httpx.Response]:
        """Yield the response, without its body, from the first address of the host that accepts a connection."""
        error: Exception | None = None
        for address in await self._targets(url):
            # Connect to the checked address, because a second look-up could return a different one.
            headers = {**_HEADERS, "host": url.netloc.decode("ascii"), "user-agent": f"fulcrum/{release()}"}
            names = {"sni_hostname": host_of(url)}
            try:
                target = url.copy_with(host=address)
                request = client.build_request("GET", target, headers=headers, extensions=names)
                response = await client.send(request, stream=True)
            except (httpx.ConnectError, httpx.ConnectTimeout, OSError) as failed:
                error = failed
                continue
            except (httpx.HTTPError, httpx.InvalidURL) as failed:
                raise _Failed("unreachable", f"cannot be fetched: {one_line(failed, MAX_REASON_CHARS)}") from None
            try:
                yield response
            finally:
                await response.aclose()
            return
        assert error is not None, "a host without addresses was refused"
        raise _Failed("unreachable", f"cannot be fetched: {one_line(error, MAX_REASON_CHARS)}")

    async def _targets(self, url: httpx.URL) -> list[str]:
        host = host_of(url)
        try:
            found = await self._resolve(host, port_of(url))
        except (OSError, UnicodeError) as error:
            reason = f"{host} cannot be looked up: {one_line(error, MAX_REASON_CHARS)}"
            raise _Failed("unreachable", reason) from None
        allowed = [address for address in found if self._hosts.allows_target(address)]
        if not allowed:
            raise RefusedUrl(f"{host} has only private addresses, and {SETTING} of the gateway names none of them")
        return allowed[:MAX_ADDRESSES]

    async def _body(self, response: httpx.Response, hold: Callable[[int], None]) -> bytes:
        if response.status_code != _OK:
            raise _Failed("status", f"answered {response.status_code}, not {_OK}")
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            raise _Failed("refused", "came compressed, which was not asked for")
        most, too_large = self._bounds.max_bytes, f"is over {self._bounds.max_bytes} bytes: send a smaller one"
        length = response.headers.get("content-length", "")
        if length.isdecimal() and int(length) > most:
            raise _Failed("too_large", too_large)
        parts = bytearray()
        try:
            async for part in response.aiter_raw():
                if len(parts) + len(part) > most:
                    raise _Failed("too_large", too_large)
                hold(len(part))
                parts += part
        except httpx.HTTPError as error:
            raise _Failed("unreachable", f"broke off: {one_line(error, MAX_REASON_CHARS)}") from None
        if not parts:
            raise _Failed("status", "came without a byte")
        return bytes(parts)


def _refusal(image: SentImage, refused: RefusedUrl) -> UnsupportedField:
    return UnsupportedField(f"{image.field}: {refused}: add the host there, or {_INSTEAD}", param=image.field)


def _fault(image: SentImage, reason: str) -> InvalidRequest:
    return InvalidRequest(f"{image.field}: the image {reason}: check the address, or {_INSTEAD}", param=image.field)
