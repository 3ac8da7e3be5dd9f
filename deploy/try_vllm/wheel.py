"""The Python sources of a released vLLM, read out of its wheel on the package index by range requests."""

import io
import json
import os
import re
import ssl
import sys
import tempfile
import time
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from libs.runtime.paths import cache_dir

INDEX: Final = "https://pypi.org/simple"
JSON: Final = "application/vnd.pypi.simple.v1+json"
# The GPU build that images install. Its Python sources are the same for every platform.
PLATFORM: Final = "x86_64.whl"
BLOCK_BYTES: Final = 1 << 20
TIMEOUT_S: Final = 180.0
PROGRESS_S: Final = 1.0
KEPT_BLOCKS: Final = 4
FILE_LIST: Final = "files.txt"
METADATA_FILE: Final = "METADATA"


class FetchError(Exception):
    """An error with a text for people, shown without a traceback."""


def sources_of(version: str, report: Callable[[str], None]) -> Path:
    """Return the folder with a version's `vllm/**/*.py`, from the cache or the package index. Raise FetchError."""
    folder = cache_dir() / "vllm-sources" / version
    if not folder.is_dir():
        url = wheel_url(version)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as part:
            _extract(url, Path(part) / version, report)
            # A folder is complete once it has its final name, even if this program is interrupted.
            (Path(part) / version).rename(folder)
    return folder


def wheel_url(version: str) -> str:
    """Return the URL of a version's wheel. Raise FetchError that lists the newest versions if there is none."""
    index = os.environ.get("PIP_INDEX_URL", INDEX).rstrip("/")
    with _open(f"{index}/vllm/", Accept=JSON) as response:
        page, kind = response.read(), response.headers.get_content_type()
    if not kind.endswith("json"):
        raise FetchError(f"{index} answers {kind}, not {JSON}: name an index that does in PIP_INDEX_URL")
    urls: dict[str, str] = {}
    for file in json.loads(page)["files"]:
        found = re.fullmatch(r"vllm-([^-]+)-.*" + re.escape(PLATFORM), file["filename"])
        if found:
            urls[found[1]] = urllib.parse.urljoin(f"{index}/vllm/", file["url"])
    if version not in urls:
        newest = sorted(urls, key=lambda each: [int(part) for part in re.findall(r"\d+", each)])[-3:]
        raise FetchError(f"there is no wheel of vllm {version}; the newest are {', '.join(newest)}")
    return urls[version]


def _extract(url: str, folder: Path, report: Callable[[str], None]) -> None:
    remote = RemoteFile(url)
    report(
        f"reading the sources in {url.rpartition('/')[2]} ({remote.size / 1e6:.0f} MB, of which only these are fetched)"
    )
    last_s = time.monotonic()
    with zipfile.ZipFile(io.BufferedReader(remote, BLOCK_BYTES)) as wheel:
        wanted = [each for each in wheel.infolist() if each.filename.endswith((".py", f"dist-info/{METADATA_FILE}"))]
        wanted.sort(key=lambda each: each.header_offset)  # neighbours share a block
        for number, each in enumerate(wanted, 1):
            name = METADATA_FILE if each.filename.endswith(METADATA_FILE) else each.filename
            path = folder / name
            if not path.resolve().is_relative_to(folder.resolve()):
                raise FetchError(f"the wheel has a file outside its folder: {each.filename}")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(wheel.read(each))
            if time.monotonic() - last_s >= PROGRESS_S:
                last_s = time.monotonic()
                report(f"  {number} of {len(wanted)} files, {remote.fetched / 1e6:.0f} MB fetched")
        (folder / FILE_LIST).write_text("\n".join(wheel.namelist()) + "\n")
    report(f"  {len(wanted)} files, {remote.fetched / 1e6:.0f} MB fetched in {remote.requests} requests")


class RemoteFile(io.RawIOBase):
    """A file on a web server that answers range requests. It is read by blocks."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._at = 0
        self._blocks: dict[int, bytes] = {}
        self.fetched = self.requests = 0
        with _open(url, Range="bytes=0-0") as response:
            whole = re.fullmatch(r"bytes 0-0/(\d+)", response.headers.get("Content-Range", ""))
        if whole is None:
            raise FetchError(f"the server of {url} does not answer range requests")
        self.size = int(whole[1])

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self.size)[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer` from at most one block."""
        number, start = divmod(self._at, BLOCK_BYTES)
        part = self._block(number)[start : start + len(buffer)] if self._at < self.size else b""
        buffer[: len(part)] = part
        self._at += len(part)
        return len(part)

    def _block(self, number: int) -> bytes:
        if number not in self._blocks:
            first = number * BLOCK_BYTES
            last = min(first + BLOCK_BYTES, self.size) - 1
            with _open(self._url, Range=f"bytes={first}-{last}") as response:
                found = response.read()
            if len(found) != last - first + 1:
                raise FetchError(f"{self._url} is cut short at byte {first + len(found)}")
            self.fetched += len(found)
            self.requests += 1
            if len(self._blocks) >= KEPT_BLOCKS:
                del self._blocks[next(iter(self._blocks))]
            self._blocks[number] = found
        return self._blocks[number]


def _open(url: str, **headers: str) -> Any:
    if not url.startswith("https://"):
        raise FetchError(f"{url} is no address over https")
    context = ssl.create_default_context(cafile=os.environ.get("PIP_CERT"))
    request = urllib.request.Request(url, headers=headers)  # noqa: S310 - https alone
    try:
        return urllib.request.urlopen(request, timeout=TIMEOUT_S, context=context)  # noqa: S310
    except OSError as error:
        raise FetchError(f"{url} cannot be read: {error}") from error


def to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
