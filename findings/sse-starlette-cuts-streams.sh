#!/usr/bin/env bash
# sse-starlette: at SIGTERM every open stream is cut at once, though uvicorn waits for open requests as it should.
# The same events as a StreamingResponse reach their end before the server stops, with and without
# `--timeout-graceful-shutdown`. EventSourceResponse has its own grace period, which is 0.
# Met by: rolling updates of servers that stream answers by it: each update cuts the answers of that moment.
set -euo pipefail
T=$(mktemp -d); trap 'rm -rf "$T"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_COMPILE=1
python3 -m venv "$T/v" || { echo "needs python3-venv"; exit 2; }
"$T/v/bin/python" -m pip install -q starlette==1.10.0 uvicorn==0.54.0 sse-starlette==3.7.0 httpx==0.28.1
cat > "$T/served.py" <<'PY'
import asyncio

from sse_starlette.sse import EventSourceResponse
from starlette.applications import Starlette
from starlette.responses import StreamingResponse
from starlette.routing import Route

EVENTS, GAP_S = 15, 0.2


async def events():
    for number in range(EVENTS):
        yield {"data": str(number)}
        await asyncio.sleep(GAP_S)


async def lines():
    async for event in events():
        yield f"data: {event['data']}\r\n\r\n"


async def sse(request):
    return EventSourceResponse(events())


async def plain(request):
    return StreamingResponse(lines(), media_type="text/event-stream")


app = Starlette(routes=[Route("/sse", sse), Route("/plain", plain)])
PY
cat > "$T/run.py" <<'PY'
import signal, socket, subprocess, sys, time
from importlib.metadata import version

import httpx
from served import EVENTS


def ended(path, *options):
    """Send SIGTERM after three events; return the number of events that came and the end of the stream."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    command = [sys.executable, "-m", "uvicorn", "served:app", "--port", str(port), "--log-level", "critical", *options]
    process, until, came = subprocess.Popen(command), time.monotonic() + 60, 0
    try:
        while True:
            try:
                httpx.get(f"http://127.0.0.1:{port}/none")
                break
            except httpx.ConnectError:
                assert time.monotonic() < until, "the server did not start"
                time.sleep(0.1)
        with httpx.stream("GET", f"http://127.0.0.1:{port}/{path}") as response:
            for line in response.iter_lines():
                came += line.startswith("data: ")
                if came == 3 and line.startswith("data: "):
                    process.send_signal(signal.SIGTERM)
        return came, "end"
    except httpx.RemoteProtocolError as error:
        return came, str(error)
    finally:
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


GRACE = ("--timeout-graceful-shutdown", "30")
seen = {(path, options): ended(path, *options) for path in ("plain", "sse") for options in ((), GRACE)}
print("version:    ", *(f"{name} {version(name)}" for name in ("sse-starlette", "starlette", "uvicorn")))
print(f"expectation: the server waits for its streams at SIGTERM, so all {EVENTS} events come")
print("behaviour:   so it does for StreamingResponse; EventSourceResponse drops the stream in the middle")
for (path, options), found in seen.items():
    print("output:     ", path, *options, found)
for (path, _), (came, end) in seen.items():
    if path == "plain":
        assert (came, end) == (EVENTS, "end"), "the behaviour has changed"
    else:
        assert came < EVENTS and "incomplete chunked read" in end, "the behaviour has changed"
PY
cd "$T"
"$T/v/bin/python" run.py
