"""Chat templates render as in transformers, stay in their sandbox, and bad messages are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from quire.frontend.text import chat_template as chat_template_module
from quire.frontend.text.chat_template import ChatTemplate
from quire.frontend.tools import Tool
from quire.ipc.errors import ModelError, PromptError
from refusals import Refusal, refusals
from tool_template import HARMONY_TEMPLATE

TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": 'Hi <b>&"you"</b>'},
    {"role": "assistant", "content": "Hello there "},
]
LOOP = "{% for m in messages %}"
TEMPLATES = {
    "blocks": LOOP + "\n    {% if m.role == 'user' %}\n  U:{{ m.content }}\n{% endif %}\n{% endfor %}",
    "loop controls": LOOP + "{% if loop.index == 2 %}{% break %}{% endif %}{{ m['content'] }}{% endfor %}",
    "tojson": "{{ messages | tojson }}|{{ messages[1] | tojson(indent=2, sort_keys=true) }}",
    "namespace": "{% set ns = namespace(n=0) %}" + LOOP + "{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "generation": LOOP + "{% generation %}{{ m.content | trim }}{% endgeneration %};{% endfor %}",
    "tokens": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}{{ dict(a=1)['a'] }}{{ nothing }}",
    "prompt": "{{ messages[-1].content }}{% if add_generation_prompt %}<go>{% endif %}{{ tools is none }}",
    "variable": "{{ mood }}{{ messages[0].role | upper }}{{ ' x ' | trim }}",
    "strip": "a \n{%- if true -%} \n b{% endif %}\n",
}
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def oracle_render(source: str, messages: list[dict[str, Any]], **kwargs: Any) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, _ = render_jinja_template([messages], chat_template=source, **TOKENS, **kwargs)
    return rendered[0]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_templates_render_as_in_transformers(name: str, add_generation_prompt: bool):
    source = TEMPLATES[name]
    ours = ChatTemplate(source, TOKENS).render(TALK, add_generation_prompt, variables={"mood": "calm"})
    assert ours == oracle_render(source, TALK, add_generation_prompt=add_generation_prompt, mood="calm")


@pytest.mark.parametrize("name", ["prompt", "generation", "blocks"])
def test_continuing_the_final_message_ends_inside_it_as_in_transformers(name: str):
    talk = TALK[:2] if name == "blocks" else TALK
    ours = ChatTemplate(TEMPLATES[name], TOKENS).render(talk, False, continue_final_message=True)
    expected = oracle_render(TEMPLATES[name], talk, continue_final_message=True)
    assert ours.rstrip() == expected.rstrip()


def test_the_caller_s_messages_are_left_as_they_were():
    talk = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    ChatTemplate("{{ messages[0].content }}", {}).render(talk, False, continue_final_message=True)
    assert talk == [{"role": "user", "content": [{"type": "text", "text": "a"}]}]


def test_text_parts_are_joined_unless_the_template_walks_over_them():
    talk = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert ChatTemplate("{{ messages[0].content }}", {}).render(talk) == "a\nb"
    walking = "{% for m in messages %}{% for part in m['content'] %}[{{ part.text }}]{% endfor %}{% endfor %}"
    assert ChatTemplate(walking, {}).render(talk) == "[a][b]"
    inner = "{% set content = m.content %}{% for p in content %}<{{ p.text }}>{% endfor %}"
    named = LOOP + inner + "{% endfor %}"
    assert ChatTemplate(named, {}).render(talk) == "<a><b>"


@refusals("chat_messages")
def test_malformed_messages_are_refused_by_field(refusal: Refusal):
    refusal.check(ChatTemplate("x", {}).render)


@refusals("chat_templates")
def test_what_reaches_out_of_the_sandbox_or_fails_is_a_prompt_error(refusal: Refusal):
    refusal.check(lambda source: ChatTemplate(source, {}).render(TALK))


def test_a_template_s_own_refusal_is_quoted():
    with pytest.raises(PromptError, match="roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}", {}).render(TALK)


def test_a_template_that_does_not_compile_is_a_model_error():
    with pytest.raises(ModelError, match="Jinja"):
        ChatTemplate("{% for %}", {}).render(TALK)


def test_a_result_that_grows_without_end_is_cut_off(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(chat_template_module, "MAX_RENDERED_LENGTH", 1000)
    endless = "{% for i in range(90000) %}{% for j in range(90000) %}aaaa{% endfor %}{% endfor %}"
    with pytest.raises(PromptError, match="at most 1000"):
        ChatTemplate(endless, {}).render(TALK)


def test_objects_with_methods_do_not_enter_the_sandbox(tmp_path: Any):
    source = "{{ thing }}"
    assert ChatTemplate(source, {}).render(TALK, variables={"thing": tmp_path}) == "<PosixPath>"


def test_generating_and_continuing_exclude_each_other():
    with pytest.raises(PromptError, match="continue_final_message"):
        ChatTemplate("x", {}).render(TALK, True, True)


def test_a_template_that_drops_the_final_message_cannot_continue_it():
    with pytest.raises(PromptError, match="drops it"):
        ChatTemplate("x", {}).render(TALK, False, True)


@pytest.mark.parametrize("content", ["x", [{"type": "text", "text": "x"}]])
def test_a_template_too_deep_to_compile_is_refused_as_one(content: Any):
    template = ChatTemplate("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", {})
    with pytest.raises(ModelError, match=r"^chat_template=.*a Jinja template \(maximum recursion depth"):
        template.render([{"role": "user", "content": content}])


def test_calls_and_results_that_a_template_leaves_out_are_refused_by_their_place():
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    talk: list[dict[str, Any]] = [
        TALK[1],
        {"role": "assistant", "content": "Wait.", "tool_calls": [call]},
        {"role": "tool", "content": "4", "tool_call_id": "c"},
    ]
    contents = LOOP + "{{ m.content }};{% endfor %}"
    with pytest.raises(
        PromptError, match=r"messages\[1\]\.tool_calls='1 calls': expected none: .* shows no calls"
    ):
        ChatTemplate(contents, {}).render(talk)
    calls = LOOP + "{% if m.role != 'tool' %}{{ m.content }}{{ m.tool_calls }}{% endif %}{% endfor %}"
    with pytest.raises(PromptError, match=r"messages\[2\]\.role='tool': expected another role"):
        ChatTemplate(calls, {}).render(talk)
    assert "'name': 'f'" in ChatTemplate(calls, {}).render(talk[:2])
    assert ChatTemplate(LOOP + "{{ m.content }}{{ m.tool_calls }}{% endfor %}", {}).render(talk).endswith("4")
    # What refuses the conversation that is tried may show calls all the same.
    strict = "{% if messages | length == 3 %}{{ raise_exception('no') }}{% endif %}" + contents
    assert "Wait." in ChatTemplate(strict, {}).render(talk[:2])


HARMONY_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ({"content": None}, ""),
        ({"content": ""}, ""),
        ({"content": "So."}, "So."),
        ({"reasoning_content": "Hm."}, "Hm."),
        ({"content": "So.", "reasoning_content": "Hm."}, "Hm.\n\nSo."),
    ],
)
def test_what_a_template_fails_without_is_filled_in(said: dict[str, Any], shown: str):
    turn = {"role": "assistant", "tool_calls": [HARMONY_CALL], **said}
    talk = [TALK[1], turn, {"role": "tool", "tool_call_id": "c", "content": "2"}]
    text = ChatTemplate(HARMONY_TEMPLATE, {}).render(talk, tools=[Tool("f", None, {"type": "object"})])
    assert '// \ntype f = (_: {"type": "object"})' in text
    analysis = f"<|start|>assistant<|channel|>analysis<|message|>{shown}<|end|>" if shown else ""
    assert f'you"</b><|end|>{analysis}<|start|>assistant to=functions.f' in text


def test_a_failure_that_nothing_fills_in_is_told_as_it_was():
    turn = {"role": "assistant", "content": None, "tool_calls": [HARMONY_CALL]}
    with pytest.raises(PromptError, match="TypeError"):
        ChatTemplate("{% for m in messages %}{{ 1 + m.content }}{% endfor %}", {}).render([TALK[1], turn])
