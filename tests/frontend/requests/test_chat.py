"""LLM.chat with tools and thoughts, over an engine that answers with scripted tokens."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from frontend_fakes import FakeClient, use_client
from quire.frontend.llm import LLM
from quire.frontend.models.model_folder import pocket_folder
from quire.frontend.outputs import RequestOutput
from quire.frontend.requests.input_processor import InputProcessor, PreparedParams
from quire.frontend.text.tokenizer import Tokenizer
from quire.ipc.errors import InputError
from quire.ipc.params.sampling_params import SamplingParams
from refusals import Refusal, refusals
from tool_template import TEMPLATE

USER = {"role": "user", "content": "What is 2 plus 3?"}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "strict": False}}]
THOUGHTS = "<think>\nHm.\n</think>\n\n"
SAID = THOUGHTS + 'Let me see.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
END = 2


class Talk:
    """An LLM whose template knows tools, and whose model says SAID."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        sizes = {"vocab_size": 2048, "max_model_len": 1024, "num_gpu_blocks": 100, "block_size": 16}
        self.client = FakeClient(lambda _request: [*self.says, END], model=str(pocket_folder()), **sizes)
        use_client(monkeypatch, self.client)
        self.llm = LLM()
        own = self.llm.get_tokenizer()
        assert own is not None
        self.says = own.encode(SAID, add_special_tokens=False)
        self._own = own
        self.take_template(TEMPLATE)

    def take_template(self, template: str) -> None:
        tokenizer, engine = (
            Tokenizer(self._own.backend, self._own.special_tokens, template),
            self.llm.llm_engine,
        )
        engine.tokenizer = tokenizer
        engine.input_processor = InputProcessor(engine.facts, tokenizer)

    def chat(self, params: SamplingParams | PreparedParams | None = None, **fields: Any) -> RequestOutput:
        params = params or SamplingParams(max_tokens=200)
        (output,) = self.llm.chat([USER], params, use_tqdm=False, **fields)
        return output

    @property
    def grammars(self) -> list[str]:
        """Of the requests so far."""
        return [request.grammar for request in self.client.engine.added]


@pytest.fixture
def talk(monkeypatch: pytest.MonkeyPatch) -> Talk:
    return Talk(monkeypatch)


def test_tools_have_a_grammar_and_calls_are_in_the_message_beside_the_raw_text(talk: Talk):
    output = talk.chat(tools=TOOLS, tool_choice="auto")
    (one,) = output.outputs
    assert one.text == SAID
    assert one.message is not None
    assert (one.message.content, one.message.reasoning) == ("Let me see.", "Hm.")
    assert [(call.name, call.arguments) for call in one.message.tool_calls] == [("f", '{"a": 1}')]
    assert '"name": "f"' in (output.prompt or "")
    assert "calls:" in talk.grammars[0]


def test_each_prompt_has_the_grammar_of_its_own_turn(talk: Talk):
    begun = {"role": "assistant", "content": "<think>\nLet"}
    params = SamplingParams(max_tokens=200)
    fields: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    plain, thinking, same = talk.llm.chat(
        [[USER, begun | {"content": "So"}], [USER, begun], [USER, begun]],
        params,
        use_tqdm=False,
        tools=TOOLS,
        tool_choice="required",
        **fields,
    )
    assert len(set(talk.grammars)) == 2
    assert talk.grammars[1] == talk.grammars[2]
    assert [one.outputs[0].text for one in (plain, thinking, same)] == [SAID] * 3


def test_parameters_that_were_prepared_keep_what_was_prepared_of_them(talk: Talk):
    (own,) = talk.llm.get_tokenizer().encode_texts(["no"])  # pyright: ignore[reportOptionalMemberAccess]
    processor = talk.llm.llm_engine.input_processor
    prepared = processor.prepare_params(SamplingParams(max_tokens=200, bad_words=["no"]), [own.ids] * 2)
    talk.chat(msgspec.structs.replace(prepared, extra_args='{"a": 1}'), tools=TOOLS)
    (sent,) = talk.client.engine.added
    assert sent.extra_args == '{"a": 1}'
    assert sent.token_lists == prepared.token_lists
    assert sent.purpose == "tools"
    assert sent.grammar


def test_without_tools_thoughts_are_told_apart_and_markup_of_calls_is_content(talk: Talk):
    (one,) = talk.chat().outputs
    assert one.message is not None
    assert (one.message.reasoning, one.message.tool_calls) == ("Hm.", [])
    assert "<tool_call>" in one.message.content
    assert talk.grammars == [""]


def test_a_message_ends_before_a_stop_text_as_the_text_does(talk: Talk):
    (one,) = talk.chat(SamplingParams(max_tokens=200, stop="me see")).outputs
    assert one.text == THOUGHTS + "Let "
    assert one.message is not None
    assert (one.message.content, one.message.reasoning) == ("Let ", "Hm.")


def test_a_model_that_writes_plain_text_has_no_message(talk: Talk):
    talk.take_template("{{ messages[0].content }}")
    assert talk.chat().outputs[0].message is None
    with pytest.raises(InputError, match="how this model writes calls is not known"):
        talk.chat(tools=TOOLS)


@refusals("tools_of_chats")
def test_tools_that_cannot_be_used_are_refused_by_field(talk: Talk, refusal: Refusal):
    refusal.check(lambda fields: talk.chat(**fields))
    assert not talk.grammars
