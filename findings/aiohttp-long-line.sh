#!/usr/bin/env bash
# aiohttp 3.14: a line too long for its buffer raises an error that is neither ValueError nor ClientError.
# Met by: whoever reads a Kubernetes watch or server-sent events line by line and handles long ones as aiohttp 3.13
# and before had it, by ValueError ("Chunk too big"). LineTooLong is in a module that is not public, and handlers of
# aiohttp.ClientError, which all other failures of a client are, do not see it. The limit grew as well.
set -euo pipefail
T=$(mktemp -d); trap 'rm -rf "$T"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_COMPILE=1
cat > "$T/run.py" <<'PY'
import asyncio, logging
from contextlib import suppress

import aiohttp
from aiohttp import web


async def lines(request):
    response = web.StreamResponse()
    await response.prepare(request)
    with suppress(ConnectionError):
        for size in (2_000, 300_000, 1_000_000):
            await response.write(b"x" * size + b"\n")
    return response


async def main():
    app = web.Application()
    app.router.add_get("/", lines)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    read = []
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{runner.addresses[0][1]}/") as answer:
        try:
            async for line in answer.content:
                read.append(len(line))
        except Exception as error:
            kinds = [kind.__name__ for kind in (ValueError, aiohttp.ClientError) if isinstance(error, kind)]
            print(f"{aiohttp.__version__}: read {read}, then {type(error).__name__}, which is {kinds}")
    await runner.cleanup()


logging.disable()
asyncio.run(main())
PY
for version in 3.13.2 3.14.5; do
  python3 -m venv "$T/$version" || { echo "needs python3-venv"; exit 2; }
  "$T/$version/bin/python" -m pip install -q "aiohttp==$version"
  "$T/$version/bin/python" "$T/run.py" | tee -a "$T/out"
done
# Seen with Python 3.11.
diff "$T/out" - <<'SEEN' && echo "as described"
3.13.2: read [2001], then ValueError, which is ['ValueError']
3.14.5: read [2001, 300001], then LineTooLong, which is []
SEEN
