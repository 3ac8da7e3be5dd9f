"""Tests of the list of vLLM names that this project uses, and of the check against a version's source."""

import ast
from pathlib import Path

import pytest

from deploy.try_vllm.check import Check
from deploy.try_vllm.derived import ROOT, our_files
from deploy.try_vllm.names import touched
from deploy.try_vllm.touched import CallArguments, Kind, Touched

OURS = "libs/engine/vllm/scheduler.py"
ENGINE = """
from vllm.parts import Base as Root, limit

class Engine(Root):
    kind: "Kind"
    def __init__(self, config: "Kind", *, quiet=False):
        self.config = config
        self.steps, self.ended = 0, 0
    def run(self, steps, *, wait=True):
        self._publisher.publish(steps)
        return self.add_request(steps)

class Kind:
    name = "engine"
    async def ask(self, what, where=None): ...

if limit:
    LATE = 1
else:
    from vllm.parts import LATE
"""
PARTS = """
import dataclasses

class Base:
    def add_request(self, request, urgent=False): ...
    @staticmethod
    def make(first): ...

@dataclasses.dataclass
class Fields:
    one: int
    two: int = 2
    def total(self): ...

limit = dict(name="vllm:tokens")
LATE = 2
"""


@pytest.fixture
def check(tmp_path: Path) -> Check:
    """A small vLLM."""
    folder = tmp_path / "vllm"
    (folder / "v1").mkdir(parents=True)
    (folder / "__init__.py").write_text("from vllm.v1 import *\nfrom .v1 import Engine as Short\n")
    (folder / "v1" / "__init__.py").write_text(ENGINE)
    (folder / "parts.py").write_text(PARTS)
    (tmp_path / "files.txt").write_text("vllm/_C.abi3.so\n")
    return Check(tmp_path)


def reasons(check: Check, *touched_names: Touched) -> list[str]:
    return [each.reason for each in check.problems(list(touched_names))]


def name(dotted: str) -> Touched:
    return Touched(dotted, Kind.NAME, OURS)


def call(dotted: str, positional: int = 0, *names: str) -> Touched:
    return Touched(dotted, Kind.CALL, OURS, CallArguments(positional, names))


@pytest.mark.parametrize(
    "dotted",
    [
        "vllm.v1", "vllm.parts.Base", "vllm.Engine", "vllm.Short.add_request", "vllm.v1.Engine.steps",
        "vllm.v1.Engine.ended", "vllm.v1.Engine.kind.name", "vllm.v1.Engine.config.ask", "vllm.v1.LATE",
        "vllm.v1.Engine.steps.whatever", "vllm.parts.Fields.two",
    ],
)  # fmt: skip
def test_names_are_found_through_reexports_base_classes_instances_and_annotations(check: Check, dotted: str) -> None:
    assert reasons(check, name(dotted)) == []


def test_a_missing_name_is_reported_with_the_present_location_of_its_last_part(check: Check) -> None:
    assert reasons(check, name("vllm.v1.Engine.config.add_request")) == [
        "vllm.v1.Engine.config has no 'add_request'; 'add_request' is in vllm.parts"
    ]
    assert reasons(check, name("vllm.v2.Engine")) == ["vllm has no 'v2'"]


def test_an_optional_name_may_be_missing(check: Check) -> None:
    lacking = Touched("vllm.v1.Later", Kind.NAME, OURS, optional=True)
    assert reasons(check, lacking) == [] and check.absent([lacking]) == [lacking]


def test_calls_are_checked_against_signatures_fields_and_static_methods(check: Check) -> None:
    fitting = (
        call("vllm.v1.Engine", 1, "quiet"), call("vllm.v1.Engine.run", 1, "wait"), call("vllm.parts.Base.make", 1),
        call("vllm.parts.Fields", 0, "one"), call("vllm.parts.Fields.total", 1), call("vllm.v1.Engine.kind.ask", 2),
    )  # fmt: skip
    assert reasons(check, *fitting) == []
    assert reasons(check, call("vllm.v1.Engine.run", 2, "often")) == [
        "run(steps, *, wait) takes no argument 'often'",
        "run(steps, *, wait) takes 1 positional arguments, not 2",
    ]
    assert reasons(check, call("vllm.parts.Fields", 0, "two")) == ["Fields(one, two) needs one"]


