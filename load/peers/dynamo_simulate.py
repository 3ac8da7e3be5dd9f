"""One replay through DynoSim, by the peer's Python: JSON in argv[1], JSON on the last line of stdout.

The input has trace, block_tokens, prefill, decode, blocks, chunk_tokens, max_sequences, router, ttft_ms, itl_ms and
profile. The profile is the .npz of step times that DynoSim looks up; if empty, it uses its own polynomial. This module
imports nothing of Fulcrum.
"""

import json
import os
import sys
import time


def main() -> None:
    """Replay the trace. Print the time, which includes reading the trace, and DynoSim's summary."""
    options = json.loads(sys.argv[1])
    os.environ["DYN_LOG"] = "error"
    from dynamo.replay import run_trace_replay  # type: ignore[import-not-found]  # noqa: PLC0415

    def engine(role: str) -> dict[str, object]:
        found: dict[str, object] = {
            "worker_type": role, "num_gpu_blocks": options["blocks"], "block_size": options["block_tokens"],
            "max_num_batched_tokens": options["chunk_tokens"], "max_num_seqs": options["max_sequences"],
            "enable_prefix_caching": True, "enable_chunked_prefill": True, "kv_transfer_bandwidth": 0,
        }  # fmt: skip
        if options["profile"]:
            looked_up = {"type": "external", "provider": "dynamo_profile", "config": {"path": options["profile"]}}
            found["timing_model"] = looked_up
        return {"engine": found}

    cpu, wall = time.process_time(), time.perf_counter()
    report = run_trace_replay(
        options["trace"], prefill_engine_args=engine("prefill"), decode_engine_args=engine("decode"),
        num_prefill_workers=options["prefill"], num_decode_workers=options["decode"], router_mode=options["router"],
        trace_block_size=options["block_tokens"], sla_ttft_ms=options["ttft_ms"], sla_itl_ms=options["itl_ms"],
    )  # fmt: skip
    cpu_s, wall_s = time.process_time() - cpu, time.perf_counter() - wall
    print(json.dumps({"cpu_s": cpu_s, "wall_s": wall_s, "summary": report.summary}))


if __name__ == "__main__":
    main()
