"""Chat templates: like Qwen3's, with tools and calls as hermes has them and thoughts; and plain ones."""

from __future__ import annotations

TEMPLATE = """\
{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '\\n</tools>\\nFor each call, return JSON within tags:\\n<tool_call>\\n' }}
{{- '{"name": <name>, "arguments": <args>}\\n</tool_call><|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.reasoning_content %}{{- '<think>\\n' + message.reasoning_content }}
{{- '\\n</think>\\n\\n' }}{%- endif %}
{%- if message.content %}{{- message.content }}{%- endif %}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}{%- endfor %}
{{- '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""
PLAIN_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
CHATML_TEMPLATE = """\
{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}
{{- message['content'] + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
# As gpt-oss' own, which fails where a turn with calls has no text, or a tool no description, and takes
# thoughts by another name than others do.
HARMONY_TEMPLATE = """\
<|start|>system<|message|># Valid channels: analysis, commentary, final.<|end|>
{%- if tools %}{{- '<|start|>developer<|message|># Tools\\n\\nnamespace functions {\\n' }}
{%- for tool in tools %}{{- '// ' + tool.function.description + '\\ntype ' + tool.function.name }}
{{- ' = (_: ' + (tool.function.parameters | tojson) + ') => any;\\n' }}{%- endfor %}
{{- '}<|end|>' }}{%- endif %}
{%- set last = namespace(name=none) %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{%- if '<|channel|>' in message.content %}{{- raise_exception('no channels') }}{%- endif %}
{%- if 'tool_calls' in message %}
{%- set call = message.tool_calls[0].function %}{%- set last.name = call.name %}
{%- if message.content and message.thinking %}{{- raise_exception('not both') }}{%- endif %}
{%- if message.content or message.thinking %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + (message.content or message.thinking) + '<|end|>' }}
{%- endif %}
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
{{- (call.arguments | tojson) + '<|call|>' }}
{%- else %}{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}{%- endif %}
{%- elif message.role == 'tool' %}
{{- '<|start|>functions.' + last.name + ' to=assistant<|channel|>commentary<|message|>' }}
{{- (message.content | tojson) + '<|end|>' }}
{%- else %}{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{%- endif %}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""
