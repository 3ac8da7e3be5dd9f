"""All names of vLLM that this project uses: those listed here, and those that follow from our source (derived.py).

The list has what syntax does not show: attributes of objects without an annotated class, arguments in dictionaries,
methods that ours replace, environment variables, and metrics. Each line has a dotted name, as where vLLM defines it,
and our file.
"""

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from deploy.try_vllm.derived import ROOT, derive
from deploy.try_vllm.touched import CallArguments, Kind, Touched
from libs.engine.vllm.arguments import RESERVED
from libs.engine.vllm.connectors import KINDS
from libs.observe.vllm import HISTOGRAMS, KV_USED, SCALARS, TOKEN_GAPS

OURS: Final = "libs/engine/vllm"
ARGUMENTS, CONNECTORS, CORE = f"{OURS}/arguments.py", f"{OURS}/connectors.py", f"{OURS}/core.py"
KV, LAUNCH, PACING = f"{OURS}/kv_groups.py", f"{OURS}/launch.py", f"{OURS}/pacing.py"
PLUGIN, SCHEDULER, SEQUENCES = f"{OURS}/plugin.py", f"{OURS}/scheduler.py", f"{OURS}/sequences.py"
GUIDES, HANDOVER, MARKS = f"{OURS}/guides.py", f"{OURS}/handover.py", f"{OURS}/pull_marks.py"
REPORTS, WIRE, CPU_WORKER = f"{OURS}/step_reports.py", f"{OURS}/wire.py", f"{OURS}/cpu_worker.py"
OBSERVER: Final = "deploy/vllm-plugin/fulcrum_observe/engine.py"
PARSER: Final = "libs/observe/vllm.py"
EXECUTOR: Final = "libs/testing/engines/async_executor.py"
IMAGE: Final = "deploy/images/check_imports.py"
PROFILES: Final = "libs/launch/profiles"
PARALLEL: Final = "libs/engine/config.py"


def _name(name: str, *where: str, optional: bool = False) -> list[Touched]:
    return [Touched(name, Kind.NAME, each, optional=optional) for each in where]


def _call(name: str, where: str, positional: int = 0, *names: str) -> list[Touched]:
    return [Touched(name, Kind.CALL, where, CallArguments(positional, names))]


def _override(name: str, where: str, ours: str) -> list[Touched]:
    return [Touched(name, Kind.OVERRIDE, where, text=ours)]


def _text(within: str, text: str, where: str, *, optional: bool = False) -> list[Touched]:
    return [Touched(within, Kind.TEXT, where, text=text, optional=optional)]


def _file(path: str, where: str) -> list[Touched]:
    return [Touched(path, Kind.FILE, where)]


CLIENT: Final = "vllm.v1.engine.core_client.AsyncMPClient"
RESOURCES: Final = "vllm.v1.engine.core_client.BackgroundResources"
MULTIPROC: Final = "vllm.v1.executor.multiproc_executor"
CONFIG: Final = "vllm.config.VllmConfig"
INTERFACE: Final = "vllm.v1.kv_cache_interface"
EVENTS: Final = "vllm.distributed.kv_events"
SCHED: Final = "vllm.v1.core.sched.scheduler.Scheduler"
STEP: Final = "vllm.v1.core.sched.output.SchedulerOutput"
QUEUE: Final = "vllm.v1.core.sched.request_queue.RequestQueue"
REQUEST: Final = "vllm.v1.request.Request"
OUTPUT: Final = "vllm.v1.engine.EngineCoreOutput"
SPIN: Final = "vllm.distributed.device_communicators.shm_broadcast.SpinCondition"
CONNECTOR_CODE: Final = "vllm.distributed.kv_transfer.kv_connector"
NIXL_CODE: Final = f"{CONNECTOR_CODE}.v1.nixl"
PULLS: Final = f"{NIXL_CODE}.pull_worker.NixlPullConnectorWorker"
MOONCAKE_CODE: Final = f"{CONNECTOR_CODE}.v1.mooncake"
FLOPS: Final = "vllm.v1.metrics.perf"
PROC: Final = "vllm.v1.engine.core.EngineCoreProc"
LOOP: Final = "vllm.v1.engine.core.EngineCore"
ENGINE_ARGUMENTS: Final = "vllm.engine.arg_utils.AsyncEngineArgs"
METRICS: Final = "vllm.v1.metrics"

