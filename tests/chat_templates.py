# ruff: noqa: E501 (a template's white space is part of it)
"""Chat templates of our own that use what published ones use, family by family, for comparison with transformers.

No published text is copied: each holds the constructs that made its family's template hard to render elsewhere.
"""

from dataclasses import dataclass
from typing import Literal

from tests.chat_templates_llama_qwen import (
    LLAMA_2,
    LLAMA_3_1,
    LLAMA_4,
    QWEN_2_5,
    QWEN_3,
    QWEN_3_CODER,
    QWEN_VL,
)


@dataclass(frozen=True)
class Family:
    """A template, and the form of messages that it needs."""

    source: str
    contents: Literal["text", "parts", "only parts"] = "text"
    """The kinds of contents that it accepts: text, lists of parts beside texts, or parts alone."""
    null: Literal["left out", "none"] = "left out"
    """The value that it gets in place of null content."""
    arguments: Literal["object", "text"] = "object"
    """The form in which it gets the arguments of calls."""
    tool_use: str | None = None
    """Another template for chats with tools."""
    refuses: bool = False
    """True if it uses what templates may not have."""


CHATML = """{% for message in messages %}
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}
{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

MISTRAL_3 = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set loop_messages = messages %}{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- for message in loop_messages | rejectattr("role", "equalto", "tool") | rejectattr("tool_calls", "defined") | list %}
    {%- if (message["role"] == "user") != (loop.index0 % 2 == 0) %}
        {{- raise_exception("After the system message, roles must alternate") }}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS][" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}{{- '"' + key + '": "' + val + '"' }}
                    {%- else %}{{- '"' + key + '": ' + val|tojson }}{%- endif %}
                    {%- if not loop.last %}{{- ", " }}{%- endif %}
                {%- endfor %}
                {{- "}}" }}
            {%- endfor %}
            {{- "][/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}{{- "[INST]" + system_message + "\n\n" + message["content"] + "[/INST]" }}
        {%- else %}{{- "[INST]" + message["content"] + "[/INST]" }}{%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS][" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function|tojson %}{{- out[:-1] }}
            {%- if not tool_call.id is defined or tool_call.id|length != 9 %}
                {{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
            {%- endif %}
            {{- ', "id": "' + tool_call.id + '"}' }}
        {%- endfor %}
        {{- "]" + eos_token }}
    {%- elif message["role"] == "assistant" %}
        {{- message["content"] + eos_token }}
    {%- elif message["role"] == "tool_results" or message["role"] == "tool" %}
        {%- if message.content is defined and message.content.content is defined %}{%- set content = message.content.content %}
        {%- else %}{%- set content = message.content %}{%- endif %}
        {{- '[TOOL_RESULTS]{"content": ' + content|string + ", " }}{{- '"call_id": "' + message.tool_call_id + '"}' }}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported") }}
    {%- endif %}
{%- endfor %}"""

MISTRAL_SMALL = """{%- set today = strftime_now("%Y-%m-%d") %}
{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] == 'system' %}
        {%- if message['content'] is string %}{{- '[SYSTEM_PROMPT]' + message['content'] + today + '[/SYSTEM_PROMPT]' }}
        {%- else %}{{- '[SYSTEM_PROMPT]' + message['content'][0]['text'] + today + '[/SYSTEM_PROMPT]' }}{%- endif %}
    {%- elif message['role'] == 'user' %}
        {%- if message['content'] is string %}{{- '[INST]' + message['content'] + '[/INST]' }}
        {%- else %}
            {{- '[INST]' }}
            {%- for block in message['content'] %}
                {%- if block['type'] == 'text' %}{{- block['text'] }}
                {%- elif block['type'] in ['image', 'image_url'] %}{{- '[IMG]' }}
                {%- else %}{{- raise_exception('Only text and image blocks are supported') }}{%- endif %}
            {%- endfor %}
            {{- '[/INST]' }}
        {%- endif %}
    {%- elif message['role'] == 'assistant' %}
        {%- if message['content'] is defined and message['content'] != '' %}{{- message['content'] }}{%- endif %}
        {%- for call in message['tool_calls'] or [] %}{{- '[ARGS]' + call.function.arguments | tojson }}{%- endfor %}
        {{- eos_token }}
    {%- else %}{{- raise_exception('Only user, system and assistant') }}{%- endif %}
{%- endfor %}"""

