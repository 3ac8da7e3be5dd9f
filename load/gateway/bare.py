"""A bare FastAPI endpoint that replays recorded answers part by part, which shows the cost of the web stack alone.

    python -m load.gateway.bare FOLDER

FOLDER has a JSON list of texts for each shape, <tokens>-<stream|whole>.json, with the parts of one answer's body.
"""

import argparse
import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import uvloop
from fastapi import FastAPI
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel

from libs.runtime import status
from libs.runtime.http import bind, serve_http
from libs.runtime.tasks import TaskOwner


class _Message(BaseModel):
    role: str
    content: str


class _Request(BaseModel):
    model: str
    messages: list[_Message]
    max_tokens: int
    stream: bool = False


def make_app(folder: Path) -> FastAPI:
    """Return the app. It validates bodies as FastAPI's users do."""
    app = FastAPI()
    answers = {file.stem: [part.encode() for part in json.loads(file.read_text())] for file in folder.glob("*.json")}

    @app.post("/v1/chat/completions")
    async def chat(request: _Request) -> Response:
        parts = answers[f"{request.max_tokens}-{'stream' if request.stream else 'whole'}"]
        if request.stream:
            return StreamingResponse(_each(parts), media_type="text/event-stream")
        return Response(parts[0], media_type="application/json")

    return app


async def _each(parts: list[bytes]) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


async def _main(folder: Path) -> None:
    tasks = TaskOwner()
    async with serve_http(make_app(folder), bind("127.0.0.1", 0, "the port"), tasks=tasks) as url:
        status.emit("ready", http=url)
        await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    uvloop.run(_main(parser.parse_args().folder))
