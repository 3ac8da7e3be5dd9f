"""The start of EngineCore from the worker's configuration.

It imports vLLM, so only the starting thread may import it.
"""

import contextlib
import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import vllm
from vllm.config import KVEventsConfig, KVTransferConfig, PoolerConfig, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.v1.engine.core_client import AsyncMPClient, EngineCoreClient
from vllm.v1.executor import Executor
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.metrics.perf import ExecutionContext, ModelMetrics

from libs.contracts.errors import StartupError
from libs.engine.config import PORT, SETTING, EngineConfig, parallel_of, rendezvous_port
from libs.engine.port import Capabilities, EngineIdentity
from libs.engine.torch.device import cpu_name, device_peaks
from libs.engine.vllm.arguments import (
    EXTENSION,
    adapter_arguments,
    can_sleep,
    check_arguments,
    default_environment,
    own_environment,
    pooling_arguments,
    pooling_of,
    sleep_arguments,
    vision_arguments,
)
from libs.engine.vllm.connectors import NIXL, Connector, ConnectorSession, connector_of
from libs.engine.vllm.scheduler import CHUNK_SETTING, SUPPORTED, AsyncStepScheduler, StepScheduler
from libs.engine.vllm.starting import KvFacts, StartedCore, check_plugins, starting
from libs.engine.vllm.step_reports import Board, SpanRing
from libs.engine.vllm.wire import ImageReader
from libs.model.files import read_json
from libs.model.info import load_model_info
from libs.model.vision import Vision, load_vision
from libs.perfmodel.profiles import VARIANT_EAGER, VARIANT_UNCOMPILED
from libs.perfmodel.utilisation import Compute, KvShape
from libs.policy.worker.handing_over import KvSplit, width_class
from libs.runtime.net.ports import held_port

# vLLM's attention on CPUs needs a multiple of this block size.
CPU_BLOCK_TOKENS = 32
# Every engine can compute this many tokens in a step, even with a smaller chunk, so that prefill can be measured up to
# it.
MIN_STEP_TOKENS, MIN_STEP_TOKENS_GPU = 2048, 8192
# vLLM's methods of speculative decoding that need no weights.
WEIGHTLESS_DRAFTS = frozenset({"ngram", "ngram_gpu", "suffix"})
LOOPBACK = "localhost"
# An address that is never assigned (RFC 5737).
SOMEBODY = "192.0.2.1"


def launch(config: EngineConfig, identity: EngineIdentity) -> tuple[AsyncMPClient, StartedCore]:
    """Start EngineCore and wait until it serves. Raise StartupError, or vLLM's own error."""
    with _prepared(config, identity) as (vllm_config, connector, bootstrap, vision):
        compute = compute_of(config, vllm_config)
        images = _image_reader(vision, vllm_config)  # fails before anything is loaded
        client, shown, handshake, kv = _client(vllm_config)
    layout = kv_layout(vllm_config, connector, kv, handshake)
    capabilities = replace(
        _capabilities(config, vllm_config, layout, compute, kv.shape, kv_once=connector.holds),
        images=images is not None,
    )
    handing = ConnectorSession(connector, vllm_config.kv_transfer_config.engine_id, bootstrap)
    return client, StartedCore(capabilities, _device(), handing, *shown, images)


def follow(config: EngineConfig, identity: EngineIdentity) -> None:
    """Run this node's part of an engine until it ends. Raise StartupError, or vLLM's own error."""
    with _prepared(config, identity) as (vllm_config, *_), starting() as files:
        executor = MultiprocExecutor(vllm_config, monitor_workers=False)
        try:
            files.check(worker.proc.pid for worker in executor.workers)
        except StartupError:
            executor.shutdown()
            raise
    executor.start_worker_monitor(inline=True)


@contextlib.contextmanager
def _prepared(
    config: EngineConfig, identity: EngineIdentity
) -> Iterator[tuple[VllmConfig, Connector, str, Vision | None]]:
    """Check the configuration and set vLLM's environment.

    Yield vLLM's configuration, the connector with its URL, and the model's vision. The context reserves the connector's
    ports, on which vLLM's processes listen once they have loaded.
    """
    if not vllm.__version__.startswith(SUPPORTED):
        written_for = " and ".join(f"{each}x" for each in SUPPORTED)
        raise StartupError(f"vllm {vllm.__version__} is installed, this engine is written for {written_for}")
    check_plugins(os.environ)
    connector = connector_of(config)
    _check_device(config)
    host = _reachable(identity)
    for name, value in default_environment(config, on_cpu=current_platform.is_cpu()).items():
        os.environ.setdefault(name, value)
    assert config.model_path is not None
    info = load_model_info(config.model_path)
    with held_port(host) as nixl_port, held_port(host) as mooncake_port:
        os.environ.update(
            own_environment(
                host=host,
                nixl_port=nixl_port,
                mooncake_port=mooncake_port,
                revision=info.revision,
                worker_pid=os.getpid(),
            )
        )
        yield configured(config, connector), connector, f"http://{host}:{mooncake_port}", info.vision


