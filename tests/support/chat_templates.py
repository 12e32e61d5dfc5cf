"""Chat templates in the manner of well-known model families, written for tests: same constructs, own words."""

from __future__ import annotations

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# A beginning-of-text token, trimmed contents, headers around roles (Llama 3).
HEADERS = """{%- set loop_messages = messages -%}
{%- for message in loop_messages -%}
{%- set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' -%}
{%- if loop.index0 == 0 -%}{%- set content = bos_token + content -%}{%- endif -%}
{{- content -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif -%}
"""

# Strict about roles and their order (Gemma).
STRICT = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{% endif %}
{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}
"""

# Control tokens put together from the role (Phi-3).
DYNAMIC = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + '\n' + message['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)

# The same with tools as JSON.
DYNAMIC_TOOLS = "{% if tools %}{{ '<|' + 'system' + '|>' + (tools | tojson) + '<|end|>\n' }}{% endif %}" + DYNAMIC

# Looks into contents, keeps namespaces, macros, tools and loop controls (Qwen 3, Llama 3.1).
LOOKING = """{%- macro tools_block(tools) -%}
# Tools
{% for tool in tools %}
{{ tool | tojson }}
{% endfor %}
{%- endmacro -%}
{%- set ns = namespace(last=-1, open=false) -%}
{%- for message in messages -%}{%- if message.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- if tools -%}{{ '<|im_start|>system\n' + tools_block(tools) + '<|im_end|>\n' }}{%- endif -%}
{%- for message in messages -%}
{%- if message.content is string -%}{%- set content = message.content -%}{%- else -%}{%- set content = '' -%}{%- endif -%}
{%- if message.role == 'assistant' -%}
{%- if '</think>' in content -%}{%- set content = content.split('</think>')[-1].lstrip('\n') -%}{%- endif -%}
{{- '<|im_start|>assistant\n' }}{% generation %}{{ content }}
{%- for call in message.tool_calls or [] -%}
{{ '\n<tool_call>\n{"name": "' ~ call.function.name ~ '", "arguments": ' ~ (call.function.arguments | tojson) ~ '}\n</tool_call>' }}
{%- endfor -%}{{ '<|im_end|>' }}{% endgeneration %}{{ '\n' }}
{%- elif message.role == 'tool' -%}
{{ '<|im_start|>user\n<tool_response>\n' + content + '\n</tool_response><|im_end|>\n' }}
{%- elif message.role not in ['system', 'user'] -%}{%- continue -%}
{%- else -%}{{ '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and not enable_thinking -%}{{ '<think>\n\n</think>\n\n' }}{%- endif -%}{%- endif -%}
"""
