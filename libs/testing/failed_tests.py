"""`python libs/testing/failed_tests.py RESULTS`: print the names of the tests that failed, from pytest's JUnit XML.

Exit code 1, with the reason on stdout, where no names say what failed: pytest did not come to its end, or not to its
tests. Standard library only: it runs where nothing is set up. The file is to be written with junit_family=xunit1,
which alone says the test's file.
"""

import sys
from pathlib import Path
from xml.etree import ElementTree

NO_NAMES = ("collection failure", "internal error")
"""pytest's words for what is no failure of a test."""


class Unnamed(Exception):
    """Something other than tests has failed."""


def failed_tests(results: Path) -> list[str]:
    """Names as pytest takes them, in the order they ran. Raises Unnamed."""
    try:
        cases = ElementTree.parse(results).getroot().iter("testcase")  # noqa: S314 - pytest's own
    except (OSError, ElementTree.ParseError):
        raise Unnamed("it crashed, or never began to test") from None
    names: dict[str, None] = {}
    """Once each: a test that fails and cannot be taken down is two entries."""
    for case in cases:
        problems = [*case.iter("failure"), *case.iter("error")]
        if unnamed := [problem.get("message") for problem in problems if problem.get("message") in NO_NAMES]:
            raise Unnamed(f"{unnamed[0]}: {case.get('name')}")
        if problems:
            names[f"{case.get('file')}::{_within(case)}"] = None
    if not names:
        raise Unnamed("no test has failed, and yet it did")
    return list(names)


def _within(case: ElementTree.Element) -> str:
    """Class, if any, and function: classname is the module with dots, then the class."""
    module = str(case.get("file")).removesuffix(".py").replace("/", ".")
    classes = str(case.get("classname")).removeprefix(module).strip(".").split(".")
    return "::".join([*filter(None, classes), str(case.get("name"))])


def main(results: str) -> int:
    """0 when the names say what has failed."""
    try:
        print(*failed_tests(Path(results)), sep="\n")
    except Unnamed as error:
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
