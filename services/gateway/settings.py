"""Settings of a gateway."""

import json
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, Field, SecretStr, model_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from libs.contracts.ranges import MOST_JOB_LINES
from libs.model.info import BUILTIN_SIM, SIM_NAME
from libs.policy.gateway.binding import PolicyName
from libs.policy.gateway.view import MAX_SILENT_MS, SILENT_MS
from libs.runtime.http.settings import HttpSettings
from libs.runtime.settings import MemberName, own_name
from services.gateway.request.schema import MAX_CHOICES

ReasoningName = Literal["think", "mistral", "seed", "harmony", "none"]
ToolFormatName = Literal[
    "hermes", "llama3-json", "mistral", "deepseek", "kimi-k2", "qwen3-coder", "glm", "minimax-m2", "seed-oss", "none"
]
"""Of the tables in services/gateway/answers/families.py."""


class ClassTargets(BaseModel):
    """The tightest targets of a class."""

    ttft_ms: float = Field(0.0, ge=0)
    tpot_ms: float = Field(0.0, ge=0)


def _from_json(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) else value


class GatewaySettings(HttpSettings):
    """What a gateway reads from the environment as FULCRUM_GATEWAY_<FIELD>."""

    model_config = SettingsConfigDict(env_prefix="FULCRUM_GATEWAY_")
    tls_role: ClassVar[str] = "gateway"

    id: MemberName = Field(default_factory=lambda: own_name("gateway"))
    """Unique in the cluster."""
    port: int = Field(8000, ge=0, le=65535)
    """Port of the REST API; 0 picks one."""
    models: Annotated[dict[str, str], NoDecode, BeforeValidator(_from_json)] = Field(
        default_factory=lambda: {SIM_NAME: BUILTIN_SIM}
    )
    """JSON object of served name -> folder in Hugging Face's layout, or builtin:sim. Empty: the catalogue's alone."""
    adapters: Annotated[dict[str, str], NoDecode, BeforeValidator(_from_json)] = Field(default_factory=dict)
    """JSON object of LoRA adapters by the name that requests use -> served name of the model that they belong to, whose
    workers have to know them (FULCRUM_WORKER_ADAPTERS)."""
    model_catalogue: bool = False
    """Whether models of the cluster's catalogue are served too, which are loaded when they are asked for."""
    max_model_wait_ms: int = Field(60_000, ge=1)
    """How long a request waits for such a model; where that is not expected to suffice it is refused, with
    Retry-After."""

    reasoning_formats: Annotated[dict[str, ReasoningName], NoDecode, BeforeValidator(_from_json)] = Field(
        default_factory=dict
    )
    """JSON object of served name (or * for all others) -> how the model writes its reasoning, where its chat template
    does not show it: think, mistral, seed, harmony, or none to leave answers as they are."""
    tool_formats: Annotated[dict[str, ToolFormatName], NoDecode, BeforeValidator(_from_json)] = Field(
        default_factory=dict
    )
    """Likewise, how it calls tools: hermes, llama3-json, mistral, deepseek, kimi-k2, qwen3-coder, glm, minimax-m2,
    seed-oss, or none."""
    chat_templates: Annotated[dict[str, str], NoDecode, BeforeValidator(_from_json)] = Field(default_factory=dict)
    """Likewise, a file with a Jinja chat template to use in place of the model's own."""
    tools_as_text: bool = True
    """Whether tools, earlier calls and results are given as text (docs/api.md) where a model's chat template takes
    none; otherwise such requests are refused with 400."""

    cors_origins: str = Field("", pattern=r"^(\*|[a-z]+://[^\s,/*]+(\s*,\s*[a-z]+://[^\s,/*]+)*)?$")
    """Origins, separated by commas, whose web pages may read answers (CORS), such as https://chat.example.com, or * for
    all; cookies are never taken. Empty: none. On loopback without keys FULCRUM_HTTP_HOSTS has to name them too."""

    max_body_bytes: int = Field(2 * 1024 * 1024, ge=1024)
    """Bound of a request's body; larger ones are refused with 413."""
    max_n: int = Field(MAX_CHOICES, ge=1, le=MAX_CHOICES)
    """Bound of a request's `n`."""
    max_choices: int = Field(128, ge=1)
    """Bound of `n` times the number of prompts."""
    max_open: int = Field(4096, ge=1)
    """Requests that are being read or answered, those of clients that read slowly included; more are refused with
    429."""
    max_open_body_bytes: int = Field(256 * 1024 * 1024, ge=1024)
    """Bytes of their bodies together, at least one of the largest; more are refused with 429."""
    client_stall_s: int = Field(30, ge=1)
    """How long a client may take no byte of its answer, or not answer the network at all, before its connection is
    ended."""
    max_waiting: int = Field(1024, ge=1)
    """Choices that may wait for a worker; more are refused with 429."""
    max_wait_ms: int = Field(60_000, ge=1)
    """How long a choice may wait for a worker with room."""
    no_workers_wait_ms: int = Field(10_000, ge=1)
    """How long a choice may wait while the model has no worker at all, so that a restart is not an error."""
    silent_after_ms: float = Field(SILENT_MS, ge=250)
    """How long a connected worker may say nothing, which speaks every 50 ms, before what runs there goes elsewhere.
    More where workers share their cores with what they compute."""
    max_silent_ms: float = Field(MAX_SILENT_MS, ge=250)
    """How long it may say nothing where no other could take over, or where most are quiet: then it is left anyway."""
    max_reroutes: int = Field(8, ge=0)
    """How often one choice may be sent elsewhere because a worker failed it."""
    poison_s: float = Field(600.0, ge=0)
    """How long a prompt that two workers have died of is refused; 0 refuses none, but still ends the request that was
    the second's."""

    routing: PolicyName = "predicted-ttft"
    """How requests are given to workers; the others are baselines."""
    prefix_wait_ms: float = Field(5.0, ge=0)
    """How long a request waits at most to hear which workers have its prefix cached."""
    ttft_deadline_ms: int = Field(5_000, ge=1)
    """TTFT target of requests that name none."""
    tpot_target_ms: float = Field(100.0, gt=0)
    """TPOT target of requests that name none."""
    class_targets: Annotated[dict[str, ClassTargets], NoDecode, BeforeValidator(_from_json)] = Field(
        default_factory=dict
    )
    """JSON object of class (or * for all others) -> {"ttft_ms": N, "tpot_ms": N}: requests of the class that ask for
    less get these, since who names a nearer deadline is served sooner. Empty: what they ask for."""
    responses_keep_s: int = Field(86_400, ge=0, le=30 * 86_400)
    """How long responses of /v1/responses are kept, 1,000 of each tenant and 64 MiB at most; 0 keeps none."""
    drain_s: int = Field(5, ge=0)
    """How long running requests may go on after SIGTERM."""

    files_folder: str = ""
    """Where files of batch jobs are kept, shared by the gateways of a cluster; empty means in the cache folder, by
    cluster."""
    files_s3_bucket: str = ""
    """Bucket for them in place of the folder, which must be there; needs `pip install 'fulcrum[s3]'`."""
    files_s3_prefix: str = ""
    """Prefix of the files' keys in the bucket."""
    files_s3_endpoint: str = ""
    """Address of an S3-compatible store other than AWS's own."""
    files_s3_region: str = ""
    """Its region; like the keys, where it is empty it comes from where AWS's clients take it."""
    files_s3_access_key: SecretStr = SecretStr("")
    """Access key for the bucket."""
    files_s3_secret_key: SecretStr = SecretStr("")
    """Secret of the access key."""
    files_max_bytes: int = Field(20 * 1024**3, ge=1024)
    """Bound of all files together."""
    files_max_count: int = Field(10_000, ge=1)
    """Bound of the number of files, including those that unfinished batches will write."""
    tenant_files_max_count: int = Field(2_000, ge=1)
    """How many of these one tenant may have, where keys tell tenants apart and `fulcrum keys limits --files` says
    nothing else."""
    file_max_bytes: int = Field(512 * 1024**2, ge=1024)
    """Bound of one file that is uploaded."""
    batch_max_lines: int = Field(1_000_000, ge=1, le=MOST_JOB_LINES)
    """Lines that a batch's file may have."""
    batch_share: float = Field(0.75, gt=0, le=1)
    """Share of the workers' sequence slots, as this gateway sees them, that batch lines may use."""
    batch_order: Literal["prefix", "arrival"] = "prefix"
    """Lines of a share whose prompts begin alike are asked one after the other, or all in the file's order."""
    batch_topics: str = Field("", pattern=r"^[A-Za-z0-9._*{}, -]*$")
    """Kafka topics that jobs may read and write: names, or patterns with *, separated by commas; empty allows none.
    Where keys exist a user's jobs may name those of patterns with {tenant}, which stands for its tenant.
    Never those that begin with fulcrum. or __, whatever is said here. `fulcrum up` on loopback allows batch.*."""
    batch_max_in_flight: int = Field(256, ge=1)
    """Batch lines that this gateway runs at once."""

    @model_validator(mode="after")
    def _has_models(self) -> Self:
        if not self.models and not self.model_catalogue:
            raise ValueError("FULCRUM_GATEWAY_MODELS names no model: name one, or set FULCRUM_GATEWAY_MODEL_CATALOGUE")
        return self