def _client(vllm_config: VllmConfig) -> tuple[AsyncMPClient, tuple[Board, SpanRing], str, KvFacts]:
    """Return a client of a serving EngineCore, the board and ring of its steps, its handshake, and its KV facts."""
    with starting() as files:
        client = EngineCoreClient.make_async_mp_client(
            vllm_config=vllm_config, executor_class=Executor.get_class(vllm_config), log_stats=False
        )
        assert isinstance(client, AsyncMPClient)
        try:
            files.check(process.pid for process in client.resources.engine_manager.processes)
        except StartupError:
            client.shutdown(timeout=0)
            raise
        return client, (Board(files.board), SpanRing(files.dummies)), files.handshake(), files.kv()


def _reachable(identity: EngineIdentity) -> str:
    """Return the numeric address at which other engines reach this one's connector, from the worker's address."""
    name = identity.address.rpartition(":")[0].strip("[]") or LOOPBACK
    try:
        host = socket.gethostbyname(name)
    except OSError:
        raise StartupError(
            f"this worker's address {name!r} has no number: set FULCRUM_WORKER_ADVERTISE to one that others reach"
        ) from None
    if host.startswith("127.") and name != LOOPBACK and not name.startswith("127."):
        host = _outward() or host  # Debian maps a machine's own name to a loopback address
    return host


def _outward() -> str:
    """Return this machine's source address for other networks; empty without a network. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((SOMEBODY, 9))
        except OSError:
            return ""
        host: str = probe.getsockname()[0]
    return host


def _check_device(config: EngineConfig) -> None:
    """Raise StartupError for impossible arguments, or if vLLM finds fewer devices than the arguments need.

    vLLM itself reports missing devices in many lines, or not at all.
    """
    wants_gpu = config.device.startswith("cuda")
    if current_platform.is_unspecified() or (wants_gpu and not current_platform.is_cuda_alike()):
        raise StartupError(
            f"vLLM {vllm.__version__} finds no GPU here: nvidia-smi has to list one (a container gets it from the"
            " NVIDIA container toolkit), and this has to be vLLM's build for GPUs; FULCRUM_WORKER_DEVICE=cpu with the"
            " build for CPUs needs none"
        )
    try:
        check_arguments(config.vllm_arguments)
        parallel = parallel_of(config.vllm_arguments)
    except ValueError as error:
        raise StartupError(str(error)) from None
    if parallel.data > 1 and parallel.data_rank == 0:
        _check_rendezvous(str(config.vllm_arguments["data_parallel_address"]), rendezvous_port(config.vllm_arguments))
    wanted = parallel.gpus_here
    if current_platform.is_cuda_alike() and wanted > current_platform.device_count():
        raise StartupError(
            f"an engine of {wanted} GPUs is asked for, vLLM sees {current_platform.device_count()} GPUs: see"
            f" CUDA_VISIBLE_DEVICES (of compose's workers: FULCRUM_PREFILL_GPUS, FULCRUM_DECODE_GPUS) and {SETTING}"
        )


def _check_rendezvous(host: str, port: int) -> None:
    """Raise StartupError if another data-parallel group of this node already listens at this address.

    Otherwise its ranks would join this group, or this group would wait forever for its own.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ignores sockets of a process that has just ended
        try:
            probe.bind((host, port))
        except OSError as error:
            raise StartupError(
                f"rank 0 of a data-parallel group cannot listen at {host}:{port} ({error.strerror}): name an address of"
                f" this node, and where several groups share it, a {PORT} for each in {SETTING}"
            ) from None


