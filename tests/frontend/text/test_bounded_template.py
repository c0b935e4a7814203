"""A template without end, or one that eats memory, costs its own conversation, not its caller's process."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections import UserList
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from quire.frontend.text.bounded_template import BoundedTemplate, RenderProcess
from quire.frontend.text.chat_template import ChatTemplate
from quire.frontend.text.chosen_template import read_chosen_template
from quire.frontend.text.end_tokens import find_turn_end
from quire.frontend.text.tokenizer import load_tokenizer
from quire.frontend.tools import Tool
from quire.ipc.errors import ConfigError, InputError, ModelError, PromptError
from quire.ipc.processes.process import is_stopped

CHAT: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
TOKENS = {"eos_token": "</s>"}
NESTED = "".join(f"{{% for {name} in range(99999) %}}" for name in "abc") + "{% endfor %}" * 3
HOSTILE = {
    "loops": (NESTED, "0.2 s"),
    "a number, while it is compiled": ("{{ (9 ** (9 ** 9)) % 7 }}", "0.2 s"),
    "calls": (
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(40) }}",
        "0.2 s",
    ),
    "a text": ("{{ messages[0].content * 9000000000 }}", "2048 MiB"),
    "a text, while it is compiled": ("{{ 'a' * 9000000000 }}", "2048 MiB"),
    "a width": ("{{ '%9000000000d' % 1 }}", "expected"),
    "doubling": (
        "{% set n = namespace(x='ab') %}{% for a in range(99)%}{%set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
        "expected",
    ),
}


@pytest.fixture
def process() -> Iterator[RenderProcess]:
    process = RenderProcess(max_render_s=0.2)
    yield process
    process.close()


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_refused_and_the_next_conversation_renders(process: RenderProcess, name: str):
    source, reason = HOSTILE[name]
    with pytest.raises(PromptError, match=r"^messages") as refused:
        BoundedTemplate(process, source, TOKENS).render(CHAT)
    assert reason in str(refused.value)
    assert BoundedTemplate(process, PLAIN, TOKENS).render(CHAT) == "user: Hi</s>"


def render_or_refuse(template: ChatTemplate | BoundedTemplate, messages: Any, **options: Any) -> object:
    try:
        return template.render(messages, **options)
    except InputError as error:
        return type(error), error.field, error.allowed


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain": (CHAT, {}),
    "a sequence": (UserList(CHAT), {}),
    "variables": (CHAT, {"variables": {"mood": "calm", "odd": object()}}),
    "continued": (CHAT, {"add_generation_prompt": False, "continue_final_message": True}),
    "tools": (CHAT, {"tools": (Tool("look", "Looks."),)}),
    "no role": ([{"content": "Hi"}], {}),
    "no list": ("Hi", {"param": "input"}),
    "none": ([], {}),
    "no message": ([7], {}),
    "an unknown role": ([{"role": "robot", "content": "Hi"}], {}),
    "a lone surrogate in a name": ([{"role": "user", "content": 3, "name": "x"}], {}),
}


@pytest.mark.parametrize("source", [PLAIN, "{{ messages[0].content", "{{ raise_exception('no') }}"])
def test_texts_and_refusals_are_those_of_the_template_itself(process: RenderProcess, source: str):
    for messages, options in CASES.values():
        pair = ChatTemplate(source, TOKENS), BoundedTemplate(process, source, TOKENS)
        whole, bounded = (render_or_refuse(template, messages, **options) for template in pair)
        assert bounded == whole
    for text in ("\ud800", "x" * (1 << 20)):
        got = render_or_refuse(BoundedTemplate(process, PLAIN, {}), [{"role": "user", "content": text}])
        assert got == f"user: {text}" if text[0] == "x" else isinstance(got, tuple)


def test_conversations_with_tools_take_their_own_template(process: RenderProcess):
    template = BoundedTemplate(process, "plain", {}, "{{ tools[0].function.name }}")
    assert template.render(CHAT, tools=[Tool("look")]) == "look"
    assert template.render(CHAT) == "plain"


def find_pid(process: RenderProcess) -> int:
    assert process.pid is not None
    return process.pid


def test_a_process_that_is_killed_or_closed_is_replaced_and_nothing_stays(process: RenderProcess):
    template = BoundedTemplate(process, "{{ messages[0].content }}", {})
    pids: list[int] = []
    for end in (lambda pid: os.kill(pid, signal.SIGKILL), lambda _pid: process.close()):
        assert template.render(CHAT) == "Hi"
        pids.append(find_pid(process))
        end(pids[-1])
        assert template.render(CHAT) == "Hi"
        assert process.pid not in pids
    last = find_pid(process)
    process.close()
    assert not Path(f"/proc/{last}").exists()


def test_closing_ends_a_template_that_another_thread_renders(process: RenderProcess):
    """And of a process that is stopped, which no limit of processor time ends."""
    process.start()
    stopped, texts = find_pid(process), list[str]()
    os.kill(stopped, signal.SIGSTOP)
    while not is_stopped(stopped):
        pass
    thread = threading.Thread(
        target=lambda: texts.append(BoundedTemplate(process, PLAIN, TOKENS).render(CHAT))
    )
    thread.start()
    process.close()
    thread.join(30.0)
    assert texts == ["user: Hi</s>"]
    assert process.pid != stopped


def test_a_fork_starts_its_own(tmp_path: Path):
    tokenizer = make_tokenizer(tmp_path, PLAIN)
    loaded = load_tokenizer(tokenizer)
    assert loaded.render_chat(CHAT) == "user: Hi"
    mine = loaded.find_render_process()
    child = os.fork()
    if not child:
        ends_well = loaded.find_render_process() is not mine and loaded.render_chat(CHAT) == "user: Hi"
        mine.close()
        os._exit(0 if ends_well else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    pid = mine.pid
    assert loaded.render_chat(CHAT) == "user: Hi"
    assert mine.pid == pid
    loaded.close()


def make_tokenizer(folder: Path, template: str) -> Path:
    words = {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}
    (folder / "tokenizer.json").write_text(json.dumps(words))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder


def test_a_start_and_a_chosen_template_are_bounded_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("quire.frontend.text.bounded_template.MAX_RENDER_S", 0.2)
    assert find_turn_end(str(make_tokenizer(tmp_path, NESTED))) is None
    with pytest.raises(ConfigError, match=r"chat_template=.* renders in 0\.2 s"):
        read_chosen_template("{{ (9 ** (9 ** 9)) % 7 }}")
    with pytest.raises(ModelError, match="chat_template"):
        load_tokenizer(make_tokenizer(tmp_path, "{{ unclosed")).render_chat(CHAT)
