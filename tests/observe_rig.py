"""Servers that answer /metrics as vLLM 0.32 does, under a load that a test sets."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from typing import Final

STEP_BOUNDS: Final = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, float("inf"))
TTFT_BOUNDS: Final = (0.01, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, float("inf"))
MODEL: Final = "m"
MODELS: Final = json.dumps({"object": "list", "data": [{"id": MODEL, "object": "model"}]}).encode()


@dataclass(frozen=True)
class Load:
    """A steady load of a server."""

    decoding: int = 0
    """Sequences that decode at any time."""
    prompts_per_s: float = 0.0
    prompt_tokens: int = 1_000
    waiting: int = 0
    waiting_per_s: float = 0.0
    """Growth of the queue in requests per second."""
    kv_used: float = 0.2
    ttft_s: float = 0.2
    step_s: float = 0.01


IDLE: Final = Load()


@dataclass
class FakeVllm:
    """Counters of one server over time. Decode steps take `step_s`, and a prompt token 25 us."""

    load: Load = IDLE
    now_s: Callable[[], float] = time.monotonic
    counts: dict[str, float] = field(default_factory=dict)
    ttft: list[float] = field(default_factory=lambda: [0.0] * len(TTFT_BOUNDS))
    steps_at_most: list[float] = field(default_factory=lambda: [0.0] * len(STEP_BOUNDS))
    body: bytes | None = None
    """The answer in place of metrics."""

    def __post_init__(self) -> None:
        self._lock = Lock()
        self._at_s = self.now_s()
        self._waiting = float(self.load.waiting)

    def set(self, load: Load) -> None:
        """Change the load from now on."""
        with self._lock:
            self._advance()
            self.load, self._waiting = load, float(load.waiting)

    def restart(self) -> None:
        """Restart at zero, as a new process does."""
        with self._lock:
            self._advance()
            self.counts, self.ttft = {}, [0.0] * len(TTFT_BOUNDS)
            self.steps_at_most = [0.0] * len(STEP_BOUNDS)

    def exposition(self) -> str:
        with self._lock:
            self._advance()
            return "\n".join(self._lines()) + "\n"

    def _advance(self) -> None:
        load, now_s = self.load, self.now_s()
        passed_s, self._at_s = now_s - self._at_s, now_s
        prompts = load.prompts_per_s * passed_s
        prompt_s = prompts * load.prompt_tokens * 25e-6
        steps = max(passed_s - prompt_s, 0.0) / load.step_s if load.decoding else 0.0
        for name, by in {
            "samples": steps + prompts,
            "prompt": prompts * load.prompt_tokens,
            "first": prompts,
            "generated": steps * load.decoding + prompts,
            "gaps": steps * load.decoding,
            "gaps_s": passed_s * load.decoding,
            "prefills_s": prompt_s + prompts * load.step_s,
        }.items():
            self.counts[name] = self.counts.get(name, 0.0) + by
        self._waiting += load.waiting_per_s * passed_s
        for number, bound in enumerate(TTFT_BOUNDS):
            self.ttft[number] += prompts * (load.ttft_s <= bound)
        for number, bound in enumerate(STEP_BOUNDS):
            self.steps_at_most[number] += steps * (load.decoding <= bound)
            self.steps_at_most[number] += prompts * (load.prompt_tokens + load.decoding <= bound)

    def _lines(self) -> Iterator[str]:
        counts, load = {name: int(value) for name, value in self.counts.items()}, self.load
        busy = load.decoding + (1 if load.prompts_per_s else 0)
        values = {
            "num_requests_running": busy,
            "num_requests_waiting": int(self._waiting),
            "kv_cache_usage_perc": load.kv_used,
            "prompt_tokens_total": counts["prompt"],
            "generation_tokens_total": counts["generated"],
            "request_success_total": counts["first"],
            "iteration_tokens_total_count": counts["samples"],
            "time_to_first_token_seconds_count": counts["first"],
            "inter_token_latency_seconds_count": counts["gaps"],
            "inter_token_latency_seconds_sum": self.counts["gaps_s"],
            "request_prefill_time_seconds_count": counts["first"],
            "request_prefill_time_seconds_sum": self.counts["prefills_s"],
        }
        yield "# HELP vllm:num_requests_running Number of requests in model execution batches."
        yield "# TYPE vllm:num_requests_running gauge"
        for name, value in values.items():
            yield f'vllm:{name}{{engine="0",model_name="{MODEL}"}} {float(value)}'
        yield 'vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="20000"} 1.0'
        histograms = (
            ("iteration_tokens_total", STEP_BOUNDS, self.steps_at_most),
            ("time_to_first_token_seconds", TTFT_BOUNDS, self.ttft),
        )
        for name, bounds, found in histograms:
            for bound, value in zip(bounds, found, strict=True):
                le = "+Inf" if bound == float("inf") else str(float(bound))
                yield f'vllm:{name}_bucket{{engine="0",le="{le}",model_name="{MODEL}"}} {int(value)}'


@contextmanager
def serving(fake: FakeVllm, token: str = "", host: str = "127.0.0.1") -> Iterator[str]:
    """Yield the address of a server; with a token it refuses requests without it."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            allowed = not token or self.headers.get("authorization") == f"Bearer {token}"
            # Routers request its health and its model before they send it anything.
            known = {"/health": b"", "/v1/models": MODELS}
            found = self.path == "/metrics" or self.path in known
            body = known.get(self.path, b"")
            if self.path == "/metrics" and allowed:
                body = fake.body if fake.body is not None else fake.exposition().encode()
            self.send_response(404 if not found else 200 if allowed else 401)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer((host, 0), Handler) as http:
        http.daemon_threads = True
        thread = Thread(target=http.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://{host}:{http.server_port}"
        finally:
            http.shutdown()
            thread.join()