def configured(config: EngineConfig, connector: Connector) -> VllmConfig:
    """Build vLLM's own configuration without loading anything. Raise StartupError, or vLLM's own error."""
    on_cpu = current_platform.is_cpu()
    if on_cpu and config.block_size_tokens % CPU_BLOCK_TOKENS:
        raise StartupError(
            f"vLLM on a CPU needs a KV block of a multiple of {CPU_BLOCK_TOKENS} tokens, not"
            f" {config.block_size_tokens}: set FULCRUM_WORKER_BLOCK_SIZE_TOKENS"
        )
    step_tokens = MIN_STEP_TOKENS if on_cpu else MIN_STEP_TOKENS_GPU
    arguments: dict[str, Any] = {
        "model": str(config.model_path),
        "served_model_name": config.model_name,
        "dtype": _dtype(config, on_cpu=on_cpu),
        "block_size": config.block_size_tokens,
        "max_num_seqs": config.max_sequences,
        "max_num_batched_tokens": max(step_tokens, config.prefill_chunk_tokens) + config.max_sequences,
        "skip_tokenizer_init": True,
        "enforce_eager": on_cpu,
        "enable_prefix_caching": True,
        "scheduling_policy": "priority",
        "generation_config": "vllm",
        "disable_log_stats": True,
        "kv_events_config": KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
        "kv_transfer_config": KVTransferConfig(
            kv_connector=connector.name,
            kv_role="kv_both",
            kv_buffer_device="cpu" if on_cpu else "cuda",
            kv_load_failure_policy="fail",
            kv_connector_extra_config=dict(connector.config),
        ),
        "additional_config": {CHUNK_SETTING: config.prefill_chunk_tokens},
    }
    if config.adapters:
        arguments |= adapter_arguments(config.adapters, config.max_adapters, on_cpu=on_cpu)
    assert config.model_path is not None
    # The other facts of the model need its weights, but vLLM's configuration can be built without them.
    vision = load_vision(config.model_path, read_json(config.model_path / "config.json"))
    if vision is not None:
        arguments |= vision_arguments(serves=not vision.unserved and connector.holds)
    if on_cpu:
        arguments["kv_cache_memory_bytes"] = config.kv_memory_mb * 1024 * 1024
        arguments["worker_cls"] = "libs.engine.vllm.cpu_worker.MendedWorker"
    arguments |= config.vllm_arguments
    if (pooling := pooling_of(config)) is not None:
        arguments |= pooling_arguments(pooling, config, step_tokens=arguments["max_num_batched_tokens"])
        arguments["pooler_config"] = PoolerConfig(**arguments["pooler_config"])
    if can_sleep(config, connector, available=current_platform.is_sleep_mode_available()):
        arguments |= sleep_arguments(config, current_platform.get_device_total_memory())
    vllm_config = AsyncEngineArgs(**arguments).create_engine_config()
    if pooling is None and vllm_config.model_config.runner_type == "pooling":
        raise StartupError("vLLM serves this model's classes or embeddings only: encoders are not served here")
    scheduler = vllm_config.scheduler_config
    scheduler.scheduler_cls = AsyncStepScheduler if scheduler.async_scheduling else StepScheduler
    return vllm_config


def _image_reader(vision: Vision | None, vllm_config: VllmConfig) -> ImageReader | None:
    """Return the reader of prompts' images; None if the engine serves no images. Raise StartupError."""
    model = vllm_config.model_config
    if vision is None or not model.supports_multimodal_inputs or model.runner_type == "pooling":
        return None
    return ImageReader(model, vision)


def _dtype(config: EngineConfig, *, on_cpu: bool) -> str:
    if config.dtype != "auto":
        return config.dtype
    return "float32" if on_cpu else "auto"


def _capabilities(
    config: EngineConfig, vllm_config: VllmConfig, layout: str, compute: Compute | None, kv: KvShape, *, kv_once: bool
) -> Capabilities:
    model, cache = vllm_config.model_config, vllm_config.cache_config
    assert config.model_path is not None
    info = load_model_info(config.model_path, config.model_name)
    pooling = pooling_of(config)
    sleeps = bool(model.enable_sleep_mode and vllm_config.parallel_config.worker_extension_cls == EXTENSION)
    return Capabilities(
        block_size_tokens=cache.block_size,
        kv_blocks=cache.num_gpu_blocks - 1,  # vLLM uses one for padding
        kv_block_bytes=kv.block_bytes(cache.block_size),
        max_context_tokens=model.max_model_len,
        max_sequences=config.max_sequences,
        kv_layout=layout,
        vocab_size=info.vocab_size,
        pools=frozenset() if pooling is None else frozenset({pooling}),
        generates=pooling is None,
        hands_over_running_kv=False,
        streams_kv=False,
        kv_once=kv_once,
        seeds_by_position=False,
        first_token_from="decode",
        chunk_tokens=config.prefill_chunk_tokens,
        compute=compute and with_kv(compute, kv),
        kv_shape=kv,
        sleeps=sleeps,
        drops_weights=sleeps and not config.adapters and not _drafts_by_weights(vllm_config),
        variant=_variant(config, vllm_config),
    )


def _drafts_by_weights(vllm_config: VllmConfig) -> bool:
    """Return whether the engine speculates with a draft model, whose weights `reload_weights` does not read again."""
    speculative = vllm_config.speculative_config
    return speculative is not None and speculative.method not in WEIGHTLESS_DRAFTS


