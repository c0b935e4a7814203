"""A transcript or more of every format, written as the models' own templates and documents show them."""
# ruff: noqa: E501, RUF001 - transcripts keep their lines, and DeepSeek its full-width bars

from __future__ import annotations

from transcripts import END, USER, Transcript

QWEN = ("<think>", "</think>", "<tool_call>", "</tool_call>")
DEEPSEEK = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
)
ROME = ("get_weather", '{"city": "Rome", "days": 2}')
FILES = ("list_files", "{}")

TRANSCRIPTS = {
    "hermes": Transcript(
        "hermes",
        "<think>\nThe user wants <tool_call> things: 漢字.\n</think>\n\nI look.\n"
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "R\\"o}m</tool_call>e", "days": 2}}\n</tool_call>\n'
        '<tool_call>\n{"name": "list_files", "arguments": {}}\n</tool_call>' + END,
        content="I look.",
        reasoning="The user wants <tool_call> things: 漢字.",
        calls=[("get_weather", '{"city": "R\\"o}m</tool_call>e", "days": 2}'), FILES],
        added=QWEN,
        num_reasoning_tokens=34,
    ),
    "hermes, opened by the prompt": Transcript(
        "hermes",
        "Hm.\n</think>\n\nRome is \x00<tool_call>\x00 warm. 😀\n" + END,
        content="Rome is <tool_call> warm. 😀\n",
        reasoning="Hm.",
        prompt=USER + "Weather? <think> no </think>" + END + "assistant\n<think>\n",
        added=QWEN,
        num_reasoning_tokens=4,
    ),
    "hermes, in any order of members": Transcript(
        "hermes",
        '<tool_call>{"arguments": {"city": "Rome", "days": 2}, "id": 5, "name": "get_weather"}</tool_call>'
        '<tool_call> {"name": "get_weather", "arguments": "{\\"city\\": \\"Rome\\", \\"days\\": 2}"} </tool_call>'
        '<tool_call>{"name": "list_files"}</tool_call>'
        '<tool_call>{"name": "list_files", "arguments": null}</tool_call>'
        '<tool_call>{"type": "function", "name": "list_files", "arguments": {}</tool_call>',
        calls=[ROME, ROME, FILES, FILES, FILES],
        added=QWEN,
    ),
    "hermes, without tokens of its own": Transcript(
        "hermes",
        '<think>\n\n</think>\n\nSo <tool, then:\n\n<tool_call>\n{"name": "list_files", "arguments": {}}\n</tool_call>\n',
        content="So <tool, then:",
        calls=[FILES],
        num_errors=0,
    ),
    "qwen3_coder": Transcript(
        "qwen3_coder",
        'I write.\n\n<tool_call>\n<function=write>\n<parameter=text>\n\ndef f():\n\treturn "</p" # </think>\n\n'
        "</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
        '<parameter=tags>\n[\'a\', "b"]\n</parameter>\n<parameter=where>\n{"x": [1]}\n</parameter>\n'
        "<parameter=exact>\nTrue\n</parameter>\n<parameter=factor>\n1.50\n</parameter>\n<parameter=units>\nnull\n"
        "</parameter>\n<parameter=other>\n5\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=list_files>\n</function>\n</tool_call>" + END,
        content="I write.",
        calls=[
            ("write", '{"text": "\\ndef f():\\n\\treturn \\"</p\\" # </think>\\n"}'),
            (
                "get_weather",
                '{"city": "Rome", "days": 2, "tags": ["a", "b"], "where": {"x": [1]}, "exact": true, '
                '"factor": 1.50, "units": null, "other": "5"}',
            ),
            FILES,
        ],
        added=QWEN,
    ),
    "llama3_json": Transcript(
        "llama3_json",
        '{"name": "get_weather", "parameters": {"city": "Rome", "days": 2}}; {"name": "list_files", "parameters": {}}'
        + END,
        calls=[ROME, FILES],
        special=("<|python_tag|>", "<|eom_id|>"),
    ),
    "llama3_json, announced": Transcript(
        "llama3_json",
        'I look. <|python_tag|>{"type": "function", "name": "get_weather", '
        '"parameters": {"city": "Rome", "days": 2}}<|eom_id|>',
        content="I look.",
        calls=[ROME],
        special=("<|python_tag|>", "<|eom_id|>"),
    ),
    "llama3_json, an answer in JSON": Transcript(
        "llama3_json",
        ' {"name": "Rome", "parameters": {}}\n[1]' + END,
        content=' {"name": "Rome", "parameters": {}}\n[1]',
        special=("<|python_tag|>", "<|eom_id|>"),
    ),
    "mistral_list": Transcript(
        "mistral_list",
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}, '
        '{"name": "list_files", "arguments": {}}]' + END,
        calls=[ROME, FILES],
        special=("[TOOL_CALLS]",),
    ),
    "mistral": Transcript(
        "mistral",
        "[THINK]It is [TOOL_CALLS] time.[/THINK]Well.[TOOL_CALLS]get_weather[CALL_ID]abc123DEF[ARGS]"
        '{"city": "Rome", "days": 2}[TOOL_CALLS]list_files{}' + END,
        content="Well.",
        reasoning="It is [TOOL_CALLS] time.",
        calls=[ROME, FILES],
        special=("[THINK]", "[/THINK]", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
        num_reasoning_tokens=13,
    ),
    "deepseek_v3": Transcript(
        "deepseek_v3",
        "<think>\nOk\n</think>\n\nI look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
        '```json\n{"city": "Rome", "days": 2}\n```<｜tool▁call▁end｜>\n'
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>list_files\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        + END,
        content="I look.",
        reasoning="Ok",
        calls=[ROME, FILES],
        special=DEEPSEEK,
        added=("<think>", "</think>"),
        num_reasoning_tokens=4,
    ),
    "deepseek_v31": Transcript(
        "deepseek_v31",
        "Yes.</think>I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
        '{"city": "Rome", "days": 2}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>list_files<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>" + END,
        content="I look.",
        reasoning="Yes.",
        calls=[ROME, FILES],
        prompt=USER + "<think>",
        special=DEEPSEEK,
        added=("<think>", "</think>"),
        num_reasoning_tokens=4,
    ),
    "glm45": Transcript(
        "glm45",
        "\n<think>Ok.</think>\nI look.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n<tool_call>list_files\n</tool_call>"
        "<tool_call>list_files</tool_call><tool_call>get_weather<arg_key>city</arg_key><arg_value>Rome</arg_value>"
        "<arg_key>days</arg_key><arg_value>2</arg_value></tool_call>" + END,
        content="I look.",
        reasoning="Ok.",
        calls=[ROME, FILES, FILES, ROME],
        special=QWEN,
        added=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    "functiongemma": Transcript(
        "functiongemma",
        "<start_function_call>call:get_weather{city:<escape>Rome<escape>,days:2}<end_function_call>"
        '<start_function_call>call:get_weather{where:{x:[1,<escape>a"b\\<escape>,true],y:{}},exact:false}'
        "<end_function_call><start_function_call>call:list_files{}<end_function_call>" + END,
        calls=[
            ROME,
            ("get_weather", '{"where": {"x": [1, "a\\"b\\\\", true], "y": {}}, "exact": false}'),
            FILES,
        ],
        special=("<start_function_call>", "<end_function_call>", "<escape>", "<start_function_response>"),
    ),
    "gemma4": Transcript(
        "gemma4",
        '<|channel>thought\nOk.\n<channel|>I look.<|tool_call>call:get_weather{city:<|"|>Rome<|"|>,days:2}<tool_call|>'
        "<|tool_response>" + END,
        content="I look.",
        reasoning="Ok.",
        calls=[ROME],
        special=("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>', "<|tool_response>"),
    ),
    "pythonic": Transcript(
        "pythonic",
        "[get_weather(city='Rome', days=2), list_files(), get_weather(city=\"a'\\n\\u00e9\", where={'x': (1, None,)}, "
        "exact=True, factor=-.5,)]" + END,
        calls=[
            ROME,
            FILES,
            (
                "get_weather",
                '{"city": "a\'\\n\\u00e9", "where": {"x": [1, null]}, "exact": true, "factor": -0.5}',
            ),
        ],
    ),
    "pythonic, an answer with brackets": Transcript(
        "pythonic", "[1] See [list_files()]." + END, content="[1] See [list_files()]."
    ),
    "llama4_pythonic": Transcript(
        "llama4_pythonic",
        'I look. <|python_start|>[get_weather(city="""Rome""", days=2)]<|python_end|>' + END,
        content="I look.",
        calls=[ROME],
        special=("<|python_start|>", "<|python_end|>"),
    ),
    "harmony": Transcript(
        "harmony",
        "<|channel|>analysis<|message|>I need it.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        '{"city": "Rome", "days": 2}<|call|>',
        content="I look.",
        reasoning="I need it.",
        calls=[ROME],
        prompt="<|start|>user<|message|>Hi<|end|><|start|>assistant",
        special=(
            "<|start|>",
            "<|channel|>",
            "<|message|>",
            "<|end|>",
            "<|call|>",
            "<|return|>",
            "<|constrain|>",
        ),
        num_reasoning_tokens=10,
    ),
}
