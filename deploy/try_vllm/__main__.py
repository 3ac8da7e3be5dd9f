"""`python -m deploy.try_vllm VERSION`: what of vLLM's names this project touches is missing or changed in a version.

Only the Python sources of its wheel are fetched, and nothing is imported or installed. Exit code 1 if anything is
missing. It says nothing of behaviour: docs/deploy-vllm.md lists what to read and run besides.
"""

import argparse
import sys
from collections import Counter

from deploy.try_vllm.check import Check
from deploy.try_vllm.names import touched
from deploy.try_vllm.wheel import METADATA_FILE, FetchError, sources_of, to_stderr

# Packages whose versions decide about images and locks.
SHOWN = ("torch", "transformers", "flashinfer-python", "nixl", "nixl-cu13", "llguidance")


def main(words: list[str]) -> int:
    """Print what a version lacks, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m deploy.try_vllm", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("version", nargs="?", help="a version on the package index, e.g. 0.33.0")
    parser.add_argument("--list", action="store_true", help="print every touched name with its place here, and end")
    chosen = parser.parse_args(words)
    names = touched()
    if chosen.list:
        print(*names, sep="\n")
        return 0
    if not chosen.version:
        parser.error("name a version, e.g. 0.33.0")
    try:
        folder = sources_of(chosen.version, to_stderr)
    except FetchError as error:
        print(error, file=sys.stderr)
        return 2
    check = Check(folder)
    problems = check.problems(names)
    print(*problems, sep="\n")
    absent = {each.text or each.name for each in check.absent(names)}
    if absent:
        print(f"not there, and not needed: {', '.join(sorted(absent))}")
    for line in (folder / METADATA_FILE).read_text(encoding="utf-8").splitlines():
        field, _, value = line.partition(": ")
        if field == "Requires-Dist" and "extra ==" not in value and value.split("<")[0].split("=")[0].rstrip(">~[") in SHOWN:
            print(f"requires {value}")
    kinds = ", ".join(f"{count} of kind {kind}" for kind, count in Counter(each.kind.value for each in names).items())
    print(f"vllm {chosen.version}: {len(names)} names ({kinds}), {len(problems) or 'none'} missing or changed")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
