"""Commands that run clients from registries against suites.

Clients are installed into the cache folder, those for Python as locked in locks/clients.txt."""

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from libs.model.info import CHATML_TEMPLATE
from libs.runtime.paths import cache_dir
from libs.testing.engines.real_model import REAL_MODEL_NAME, real_model_folder
from libs.testing.suites.suite import RunningSuite, running_suite

HERE = Path(__file__).parent
LOCK = HERE.parents[2] / "locks" / "clients.txt"
NODE_CLIENT, GUIDELLM = "openai@6.49.0", "guidellm==0.8.1"
NODE_AGENT = "openai, for Node"
# The last major version that runs on Node 20.
VERCEL, VERCEL_PACKAGES = "ai, for Node", ("ai@6.0.325", "@ai-sdk/openai-compatible@2.0.92", "zod@4.6.7")
OFFLINE = {"HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_AGENTS_DISABLE_TRACING": "1"}
CLIENT_TIMEOUT_S = 600
# Bound on a suite's start: beside other work two workers import torch for minutes.
START_S = 300.0
TOKENS = 8
REQUEST_BODY = {"model": "sim", "messages": [{"role": "user", "content": "Say something."}], "max_tokens": TOKENS}
BODY = json.dumps(REQUEST_BODY)
BENCHMARK_REQUESTS = 8

Client = Callable[[str, Path], Sequence[str]]
"""Takes a gateway's address and a folder of its own; returns the command to run."""


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
    """Use java.net.http.HttpClient, which offers HTTP/2 by default."""
    return (_need("java"), str(HERE / "Ask.java"), f"{gateway}/v1/chat/completions", BODY)


def _curl(gateway: str, option: str, body: str) -> Sequence[str]:
    url, media = f"{gateway}/v1/chat/completions", "content-type: application/json"
    return (_need("curl"), "--silent", "--show-error", "--fail-with-body", option, url, "-H", media, "-d", body)


def curl_http2(gateway: str, _folder: Path) -> Sequence[str]:
    """Offer an upgrade to HTTP/2."""
    return _curl(gateway, "--http2", BODY)


def curl_http10(gateway: str, _folder: Path) -> Sequence[str]:
    return _curl(gateway, "--http1.0", json.dumps({**REQUEST_BODY, "stream": True}))


def openai_python(gateway: str, _folder: Path) -> Sequence[str]:
    """Use OpenAI's client in the version of the suite's own tests."""
    return (sys.executable, str(HERE / "agent_clients.py"), "ask", f"{gateway}/v1", BODY)


def openai_node(gateway: str, _folder: Path) -> Sequence[str]:
    return (*_node(HERE / "ask.mjs", NODE_CLIENT), f"{gateway}/v1", BODY)


def _node(script: Path, *packages: str) -> Sequence[str]:
    """Return the command for a script beside these packages, the first of which names their folder."""
    node, home = _need("node"), cache_dir() / "clients" / packages[0]
    name = packages[0].partition("@")[0]
    if not (home / "node_modules" / name).is_dir():
        home.mkdir(parents=True, exist_ok=True)
        _install(_need("npm"), "install", "--silent", "--prefix", str(home), *packages)
    shutil.copy(HERE / "city.mjs", home)  # Node looks for packages beside the file
    return (node, str(shutil.copy(script, home)))


def _environment(name: str, *what: str) -> Path:
    """Return Python of an environment with these packages, made once."""
    home = cache_dir() / "clients" / name
    python, made = home / "bin" / "python", home / "made"
    if not made.is_file():
        uv = (sys.executable, "-m", "uv")
        _install(*uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(home))
        _install(*uv, "pip", "install", "--quiet", "--python", str(python), *what)
        made.touch()
    return python


def agent_python() -> Path:
    """Return Python of the environment that locks/clients.txt describes. Raise Unavailable if it cannot be made."""
    digest = hashlib.sha256(LOCK.read_bytes()).hexdigest()[:12]
    return _environment(f"python-{digest}", "--require-hashes", "-r", str(LOCK))