def kv_layout(vllm_config: VllmConfig, connector: Connector, facts: KvFacts, handshake: str = "") -> str:
    """Return the name of the KV layout, equal for engines that can read each other's blocks.

    `handshake` is a digest of the values that NIXL compares before it reads.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    heads = model.get_total_num_kv_heads()
    split = KvSplit(
        parallel.tensor_parallel_size,
        heads,
        is_latent=model.use_mla,
        has_states=facts.has_states,
        order=facts.order,
        context_width=parallel.decode_context_parallel_size,
        over_nixl=connector.name == NIXL,
    )
    shape = f"{model.get_total_num_hidden_layers()}x{1 if model.use_mla else heads}x{model.get_head_size()}"
    parts = ["vllm", vllm.__version__, connector.layout, _kv_dtype(vllm_config), shape, width_class(split)]
    parts += [f"pp{parallel.pipeline_parallel_size}"] * (parallel.pipeline_parallel_size > 1)
    parts += [facts.order] * (bool(facts.order) and not model.use_mla)
    parts.append(f"block{vllm_config.cache_config.block_size}")
    if handshake and connector.shakes_hands:
        parts.append(f"handshake-{handshake}")
    return "/".join(parts)


def _kv_dtype(vllm_config: VllmConfig) -> str:
    dtype, kv_dtype = str(vllm_config.model_config.dtype).removeprefix("torch."), vllm_config.cache_config.cache_dtype
    return f"{dtype}+{kv_dtype}" if kv_dtype != "auto" else dtype


def _variant(config: EngineConfig, vllm_config: VllmConfig) -> str:
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    widths = (("tp", parallel.tensor_parallel_size), ("pp", parallel.pipeline_parallel_size))
    parts = [
        _kv_dtype(vllm_config),
        *(f"{name}{width}" for name, width in (*widths, ("dp", parallel.data_parallel_size)) if width > 1),
    ]
    parts += [str(model.quantization)] * (model.quantization is not None) + [VARIANT_EAGER] * bool(model.enforce_eager)
    parts.append(f"vllm {vllm.__version__}")
    if not (current_platform.is_cpu() or model.enforce_eager or vllm_config.compilation_config.mode):
        parts.append(VARIANT_UNCOMPILED)
    if current_platform.is_cpu():
        parts += [f"{config.threads or 1} threads", cpu_name()]
    return ", ".join(parts)


def _device() -> str:
    return "cpu" if current_platform.is_cpu() else f"cuda:{current_platform.get_device_name()}"


LAYER_PARTS = ("attn.qkv_proj", "attn.out_proj", "ffn.dense_ffn")
HEAD = "unembed.unembed"
FLOPS_A_PARAMETER = 2


def compute_of(config: EngineConfig, vllm_config: VllmConfig) -> Compute | None:
    """Return the compute of a dense model without quantisation; None for others.

    A token uses only part of the weights of a mixture of experts, and quantised weights are narrower than the
    arithmetic. `with_kv` adds the KV, which is known only once EngineCore serves.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    if model.quantization is not None or model.is_moe:
        return None
    flops = ModelMetrics(vllm_config).get_num_flops_breakdown(
        ExecutionContext.from_single_request(num_tokens=1, context_len=1, is_prefill=True), per_gpu=False
    )
    if not flops.keys() >= {*LAYER_PARTS, HEAD}:
        return None
    layers, heads = model.get_total_num_hidden_layers(), model.get_num_attention_heads(parallel)
    width = layers * heads * model.get_head_size() * parallel.tensor_parallel_size
    device = torch.device(vllm_config.device_config.device_type)
    if device.type == "cpu":  # measure with as many threads as EngineCore will use
        torch.set_num_threads(config.threads or 1)
    flops_per_s, bytes_per_s = device_peaks(device, model.dtype)
    return Compute(
        layer_parameters=sum(flops[part] for part in LAYER_PARTS) // FLOPS_A_PARAMETER,
        head_parameters=flops[HEAD] // FLOPS_A_PARAMETER,
        parameter_bytes=model.dtype.itemsize,
        attention_width=width,
        kv_token_bytes=0,
        peak_flops_per_s=flops_per_s,
        peak_bytes_per_s=bytes_per_s,
    )


def with_kv(compute: Compute, kv: KvShape) -> Compute:
    """Return a copy with the bytes of KV that steps read."""
    return replace(
        compute,
        kv_token_bytes=kv.token_bytes,
        kv_window_token_bytes=kv.window_token_bytes,
        kv_window_tokens=kv.window_tokens,
        kv_state_bytes=kv.state_bytes,
    )
