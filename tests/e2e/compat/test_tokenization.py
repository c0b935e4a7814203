"""/tokenize, /detokenize and /tokenizer_info: what the model's own files say."""

from __future__ import annotations

from typing import Any

import pytest
from quire.frontend.text.tokenizer import Tokenizer
from served import Ask

TALK = [
    {"role": "user", "content": "Hi there!"},
    {"role": "assistant", "content": "Nice to meet you!"},
    {"role": "user", "content": "Can I ask a question?"},
]
TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
}


@pytest.mark.parametrize("adds", [False, True])
def test_a_prompt_has_the_tokenizers_ids(ask: Ask, tokenizer: Tokenizer, adds: bool) -> None:
    text = "vllm1 This is a test prompt."
    told = ask("/tokenize", {"model": "pocket", "prompt": text, "add_special_tokens": adds}).json
    ids = tokenizer.encode(text, add_special_tokens=adds)
    assert told == {"count": len(ids), "max_model_len": 2048, "tokens": ids, "token_strs": None}


@pytest.mark.parametrize("adds_special", [False, True])
@pytest.mark.parametrize(("adds", "continues"), [(False, False), (True, False), (False, True)])
def test_a_conversation_has_the_ids_of_its_template(
    ask: Ask, tokenizer: Tokenizer, adds: bool, continues: bool, adds_special: bool
) -> None:
    talk = [*TALK, {"role": "assistant", "content": "Sure,"}] if continues else TALK
    text = tokenizer.apply_chat_template(
        talk, tokenize=False, add_generation_prompt=adds, continue_final_message=continues
    )
    body = {"messages": talk, "add_generation_prompt": adds, "continue_final_message": continues}
    told = ask("/tokenize", body | {"add_special_tokens": adds_special}).json
    assert told["tokens"] == tokenizer.encode(str(text), add_special_tokens=adds_special)


def test_strings_of_tokens_are_the_vocabularys(ask: Ask, tokenizer: Tokenizer) -> None:
    told = ask("/tokenize", {"prompt": "This is a token_strs test!", "return_token_strs": True}).json
    assert told["token_strs"] == [tokenizer.backend.id_to_token(one) for one in told["tokens"]]
    assert any(one.startswith("\u0120") for one in told["token_strs"])  # as a space is written there


def test_ids_become_the_text_that_they_were(ask: Ask, tokenizer: Tokenizer) -> None:
    text = "This is a test prompt. vllm1"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ask("/detokenize", {"model": "pocket", "tokens": ids}).json == {"prompt": text}


def test_the_tokenizers_settings_fit_the_model(ask: Ask) -> None:
    info: dict[str, Any] = ask("/tokenizer_info").json
    assert isinstance(info["tokenizer_class"], str)
    assert info["chat_template"].strip()
    for token in (info.get("added_tokens_decoder") or {}).values():
        assert isinstance(token["content"], str)
        assert isinstance(token["special"], bool)
    assert info.get("model_max_length", 2048) >= 2048
    assert not {"vocab_file", "merges_file"} & info.keys()
