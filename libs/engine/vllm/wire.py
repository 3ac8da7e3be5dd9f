"""The translation between the port's types and vLLM's. It imports vLLM, so only a running engine imports it."""

import time
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import msgspec
from PIL import Image
from vllm.exceptions import VLLMClientError
from vllm.lora.request import LoRARequest
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.multimodal.processing import ProcessorInputs, TimingContext
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams as VllmSamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine import FinishReason as VllmFinish

from libs.contracts.errors import InvalidRequest, StartupError, one_line
from libs.engine.port import EnginePhase, EngineRequest, PromptImage
from libs.engine.port import SamplingParams as Sampling
from libs.engine.reports import FinishReason, Logprob
from libs.engine.vllm.connectors import ConnectorSession, KvRoute
from libs.engine.vllm.step_reports import (
    COMMAND_KEY,
    GENERATED_KEY,
    LEASE_KEY,
    PACE_KEY,
    REPORT_KEY,
    TRIAL_KEY,
    Command,
    EngineReport,
    decode_report,
    encode,
)
from libs.model.pictures import TRIAL_PIXELS, BrokenImage, breaks_on_errors, read_sent_picture
from libs.model.vision import Vision

# Offsets of a priority, of which the lowest is served first. Transferred sequences have none, since another engine
# holds their blocks under a lease.
PROMPTS_AFTER, YIELDS_AFTER = 2, 1
FINISHED = {VllmFinish.STOP: FinishReason.STOP, VllmFinish.LENGTH: FinishReason.LENGTH}
SEED_BITS = 63


class Handover(msgspec.Struct, frozen=True):
    """The content of a KV handle's opaque bytes: vLLM's own parameters and their expiry.

    Without parameters, the blocks are in a store, where they are looked up by their tokens.
    """

    parameters: dict[str, Any]
    expires_unix_ns: int

    @property
    def stored(self) -> bool:
        return not self.parameters

    @property
    def request_id(self) -> str:
        """The id of the prefilled request in the engine that computed it."""
        return str(self.parameters.get("remote_request_id", ""))

    @property
    def engine_id(self) -> str:
        """The id of the KV connector of the engine that computed the prompt."""
        return str(self.parameters.get("remote_engine_id", ""))


def pack_handover(handover: Handover) -> bytes:
    return msgspec.msgpack.encode(handover)


def unpack_handover(opaque: bytes) -> Handover | None:
    """Decode a handle's opaque bytes; None if no vLLM engine wrote them."""
    try:
        return msgspec.msgpack.decode(opaque, type=Handover)
    except msgspec.DecodeError:
        return None


def core_request(
    request: EngineRequest,
    request_id: str,
    kv: Handover | None,
    *,
    max_tokens: int,
    eos_token_ids: frozenset[int],
    handing: ConnectorSession,
    adapters: Mapping[str, Path],
) -> EngineCoreRequest:
    """Return a sequence as EngineCore's request. Raise InvalidRequest for parameters that vLLM refuses."""
    parameters: VllmSamplingParams | None
    if request.pooling is not None:
        parameters = None
    elif request.phase is EnginePhase.PREFILL:
        transfer_params = handing.transfer_params(request_id)
        parameters = VllmSamplingParams(
            temperature=0.0,
            max_tokens=1,
            detokenize=False,
            watermarking=False,
            extra_args={"kv_transfer_params": transfer_params} if transfer_params else None,
        )
    else:
        try:
            parameters = _sampling(request, max_tokens, eos_token_ids, kv)
        except (ValueError, VLLMClientError) as error:
            raise InvalidRequest(" ".join(str(error).split())) from None
    pace: dict[str, Any] = {
        "yields": request.yields, "tpot_target_ns": request.tpot_target_ns, "kind": request.kind,
    }  # fmt: skip
    if len(request.token_ids) == request.prompt_tokens:
        pace["first_token_due_ns"] = request.first_token_due_ns
    if kv is not None and kv.stored:
        pace["stored"] = True
    generated = len(request.token_ids) - request.prompt_tokens
    carried: dict[str, Any] = {PACE_KEY: pace, GENERATED_KEY: generated}
    if kv is not None and handing.connector.way is KvRoute.REPLY:
        carried[LEASE_KEY] = kv.expires_unix_ns
    if parameters is not None:
        parameters.extra_args = (parameters.extra_args or {}) | carried
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=request.token_ids.tolist(),
        mm_features=_features(request.images) or None,
        sampling_params=parameters,
        pooling_params=_pooling(carried) if parameters is None else None,
        arrival_time=time.time(),
        lora_request=_adapter(request.adapter, adapters),
        # The root separates tenants and models. Without a root, the sequence shares nothing.
        cache_salt=request.chain_root.hex() or f"private {request_id}",
        data_parallel_rank=None,
        priority=(0 if kv else PROMPTS_AFTER) + (YIELDS_AFTER if request.yields else 0),
    )


MODALITY: Final = "image"


def _features(images: Iterable[PromptImage]) -> list[MultiModalFeatureSpec]:
    """Return the images in vLLM's terms, without their pixels.

    vLLM hashes the identifier into the keys of blocks and embeddings. Images without pixels need it too, since blocks
    that came from another engine are reused here.
    """
    return [
        MultiModalFeatureSpec(
            data=None,
            modality=MODALITY,
            identifier=image.span.digest.hex(),
            mm_position=PlaceholderRange(offset=image.span.first, length=image.span.tokens),
            mm_hash=image.span.digest.hex(),
        )
        for image in images
    ]


