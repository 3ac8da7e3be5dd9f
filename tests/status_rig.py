"""An answer of `/v1/status` for tests of the clients that show it."""

from typing import Any

NOW_MS = 1_800_000_000_000


def action(*workers: str) -> dict[str, Any]:
    return {"command": f"fulcrum role {' '.join(workers)} prefill", "workers": list(workers), "role": "prefill"}


def cause(code: str, sentence: str, act: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"code": code, "sentence": sentence, "since_unix_ms": NOW_MS - 3000, "action": act, "workers": []}


def answer(**changes: Any) -> dict[str, Any]:
    bound = cause("prefill_bound", "Prefill-bound: pressure 1.8 against 0.2.", action("gpu-4", "gpu-6"))
    slow = cause("slow_worker", "gpu-7 takes 2.4 times as long.")
    return {
        "as_of_unix_ms": NOW_MS,
        "age_ms": 180,
        "live": True,
        "not_live_because": None,
        "verdict": {**bound, "model": "sim", "causes": [bound, slow]},
        "planner": {
            "heard": True, "mode": "advisory", "leader": "p", "acts": False, "decided_unix_ms": NOW_MS - 1000,
            "reason": "prompts press", "reason_code": "best",
            "last_move": {
                "worker": "gpu-2", "from_role": "decode", "to_role": "prefill", "actor": "p", "reason": "",
                "at_unix_ms": NOW_MS - 10_000,
            },
        },
        "models": [
            {
                "model": "sim", "verdict": "prefill_bound", "known": True, "cluster_pressure": 0.92,
                "best_split": {"prefill": 5, "decode": 3},
                "prefill": {
                    "pressure": 1.8, "workers": 3, "gpus": 3, "busy": 0.99, "waiting_prompt_tokens": 90_000,
                    "waiting_requests": 41, "waiting_s": 3.7, "brand_new_field": 1,
                },
                "decode": {
                    "pressure": 0.2, "workers": 5, "gpus": 5, "busy": 0.95, "running": 6, "held": 0, "slots": 192,
                    "largest_batch": 160, "kv_used": 0.07, "tpot_ms": 12.1, "tpot_target_ms": 50.0,
                },
                "mixed": {"workers": 0, "pressure": None},
            }
        ],
        "traffic": {"window_ms": 10_000, "requests_per_s": 31.2, "too_many_per_s": 2.0, "cache_hit": 0.31},
        "alerts_firing": 1,
        **changes,
    }  # fmt: skip
