"""Tests that the tree contains no secret: keys of ours and of known services, private keys and passwords."""

import re
import subprocess
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[3]
SKIPPED: Final = (".png", ".svg", ".ico", ".woff2", ".gz", ".npz")
PATTERNS: Final = {
    "a key of a suite": r"sk-fulcrum-[A-Za-z0-9_-]{43}",
    "a key of another service": r"\bsk-(?:proj-)?[A-Za-z0-9]{32,}|\bhf_[A-Za-z0-9]{30,}|\bgh[opsu]_[A-Za-z0-9]{36}",
    "a cloud's key": r"\bAKIA[0-9A-Z]{16}\b|\bAIza[0-9A-Za-z_-]{35}\b",
    "a private key": r"-----BEGIN (?:RSA |EC |OPENSSH |ENCRYPTED )?PRIVATE KEY-----",
    "a password in an address": r"\b(?:rediss?|https?|postgres)://[^\s/:@\"'{}<>$]*:(?!PASSWORD|password|secret|pw)[^\s/@\"'{}<>$]{8,}@",
}


def tree() -> list[Path]:
    """Return the files that are in git, or about to be."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode:
        pytest.skip("no git checkout")
    return [ROOT / name for name in listed.stdout.splitlines() if not name.endswith(SKIPPED)]


@pytest.mark.system
def test_the_tree_contains_no_secret() -> None:
    found = []
    for path in tree():
        if path.is_symlink() or not path.is_file():
            continue
        text = path.read_text(errors="replace")
        for what, pattern in PATTERNS.items():
            found += [f"{path.relative_to(ROOT)}: {what}" for _ in re.finditer(pattern, text)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("a key of a suite", "sk-fulcrum-" + "a" * 43),
        ("a key of another service", "sk-" + "a1" * 24),
        ("a key of another service", "hf_" + "a" * 34),
        ("a cloud's key", "AKIA" + "A" * 16),
        ("a private key", "-----BEGIN " + "EC PRIVATE KEY-----"),
        ("a password in an address", "redis://:" + "hunter2hunter2@redis:6379"),
    ],
)
def test_each_kind_of_secret_would_be_detected(what: str, text: str) -> None:
    assert re.search(PATTERNS[what], text)
