"""Tests of reasoning and tool calls through the REST API."""

import json
from dataclasses import replace

import httpx
import openai
import pytest

from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.model.chat import ChatTemplate
from libs.model.info import load_model_info, sim_tokenizer
from libs.model.tokenizer import Tokenizer
from libs.testing.engines.harmony import sim_with_markers
from libs.testing.workers.scripted import Plan, ScriptedWorker
from services.gateway.answers.families import FormatNames
from services.gateway.request.prompt import Catalog, ServedModel, load_catalog
from tests.e2e.gateway.gateway_rig import CHAT, TOOL


def harmony_catalog(_models: object) -> Catalog:
    """The built-in model, with the markers of gpt-oss's format."""
    tokenizer = sim_with_markers()
    ends = frozenset(tokenizer.encode("<|return|><|call|>", add_special_tokens=False))
    info = replace(load_model_info("builtin:sim"), vocab_size=300, eos_token_ids=ends)
    return Catalog([ServedModel(info, tokenizer)])


REASONED = "<|channel|>analysis<|message|>Think STOP.<|end|><|start|>assistant<|channel|>final<|message|>"
OF_HARMONY = pytest.mark.parametrize("url", [harmony_catalog], indirect=True)


def spoken(text: str) -> list[int]:
    return sim_with_markers().encode(text, add_special_tokens=False)


@OF_HARMONY
@pytest.mark.parametrize("end", ["<|return|>", ""])
async def test_reasoning_is_separate_from_content_and_counts_as_output(
    http: httpx.AsyncClient, worker: ScriptedWorker, end: str
) -> None:
    worker.script = spoken(f"{REASONED}Paris.{end}")
    tokens = len(worker.script)
    body = {**CHAT, "max_tokens": tokens, "stop": ["STOP", "final"]}
    answer = (await http.post("/v1/chat/completions", json=body)).json()
    (choice,) = answer["choices"]
    assert (choice["message"]["content"], answer["usage"]["completion_tokens"]) == ("Paris.", tokens)
    streamed = await http.post(
        "/v1/chat/completions", json={**body, "stream": True, "stream_options": {"include_usage": True}}
    )
    *events, _, _ = streamed.text.split("\n\n")
    *chunks, closing = [json.loads(event.removeprefix("data: ")) for event in events]
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert (text, closing["usage"]["completion_tokens"]) == ("Paris.", tokens)
    assert chunks[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]
    thoughts = "".join(chunk["choices"][0]["delta"].get("reasoning_content") or "" for chunk in chunks)
    assert thoughts == choice["message"]["reasoning_content"] == choice["message"]["reasoning"] == "Think STOP."
    for usage in (answer["usage"], closing["usage"]):
        assert usage["completion_tokens_details"] == {"reasoning_tokens": len("Think STOP.") + 1}
    hidden = await http.post("/v1/chat/completions", json={**body, "include_reasoning": False})
    assert hidden.json()["usage"] == answer["usage"] and "reasoning" not in hidden.json()["choices"][0]["message"]
    streamed = await http.post("/v1/chat/completions", json={**body, "include_reasoning": False, "stream": True})
    assert "Paris" in streamed.text and "reasoning" not in streamed.text


