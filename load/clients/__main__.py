"""`python -m load.clients`: a suite on the sim engine, and every client that can be had here. Exit code 1 where one of
them got no answer. Clients from registries are installed into the cache folder."""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from libs.runtime.paths import cache_dir
from libs.testing.suites.suite import running_suite

HERE = Path(__file__).parent
NODE_CLIENT, GUIDELLM = "openai@6", "guidellm==0.8.1"
CLIENT_TIMEOUT_S = 180
TOKENS = 8
ASKED = {"model": "sim", "messages": [{"role": "user", "content": "Say something."}], "max_tokens": TOKENS}
BODY = json.dumps(ASKED)
BENCHMARK_REQUESTS = 8


class Unavailable(Exception):
    """The client cannot be had on this machine; the message says what is missing."""


def _need(program: str) -> str:
    found = shutil.which(program)
    if found is None:
        raise Unavailable(f"no {program} here")
    return found


def _install(*command: str) -> None:
    if subprocess.run(command, capture_output=True, check=False).returncode:
        raise Unavailable(f"{' '.join(command[:3])} failed: no registry?")


def java(gateway: str, _folder: Path) -> Sequence[str]:
    """java.net.http.HttpClient, which offers HTTP/2 by default."""
    return (_need("java"), str(HERE / "Ask.java"), f"{gateway}/v1/chat/completions", BODY)


def _curl(gateway: str, option: str, body: str) -> Sequence[str]:
    url, media = f"{gateway}/v1/chat/completions", "content-type: application/json"
    return (_need("curl"), "--silent", "--show-error", "--fail-with-body", option, url, "-H", media, "-d", body)


def curl_http2(gateway: str, _folder: Path) -> Sequence[str]:
    """curl that offers an upgrade to HTTP/2."""
    return _curl(gateway, "--http2", BODY)


def curl_http10(gateway: str, _folder: Path) -> Sequence[str]:
    """A stream over HTTP/1.0."""
    return _curl(gateway, "--http1.0", json.dumps({**ASKED, "stream": True}))


def openai_python(gateway: str, _folder: Path) -> Sequence[str]:
    """OpenAI's own client."""
    return (sys.executable, str(HERE / "ask.py"), f"{gateway}/v1", BODY)


def openai_node(gateway: str, _folder: Path) -> Sequence[str]:
    """OpenAI's own client for Node."""
    node, home = _need("node"), cache_dir() / "clients" / "node"
    if not (home / "node_modules" / "openai").is_dir():
        home.mkdir(parents=True, exist_ok=True)
        _install(_need("npm"), "install", "--silent", "--prefix", str(home), NODE_CLIENT)
    script = shutil.copy(HERE / "ask.mjs", home)  # Node looks for packages beside the file
    return (node, str(script), f"{gateway}/v1", BODY)


def guidellm(gateway: str, folder: Path) -> Sequence[str]:
    """The benchmark with its default backend; prompts from a file, as its own want a tokenizer from a hub."""
    home = cache_dir() / "clients" / GUIDELLM
    if not (home / "bin" / "guidellm").is_file():
        uv = (sys.executable, "-m", "uv")
        _install(*uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(home))
        _install(*uv, "pip", "install", "--quiet", "--python", str(home / "bin" / "python"), GUIDELLM)
    prompts = folder / "prompts.jsonl"
    lines = ({"prompt": f"Tell me something, take {n}", "output_tokens_count": TOKENS} for n in range(20))
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return (
        str(home / "bin" / "guidellm"), "run", "--disable-progress", "--backend", f"kind=openai_http,target={gateway}",
        "--profile", "kind=synchronous", "--constraint", f"kind=max_requests,count={BENCHMARK_REQUESTS}",
        "--data", f"kind=json_file,path={prompts}", "--output", f"kind=json,path={folder / 'guidellm.json'}",
    )  # fmt: skip


CLIENTS: dict[str, Callable[[str, Path], Sequence[str]]] = {
    "Java HttpClient": java,
    "curl --http2": curl_http2,
    "curl --http1.0, streamed": curl_http10,
    "openai-python": openai_python,
    "openai-node": openai_node,
    "GuideLLM": guidellm,
}


def _ask(name: str, gateway: str, folder: Path) -> tuple[str, str]:
    """(answered, failed or not here; what it said last)."""
    try:
        command = CLIENTS[name](gateway, folder)
    except Unavailable as error:
        return "not here", str(error)
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=folder, env=env, timeout=CLIENT_TIMEOUT_S, check=False
    )
    said = (done.stdout.strip() or done.stderr.strip()).splitlines()
    if done.returncode == 0 and name == "GuideLLM":
        return _guidellm_result(folder / "guidellm.json")
    return ("answered" if done.returncode == 0 else "failed"), said[-1] if said else ""


def _guidellm_result(report: Path) -> tuple[str, str]:
    """It ends well even where every request failed: its report tells."""
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    counts = {kind: len(benchmark["requests"][kind]) for kind in ("successful", "errored", "incomplete")}
    whole = counts["successful"] == BENCHMARK_REQUESTS and not counts["errored"]
    return ("answered" if whole else "failed"), json.dumps(counts)


def main() -> int:
    """Ask all of them, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=list(CLIENTS), default=list(CLIENTS), metavar="CLIENT")
    names = parser.parse_args().only
    table = Table("client", "outcome", "what it said last")
    outcomes = {}
    with tempfile.TemporaryDirectory() as home, running_suite(Path(home), "--engine", "sim") as suite:
        for name in names:
            print(f"{name} …", file=sys.stderr, flush=True)
            outcomes[name], said = _ask(name, suite.gateway, Path(home))
            table.add_row(name, outcomes[name], said[:100])
    Console().print(table)
    print(json.dumps(outcomes))
    return 1 if "failed" in outcomes.values() else 0


if __name__ == "__main__":
    sys.exit(main())