# fmt: off
BY_HAND: Final[tuple[Touched, ...]] = (
    # The client of EngineCore
    *_call(f"{CLIENT}.add_request_async", CORE, 1),
    *_call(f"{CLIENT}.abort_requests_async", CORE, 1),
    *_call(f"{CLIENT}.get_output_async", CORE),
    *_call(f"{CLIENT}.sleep_async", CORE, 2),
    *_call(f"{CLIENT}.wake_up_async", CORE, 1),
    *_call(f"{CLIENT}.collective_rpc_async", CORE, 1),
    *_call(f"{CLIENT}.shutdown", CORE, 0, "timeout"),
    *_call(f"{CLIENT}.shutdown", LAUNCH, 0, "timeout"),
    *_name(f"{CLIENT}.outputs_queue", CORE),
    *_name(f"{CLIENT}.resources", CORE, LAUNCH),
    *_name(f"{RESOURCES}.engine_manager", CORE, LAUNCH),
    *_name(f"{RESOURCES}.engine_dead", CORE),
    *_name("vllm.v1.engine.utils.CoreEngineProcManager.processes", CORE, LAUNCH),
    *_call("vllm.v1.worker.gpu_worker.Worker.reload_weights", CORE),
    *_text("vllm.v1.executor.abstract", "weights", CORE),
    *_text("vllm.v1.executor.abstract", "kv_cache", CORE),
    # The start
    *_call(f"{MULTIPROC}.MultiprocExecutor.shutdown", LAUNCH),
    *_call(f"{MULTIPROC}.MultiprocExecutor.start_worker_monitor", LAUNCH, 0, "inline"),
    *_name(f"{MULTIPROC}.MultiprocExecutor.workers", LAUNCH),
    *_name(f"{MULTIPROC}.WorkerProcHandle.proc", LAUNCH),
    *_call(f"{ENGINE_ARGUMENTS}.create_engine_config", LAUNCH),
    *_name(f"{CONFIG}.kv_transfer_config.engine_id", LAUNCH),
    *_name(f"{CONFIG}.scheduler_config.scheduler_cls", LAUNCH),
    *_name(f"{CONFIG}.scheduler_config.async_scheduling", LAUNCH, EXECUTOR),
    *_name(f"{CONFIG}.parallel_config.distributed_executor_backend", EXECUTOR),
    *_call(f"{FLOPS}.ModelMetrics.get_num_flops_breakdown", LAUNCH, 1, "per_gpu"),
    *_text(FLOPS, "attn", LAUNCH),
    *_text(FLOPS, "qkv_proj", LAUNCH),
    *_text(FLOPS, "out_proj", LAUNCH),
    *_text(FLOPS, "ffn", LAUNCH),
    *_text(FLOPS, "dense_ffn", LAUNCH),
    *_text(FLOPS, "unembed", LAUNCH),
    *_text("vllm.config.speculative", "ngram", LAUNCH),
    *_text("vllm.config.speculative", "ngram_gpu", LAUNCH),
    *_text("vllm.config.speculative", "suffix", LAUNCH),
    # The plug-in and vLLM's processes
    *_text("vllm.plugins", "vllm.general_plugins", "pyproject.toml"),
    *_text(NIXL_CODE, "nixl_connector_version", PLUGIN),
    *_name(f"{SPIN}.last_read", PLUGIN),
    *_call(SPIN, PLUGIN, 3, "busy_loop_s"),
    *_override(f"{SPIN}.wait", PLUGIN, ""),
    # KV connectors
    *(each for name in KINDS for each in _text(f"{CONNECTOR_CODE}.factory", name, CONNECTORS)),
    *_text(NIXL_CODE, "kv_lease_duration", CONNECTORS),
    *_text(NIXL_CODE, "enforce_handshake_compat", CONNECTORS),
    *_text(CONNECTOR_CODE, "shared_storage_path", CONNECTORS),
    *_text("vllm.v1.kv_offload.factory", "spec_name", CONNECTORS),
    *_text(f"{CONNECTOR_CODE}.v1.multi_connector", "connectors", CONNECTORS),
    *_text(NIXL_CODE, "do_remote_decode", CONNECTORS),
    *_text(NIXL_CODE, "do_remote_prefill", CONNECTORS),
    *_text(NIXL_CODE, "remote_engine_id", WIRE),
    *_text(NIXL_CODE, "remote_request_id", WIRE),
    *_text(NIXL_CODE, "_remote_blocks_processed", KV),
    *_text(MOONCAKE_CODE, "do_remote_decode", CONNECTORS),
    *_text(MOONCAKE_CODE, "do_remote_prefill", CONNECTORS),
    *_text(MOONCAKE_CODE, "remote_engine_id", CONNECTORS),
    *_text(MOONCAKE_CODE, "remote_bootstrap_addr", CONNECTORS),
    *_text(MOONCAKE_CODE, "transfer_id", CONNECTORS),
    *_text("vllm.v1.request", "kv_transfer_params", WIRE),
    # Reads of KV whose blocks are marked
    *_override(f"{PULLS}._read_blocks_for_req", MARKS, ""),
    *_override(f"{PULLS}._pop_done_transfers", MARKS, ""),
    *(each for name in (
        "_remote_agents", "vllm_config", "xfer_stats", "use_host_buffer", "_mixed_mem_types", "dcp_size", "engine_id",
        "_transfer_layer_group_ids", "kv_caches_base_addr", "tp_rank", "_uses_region_group_mapping", "_has_mamba",
        "device_kv_caches", "region_names", "region_group_ids", "block_stride_per_layer", "block_len_per_layer",
        "transfer_topo", "dst_region_group_ids", "_group_spec_types",
    ) for each in _name(f"{PULLS}.{name}", MARKS)),
    *_call(f"{PULLS}._logical_to_kernel_block_ids", MARKS, 2),
    *_name(f"{NIXL_CODE}.metadata.ReqMeta.local_physical_block_ids", MARKS),
    *_name(f"{NIXL_CODE}.metadata.RemoteMeta.block_ids", MARKS),
    *_name(f"{NIXL_CODE}.metadata.RemoteMeta.engine_id", MARKS),
    # The layout of KV, and its events
    *_name(f"{INTERFACE}.CircularBufferSpec", KV, optional=True),
    *_name(f"{INTERFACE}.KVCacheGroupSpec.layer_names", KV),
    *_name(f"{INTERFACE}.KVCacheGroupSpec.kv_cache_spec", KV),
    *_name(f"{INTERFACE}.KVCacheTensor.layer_stride", KV),
    *_name(f"{INTERFACE}.KVCacheTensor.layers", KV),
    *_name(f"{INTERFACE}.KVCacheSpec.block_size", KV),
    *_name(f"{INTERFACE}.MambaSpec.num_speculative_blocks", KV),
    *_name(f"{INTERFACE}.UniformTypeKVCacheSpecs.kv_cache_specs", KV),
    *_name(f"{INTERFACE}.AttentionSpec.real_page_size_bytes", KV),
    *_name("vllm.v1.kv_cache_layout.KVCacheLayout.stride_order", KV),
    *_name(f"{EVENTS}.KVEventBatch.events", KV),
    *_name(f"{EVENTS}.BlockStored.group_idx", KV),
    *_name(f"{EVENTS}.BlockStored.extra_keys", KV),
    *_name(f"{EVENTS}.BlockStored.block_hashes", KV),
    *_name(f"{EVENTS}.BlockStored.parent_block_hash", KV),
    *_name(f"{EVENTS}.BlockStored.token_ids", KV),
    *_name(f"{EVENTS}.BlockRemoved.group_idx", KV),
    *_name(f"{EVENTS}.BlockRemoved.block_hashes", KV),
    Touched("vllm.v1", Kind.STAND_IN, f"{KV}:Rehasher", text="kv_event_publisher"),
    # Images
    *_call("vllm.multimodal.registry.MultiModalRegistry.create_processor", WIRE, 1),
    *_call("vllm.multimodal.processing.processor.BaseMultiModalProcessor.apply", WIRE, 2),
    *_call("vllm.multimodal.processing.context.BaseProcessingInfo.parse_mm_data", WIRE, 1),
    *_name("vllm.multimodal.inputs.MultiModalFeatureSpec.data", WIRE, KV),
    *_name("vllm.multimodal.inputs.PlaceholderRange.length", WIRE),
    *_name("vllm.v1.request.Request.mm_features", KV),
    *_call("vllm.config.ModelConfig.get_inputs_embeds_size", KV),
    *_name("vllm.config.ModelConfig.supports_multimodal_inputs", KV, LAUNCH, PLUGIN),
    *_call("vllm.v1.worker.worker_base.WorkerWrapperBase.initialize_from_config", PLUGIN, 1),
    *_name("vllm.v1.worker.worker_base.WorkerWrapperBase.global_rank", PLUGIN),
    *_call("vllm.v1.worker.worker_base.WorkerBase.get_model", PLUGIN),
    *_call("vllm.model_executor.models.interfaces.SupportsMultiModal.embed_multimodal", PLUGIN),
    # The scheduler
    *_override(f"{SCHED}.add_request", SCHEDULER, "_Reporting"),
    *_override(f"{SCHED}.schedule", SCHEDULER, "_Reporting"),
    *_override(f"{SCHED}.update_from_output", SCHEDULER, "_Reporting"),
    *_override(f"{SCHED}.make_stats", SCHEDULER, "_Reporting"),
    *_override(f"{SCHED}.finish_requests", SCHEDULER, "_Reporting"),
    *_override(f"{SCHED}._free_request", SCHEDULER, "_Reporting"),
    *_override(f"{SCHED}._free_blocks", SCHEDULER, "_Reporting"),
    *_override(f"{SCHED}._preempt_request", SCHEDULER, "_Reporting"),
    *_override(f"{SCHED}._set_kv_fetch_stage", SCHEDULER, "_Reporting"),
    *_override(f"{SCHED}._update_from_kv_xfer_finished", SCHEDULER, "_Reporting"),
    *_name(f"{SCHED}.running", SCHEDULER, OBSERVER),
    *_name(f"{SCHED}.max_num_active_reqs", SCHEDULER),
    *_name(f"{SCHED}.max_num_scheduled_tokens", SCHEDULER),
    *_name(f"{SCHED}.kv_event_publisher", SCHEDULER),
    *_name(f"{SCHED}.scheduler_config.long_prefill_token_threshold", SCHEDULER),
    *_name(f"{STEP}.total_num_scheduled_tokens", SCHEDULER, OBSERVER),
    *_name(f"{STEP}.num_scheduled_tokens", SCHEDULER, OBSERVER),
    *_name(f"{STEP}.scheduled_encoder_inputs", SCHEDULER),
    *_name(f"{SCHED}.encoder_cache_manager", SCHEDULER),
    *_name("vllm.v1.core.encoder_cache_manager.EncoderCacheManager.cache_size", SCHEDULER),
    *_name("vllm.v1.core.encoder_cache_manager.EncoderCacheManager.num_free_slots", SCHEDULER),
    *_call(f"{QUEUE}.remove_requests", SCHEDULER, 1),
    *_call(f"{QUEUE}.add_request", SCHEDULER, 1),
    *_name("vllm.v1.outputs.KVConnectorOutput.finished_sending", SCHEDULER),
    *_name("vllm.v1.outputs.KVConnectorOutput.finished_recving", SCHEDULER),
    *_name("vllm.v1.outputs.KVConnectorOutput.failed_recving", SCHEDULER),
    *_name("vllm.v1.outputs.ModelRunnerOutput.kv_connector_output", SCHEDULER),
    *_call("vllm.config.KVTransferConfig.get_from_extra_config", SCHEDULER, 2),
    *_call("vllm.config.KVTransferConfig.has_connector", PLUGIN, 1),
    *_text(NIXL_CODE, "kv_lease_duration", SCHEDULER),
    *_text(NIXL_CODE, "remote_num_tokens", HANDOVER),
    *_call(LOOP + ".execute_dummy_batch", REPORTS),
    # Requests
    *_name(f"{REQUEST}.lora_request", SCHEDULER),
    *_name("vllm.lora.request.LoRARequest.lora_int_id", SCHEDULER),
    *_name("vllm.config.LoRAConfig.max_loras", SCHEDULER),
    *_name(f"{REQUEST}.num_tokens", SCHEDULER, PACING, OBSERVER),
    *_name(f"{REQUEST}.num_tokens_with_spec", PACING),
    *_name(f"{REQUEST}.num_computed_tokens", PACING, OBSERVER),
    *_name(f"{REQUEST}.num_output_tokens", PACING),
    *_name(f"{REQUEST}.num_output_placeholders", PACING),
    *_name(f"{REQUEST}.num_prompt_tokens", PACING),
    *_name(f"{REQUEST}.max_tokens", PACING),
    *_name(f"{REQUEST}.status", OBSERVER),
    # Guides
    *_override("vllm.v1.structured_output.backend_types.StructuredOutputBackend.compile_grammar",
               GUIDES, "GuideBackend"),
    *_override("vllm.v1.structured_output.backend_types.StructuredOutputBackend.allocate_token_bitmask",
               GUIDES, "GuideBackend"),
    *_override("vllm.v1.structured_output.backend_types.StructuredOutputBackend.destroy", GUIDES, "GuideBackend"),
    *_call("vllm.v1.structured_output.backend_types.StructuredOutputBackend",
           GUIDES, 1, "tokenizer", "vocab_size"),
    *_call("vllm.v1.structured_output.backend_guidance.GuidanceGrammar.accept_tokens", GUIDES, 2),
    *_name("vllm.v1.structured_output.StructuredOutputManager.executor", GUIDES),
    # Outputs
    *_name("vllm.v1.engine.EngineCoreOutputs.outputs", SEQUENCES),
    *_name("vllm.v1.engine.EngineCoreOutputs.scheduler_stats", WIRE),
    *_name("vllm.v1.metrics.stats.SchedulerStats.kv_connector_stats", WIRE),
    *_name(f"{OUTPUT}.request_id", SEQUENCES),
    *_name(f"{OUTPUT}.prefill_stats", SEQUENCES),
    *_name(f"{OUTPUT}.new_token_ids", SEQUENCES),
    *_name(f"{OUTPUT}.finish_reason", SEQUENCES),
    *_name(f"{OUTPUT}.kv_transfer_params", SEQUENCES),
    *_name(f"{OUTPUT}.new_logprobs", WIRE),
    *_name("vllm.v1.outputs.LogprobsLists.logprob_token_ids", WIRE),
    *_name("vllm.v1.outputs.LogprobsLists.logprobs", WIRE),
    *_name("vllm.v1.metrics.stats.PrefillStats.num_local_cached_tokens", SEQUENCES),
    *_name("vllm.v1.metrics.stats.PrefillStats.num_external_cached_tokens", SEQUENCES, KV),
    *_name("vllm.sampling_params.SamplingParams.extra_args", WIRE),
    # The worker for CPUs, and the executor of tests
    *_override("vllm.v1.worker.cpu_worker.CPUWorker.init_device", CPU_WORKER, "MendedWorker"),
    *_override("vllm.v1.worker.cpu_worker.CPUWorker.initialize_from_config", CPU_WORKER, "MendedWorker"),
    *_override("vllm.v1.worker.cpu_worker.CPUWorker.sample_tokens", CPU_WORKER, "MendedWorker"),
    *_override("vllm.v1.executor.uniproc_executor.UniProcExecutor._init_executor", EXECUTOR, "ThreadedExecutor"),
    *_override("vllm.v1.executor.uniproc_executor.UniProcExecutor.collective_rpc", EXECUTOR, "ThreadedExecutor"),
    *_override("vllm.v1.executor.uniproc_executor.UniProcExecutor.shutdown", EXECUTOR, "ThreadedExecutor"),
    *_name("vllm.v1.executor.uniproc_executor.UniProcExecutor.vllm_config", EXECUTOR),
    # The plug-in of `fulcrum observe`
    *_call(f"{PROC}.run_busy_loop", OBSERVER),
    *_call("vllm.v1.engine.core.DPEngineCoreProc.run_busy_loop", OBSERVER),
    *_name(f"{PROC}.vllm_config", OBSERVER),
    *_name(f"{PROC}.scheduler", OBSERVER),
    *_call(f"{PROC}.execute_dummy_batch", OBSERVER),
    *_name(f"{SCHED}.schedule", OBSERVER),
    *_name(f"{SCHED}.update_from_output", OBSERVER),
    *_name(f"{SCHED}.requests", OBSERVER),
    *_name(f"{SCHED}.waiting", OBSERVER),
    *_name(f"{SCHED}.kv_holding_waiting", OBSERVER),
    *_call(f"{SCHED}.kv_cache_manager.block_pool.get_num_free_blocks", OBSERVER),
    *_name(f"{CONFIG}.parallel_config.data_parallel_index", OBSERVER),
    *_name(f"{CONFIG}.parallel_config.data_parallel_rank", OBSERVER),
    *_name(f"{CONFIG}.parallel_config.data_parallel_size", OBSERVER),
    *_name(f"{CONFIG}.parallel_config.tensor_parallel_size", OBSERVER),
    *_name(f"{CONFIG}.parallel_config.pipeline_parallel_size", OBSERVER),
    *_name(f"{CONFIG}.cache_config.num_gpu_blocks", OBSERVER),
    *_name(f"{CONFIG}.cache_config.block_size", OBSERVER),
    *_name(f"{CONFIG}.scheduler_config.max_num_seqs", OBSERVER),
    *_name(f"{CONFIG}.scheduler_config.max_num_batched_tokens", OBSERVER),
    *_name(f"{CONFIG}.model_config.served_model_name", OBSERVER),
    *_name(f"{CONFIG}.kv_transfer_config.kv_role", OBSERVER),
    *_text("vllm.config.kv_transfer", "kv_producer", OBSERVER),
    *_text("vllm.config.kv_transfer", "kv_consumer", OBSERVER),
    *_name("vllm.v1.request.RequestStatus.WAITING_FOR_REMOTE_KVS", OBSERVER),
    # The metrics that `fulcrum observe` reads. Their names follow below.
    *_text(METRICS, "local_compute", PARSER),
    *_text(METRICS, "engine", PARSER),
    *_text(METRICS, "model_name", PARSER),
    *_name("vllm.config.CacheConfig.block_size", PARSER),
    *_name("vllm.config.CacheConfig.num_gpu_blocks", PARSER),
    # The check of images
    *_name("vllm.v1.sample.ops.topk_topp_sampler", IMAGE),
    *_name("vllm.v1.attention.backends.flashinfer", IMAGE),
    *_name("vllm.v1.attention.backends.flash_attn", IMAGE),
    *_name(f"{NIXL_CODE}", IMAGE),
    *_file("vllm/_C_stable_libtorch", IMAGE),
    *_file("vllm/_moe_C_stable_libtorch", IMAGE),
)
# fmt: on

