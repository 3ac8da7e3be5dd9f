"""`python -m deploy.compile build/lab`: compile the modules that the lab runs, from the same sources, with mypyc.

`--services` compiles the modules on the path of a request instead.

The folder gets a copy of `libs/` with an extension module beside each of `MODULES`. Python prefers an extension module
to a `.py` file of the same name. Only commands with the folder in their path use it: `PYTHONPATH=build/lab fulcrum lab
run …` and `PYTHONPATH=build/services fulcrum up`. Figures and answers are those of plain Python
(tests/e2e/test_lab_compiled.py, test_services_compiled.py). A folder that is up to date is not built again. The command
needs mypy with mypyc, setuptools and a C compiler. A build takes minutes.

mypyc leaves the `__init__` that `@dataclass` generates to the interpreter, which took a third of the compiled lab's
time. The copies therefore get constructors as source code. Their dataclasses are no longer `frozen`, which type checks
of the sources have made unnecessary. Fields, defaults, equality and hash remain.
"""

import argparse
import ast
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from libs.lab.cluster.worker import LabWorker


class _Field(NamedTuple):
    name: str
    annotation: str
    default: str
    """The source of the default; empty if there is none."""
    factory: str
    init: bool


def bases(sources: Iterable[str]) -> frozenset[str]:
    """Return the names of all base classes.

    Their fields would also have to be in the constructors of derived classes.
    """
    found: set[str] = set()
    for source in sources:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                found.update(base.id for base in node.bases if isinstance(base, ast.Name))
    return frozenset(found)


def with_constructors(source: str, derived_from: frozenset[str] = frozenset()) -> str:
    """Return the module with a constructor in each dataclass that has none and neither has nor is a base class."""
    lines = source.splitlines()
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    for node in reversed(classes):
        decorator = _decorator(node)
        if decorator is None or node.bases or node.name in derived_from or _has_constructor(node):
            continue
        fields = _fields(node)
        if fields is None:
            continue
        assert node.end_lineno is not None and decorator.end_lineno is not None
        lines[node.end_lineno : node.end_lineno] = _constructor(node, fields)
        lines[decorator.lineno - 1 : decorator.end_lineno] = [_plain(decorator)]
    return "\n".join(lines) + "\n"


def _decorator(node: ast.ClassDef) -> ast.expr | None:
    if len(node.decorator_list) != 1:
        return None
    found = node.decorator_list[0]
    name = found.func if isinstance(found, ast.Call) else found
    return found if isinstance(name, ast.Name) and name.id == "dataclass" else None


def _plain(decorator: ast.expr) -> str:
    """Return the decorator with `init=False` and without `frozen`. Frozen classes keep their hash."""
    keywords = decorator.keywords if isinstance(decorator, ast.Call) else []
    options = {each.arg: ast.unparse(each.value) for each in keywords if each.arg is not None}
    frozen = options.pop("frozen", "False") == "True"
    if frozen and options.get("eq") != "False":
        options["unsafe_hash"] = "True"
    options["init"] = "False"
    return f"@dataclass({', '.join(f'{name}={value}' for name, value in options.items())})"


def _has_constructor(node: ast.ClassDef) -> bool:
    return any(isinstance(each, ast.FunctionDef) and each.name == "__init__" for each in node.body)


def _fields(node: ast.ClassDef) -> list[_Field] | None:
    """Return the fields; None if one is of an unknown kind."""
    found = []
    for each in node.body:
        if not isinstance(each, ast.AnnAssign):
            continue
        annotation = _unquoted(each.annotation)
        if not isinstance(each.target, ast.Name) or any(
            word in annotation for word in ("ClassVar", "InitVar", "KW_ON")
        ):
            return None
        field = _field(each.target.id, annotation, each.value)
        if field.factory and "None" in annotation:
            return None
        found.append(field)
    return found or None


def _unquoted(annotation: ast.expr) -> str:
    is_quoted = isinstance(annotation, ast.Constant) and isinstance(annotation.value, str)
    return str(annotation.value) if is_quoted else ast.unparse(annotation)  # type: ignore[attr-defined]


def _field(name: str, annotation: str, value: ast.expr | None) -> _Field:
    if not (isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "field"):
        return _Field(name, annotation, ast.unparse(value) if value is not None else "", "", init=True)
    options = {each.arg: ast.unparse(each.value) for each in value.keywords}
    default, factory = options.get("default", ""), options.get("default_factory", "")
    return _Field(name, annotation, default, factory, init=options.get("init") != "False")