def _agent(client: str, gateway: str, model: str) -> Sequence[str]:
    if client == NODE_AGENT:
        return (*_node(HERE / "agent.mjs", NODE_CLIENT), f"{gateway}/v1", model)
    if client == VERCEL:
        return (*_node(HERE / "vercel.mjs", *VERCEL_PACKAGES), f"{gateway}/v1", model)
    return (str(agent_python()), str(HERE / "agent_clients.py"), client, f"{gateway}/v1", model)


def guidellm(gateway: str, folder: Path) -> Sequence[str]:
    """Use the default backend. Prompts come from a file, since its own need a tokenizer from a hub."""
    python = _environment(GUIDELLM, GUIDELLM)
    prompts = folder / "prompts.jsonl"
    lines = ({"prompt": f"Tell me something, take {n}", "output_tokens_count": TOKENS} for n in range(20))
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return (
        str(python.with_name("guidellm")), "run", "--disable-progress",
        "--backend", f"kind=openai_http,target={gateway}",
        "--profile", "kind=synchronous", "--constraint", f"kind=max_requests,count={BENCHMARK_REQUESTS}",
        "--data", f"kind=json_file,path={prompts}", "--output", f"kind=json,path={folder / 'guidellm.json'}",
    )  # fmt: skip


# Any one of them requests text from the sim engine.
CLIENTS: dict[str, Client] = {
    "Java HttpClient": java,
    "curl --http2": curl_http2,
    "curl --http1.0, streamed": curl_http10,
    "openai-python": openai_python,
    "openai-node": openai_node,
    "GuideLLM": guidellm,
}
# Key of `agent_clients.CLIENTS` by name. Each streams, has a tool called and a schema filled, on either engine.
AGENT_CLIENTS: dict[str, str] = {
    "anthropic-python": "anthropic",
    "openai-python, agent": "openai",
    "openai-node, agent": NODE_AGENT,
    "Vercel AI SDK": VERCEL,
    "LangChain": "langchain",
    "LlamaIndex": "llama_index",
    "LiteLLM": "litellm",
    "pydantic-ai": "pydantic_ai",
    "instructor": "instructor",
    "openai-agents": "openai_agents",
    "smolagents": "smolagents",
}


def tool_model(home: Path) -> Path:
    """Link SmolLM2's weights beside a chat template with a place for tools, as its own has none."""
    folder = home / REAL_MODEL_NAME
    shutil.copytree(real_model_folder(), folder, copy_function=os.symlink)
    (folder / "chat_template.jinja").write_text(CHATML_TEMPLATE, encoding="utf-8")
    return folder


@contextlib.contextmanager
def suite_on(engine: str, home: Path) -> Iterator[tuple[RunningSuite, str]]:
    """Run a suite on the sim or torch engine, or "bundled" as `make up` does; yield it with the model to request.

    The chat template of torch's model has a place for tools, that of the bundled model has none.
    """
    if engine == "sim":
        model, arguments = "sim", ["--engine", "sim"]
    else:
        folder = real_model_folder() if engine == "bundled" else tool_model(home)
        model, arguments = REAL_MODEL_NAME, ["--engine", "torch", "--model", str(folder)]
    with running_suite(home, *arguments, start_s=START_S) as suite:
        yield suite, model


def ask(name: str, gateway: str, model: str, folder: Path) -> tuple[str, str]:
    """Run one client; return (answered, failed or not here; its last output)."""
    try:
        command = (
            _agent(AGENT_CLIENTS[name], gateway, model) if name in AGENT_CLIENTS else CLIENTS[name](gateway, folder)
        )
    except Unavailable as error:
        return "not here", str(error)
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=folder, env={**os.environ, **OFFLINE},
            timeout=CLIENT_TIMEOUT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "failed", f"not done after {CLIENT_TIMEOUT_S} s"
    said = (done.stdout.strip() or done.stderr.strip()).splitlines()
    if done.returncode == 0 and name == "GuideLLM":
        return _guidellm_result(folder / "guidellm.json")
    return ("answered" if done.returncode == 0 else "failed"), said[-1] if said else ""


def _guidellm_result(report: Path) -> tuple[str, str]:
    # It exits with 0 even if every request failed: its report has the truth.
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    counts = {kind: len(benchmark["requests"][kind]) for kind in ("successful", "errored", "incomplete")}
    whole = counts["successful"] == BENCHMARK_REQUESTS and not counts["errored"]
    return ("answered" if whole else "failed"), json.dumps(counts)
