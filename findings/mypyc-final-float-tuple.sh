#!/usr/bin/env bash
# mypyc: reading a module's `Final` tuple of floats raises NameError in compiled code, whatever its values.
# Met by: anyone who compiles numeric code with bounds such as (0.01, 100.0) as constants. Type checks and the build pass,
# import works, and the first read fails. Tuples that begin with an int or a str work, and so does one without `Final`.
set -euo pipefail
T=$(mktemp -d); trap 'rm -rf "$T"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_COMPILE=1
command -v cc >/dev/null || { echo "needs a C compiler"; exit 2; }
python3 -m venv "$T/v" || { echo "needs python3-venv"; exit 2; }
"$T/v/bin/python" -m pip install -q mypy==2.4.1 setuptools==80.9.0
cat > "$T/bounds.py" <<'PY'
from typing import Final

FLOATS: Final = (0.01, 100.0)
PLAIN = (0.01, 100.0)
INTS: Final = (1, 2)
INT_FIRST: Final = (2, 0.5)
LONE: Final = 0.5


def floats() -> float:
    return FLOATS[1]


def plain() -> float:
    return PLAIN[1]


def ints() -> int:
    return INTS[1]


def int_first() -> float:
    return INT_FIRST[1]


def lone() -> float:
    return LONE
PY
cat > "$T/run.py" <<'PY'
from importlib.metadata import version

import bounds


def read(name):
    try:
        return getattr(bounds, name)()
    except NameError as error:
        return f"NameError: {error}"


seen = {name: read(name) for name in ("floats", "plain", "ints", "int_first", "lone")}
print("version:     mypy (mypyc)", version("mypy"))
print("expectation: a constant is its value, compiled or not: floats 100.0")
print("behaviour:   a Final tuple whose first item is a float cannot be read in compiled code")
print("output:     ", seen)
assert bounds.__file__.endswith(".so"), "it was not compiled"
assert bounds.FLOATS == (0.01, 100.0), "the module has it, as interpreted code sees"
assert seen["floats"] == 'NameError: value for final name "FLOATS" was not set', "the behaviour has changed"
assert (seen["plain"], seen["ints"], seen["int_first"], seen["lone"]) == (100.0, 2, 0.5, 0.5), "it has changed"
PY
cd "$T"
"$T/v/bin/mypy" --strict bounds.py > types.log || { cat types.log; exit 1; }
"$T/v/bin/mypyc" bounds.py > build.log 2>&1 || { cat build.log; exit 1; }
"$T/v/bin/python" run.py
