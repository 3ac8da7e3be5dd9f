"""Settings of a gateway."""

import json
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, Field, SecretStr, field_validator, model_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from libs.contracts.ranges import MOST_JOB_LINES
from libs.model.info import BUILTIN_SIM, SIM_NAME
from libs.policy.gateway.binding import PolicyName
from libs.policy.gateway.view import MAX_SILENT_MS, SILENT_MS
from libs.runtime.http.settings import HttpSettings
from libs.runtime.settings import MemberName, own_name
from services.gateway.images.files import MAX_TOTAL_BYTES
from services.gateway.images.hosts import ImageHosts
from services.gateway.request.schema import MAX_CHOICES

ReasoningName = Literal["think", "mistral", "seed", "harmony", "none"]
ToolFormatName = Literal[
    "hermes", "llama3-json", "mistral", "deepseek", "kimi-k2", "qwen3-coder", "glm", "minimax-m2", "seed-oss", "none"
]
"""The names of the formats in services/gateway/answers/families.py."""


class ClassTargets(BaseModel):
    """The tightest targets of a class."""

    ttft_ms: float = Field(0.0, ge=0)
    tpot_ms: float = Field(0.0, ge=0)


def _from_json(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) else value


class GatewaySettings(HttpSettings):
    """The settings of a gateway, read from the environment as FULCRUM_GATEWAY_<FIELD>."""

    model_config = SettingsConfigDict(env_prefix="FULCRUM_GATEWAY_")
    tls_role: ClassVar[str] = "gateway"

    id: MemberName = Field(default_factory=lambda: own_name("gateway"))
    """Id of this gateway, unique in the cluster."""
    port: int = Field(8000, ge=0, le=65535)
    """Port of the REST API; 0 picks one."""
    models: Annotated[dict[str, str], NoDecode, BeforeValidator(_from_json)] = Field(
        default_factory=lambda: {SIM_NAME: BUILTIN_SIM}
    )
    """JSON object of served name -> folder in Hugging Face's layout, or builtin:sim. Empty: only models of the
    catalogue.
    """
    adapters: Annotated[dict[str, str], NoDecode, BeforeValidator(_from_json)] = Field(default_factory=dict)
    """JSON object of LoRA adapters: the name that requests use -> the served name of the base model. The model's
    workers must have them too (FULCRUM_WORKER_ADAPTERS).
    """
    model_catalogue: bool = False
    """Also serve the models of the cluster's catalogue, which are loaded on request."""
    max_model_wait_ms: int = Field(60_000, ge=1)
    """Maximum time that a request waits for such a model. If loading is expected to take longer, the request is refused
    with Retry-After.
    """

    reasoning_formats: Annotated[dict[str, ReasoningName], NoDecode, BeforeValidator(_from_json)] = Field(
        default_factory=dict
    )
    """JSON object of served name (or * for all others) -> the format of the model's reasoning, if its chat template
    does not show it: think, mistral, seed, harmony, or none to leave answers as they are.
    """
    tool_formats: Annotated[dict[str, ToolFormatName], NoDecode, BeforeValidator(_from_json)] = Field(
        default_factory=dict
    )
    """JSON object of served name (or *) -> the format of the model's tool calls: hermes, llama3-json, mistral,
    deepseek, kimi-k2, qwen3-coder, glm, minimax-m2, seed-oss, or none.
    """
    chat_templates: Annotated[dict[str, str], NoDecode, BeforeValidator(_from_json)] = Field(default_factory=dict)
    """JSON object of served name (or *) -> a file with a Jinja chat template to use instead of the model's own."""
    tools_as_text: bool = True
    """Pass tools, earlier calls and results as text (docs/api.md) if a model's chat template does not support them. If
    false, such requests are refused with 400.
    """

    cors_origins: str = Field("", pattern=r"^(\*|[a-z]+://[^\s,/*]+(\s*,\s*[a-z]+://[^\s,/*]+)*)?$")
    """Origins, separated by commas, whose web pages may read answers (CORS), such as https://chat.example.com, or * for
    all; cookies are never accepted. Empty: none. On loopback without keys FULCRUM_HTTP_HOSTS has to name them too.
    """

    max_body_bytes: int = Field(6 * 1024 * 1024, ge=1024)
    """Bound on a request's body; larger ones are refused with 413."""
    max_images: int = Field(8, ge=0)
    """Bound on the images of a request; 0 serves none."""
    max_image_bytes: int = Field(4 * 1024 * 1024, ge=1024, le=MAX_TOTAL_BYTES)
    """Bound on the file of one image. Its base64 must also fit in FULCRUM_GATEWAY_MAX_BODY_BYTES."""
    max_image_pixels: int = Field(16 * 1024 * 1024, ge=1)
    """Bound on the width times the height of one image."""
    image_hosts: str = ""
    """Hosts, separated by commas, from which images are fetched. Private addresses have to be listed too, or their
    networks. Empty: none.
    """
    image_fetch_s: float = Field(10.0, gt=0, le=60)
    """Maximum time to fetch an image."""
    image_redirects: int = Field(3, ge=0, le=10)
    """Redirects that a fetch may follow."""
    image_fetches: int = Field(16, ge=1)
    """Images fetched at a time."""
    max_n: int = Field(MAX_CHOICES, ge=1, le=MAX_CHOICES)
    """Bound on a request's `n`."""
    max_choices: int = Field(128, ge=1)
    """Bound on `n` times the number of prompts."""
    max_open: int = Field(4096, ge=1)
    """Requests being read or answered at a time, including those of slow readers; more are refused with 429."""
    max_open_body_bytes: int = Field(256 * 1024 * 1024, ge=1024)
    """Total bytes of the bodies of open requests, at least the largest allowed body; more are refused with 429."""
    client_stall_s: int = Field(30, ge=1)
    """Time after which a client's connection is closed if it reads no byte of its answer or does not respond on the
    network.
    """
    max_waiting: int = Field(1024, ge=1)
    """Choices that may wait for a worker; more are refused with 429."""
    max_wait_ms: int = Field(60_000, ge=1)
    """Maximum time that a choice waits for a worker with room."""
    no_workers_wait_ms: int = Field(10_000, ge=1)
    """Maximum time that a choice waits while the model has no worker at all, so that a restart causes no errors."""
    silent_after_ms: float = Field(SILENT_MS, ge=250)
    """Silence of a connected worker after which its sequences move to other workers. Workers send a frame every 50 ms.
    Raise it if workers share their cores with the computation.
    """
    max_silent_ms: float = Field(MAX_SILENT_MS, ge=250)
    """Silence after which a worker is given up even if no other can take over, or if most workers are silent."""
    max_reroutes: int = Field(8, ge=0)
    """Maximum number of times that a choice moves to another worker after a failure."""
    poison_s: float = Field(600.0, ge=0)
    """Time for which a prompt is refused after two workers died while computing it. With 0 no prompt is refused, but
    the request that took down the second worker still ends.
    """

    routing: PolicyName = "predicted-ttft"
    """Policy that assigns requests to workers; all but the default are baselines."""
    early_decodes: bool = True
    """Submit a short prompt to its decode worker together with its prefill worker, which saves two messages a request.
    The lab always does.
    """
    prefix_wait_ms: float = Field(5.0, ge=0)
    """Maximum time that a request waits for the lookup of workers that have its prefix cached."""
    ttft_deadline_ms: int = Field(5_000, ge=1)
    """TTFT target of requests that name none."""
    tpot_target_ms: float = Field(100.0, gt=0)
    """TPOT target of requests that name none."""
    class_targets: Annotated[dict[str, ClassTargets], NoDecode, BeforeValidator(_from_json)] = Field(
        default_factory=dict
    )
    """JSON object of class (or * for all others) -> {"ttft_ms": N, "tpot_ms": N}: the tightest targets that requests of
    the class get, because requests with nearer deadlines are served sooner. Empty: no bound.
    """
    responses_keep_s: int = Field(86_400, ge=0, le=30 * 86_400)
    """Time for which responses of /v1/responses are stored, at most 1,000 and 64 MiB per tenant; 0 stores none."""
    drain_s: int = Field(5, ge=0)
    """Time that running requests have to finish after SIGTERM."""

    files_folder: str = ""
    """Folder for the files of batch jobs, shared by the gateways of a cluster; empty means a folder per cluster in the
    cache.
    """
    files_s3_bucket: str = ""
    """Existing bucket for these files, instead of the folder; needs `pip install 'fulcrum-serving[s3]'`."""
    files_s3_prefix: str = ""
    """Prefix of the files' keys in the bucket."""
    files_s3_endpoint: str = ""
    """Address of an S3-compatible store other than AWS's own."""
    files_s3_region: str = ""
    """Region of the bucket. If the region or a key is empty, it comes from the usual sources of AWS clients."""
    files_s3_access_key: SecretStr = SecretStr("")
    """Access key for the bucket."""
    files_s3_secret_key: SecretStr = SecretStr("")
    """Secret of the access key."""
    files_max_bytes: int = Field(20 * 1024**3, ge=1024)
    """Bound on the total size of all files."""
    files_max_count: int = Field(10_000, ge=1)
    """Bound on the number of files, including those that unfinished batches will write."""
    tenant_files_max_count: int = Field(2_000, ge=1)
    """Bound on the number of files per tenant, if API keys exist and `fulcrum keys limits --files` sets no other."""
    file_max_bytes: int = Field(512 * 1024**2, ge=1024)
    """Bound on the size of an uploaded file."""
    batch_max_lines: int = Field(1_000_000, ge=1, le=MOST_JOB_LINES)
    """Bound on the number of lines in a batch's file."""
    batch_share: float = Field(0.75, gt=0, le=1)
    """Share of the workers' sequence slots, as this gateway sees them, that batch lines may use."""
    batch_order: Literal["prefix", "arrival"] = "prefix"
    """Order of the lines in a share: prefix runs lines with a common prefix one after the other, arrival keeps the
    file's order.
    """
    batch_topics: str = Field("", pattern=r"^[A-Za-z0-9._*{}, -]*$")
    """Kafka topics that jobs may read and write: names, or patterns with *, separated by commas; empty allows none.
    If API keys exist, a user's jobs may only use topics of patterns with {tenant}, the placeholder for the user's
    tenant. Topics that begin with fulcrum. or __ are never allowed. `fulcrum up` on loopback allows batch.*.
    """
    batch_max_in_flight: int = Field(256, ge=1)
    """Batch lines that this gateway runs at once."""

    @field_validator("image_hosts")
    @classmethod
    def _names_hosts(cls, value: str) -> str:
        ImageHosts.parse(value)
        return value

    @model_validator(mode="after")
    def _has_models(self) -> Self:
        if not self.models and not self.model_catalogue:
            raise ValueError("FULCRUM_GATEWAY_MODELS names no model: name one, or set FULCRUM_GATEWAY_MODEL_CATALOGUE")
        return self
