"""Prometheus metrics of the control plane and of routing, all named here: dashboards and alerts are checked against
this module.

Units are Prometheus's base units, last in the name. `phase` is prefill, decode, kv_wait or idle; a ratio of phases is
of covered time.
"""

from typing import Final

WORKER_PHASE_RATIO: Final = "fulcrum_worker_phase_ratio"
WORKER_MFU_RATIO: Final = "fulcrum_worker_mfu_ratio"
WORKER_MBU_RATIO: Final = "fulcrum_worker_mbu_ratio"
WORKER_COVERAGE_RATIO: Final = "fulcrum_worker_coverage_ratio"
WORKER_GPUS: Final = "fulcrum_worker_gpus"
WORKER_RUNNING_SEQUENCES: Final = "fulcrum_worker_running_sequences"
WORKER_WAITING_SEQUENCES: Final = "fulcrum_worker_waiting_sequences"
WORKER_WAITING_PREFILL_TOKENS: Final = "fulcrum_worker_waiting_prefill_tokens"
WORKER_PREEMPTIONS_TOTAL: Final = "fulcrum_worker_preemptions_total"
WORKER_RECOMPUTED_TOKENS_TOTAL: Final = "fulcrum_worker_recomputed_tokens_total"
GPU_UTILISATION_RATIO: Final = "fulcrum_gpu_utilisation_ratio"
GPU_MEMORY_USED_BYTES: Final = "fulcrum_gpu_memory_used_bytes"
GPU_MEMORY_BYTES: Final = "fulcrum_gpu_memory_bytes"
GPU_POWER_WATTS: Final = "fulcrum_gpu_power_watts"
GPU_TENSOR_ACTIVE_RATIO: Final = "fulcrum_gpu_tensor_active_ratio"
GPU_DRAM_ACTIVE_RATIO: Final = "fulcrum_gpu_dram_active_ratio"
WORKER_KV_USED_RATIO: Final = "fulcrum_worker_kv_used_ratio"
WORKER_SINCE_STEP_SECONDS: Final = "fulcrum_worker_since_step_seconds"
WORKER_POOL_FAULTS: Final = "fulcrum_worker_pool_faults"
WORKER_TELEMETRY_AGE_SECONDS: Final = "fulcrum_worker_telemetry_age_seconds"
NODE_CLOCK_OFFSET_SECONDS: Final = "fulcrum_node_clock_offset_seconds"
WORKER_LOST_BATCHES: Final = "fulcrum_worker_telemetry_lost_batches"
WORKER_DROPPED_BATCHES: Final = "fulcrum_worker_telemetry_dropped_batches"

MODEL_PHASE_RATIO: Final = "fulcrum_model_phase_ratio"
MODEL_PREFILL_DECODE_RATIO: Final = "fulcrum_model_prefill_decode_ratio"
CLUSTER_PHASE_RATIO: Final = "fulcrum_cluster_phase_ratio"
CLUSTER_COVERAGE_RATIO: Final = "fulcrum_cluster_coverage_ratio"
CLUSTER_PREFILL_DECODE_RATIO: Final = "fulcrum_cluster_prefill_decode_ratio"
CLUSTER_GPUS: Final = "fulcrum_cluster_gpus"

KV_TRANSFER_BYTES_TOTAL: Final = "fulcrum_kv_transfer_bytes_total"
TELEMETRY_BATCHES_TOTAL: Final = "fulcrum_telemetry_batches_total"
UNREVISED_WINDOWS_TOTAL: Final = "fulcrum_history_unrevised_windows_total"
HISTORY_WRITE_FAILURES_TOTAL: Final = "fulcrum_history_write_failures_total"
STREAM_READERS: Final = "fulcrum_stream_readers"
STREAM_SKIPPED_TICKS_TOTAL: Final = "fulcrum_stream_skipped_ticks_total"

TRACE_SPANS_TOTAL: Final = "fulcrum_trace_spans_total"
TRACE_DROPPED_REQUESTS_TOTAL: Final = "fulcrum_trace_dropped_requests_total"

ALERTS_FIRING: Final = "fulcrum_alerts_firing"
ALERT_CHANGES_TOTAL: Final = "fulcrum_alert_changes_total"
ALERT_UNFOLLOWED_TOTAL: Final = "fulcrum_alert_unfollowed_signs_total"
ALERT_POSTS_TOTAL: Final = "fulcrum_alert_posts_total"
ALERT_POSTS_DROPPED_TOTAL: Final = "fulcrum_alert_posts_dropped_total"

REQUESTS_TOTAL: Final = "fulcrum_requests_total"
SLO_REQUESTS_TOTAL: Final = "fulcrum_slo_requests_total"
REQUEST_QUEUE_SECONDS: Final = "fulcrum_request_queue_seconds"
REQUEST_TTFT_SECONDS: Final = "fulcrum_request_time_to_first_token_seconds"
REQUEST_TPOT_SECONDS: Final = "fulcrum_request_time_per_output_token_seconds"
REQUEST_PROMPT_TOKENS_TOTAL: Final = "fulcrum_request_prompt_tokens_total"
REQUEST_CACHED_TOKENS_TOTAL: Final = "fulcrum_request_cached_tokens_total"
REQUEST_OUTPUT_TOKENS_TOTAL: Final = "fulcrum_request_output_tokens_total"

DECISIONS_SEEN_TOTAL: Final = "fulcrum_decisions_seen_total"
DECISIONS_TOTAL: Final = "fulcrum_planner_decisions_total"
PLANNER_WORKERS: Final = "fulcrum_planner_workers"
PLANNER_COVERAGE_RATIO: Final = "fulcrum_planner_coverage_ratio"
PLANNER_REGISTRY_AGE_SECONDS: Final = "fulcrum_planner_registry_age_seconds"

BUS_PUBLISHED_TOTAL: Final = "fulcrum_bus_published_total"
BUS_DROPPED_TOTAL: Final = "fulcrum_bus_dropped_total"
BUS_UNDECODABLE_TOTAL: Final = "fulcrum_bus_undecodable_total"
BUS_BUFFERED_RECORDS: Final = "fulcrum_bus_buffered_records"

GATEWAY_BATCH_LINES: Final = "fulcrum_gateway_batch_lines_total"
GATEWAY_BATCH_COMMITS: Final = "fulcrum_gateway_batch_commits_total"
GATEWAY_BATCH_IN_FLIGHT: Final = "fulcrum_gateway_batch_in_flight"
GATEWAY_BATCH_JOBS: Final = "fulcrum_gateway_batch_unfinished_jobs"
GATEWAY_BATCH_LATE_JOBS: Final = "fulcrum_gateway_batch_late_jobs"
GATEWAY_BATCH_LEFT_LINES: Final = "fulcrum_gateway_batch_left_lines"
GATEWAY_RECOMPUTES: Final = "fulcrum_gateway_recomputes"
GATEWAY_TTFT_PREDICTED_RATIO: Final = "fulcrum_gateway_time_to_first_token_predicted_ratio"
GATEWAY_LATE_HINTS: Final = "fulcrum_gateway_late_prefix_hints"

KV_INDEX_LOOKUPS_TOTAL: Final = "fulcrum_kv_index_lookups_total"
KV_INDEX_LOOKUP_ERRORS_TOTAL: Final = "fulcrum_kv_index_lookup_errors_total"
KV_INDEX_CHANGE_ERRORS_TOTAL: Final = "fulcrum_kv_index_change_errors_total"
