"""Tests of reading a version's sources from its wheel on an index with range requests."""

import io
import json
import re
import zipfile
from email.message import Message
from pathlib import Path
from typing import Any

import pytest

from deploy.try_vllm import wheel
from deploy.try_vllm.wheel import FetchError, sources_of

FILE = "vllm-1.2.0-cp38-abi3-manylinux_2_28_x86_64.whl"


class Answer(io.BytesIO):
    """A response of the index."""

    def __init__(self, body: bytes, **headers: str) -> None:
        super().__init__(body)
        self.headers = Message()
        for name, value in headers.items():
            self.headers[name.replace("_", "-")] = value


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """The bytes of each range that was fetched of a wheel with 3 MB of compiled code."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as file:
        file.writestr("vllm/__init__.py", "one = 1\n")
        file.writestr("vllm/_C.abi3.so", bytes(3 << 20))
        file.writestr("vllm/v1/__init__.py", "two = 2\n")
        file.writestr("vllm-1.2.0.dist-info/METADATA", "Requires-Dist: torch==1.0\n")
    whole, ranges = content.getvalue(), []

    def answer(url: str, **headers: str) -> Any:
        if url.endswith("/vllm/"):
            names = (FILE, FILE.replace("1.2.0", "1.10.0"), "vllm-1.2.0.tar.gz")
            page = {"files": [{"filename": name, "url": f"https://files/{name}"} for name in names]}
            return Answer(json.dumps(page).encode(), Content_Type=wheel.JSON)
        first, last = map(int, re.findall(r"\d+", headers["Range"]))
        ranges.append(last + 1 - first)
        return Answer(whole[first : last + 1], Content_Range=f"bytes {first}-{last}/{len(whole)}")

    monkeypatch.setattr(wheel, "_open", answer)
    monkeypatch.setenv("FULCRUM_CACHE", str(tmp_path))
    return ranges


def test_only_the_blocks_with_python_sources_are_fetched_and_only_once(fetched: list[int]) -> None:
    folder = sources_of("1.2.0", lambda _line: None)
    assert (folder / "vllm" / "v1" / "__init__.py").read_text() == "two = 2\n"
    assert (folder / "METADATA").is_file() and not list(folder.rglob("*.so"))
    assert "vllm/_C.abi3.so" in (folder / "files.txt").read_text().splitlines()
    assert sum(fetched) < 3 << 20
    before = len(fetched)
    assert sources_of("1.2.0", lambda _line: None) == folder and len(fetched) == before


@pytest.mark.usefixtures("fetched")
def test_a_missing_version_is_reported_with_the_newest_one() -> None:
    with pytest.raises(FetchError, match=r"no wheel of vllm 9\.9; the newest are 1\.2\.0, 1\.10\.0"):
        sources_of("9.9", lambda _line: None)
