"""Accepted request bodies: JSON that is declared as JSON and not compressed. Pure.

A web page can make its reader's browser post text or a form to any address. Before it posts JSON the browser asks
the address, and is refused. So a body that is not declared as JSON is not read as JSON.
"""

from collections.abc import Mapping

from libs.contracts.errors import quoted
from libs.contracts.http_errors import UnsupportedMediaType

JSON = b"application/json"


def check_json(headers: Mapping[bytes, bytes]) -> None:
    """Raise UnsupportedMediaType unless the body is uncompressed JSON. `headers` are by lowercase name."""
    kind = headers.get(b"content-type", b"")
    if kind != JSON and not _is_json(kind):
        found = f"content-type {quoted(kind.decode('latin-1'))} is not served" if kind else "there is no content-type"
        raise UnsupportedMediaType(f"{found}: send the header content-type: application/json", param="content-type")
    if b"content-encoding" in headers:
        check_encoding(headers)


def check_encoding(headers: Mapping[bytes, bytes]) -> None:
    """Raise UnsupportedMediaType if the body is compressed."""
    encoding = headers.get(b"content-encoding", b"").decode("latin-1").strip()
    if encoding.lower() not in ("", "identity"):
        text = f"content-encoding {quoted(encoding)} is not served: send the body without it, uncompressed"
        raise UnsupportedMediaType(text, param="content-encoding")


def _is_json(kind: bytes) -> bool:
    """Return whether a content type is JSON, whatever its case and parameters."""
    media = kind.split(b";", 1)[0].strip().lower()
    return media == JSON or (media.startswith(b"application/") and media.endswith(b"+json"))
