"""`python -m deploy.try_vllm VERSION`: list the names of vLLM used here that are missing or changed in a version.

Only the Python sources in its wheel are downloaded, and nothing is imported or installed. The exit code is 1 if
anything is missing. The check does not cover behaviour; docs/vllm-design.md lists what else to read and run.
"""

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from deploy.try_vllm.check import Check
from deploy.try_vllm.derived import ROOT
from deploy.try_vllm.names import touched
from deploy.try_vllm.wheel import METADATA_FILE, FetchError, sources_of, to_stderr

LOCK = ROOT / "locks" / "vllm.txt"
# Packages whose versions matter for images and locks.
SHOWN = ("torch", "transformers", "flashinfer-python", "nixl", "nixl-cu13", "llguidance")


def locked() -> str:
    """Return the version of vLLM in the lock file of the images."""
    found = re.search(r"^vllm==(\S+)", LOCK.read_text(encoding="utf-8"), re.MULTILINE)
    return found[1] if found else ""


def requirements(folder: Path) -> Iterator[str]:
    """Yield the packages whose versions matter for images and locks, with these versions."""
    for line in (folder / METADATA_FILE).read_text(encoding="utf-8").splitlines():
        field, _, value = line.partition(": ")
        name = re.match(r"[\w.-]+", value)
        if field == "Requires-Dist" and name and name[0] in SHOWN and "extra ==" not in value:
            yield value.partition(";")[0]


def main(words: list[str]) -> int:
    """Print the names that a version lacks, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m deploy.try_vllm", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("version", nargs="?", help="a version on the package index, e.g. 0.33.0")
    parser.add_argument("--list", action="store_true", help="print every touched name with its place here, and end")
    parser.add_argument("--since", default=locked(), help="the version to compare code with (%(default)s, as locked)")
    chosen = parser.parse_args(words)
    names = touched()
    if chosen.list:
        print(*names, sep="\n")
        return 0
    if not chosen.version:
        parser.error("name a version, e.g. 0.33.0")
    try:
        folder, before = (sources_of(version, to_stderr) for version in (chosen.version, chosen.since))
    except FetchError as error:
        print(error, file=sys.stderr)
        return 2
    check = Check(folder)
    problems = check.problems(names)
    print(*problems, sep="\n")
    absent = {each.text or each.name for each in check.absent(names)}
    if absent:
        print(f"not there, and not needed: {', '.join(sorted(absent))}")
    for line in sorted({*requirements(folder)} - {*requirements(before)}):
        print(f"requires {line}, unlike {chosen.since}")
    for name, lines in check.changed(names, Check(before)):
        print(f"{lines:5} lines differ from {chosen.since}  {name}")
    kinds = ", ".join(f"{count} of kind {kind}" for kind, count in Counter(each.kind.value for each in names).items())
    print(f"vllm {chosen.version}: {len(names)} names ({kinds}), {len(problems) or 'none'} missing or changed")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