DEEPSEEK_R1 = """{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}
{% set ns = namespace(is_first=false, is_tool=false, is_output_first=true, system_prompt='') %}
{%- for message in messages %}{%- if message['role'] == 'system' %}{% set ns.system_prompt = message['content'] %}{%- endif %}{%- endfor %}
{{bos_token}}{{ns.system_prompt}}
{%- for message in messages %}
{%- if message['role'] == 'user' %}{%- set ns.is_tool = false -%}{{'<User>' + message['content']}}{%- endif %}
{%- if message['role'] == 'assistant' and message['content'] is none %}
{%- set ns.is_tool = false -%}
{%- for tool in message['tool_calls']%}
{%- if not ns.is_first %}{{'<Assistant><calls>' + tool['type'] + '<sep>' + tool['function']['name'] + '\n' + '```json' + '\n' + tool['function']['arguments'] + '\n' + '```'}}
{%- set ns.is_first = true -%}
{%- else %}{{'\n' + tool['function']['name'] + tool['function']['arguments']}}{%- endif %}
{%- endfor %}
{%- endif %}
{%- if message['role'] == 'assistant' and message['content'] is not none %}
{%- if ns.is_tool %}{{'</outputs>' + message['content'] + eos_token}}{%- set ns.is_tool = false -%}
{%- else %}{% set content = message['content'] %}{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}
{{'<Assistant>' + content + eos_token}}{%- endif %}
{%- endif %}
{%- if message['role'] == 'tool' %}{%- set ns.is_tool = true -%}
{%- if ns.is_output_first %}{{'<outputs><output>' + message['content']}}{%- set ns.is_output_first = false %}
{%- else %}{{'\n<output>' + message['content']}}{%- endif %}
{%- endif %}
{%- endfor -%}
{% if ns.is_tool %}{{'</outputs>'}}{% endif %}{% if add_generation_prompt and not ns.is_tool %}{{'<Assistant><think>\n'}}{% endif %}"""

PHI_4_MINI = """{% for message in messages %}
{% if message['role'] == 'system' and 'tools' in message and message['tools'] is not none %}
{{ '<|' + message['role'] + '|>' + message['content'] + '<|tool|>' + message['tools'] + '<|/tool|>' + '<|end|>' }}
{% else %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endif %}
{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"""