# The definitions of names that vLLM resolves in `__getattr__`.
ELSEWHERE: Final = {"vllm.platforms.current_platform.device_count": "vllm.platforms.cuda.CudaPlatformBase.device_count"}
# The arguments of vLLM's engine that the worker sets, by the file that has them in a dictionary.
SET: Final = {
    LAUNCH: (
        "model", "served_model_name", "dtype", "block_size", "max_num_seqs", "max_num_batched_tokens",
        "skip_tokenizer_init", "enforce_eager", "enable_prefix_caching", "scheduling_policy", "generation_config",
        "disable_log_stats", "kv_events_config", "kv_transfer_config", "additional_config", "kv_cache_memory_bytes",
        "worker_cls",
    ),
    ARGUMENTS: (
        *RESERVED, "language_model_only", "enable_lora", "max_loras", "max_cpu_loras", "max_lora_rank",
        "enable_sleep_mode", "gpu_memory_utilization", "worker_extension_cls",
    ),
    CORE: ("master_addr", "master_port"),
    PARALLEL: (
        "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "data_parallel_rank",
        "data_parallel_address", "data_parallel_rpc_port", "nnodes", "node_rank",
    ),
}  # fmt: skip


def _argument(name: str, where: str) -> Touched:
    return Touched(ENGINE_ARGUMENTS, Kind.CALL, where, CallArguments(0, (name,), partly=True))


def _of_profiles() -> Iterable[Touched]:
    """Yield vLLM's arguments in the deployment profiles of this release."""
    for path in sorted((ROOT / PROFILES).glob("*.json")):
        for worker in json.loads(path.read_text(encoding="utf-8")).get("workers", ()):
            yield from (_argument(name, f"{PROFILES}/{path.name}") for name in worker.get("arguments", ()))


def _metrics() -> Iterable[Touched]:
    """Yield the metrics that `fulcrum observe` reads, by the names of their families."""
    fallbacks = {*TOKEN_GAPS[1:], *KV_USED[1:]}
    for name in sorted({*SCALARS, *HISTOGRAMS}):
        bare = name.removesuffix("_count").removesuffix("_sum")
        yield Touched(METRICS, Kind.METRIC, PARSER, text=f"vllm:{bare}", optional=bare in fallbacks)


def touched() -> list[Touched]:
    """Return all names, in the order of our files."""
    arguments = [_argument(name, where) for where, names in SET.items() for name in names]
    derived = [replace(each, name=ELSEWHERE.get(each.name, each.name)) for each in derive()]
    return [*derived, *BY_HAND, *arguments, *_of_profiles(), *_metrics()]