def test_an_override_accepts_vllms_arguments_and_is_called(check: Check) -> None:
    override = Touched("vllm.v1.Engine.add_request", Kind.OVERRIDE, OURS, text="_Reporting")
    assert reasons(check, override) == ["add_request(request, urgent) is also given 'urgent'"]
    idle = Touched("vllm.v1.Engine.run", Kind.OVERRIDE, OURS)
    assert reasons(check, idle) == ["nothing in vLLM calls it"]


def test_an_object_that_replaces_vllms_has_the_attributes_that_vllm_uses(check: Check) -> None:
    where = "libs/engine/vllm/kv_groups.py"
    assert reasons(check, Touched("vllm.v1", Kind.STAND_IN, f"{where}:Rehasher", text="_publisher")) == []
    assert reasons(check, Touched("vllm.v1", Kind.STAND_IN, f"{where}:Nobody", text="_publisher")) != []


def test_metrics_strings_and_compiled_files_are_looked_up(check: Check) -> None:
    metric = Touched("vllm.parts", Kind.METRIC, OURS, text="vllm:tokens_total")
    file = Touched("vllm/_C", Kind.FILE, OURS)
    assert reasons(check, metric, file) == []
    assert reasons(check, Touched("vllm.v1", Kind.TEXT, OURS, text="gone")) == ["no such string in vllm.v1"]
    assert reasons(check, Touched("vllm/_moe_C", Kind.FILE, OURS)) == ["no such file in the wheel"]


def test_an_attribute_of_ours_that_hides_one_of_vllms_is_reported(tmp_path: Path) -> None:
    folder = tmp_path / "vllm" / "v1" / "core" / "sched"
    folder.mkdir(parents=True)
    for each in (folder, *list(folder.parents)[:3]):
        (each / "__init__.py").touch()
    (folder / "scheduler.py").write_text("class Scheduler:\n    def _obey(self): ...\n")
    found = Check(tmp_path).problems([])
    assert [each.reason for each in found] == ["ours has '_obey' too, and would hide vLLM's"] * len(found) and found


def test_changed_code_is_counted_without_comments_and_docstrings(tmp_path: Path) -> None:
    texts = ('def f():\n    """Do."""\n    return 1  # one\n', "def f():\n    return 1\n", "def f():\n    return 2\n")
    checks = []
    for number, text in enumerate(texts):
        (tmp_path / str(number) / "vllm").mkdir(parents=True)
        (tmp_path / str(number) / "vllm" / "__init__.py").write_text(text)
        checks.append(Check(tmp_path / str(number)))
    assert checks[1].changed([name("vllm.f")], checks[0]) == []
    assert checks[2].changed([name("vllm.f")], checks[0]) == [("vllm.f", 2)]


def test_every_import_of_vllm_is_on_the_list() -> None:
    listed = {(each.name, each.where.partition(":")[0]) for each in touched()}
    for path in our_files():
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            for each in names:
                if each.split(".")[0] == "vllm":
                    assert (each, str(path.relative_to(ROOT))) in listed


def words_of(each: Touched) -> tuple[str, ...]:
    """Return what must stand in our file for a name of the list to be used there."""
    if each.kind is Kind.CALL and each.arguments is not None and each.arguments.partly:
        return each.arguments.names
    if each.kind is Kind.FILE:
        return (each.name.replace("/", "."),)
    return (each.text if each.kind is Kind.TEXT else each.name.rpartition(".")[2],)


def test_every_name_on_the_list_is_used_where_the_list_says() -> None:
    files: dict[str, str] = {}
    for each in touched():
        file = each.where.partition(":")[0]
        text = files.setdefault(file, (ROOT / file).read_text())
        if each.kind not in {Kind.METRIC, Kind.STAND_IN}:  # both are derived from names that are used
            assert all(word in text for word in words_of(each)), f"{each} is not in its file"