@OF_HARMONY
async def test_a_harmony_answer_becomes_a_tool_call(http: httpx.AsyncClient, worker: ScriptedWorker) -> None:
    worker.script = spoken('<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>')
    worker.stops = True
    body = {**CHAT, "max_tokens": len(worker.script), "tools": [TOOL]}
    (choice,) = (await http.post("/v1/chat/completions", json=body)).json()["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    assert (call["type"], call["function"]) == ("function", {"name": "f", "arguments": '{"a": 1}'})


HERMES = '<think>\nHm.\n</think>\n\nI call. <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>' + (
    '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
)


def thinking_catalog(models: dict[str, str]) -> Catalog:
    """The built-in model with Hermes's tool format and Qwen3's reasoning format."""
    return load_catalog(models, FormatNames(reasoning={"*": "think"}))


@pytest.mark.parametrize("url", [thinking_catalog], indirect=True)
@pytest.mark.parametrize("parallel", [True, False])
async def test_openais_client_streams_reasoning_content_and_calls(
    url: str, worker: ScriptedWorker, parallel: bool
) -> None:
    worker.script, worker.stops = [*HERMES.encode(), 257], True
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x")
    text, thoughts, finish = "", "", None
    calls: dict[int, list[str]] = {}
    stream = await client.chat.completions.create(
        model="sim", messages=[{"role": "user", "content": "hi"}], tools=[TOOL], stream=True,  # type: ignore[list-item]
        parallel_tool_calls=parallel,
    )  # fmt: skip
    async for chunk in stream:
        (choice,) = chunk.choices
        text += choice.delta.content or ""
        thoughts += getattr(choice.delta, "reasoning_content", None) or ""
        for call in choice.delta.tool_calls or ():
            assert call.function is not None
            if call.id:
                calls[call.index] = [call.id, call.function.name or "", ""]
            calls[call.index][2] += call.function.arguments or ""
        finish = choice.finish_reason or finish
    assert (thoughts, text, finish) == ("Hm.", "I call.", "tool_calls")
    assert [call[1:] for call in calls.values()] == [["f", '{"a": 1}'], ["f", "{}"]][: 1 + parallel]
    assert len({call[0] for call in calls.values()}) == len(calls)


def kimi_catalog(models: dict[str, str]) -> Catalog:
    """The built-in model with Kimi K2's tool format."""
    return load_catalog(models, FormatNames(tools={"*": "kimi-k2"}))


@pytest.mark.parametrize("url", [kimi_catalog], indirect=True)
async def test_kimi_calls_have_kimis_own_ids_numbered_on_from_turn_to_turn(
    http: httpx.AsyncClient, worker: ScriptedWorker
) -> None:
    opens, begin, argue, end, closes = (
        "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
        "<|tool_calls_section_end|>",
    )  # fmt: skip
    call = f"{begin}functions.f:0{argue}{{}}{end}"
    worker.script, worker.stops = [*f"{opens}{call}{call}{closes}".encode(), 257], True
    body = {**CHAT, "max_tokens": len(worker.script), "tools": [TOOL]}
    (choice,) = (await http.post("/v1/chat/completions", json=body)).json()["choices"]
    calls = choice["message"]["tool_calls"]
    assert [call["id"] for call in calls] == ["functions.f:0", "functions.f:1"]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "12"} for call in calls]
    body["messages"] = [*CHAT["messages"], {"role": "assistant", "tool_calls": calls}, *results]
    (choice,) = (await http.post("/v1/chat/completions", json=body)).json()["choices"]
    assert [call["id"] for call in choice["message"]["tool_calls"]] == ["functions.f:2", "functions.f:3"]


def toolless_catalog(_models: object) -> Catalog:
    """The built-in model, with a chat template without tools."""
    template = ChatTemplate("{% for message in messages %}{{ message['content'] }}{% endfor %}", {})
    return Catalog([ServedModel(load_model_info("builtin:sim"), Tokenizer(sim_tokenizer(), template))])


@pytest.mark.parametrize("url", [toolless_catalog], indirect=True)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_chosen_by_the_model_is_parsed_if_tools_are_given_as_text(
    http: httpx.AsyncClient, worker: ScriptedWorker, stream: bool
) -> None:
    worker.script = list(b'I ask.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>')
    worker.stops = True
    body = {**CHAT, "max_tokens": len(worker.script), "tools": [TOOL], "stream": stream}
    answer = await http.post("/v1/chat/completions", json=body)
    assert answer.text.count('"x_fulcrum":{"tools_as_text":"hermes"}') == 1
    if stream:
        *events, _, _ = answer.text.split("\n\n")
        deltas = [json.loads(event.removeprefix("data: "))["choices"][0]["delta"] for event in events]
        calls = [call["function"] for delta in deltas for call in delta.get("tool_calls") or ()]
        assert "".join(delta.get("content") or "" for delta in deltas) == "I ask."
        assert "".join(call.get("name", "") for call in calls) == "f"
        assert "".join(call.get("arguments", "") for call in calls) == '{"a": 1}'
        return
    (choice,) = answer.json()["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", "I ask.")
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'}


@pytest.mark.parametrize("tokens", [3, 14, 22])
async def test_a_required_call_that_is_cut_off_before_its_name_is_no_content(
    http: httpx.AsyncClient, worker: ScriptedWorker, tokens: int
) -> None:
    worker.script = list(b'<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>')
    body = {**CHAT, "max_tokens": tokens, "tools": [TOOL], "tool_choice": "required"}
    (choice,) = (await http.post("/v1/chat/completions", json=body)).json()["choices"]
    assert (choice["message"]["content"] or "", choice["finish_reason"]) == ("", "length")
    assert "tool_calls" not in choice["message"]


async def test_a_call_stays_text_if_the_request_has_no_tools(http: httpx.AsyncClient, worker: ScriptedWorker) -> None:
    worker.script = list(HERMES.encode())
    body = {**CHAT, "max_tokens": len(worker.script), "tools": [TOOL], "tool_choice": "none"}
    answer = (await http.post("/v1/chat/completions", json=body)).json()
    assert answer["choices"][0]["message"] == {"content": HERMES, "role": "assistant", "refusal": None}
    assert "completion_tokens_details" not in answer["usage"]