class ImageReader:
    """vLLM's own processor of a model's images. Not thread-safe."""

    def __init__(self, model: Any, vision: Vision) -> None:
        """Create the reader. Raise StartupError if vLLM's processor contradicts the model's files."""
        self._vision = vision
        try:
            self._processor = MULTIMODAL_REGISTRY.create_processor(model)
            self._process(Image.new("RGB", (TRIAL_PIXELS, TRIAL_PIXELS)))
        except BrokenImage as error:
            raise StartupError(f"images of the model in {model.model} cannot be served: {error}") from error
        except Exception as error:  # transformers raises anything from KeyError to OSError
            raise StartupError(f"cannot use the image processor in {model.model}: {one_line(error, 200)}") from error

    def read(self, message: EngineCoreRequest, images: Iterable[PromptImage]) -> None:
        """Put the pixels of a sequence's images into its request. Raise BrokenImage."""
        for feature, image in zip(message.mm_features, images, strict=True):
            with breaks_on_errors("read"):
                feature.data = self._process(read_sent_picture(image.data, image.span.digest))

    def _process(self, picture: Image.Image) -> Any:
        items = self._processor.info.parse_mm_data({MODALITY: [picture]})
        inputs = ProcessorInputs(prompt=[self._vision.token_id], mm_data_items=items)
        found = self._processor.apply(inputs, TimingContext(enabled=False))
        (place,) = found["mm_placeholders"][MODALITY]
        if place.length != self._vision.image_tokens:
            raise BrokenImage(
                f"vLLM gives an image {place.length} tokens, its processor's files name {self._vision.image_tokens}"
            )
        (item,) = found["mm_kwargs"][MODALITY]
        return item


def _adapter(name: str, adapters: Mapping[str, Path]) -> LoRARequest | None:
    if not name:
        return None
    return LoRARequest(name, list(adapters).index(name) + 1, str(adapters[name]))


def command_request(command: Command, request_id: str) -> EngineCoreRequest:
    return _made_up([0], request_id, {COMMAND_KEY: encode(command)}, pools=False)


def trial_requests(prompts: list[list[int]], name: str, *, pools: bool) -> list[EngineCoreRequest]:
    """Return the requests of a measurement with these prompts, for an engine that generates or `pools`."""
    return [
        _made_up(token_ids, f"{name}-{number}", {TRIAL_KEY: len(prompts)}, pools=pools)
        for number, token_ids in enumerate(prompts)
    ]


def _pooling(extra: dict[str, Any]) -> PoolingParams:
    # vLLM's server replaces None here by values of its configuration. EngineCore does not.
    return PoolingParams(task="embed", use_activation=False, skip_reading_prefix_cache=False, extra_kwargs=extra)


def _made_up(token_ids: list[int], request_id: str, extra: dict[str, Any], *, pools: bool) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=token_ids,
        mm_features=None,
        sampling_params=None
        if pools
        else VllmSamplingParams(temperature=0.0, max_tokens=1, detokenize=False, watermarking=False, extra_args=extra),
        pooling_params=_pooling(extra) if pools else None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=f"private {request_id}",
        data_parallel_rank=None,
    )


def report_of(outputs: Any) -> EngineReport | None:
    """Return the scheduler's report in a message; None if it has none."""
    stats = outputs.scheduler_stats
    carried = stats.kv_connector_stats if stats is not None else None
    return decode_report(carried[REPORT_KEY]) if carried else None


def logprobs_of(output: Any) -> tuple[Logprob, ...]:
    """Return the logprobs of an output's new tokens; empty if they were not requested."""
    lists = output.new_logprobs
    if lists is None:
        return ()
    rows: Iterable[Any] = zip(lists.logprob_token_ids.tolist(), lists.logprobs.tolist(), strict=True)
    # The first column is the sampled token's, whatever its rank.
    return tuple(Logprob(values[0], tuple(zip(ids[1:], values[1:], strict=True))) for ids, values in rows)


def vector_of(output: Any) -> bytes:
    """Return an output's pooled vector as little-endian float32; empty if it has none."""
    return b"" if output.pooling_output is None else output.pooling_output.float().numpy().astype("<f4").tobytes()


def seed_of(seed: int, generated: int) -> int:
    """Return `seed` for a whole sequence, or a seed derived from both arguments if tokens were generated elsewhere."""
    if not generated:
        return seed & (1 << SEED_BITS) - 1
    digest = blake2b(f"{seed} {generated}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - SEED_BITS)


def _sampling(
    request: EngineRequest, max_tokens: int, eos_token_ids: frozenset[int], kv: Handover | None
) -> VllmSamplingParams:
    wanted: Sampling = request.sampling
    stops = wanted.stop_token_ids if wanted.ignore_eos else wanted.stop_token_ids | eos_token_ids
    generated = len(request.token_ids) - request.prompt_tokens
    return VllmSamplingParams(
        temperature=wanted.temperature,
        top_p=wanted.top_p,
        top_k=wanted.top_k,
        min_p=wanted.min_p,
        seed=seed_of(wanted.seed, generated),
        presence_penalty=wanted.presence_penalty,
        frequency_penalty=wanted.frequency_penalty,
        repetition_penalty=wanted.repetition_penalty,
        logit_bias=dict(wanted.logit_bias) or None,
        logprobs=wanted.top_logprobs if wanted.logprobs else None,
        stop_token_ids=sorted(stops),
        max_tokens=max_tokens,
        min_tokens=min(max(wanted.min_tokens - generated, 0), max_tokens),
        structured_outputs=_guided_by(wanted.guide) if wanted.guide else None,
        detokenize=False,
        watermarking=False,
        extra_args={"kv_transfer_params": dict(kv.parameters)} if kv and not kv.stored else None,
    )


def _guided_by(guide: str) -> StructuredOutputsParams:
    parameters = StructuredOutputsParams(grammar=guide)
    # vLLM's server names the backend, and 0.33 refuses a request without a name. `GuideBackend` replaces that backend.
    parameters._backend = "guidance"
    return parameters