GEMMA_2 = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}
{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}
{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}
{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"""

GEMMA_3 = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}{%- set prefix = messages[0]['content'] + '\n\n' -%}
    {%- else -%}{%- set prefix = messages[0]['content'][0]['text'] + '\n\n' -%}{%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}{%- set prefix = "" -%}{%- set loop_messages = messages -%}{%- endif -%}
{%- for message in loop_messages -%}
    {{ '<start_of_turn>' + message['role'] + '\n' + (prefix if loop.first else "") }}
    {%- if message['content'] is string -%}{{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'image' -%}{{ '<start_of_image>' }}
            {%- elif item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}
        {%- endfor -%}
    {%- else -%}{{ raise_exception("Invalid content type") }}{%- endif -%}
    {{ '<end_of_turn>\n' }}
{%- endfor -%}"""

HERMES_TOOL_USE = """{%- macro python_type(json_spec) %}
{%- set basic = {"string": "str", "number": "float", "integer": "int", "boolean": "bool"} %}
{%- if basic[json_spec.type] is defined %}{{- basic[json_spec.type] }}
{%- elif json_spec.type == "array" %}{{- "list[" + python_type(json_spec['items']) + "]" }}
{%- elif json_spec.type == "object" %}
    {%- if json_spec.additionalProperties is defined %}{{- "dict[str, " + python_type(json_spec.additionalProperties) + ']' }}
    {%- else %}{{- "dict" }}{%- endif %}
{%- elif json_spec.type is iterable and json_spec.type is not string %}
    {{- "Union[" }}{%- for t in json_spec.type %}{{- python_type({"type": t}) }}{%- if not loop.last %}{{- "," }}{%- endif %}{%- endfor %}{{- "]" }}
{%- else %}{{- "Any" }}{%- endif %}
{%- endmacro %}
{{- bos_token }}
{%- if tools is iterable and tools | length > 0 %}
{%- for tool in tools %}
    {%- if tool.function is defined %}{%- set tool = tool.function %}{%- endif %}
    {{- '{"name": "' + tool.name + '", "description": "' + tool.name + '(' }}
    {%- for param_name, param_fields in tool.parameters.properties|items %}
        {{- param_name + ": " + python_type(param_fields) }}{%- if not loop.last %}{{- ", " }}{%- endif %}
    {%- endfor %}
    {{- ") - " + tool.description + '"' }}
    {{- ', "parameters": ' }}{{- tool.parameters | tojson if tool.parameters.properties | length else "{}" }}{{- "}\n" }}
{%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "assistant" and message.tool_calls is defined %}
        {%- for tool_call in message.tool_calls %}
            {{- '\n<tool_call>\n{' }}
            {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
            {%- if tool_call.arguments is defined %}{{- '"arguments": ' }}{{- tool_call.arguments|tojson }}{%- endif %}
            {{- ', "name": "' }}{{- tool_call.name }}{{- '"}' }}
        {%- endfor %}
    {%- elif message.role == "tool" %}
        {%- if loop.previtem and loop.previtem.role != "tool" %}{{- '<|im_start|>tool\n' }}{%- endif %}
        {{- message.content }}
    {%- else %}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' }}{%- endif %}
{%- endfor %}"""

COMMAND_R = """{{ bos_token }}{% if documents %}{% for document in documents %}
{{ '\nDocument: ' }}{{ loop.index0 }}{% for key, value in document.items() %}{{ '\n' ~ key ~ ': ' ~ value }}{% endfor %}
{% endfor %}{% endif %}{% for message in messages %}
{{ '<|' ~ (message['role'] | upper) ~ '|>' }}{{ message['content'].strip() }}{% endfor %}
{% if add_generation_prompt %}{{ '<|CHATBOT|>' }}{% endif %}"""

COMMAND_R_TOOLS = """{{ bos_token }}{{ 'Tools:\n' }}{% for tool in tools %}{% if loop.index0 != 0 %}{{ '\n\n' }}{% endif %}
{{ '```python\ndef ' + tool.function.name + '(' }}
{% for name, fields in tool.function.parameters.properties.items() %}
{% if loop.index0 != 0 %}{{ ', ' }}{% endif %}{{ name }}: {% if not name in tool.function.parameters.required %}{{ 'Optional[' + fields.type|replace("string", "str") + '] = None' }}{% else %}{{ fields.type }}{% endif %}
{% endfor %}{{ ') -> List[Dict]:\n' }}{% endfor %}
{% for message in messages %}{% if message.tool_calls is defined and message.tool_calls is not none %}
{{ message.tool_calls | map(attribute='function') | list | tojson(indent=2) }}
{% else %}{{ message['content'] | trim }}{% endif %}{% endfor %}"""

GPT_OSS = """{%- macro typescript(spec, required, is_nullable=false) -%}
    {%- if spec.type == "array" -%}{%- if spec['items'] -%}{{- spec['items']['type'] + "[]" }}{%- else -%}any[]{%- endif -%}
    {%- elif spec.type is defined and spec.type is iterable and spec.type is not string and spec.type is not mapping -%}
        {{- spec.type | join(" | ") }}
    {%- elif spec.enum -%}{{- '"' + spec.enum|join('" | "') + '"' -}}
    {%- elif spec.type == "object" -%}
        {{- "{\n" }}{%- for name, prop in (spec.properties or {}).items() -%}
        {{- name -}}{%- if name not in (spec.required or []) -%}{{- "?" }}{%- endif -%}{{- ": " }}{{ typescript(prop, []) }}{{- ",\n" }}
        {%- endfor -%}{{- "}" }}
    {%- else -%}{{- spec.type or "any" -}}{%- endif -%}
{%- endmacro -%}
{%- macro namespace_of(namespace_name, tools) -%}
    {{- "## " + namespace_name + "\n\n" }}
    {%- for tool in tools %}
        {%- set tool = tool.function %}
        {{- "// " + tool.description + "\n" }}{{- "type "+ tool.name + " = (_: " + typescript(tool.parameters, []) + ") => any;\n" }}
    {%- endfor %}
{%- endmacro -%}
{%- if not model_identity is defined %}{%- set model_identity = "You are a model." %}{%- endif %}
{%- if reasoning_effort is not defined %}{%- set reasoning_effort = "medium" %}{%- endif %}
{{- "<|start|>system<|message|>" + model_identity + "\nDate: " + strftime_now("%Y-%m-%d") + "\nReasoning: " + reasoning_effort + "<|end|>" }}
{%- if messages[0].role == "developer" or messages[0].role == "system" %}
    {%- set developer_message = messages[0].content %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set developer_message = "" %}{%- set loop_messages = messages %}{%- endif %}
{%- if developer_message or tools %}{{- "<|start|>developer<|message|>" + developer_message }}{%- if tools -%}{{- namespace_of("functions", tools) }}{%- endif -%}{{- "<|end|>" }}{%- endif %}
{%- set last_tool_call = namespace(name=none) %}
{%- for message in loop_messages -%}
    {%- if message.role == 'assistant' -%}
        {%- if "tool_calls" in message %}
            {%- set tool_call = message.tool_calls[0] %}
            {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
            {%- if message.content and message.thinking %}
                {{- raise_exception("Cannot pass both content and thinking in an assistant message with tool calls!") }}
            {%- elif message.content %}{{- "<|channel|>analysis<|message|>" + message.content + "<|end|>" }}
            {%- elif message.thinking %}{{- "<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}{%- endif %}
            {{- "<|channel|>commentary to=functions." + tool_call.name + "<|message|>" + tool_call.arguments|tojson + "<|call|>" }}
            {%- set last_tool_call.name = tool_call.name %}
        {%- elif loop.last and not add_generation_prompt %}
            {%- if "thinking" in message %}{{- "<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}{%- endif %}
            {{- "<|channel|>final<|message|>" + message.content + "<|return|>" }}
        {%- else %}{{- "<|channel|>final<|message|>" + message.content + "<|end|>" }}{%- set last_tool_call.name = none %}{%- endif %}
    {%- elif message.role == 'tool' -%}
        {%- if last_tool_call.name is none %}{{- raise_exception("no previous assistant message with a tool call!") }}{%- endif %}
        {{- "<|start|>functions." + last_tool_call.name + "<|message|>" + message.content|tojson + "<|end|>" }}
    {%- elif message.role == 'user' -%}{{- "<|start|>user<|message|>" + message.content + "<|end|>" }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}"""

GRANITE = """{%- set tools_system = "Tools:" %}
{%- if tools is not none %}{%- set ns = namespace(text=tools_system) %}
    {%- for tool in tools %}{%- set ns.text = ns.text + '\n' + (tool | tojson) %}{%- endfor %}{{- ns.text }}
{%- endif %}
{%- if documents is not none %}{%- for document in documents %}{{- '<doc ' + (document.doc_id | string) + '>' + document.text }}{%- endfor %}{%- endif %}
{%- for message in messages %}
    {%- if message.content is not none and message.content is defined %}{{- '<|role|>' + message.role + '<|end|>' + message.content }}
    {%- else %}{{- '<|role|>' + message.role + '<|none|>' }}{%- endif %}
    {%- for call in message.get('tool_calls', []) %}{{- '<call>' + ({'name': call.function.name, 'arguments': call.function.arguments} | tojson) }}{%- endfor %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|role|>assistant' }}{%- if controls %}{{- ' ' + controls | tojson }}{%- endif %}{{- '<|end|>' }}{%- endif %}"""

SMOLLM_3 = """{%- if enable_thinking is not defined -%}{%- set enable_thinking = true -%}{%- endif -%}
{%- set reasoning_mode = "/think" if enable_thinking else "/no_think" -%}
{%- if messages[0].role == "system" -%}
    {%- set system_message = messages[0].content -%}
    {%- if "/no_think" in system_message -%}{%- set reasoning_mode = "/no_think" -%}{%- endif -%}
    {%- set custom = system_message.replace("/no_think", "").replace("/think", "").rstrip() -%}
{%- endif -%}
{{- "Mode: " ~ reasoning_mode ~ custom }}
{%- if xml_tools or python_tools or tools -%}
    {%- set ns = namespace(xml="<tools>\n") -%}
    {%- for tool in xml_tools or tools -%}{%- set ns.xml = ns.xml ~ (tool | string) ~ "\n" -%}{%- endfor -%}{{- ns.xml + "</tools>" -}}
{%- endif -%}
{%- for message in messages -%}
    {%- set content = message.content if message.content is string else "" -%}
    {%- if message.role == "user" -%}{{ "<|im_start|>" + message.role + "\n" + content + "<|im_end|>\n" }}
    {%- elif message.role == "assistant" -%}
        {%- set marker = "outer" -%}
        {% generation %}{%- set marker = "inner" -%}
        {%- if reasoning_mode == "/think" -%}{{ content.lstrip("\n") + "<|im_end|>\n" }}
        {%- else -%}{{ "<think>\n\n</think>\n" + content + marker + "<|im_end|>\n" }}{%- endif -%}
        {% endgeneration %}{{ marker }}
    {%- elif message.role == "tool" -%}{{ "<|im_start|>user\n" + content + "<|im_end|>\n" }}{%- endif -%}
{%- endfor -%}"""

GLM_4_5 = """[gMASK]<sop>
{%- if tools -%}
<|system|>
{% for tool in tools %}
{{ tool | tojson(ensure_ascii=False) }}
{% endfor %}
{%- endif -%}
{%- macro visible_text(content) -%}
    {%- if content is string -%}{{- content }}
    {%- elif content is iterable and content is not mapping -%}
        {%- for item in content -%}
            {%- if item is mapping and item.type == 'text' -%}{{- item.text }}{%- elif item is string -%}{{- item }}{%- endif -%}
        {%- endfor -%}
    {%- else -%}{{- content }}{%- endif -%}
{%- endmacro -%}
{%- for m in messages %}
{%- if m.role == 'user' -%}<|user|>
{{ visible_text(m.content) }}
{{- '/nothink' if (enable_thinking is defined and not enable_thinking and not visible_text(m.content).endswith("/nothink")) else '' -}}
{%- elif m.role == 'assistant' -%}
<|assistant|>
{%- set content = visible_text(m.content) %}
{%- if m.reasoning_content is string %}{{ '\n<think>' + m.reasoning_content.strip() + '</think>'}}{%- endif %}
{%- if content.strip() -%}{{ '\n' + content.strip() }}{%- endif -%}
{% if m.tool_calls %}{% for tc in m.tool_calls %}{%- if tc.function %}{%- set tc = tc.function %}{%- endif %}
{{ '\n<tool_call>' + tc.name }}
{% set _args = tc.arguments %}
{% for k, v in _args.items() %}<arg_key>{{ k }}</arg_key>
<arg_value>{{ v | tojson(ensure_ascii=False) if v is not string else v }}</arg_value>
{% endfor %}</tool_call>{% endfor %}{% endif %}
{%- elif m.role == 'tool' -%}
{%- if m.content is string -%}{{ '\n<tool_response>\n' + m.content }}
{%- else -%}{% for tr in m.content %}{{ tr.output if tr.output is defined else tr }}{% endfor %}{%- endif %}
{%- elif m.role == 'system' -%}<|system|>
{{ visible_text(m.content) }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"""

KIMI_K2 = """{%- macro shown(msg) -%}
{%- set c = msg.get('content') -%}
{%- if c is string -%}{{ c }}{%- else -%}{%- for part in c -%}{{ part['text'] }}{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{%- if tools -%}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson(separators=(',', ':'), sort_keys=true) }}<|im_end|>{%- endif -%}
{%- for message in messages -%}
{%- if loop.first and messages[0]['role'] != 'system' -%}<|im_system|>You are a model.<|im_end|>{%- endif -%}
{%- set role_name = message.get('name') or message['role'] -%}
{{ role_name }}<|im_middle|>{{ shown(message) }}
{%- for call in message.get('tool_calls') or [] -%}
<|call|>{{ call['id'] }}<|args|>{% if call['function']['arguments'] is string %}{{ call['function']['arguments'] }}{% else %}{{ call['function']['arguments'] | tojson }}{% endif %}
{%- endfor -%}
{%- if message.role == 'tool' -%}## {{ message.tool_call_id }}{%- endif -%}<|im_end|>
{%- endfor -%}{%- if add_generation_prompt -%}<|im_assistant|>{%- endif -%}"""

TULU = """{% for message in messages %}{% if message['role'] == 'system' %}{% continue %}{% endif %}
{% if message['role'] == 'assistant' %}{% if not loop.last %}
{{ '<|assistant|>\n' + message['content'] + eos_token + '\n' }}{% else %}{{ '<|assistant|>\n' + message['content'] + eos_token }}{% endif %}
{% else %}{{ '<|' ~ message.role ~ '|>\n' ~ message['content'] ~ '\n' }}{% endif %}
{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% break %}{% endif %}{% endfor %}"""

LLAVA = """{% for message in messages %}{{ message['role'] | upper + ': ' }}
{%- for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>' }}{% endfor %}
{%- for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ content['text'] }}{% endfor %}
{{- ' ' }}{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"""

SANDBOX = """{% set seen = dict(a=1, b=[1, 2.5, none, true]) %}{{ seen | tojson(indent=2) }}{{ dict.fromkeys(['k'], 0) }}
{% set ns = namespace(self=1, total=0) %}{% for n in range(3) %}{% set ns.total = ns.total + n %}{% endfor %}{{ ns.total }}
{{ messages | map(attribute='role') | join(',') }}{{ "%05.2f" | format(3.14159) }}{{ "é<&>'" | tojson }}{{ cycler is defined }}
{{ messages[-1].content | default('none') | truncate(5) }}{{ lipsum is defined }}{{ pad_token }}{{ sep_token is defined }}
{% raw %}{{ raw }}{% endraw %}{{ 7 // 2 }}{{ 2 ** 3 }}{{ -7 % 3 }}{{ messages | length is even }}
"""

APPENDS = "{% set seen = [] %}{% for message in messages %}{{ seen.append(message.role) }}{% endfor %}{{ seen | join }}"
DUNDER = "{{ messages[0].__class__ }}{{ messages.__class__.__mro__ }}"
HIDDEN = "{% set ns = namespace(_hidden=1) %}{{ messages[0].content }}"
ESCAPE = "{{ dict.mro() }}{{ messages[0].content }}"
DEEP = "{% macro down(n) %}{{ down(n + 1) }}{% endmacro %}{{ down(0) }}{{ messages[0].content }}"

FAMILIES = {
    "chatml": Family(CHATML),
    "Llama 2": Family(LLAMA_2),
    "Llama 3.1": Family(LLAMA_3_1),
    "Llama 4": Family(LLAMA_4, contents="parts"),
    "Qwen 2.5": Family(QWEN_2_5),
    "Qwen 3": Family(QWEN_3),
    "Qwen 3 Coder": Family(QWEN_3_CODER),
    "Qwen VL": Family(QWEN_VL, contents="parts"),
    "Mistral 3": Family(MISTRAL_3),
    "Mistral Small": Family(MISTRAL_SMALL, contents="parts"),
    "DeepSeek R1": Family(DEEPSEEK_R1, null="none", arguments="text"),
    "Phi 4 mini": Family(PHI_4_MINI),
    "Gemma 2": Family(GEMMA_2),
    "Gemma 3": Family(GEMMA_3, contents="parts"),
    "Hermes": Family(CHATML, tool_use=HERMES_TOOL_USE),
    "Command R": Family(COMMAND_R, tool_use=COMMAND_R_TOOLS),
    "gpt-oss": Family(GPT_OSS),
    "Granite": Family(GRANITE, null="none"),
    "SmolLM 3": Family(SMOLLM_3),
    "GLM 4.5": Family(GLM_4_5, contents="parts"),
    "Kimi K2": Family(KIMI_K2, contents="parts"),
    "Tulu": Family(TULU),
    "LLaVA": Family(LLAVA, contents="only parts"),
    "all of Jinja": Family(SANDBOX),
    "appends to a list": Family(APPENDS, refuses=True),
    "reaches for Python": Family(DUNDER, refuses=True),
    "hides a name": Family(HIDDEN, refuses=True),
    "asks dict for more": Family(ESCAPE, refuses=True),
    "never ends": Family(DEEP, refuses=True),
}
