#!/usr/bin/env bash
# mypyc: a compiled dataclass or NamedTuple has `dict` and `list` where its source has dict[str, Count] and list[Inner].
# So msgspec and pydantic check and convert the elements of such fields no more, without a word: what was refused is
# accepted, and what came as a Count is a plain list. Fields of plain types are still checked, so most tests pass.
# Met by: anyone who compiles modules with mypyc whose classes describe JSON.
set -euo pipefail
T=$(mktemp -d); trap 'rm -rf "$T"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_COMPILE=1
command -v cc >/dev/null || { echo "needs a C compiler"; exit 2; }
python3 -m venv "$T/v" || { echo "needs python3-venv"; exit 2; }
"$T/v/bin/python" -m pip install -q mypy==2.4.1 setuptools==80.9.0 msgspec==0.22.0 pydantic==2.14.3
cat > "$T/report.py" <<'PY'
from dataclasses import dataclass
from typing import NamedTuple


class Count(NamedTuple):
    running: int
    waiting: int = 0


class Report(NamedTuple):
    free: int
    tenants: dict[str, Count]


@dataclass
class Inner:
    size: int


@dataclass
class Outer:
    name: str
    many: list[Inner]
PY
cat > "$T/run.py" <<'PY'
import msgspec
import pydantic
import report

kind = "compiled" if report.__file__.endswith(".so") else "plain"


def show(what, call):
    try:
        print(f"{kind}, {what}: {call()}")
    except Exception as error:
        print(f"{kind}, {what}: {type(error).__name__}")


show("msgspec, elements", lambda: msgspec.json.decode(b'[1, {"a": [2]}]', type=report.Report).tenants["a"])
show("msgspec, a wrong element", lambda: msgspec.json.decode(b'{"name": "n", "many": [3]}', type=report.Outer).many)
show("msgspec, a wrong plain field", lambda: msgspec.json.decode(b'{"name": 3, "many": []}', type=report.Outer).name)
adapter = pydantic.TypeAdapter(report.Report)
show("pydantic, a wrong element", lambda: adapter.validate_json('[1, {"a": "x"}]').tenants["a"])
PY
cd "$T"
v/bin/python run.py > seen
v/bin/python -c "
from mypyc.build import mypycify
from setuptools import setup
setup(name='x', ext_modules=mypycify(['report.py'], opt_level='0'), py_modules=[], script_args=['-q', 'build_ext', '--inplace'])
" > build.log 2>&1 || { cat build.log; exit 1; }
v/bin/python run.py >> seen
cat seen
cat > expected <<'TXT'
plain, msgspec, elements: Count(running=2, waiting=0)
plain, msgspec, a wrong element: ValidationError
plain, msgspec, a wrong plain field: ValidationError
plain, pydantic, a wrong element: ValidationError
compiled, msgspec, elements: [2]
compiled, msgspec, a wrong element: [3]
compiled, msgspec, a wrong plain field: ValidationError
compiled, pydantic, a wrong element: x
TXT
if diff expected seen; then
  echo "as found: mypy 2.4.1, msgspec 0.22.0, pydantic 2.14.3"
else
  echo "CHANGED: generic annotations of compiled classes are seen otherwise"
  exit 1
fi
