"""The body of POST /v1/responses, as defined by OpenAI's API. Decoding checks types and ranges."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from services.gateway.request.schema import (
    MAX_TOOLS,
    AtLeastOne,
    Effort,
    FunctionName,
    Label,
    MinP,
    RepetitionPenalty,
    Seed,
    Stop,
    Stops,
    StructuredOutputs,
    Temperature,
    TopK,
    TopLogprobs,
    TopP,
)

MAX_INCLUDED = 8
LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"
ResponseId = Annotated[str, Meta(max_length=64)]


class ResponseTool(Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseToolChoice(Struct, forbid_unknown_fields=True):
    """The one tool that the model has to call."""

    type: Literal["function"]
    name: FunctionName


class TextFormat(Struct, forbid_unknown_fields=True):
    """The required form of the text: any text, any JSON object, or JSON of a named schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: FunctionName | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class TextOptions(Struct, forbid_unknown_fields=True):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningOptions(Struct, forbid_unknown_fields=True):
    """The options for reasoning. `auto` is accepted, although no summary is ever written."""

    effort: Effort | None = None
    summary: Literal["auto"] | None = None


class ResponseStreamOptions(Struct, forbid_unknown_fields=True):
    """The options of a stream. Padding against observers is accepted but never sent."""

    include_obfuscation: bool | None = None


class ResponseRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/responses.

    `top_k`, `min_p`, `repetition_penalty`, `seed`, `stop`, `ignore_eos`, `structured_outputs` and
    `chat_template_kwargs` are extensions. `user`, `safety_identifier` and `prompt_cache_key` have no effect.
    """

    model: str
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: ResponseId | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    include: Annotated[list[str], Meta(max_length=MAX_INCLUDED)] | None = None
    max_output_tokens: AtLeastOne | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None
    seed: Seed | None = None
    stop: Stop | Stops | None = None
    ignore_eos: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    top_logprobs: TopLogprobs | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: Annotated[list[ResponseTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    metadata: dict[str, Label] | None = None
    user: Label | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None


class InputText(Struct, forbid_unknown_fields=True):
    """A piece of a message, a call's output or reasoning. Clients may send back all fields of an answer's piece."""

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class InputMessage(Struct, forbid_unknown_fields=True):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[InputText]
    type: Literal["message"] = "message"
    id: Label | None = None
    status: str | None = None
    phase: str | None = None


class InputReasoning(Struct, forbid_unknown_fields=True):
    type: Literal["reasoning"]
    id: Label | None = None
    summary: list[InputText] | None = None
    content: list[InputText] | None = None
    status: str | None = None


class InputCall(Struct, forbid_unknown_fields=True):
    type: Literal["function_call"]
    call_id: Label
    name: FunctionName
    arguments: str
    id: Label | None = None
    status: str | None = None


class InputCallOutput(Struct, forbid_unknown_fields=True):
    type: Literal["function_call_output"]
    call_id: Label
    output: str | list[InputText]
    id: Label | None = None
    status: str | None = None