def _constructor(node: ast.ClassDef, fields: list[_Field]) -> list[str]:
    taken, body = [], []
    for each in fields:
        if not each.init:
            if each.default or each.factory:
                body.append(f"self.{each.name} = {each.default or f'({each.factory})()'}")
        elif each.factory:
            taken.append(f'{each.name}: "{each.annotation} | None" = None')
            body.append(f"self.{each.name} = {each.name} if {each.name} is not None else ({each.factory})()")
        else:
            taken.append(f'{each.name}: "{each.annotation}"' + (f" = {each.default}" if each.default else ""))
            body.append(f"self.{each.name} = {each.name}")
    if any(isinstance(each, ast.FunctionDef) and each.name == "__post_init__" for each in node.body):
        body.append("self.__post_init__()")
    return [
        "",
        f"    def __init__(self, {', '.join(taken)}) -> None:",
        *(f"        {line}" for line in body or ["pass"]),
    ]


ROOT: Final = Path(__file__).parents[1]
_ENGINE: Final = (
    "config",
    "core",
    "kv_blocks",
    "kv_port",
    "offers",
    "port",
    "reports",
    "roster",
    "runner",
    "sequence",
)
# Globs. Excluded are the modules of libs/engine that the lab does not load, the part of libs/lab that works before and
# after a run, and decisions about roles (libs/policy/planner, libs/policy/pressure.py), which are arithmetic on arrays.
MODULES: Final = (
    *(f"libs/policy/{name}.py" for name in ("batch", "ratios", "roles", "speed", "step_time")),
    "libs/policy/gateway/*.py",
    "libs/policy/worker/*.py",
    "libs/dispatch/*.py",
    *(f"libs/engine/{name}.py" for name in _ENGINE),
    "libs/lab/cluster/*.py",
    "libs/lab/cluster/host/*.py",
)
# The modules of these that services run, and the modules that turn tokens into frames and answers. Excluded are modules
# with coroutines, since mypyc trusts a narrowed attribute after an `await` (findings/mypyc-trusts-narrowing.sh), and
# dispatch/places.py, since msgspec does not decode into compiled classes. saturation.py is excluded because mypyc 2.4
# cannot read its `Final` tuples of floats.
_APART: Final = ("libs/lab/", "libs/policy/worker/", "libs/dispatch/")
SERVICES: Final = (
    *(glob for glob in MODULES if not glob.startswith(_APART)),
    *(f"libs/policy/worker/{name}.py" for name in ("assignment", "credits", "handing_over", "pace")),
    *(f"libs/dispatch/{name}.py" for name in ("dispatcher", "generation", "ports", "rounds", "suspects", "waiting")),
    *(f"libs/contracts/{name}.py" for name in ("hashing", "packing")),
    "libs/engine/sim_tokens.py",
    "libs/model/tokenizer.py",
    *(f"libs/worker/{name}.py" for name in ("host", "kv_wire", "roles", "wire")),
    "services/gateway/answers/parts.py",
    *(f"services/gateway/request/{name}.py" for name in ("choice", "parse")),
)
# The decisions only, which compile in a quarter of the time.
DECISIONS: Final = MODULES[: MODULES.index("libs/dispatch/*.py")]
DIGEST: Final = "built-from"
LAB_BUILD: Final = ROOT / "build" / "lab"
SERVICES_BUILD: Final = ROOT / "build" / "services"
# This runs in a separate process, because its working directory is the folder. It relaxes type checks; `make check` has
# the strict ones.
_BUILD: Final = """
import sys
from concurrent.futures import ThreadPoolExecutor
from mypyc.build import mypycify
from setuptools import setup
from distutils.ccompiler import CCompiler

optimise, jobs, *modules = sys.argv[1:]

# setuptools compiles the files of one extension after each other, and nearly all are of one.
def compile_together(self, sources, output_dir=None, macros=None, include_dirs=None, debug=0, extra_preargs=None,
                     extra_postargs=None, depends=None):
    _, objects, extra, options, build = self._setup_compile(
        output_dir, macros, include_dirs, sources, depends, extra_postargs)
    arguments = self._get_cc_args(options, debug, extra_preargs)
    with ThreadPoolExecutor(int(jobs)) as pool:
        list(pool.map(lambda each: self._compile(each, *build[each], arguments, extra, options), build))
    return objects

CCompiler.compile = compile_together
checks = ["--follow-imports=silent", "--ignore-missing-imports", "--cache-dir=.mypy_cache"]
extensions = mypycify([*checks, *modules], opt_level=optimise, debug_level="0", multi_file=True)
setup(name="lab", packages=[], ext_modules=extensions, script_args=["-q", "build_ext", "--inplace", "-j", jobs])
"""


def missing() -> str:
    """Return the requirement of compilation that this machine lacks; empty if it lacks none."""
    if shutil.which(_compiler()) is None:
        return f"no C compiler ({_compiler()})"
    found = subprocess.run([sys.executable, "-c", "import mypyc.build, setuptools"], capture_output=True, check=False)
    return "" if found.returncode == 0 else "no mypyc or no setuptools beside this Python"


def _compiler() -> str:
    return str(sysconfig.get_config_var("CC") or "cc").split()[0]


