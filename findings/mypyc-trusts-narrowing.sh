#!/usr/bin/env bash
# mypyc: an attribute that was narrowed before an `await` is taken to be of that type after it. If another task has set it
# to None meanwhile, an `is not None` check does not see that, and compiled code raises TypeError where Python goes on.
# Met by: anyone who compiles asyncio code with an attribute that is sometimes None. Strict type checks and the build pass.
set -euo pipefail
T=$(mktemp -d); trap 'rm -rf "$T"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_COMPILE=1
command -v cc >/dev/null || { echo "needs a C compiler"; exit 2; }
python3 -m venv "$T/v" || { echo "needs python3-venv"; exit 2; }
"$T/v/bin/python" -m pip install -q mypy==2.4.1 setuptools==80.9.0
cat > "$T/trial.py" <<'PY'
import asyncio


class Trials:
    """One trial at a time; whoever runs it clears it."""

    def __init__(self) -> None:
        self.open: tuple[int, asyncio.Future[int]] | None = None

    async def measure(self, tokens: int) -> int:
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.open = (tokens, done)
        try:
            return await done
        finally:
            if self.open is not None and self.open[1] is done:
                self.open = None

    def run(self) -> None:
        if self.open is not None:
            tokens, done = self.open
            self.open = None
            done.set_result(2 * tokens)


async def both() -> int:
    trials = Trials()
    asyncio.get_running_loop().call_later(0.01, trials.run)
    return await trials.measure(4)
PY
cp "$T/trial.py" "$T/plain.py"
cat > "$T/run.py" <<'PY'
import asyncio
from importlib.metadata import version

import plain
import trial


def seen(module):
    try:
        return asyncio.run(module.both())
    except TypeError as error:
        return f"TypeError: {error}"


print("version:     mypy (mypyc)", version("mypy"))
print("expectation: compiled code answers as plain code does: 8")
print("behaviour:   the attribute is read as the tuple that it was before the await")
print("output:      plain", seen(plain), "- compiled", seen(trial))
assert trial.__file__.endswith(".so"), "it was not compiled"
assert seen(plain) == 8
assert seen(trial) == "TypeError: tuple[int, object] object expected; got None", "the behaviour has changed"
PY
cd "$T"
"$T/v/bin/mypy" --strict trial.py > types.log || { cat types.log; exit 1; }
"$T/v/bin/mypyc" trial.py > build.log 2>&1 || { cat build.log; exit 1; }
"$T/v/bin/python" run.py