@OF_HARMONY
@pytest.mark.parametrize(
    ("script", "content"),
    [
        ("Paris.", "Paris."),
        ("<|channel|>analysis<|message|>Thinking and thinking", ""),
        ('<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>', ""),
    ],
    ids=["no channel", "ends in its reasoning", "a tool call"],
)
async def test_other_harmony_answers_become_content(
    http: httpx.AsyncClient, worker: ScriptedWorker, script: str, content: str
) -> None:
    worker.script = spoken(script)
    body = {**CHAT, "max_tokens": len(worker.script)}
    answer = (await http.post("/v1/chat/completions", json=body)).json()
    assert answer["choices"][0]["message"]["content"] == content
    assert answer["usage"]["completion_tokens"] == len(worker.script)


@OF_HARMONY
async def test_a_text_completion_is_returned_as_its_model_wrote_it(
    http: httpx.AsyncClient, worker: ScriptedWorker
) -> None:
    worker.script = spoken(f"{REASONED}Paris.<|return|>")
    body = {"model": "sim", "prompt": "x", "max_tokens": len(worker.script)}
    answer = (await http.post("/v1/completions", json=body)).json()
    assert answer["choices"][0]["text"] == "analysisThink STOP.assistantfinalParis."


async def contents(http: httpx.AsyncClient, path: str, body: dict[str, object]) -> set[tuple[str, str, int]]:
    """Return (content, finish reason, tokens) of two choices, whole and streamed."""
    whole = (await http.post(path, json={**body, "n": 2})).json()
    found = {
        (choice["message"]["content"] if "message" in choice else choice["text"], choice["finish_reason"])
        for choice in whole["choices"]
    }
    usage = {"stream": True, "n": 2, "stream_options": {"include_usage": True}}
    streamed = await http.post(path, json={**body, **usage})
    *events, _, _ = streamed.text.split("\n\n")
    *chunks, closing = [json.loads(event.removeprefix("data: ")) for event in events]
    for index in range(2):
        pieces = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        texts = [piece["delta"].get("content") or "" if "delta" in piece else piece["text"] for piece in pieces]
        found.add(("".join(texts), pieces[-1]["finish_reason"]))
    tokens = {answer["usage"]["completion_tokens"] // 2 for answer in (whole, closing)}
    return {(text, finish, count) for text, finish in found for count in tokens}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(
    ("requested", "answer"),
    [
        ((2, ["c"]), ("ab", "stop", 3)),
        ((3, ["c"]), ("abcdefghij", "length", 10)),
        ((3, ["cd"]), ("ab", "stop", 4)),
        ((6, ["c", "de", "h"]), ("abcdefg", "stop", 8)),
        ((10, ["j"]), ("abcdefghij", "length", 10)),
    ],
)
async def test_no_stop_string_ends_within_min_tokens(
    http: httpx.AsyncClient,
    worker: ScriptedWorker,
    path: str,
    requested: tuple[int, list[str]],
    answer: tuple[str, str, int],
) -> None:
    min_tokens, stops = requested
    prompt = {"messages": CHAT["messages"]} if "chat" in path else {"prompt": "hi"}
    body = {"model": "sim", **prompt, "max_tokens": 10, "min_tokens": min_tokens, "stop": stops}
    assert await contents(http, path, body) == {answer}
    lost = Plan(tokens=2, fail=pb.FAILURE_CODE_KV_LOST)
    worker.plans.extend([lost, lost, lost, lost])
    assert await contents(http, path, body) == {answer}, "tokens are counted over every attempt"
    assert not worker.plans


THOUGHT = "<think>no\nmatter</think>\n\n"


@pytest.mark.parametrize("url", [thinking_catalog], indirect=True)
@pytest.mark.parametrize(
    ("early", "late", "content"),
    [
        (THOUGHT[:9], THOUGHT[9:] + "ab\ncd", "ab"),
        (THOUGHT + "ab", "\ncd\n", "ab"),
        (THOUGHT + "ab\n", "cd\nef", "ab\ncd"),
        (THOUGHT + "ab \n", "<tool\nef", "ab \n<tool"),
        ("\n", "\ncd", "\n"),
    ],
    ids=repr,
)
async def test_possible_white_space_around_a_tag_belongs_to_its_own_tokens(
    http: httpx.AsyncClient, worker: ScriptedWorker, early: str, late: str, content: str
) -> None:
    """Such text is held back: it becomes content only with later tokens, which are past `min_tokens`."""
    worker.script = list(f"{early}{late}".encode())
    body = {**CHAT, "tools": [TOOL], "stop": "\n", "min_tokens": len(early), "max_tokens": len(worker.script)}
    found = await contents(http, "/v1/chat/completions", body)
    assert {text for text, _, _ in found} == {content}