def _c_flags() -> str:
    # With hidden visibility, functions that only this library calls are inlined or called directly. Debug symbols would
    # lengthen the build. CFLAGS replaces the flags of this Python, so those are repeated.
    flags = sysconfig.get_config_var("CFLAGS"), os.environ.get("CFLAGS"), "-fvisibility=hidden -g0"
    return " ".join(each for each in flags if each)


def digest(optimise: int, globs: Sequence[str] = MODULES) -> str:
    """Return a digest of everything on which a build depends."""
    of = hashlib.sha256(f"{sys.version} {optimise} {globs} {_BUILD} {_compiler()} {_c_flags()}".encode())
    for path in sorted(path for top in _tops(globs) for path in (ROOT / top).rglob("*.py")):
        of.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    of.update(Path(__file__).read_bytes())
    return of.hexdigest()


def _tops(globs: Sequence[str]) -> list[str]:
    """Return the top-level folders that a build copies. It copies services only if modules of them are compiled."""
    return ["libs", "services"] if any(glob.startswith("services/") for glob in globs) else ["libs"]


def build(folder: Path, optimise: int = 3, globs: Sequence[str] = MODULES, jobs: int = 0) -> bool:
    """Compile into `folder` unless it is up to date. Return whether it was compiled.

    Raise CalledProcessError if a module fails. Up to `jobs` C files are compiled at a time; 0 means one per core.
    """
    wanted, mark = digest(optimise, globs), folder / DIGEST
    if mark.exists() and mark.read_text() == wanted:
        return False
    if folder.exists() and not mark.exists() and any(folder.iterdir()):
        raise SystemExit(f"{folder} holds something else: name a new folder")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    mark.write_text("")  # from now on a build folder, though incomplete
    for top in _tops(globs):
        shutil.copytree(ROOT / top, folder / top, ignore=shutil.ignore_patterns("__pycache__", "node_modules"))
    modules = [str(path.relative_to(ROOT)) for glob in globs for path in sorted(ROOT.glob(glob))]
    modules = [path for path in modules if not path.endswith("__init__.py")]
    if lost := [glob for glob in globs if not any(ROOT.glob(glob))]:
        raise SystemExit(f"no module is called {', '.join(lost)} any more: mend MODULES in {__file__}")
    derived_from = bases(path.read_text() for path in folder.rglob("*.py"))
    for path in modules:
        (folder / path).write_text(with_constructors((folder / path).read_text(), derived_from))
    command = [sys.executable, "-c", _BUILD, str(optimise), str(jobs or os.cpu_count() or 1), *modules]
    environment = os.environ | {"PYTHONPATH": ""}
    if sys.platform == "linux":
        # The linker's flags of this Python are left out, since they may name folders of the machine that built it.
        environment["LDSHARED"] = f"{_compiler()} -shared"
        environment["CFLAGS"] = _c_flags()
    subprocess.run(command, cwd=folder, check=True, env=environment, stdout=sys.stderr)
    shutil.rmtree(folder / "build", ignore_errors=True)
    shutil.rmtree(folder / ".mypy_cache", ignore_errors=True)
    mark.write_text(wanted)
    return True


def compiled_files(folder: Path) -> list[str]:
    """Return the paths of a finished build's compiled modules, their sources, and the library that they share."""
    libraries = sorted(path.relative_to(folder) for path in folder.rglob("*.so"))
    sources = [path.with_name(f"{path.name.partition('.')[0]}.py") for path in libraries]
    return [str(path) for path in (*libraries, *sources) if (folder / path).exists()]


def run_compiled(module: str) -> None:
    """Restart the running program `python -m module …` with compiled modules, after a build if one is needed.

    Return without a change if the modules are already in use or cannot be built.
    """
    in_use = sys.modules[LabWorker.__module__].__file__ or ""
    if not in_use.endswith(".py") or missing():
        return
    print(f"compiling into {LAB_BUILD}, about a minute where anything has changed", file=sys.stderr)
    build(LAB_BUILD)
    paths = dict.fromkeys([str(LAB_BUILD), str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    os.execve(sys.executable, [sys.executable, "-P", "-m", module, *sys.argv[1:]], environment)  # noqa: S606


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="python -m deploy.compile", description=__doc__)
    found.add_argument("folder", type=Path, nargs="?", help="Where to; build/lab or build/services by default.")
    found.add_argument("--services", action="store_true", help="What services run, in place of what the lab runs.")
    found.add_argument("--optimise", type=int, default=3, choices=(0, 1, 2, 3), help="The C compiler's level.")
    return found


def main() -> None:
    options = parser().parse_args()
    if lacking := missing():
        raise SystemExit(f"cannot compile: {lacking}")
    folder = options.folder or (SERVICES_BUILD if options.services else LAB_BUILD)
    done = build(folder, options.optimise, SERVICES if options.services else MODULES)
    command = "fulcrum up" if options.services else "fulcrum lab run …"
    print(f"{folder} is {'built' if done else 'up to date'}: PYTHONPATH={folder} {command}")


if __name__ == "__main__":
    main()
