"""Tokenizer agrees with transformers on encoding, decoding, special tokens and chat text."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from quire.frontend.formats.known_formats import choose_output_format
from quire.frontend.models.model_folder import pocket_folder
from quire.frontend.text.tokenizer import Tokenizer, load_tokenizer
from quire.frontend.tools import Tool
from quire.ipc.errors import ModelError
from refusals import Refusal, refusals
from tokenizers import Tokenizer as Backend
from tokenizers import decoders

TEXTS = [
    "hello world",
    " leading and  double spaces ",
    "the fox, the fox.",
    "naïve café 你好 😀",
    "a<|im_end|>b <s>c</s>",
    "line\nbreak\ttab",
    "<think>hm",
]


def oracle_of(folder: Path) -> Any:
    import transformers

    return transformers.PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.fixture(params=["byte_level", "metaspace", "pocket"])
def folder(request: pytest.FixtureRequest) -> Path:
    if request.param == "pocket":
        return pocket_folder()
    return request.getfixturevalue(f"{request.param}_folder")


@pytest.mark.parametrize("text", TEXTS)
def test_encoding_and_decoding_equal_transformers(folder: Path, text: str):
    ours, oracle = load_tokenizer(folder), oracle_of(folder)
    for add_special_tokens in (True, False):
        ids = ours.encode(text, add_special_tokens)
        assert ids == oracle.encode(text, add_special_tokens=add_special_tokens)
        assert ours.encode_batch([text, text], add_special_tokens) == [ids, ids]
        for skip in (True, False):
            assert ours.decode(ids, skip) == oracle.decode(ids, skip_special_tokens=skip)


def test_special_tokens_equal_transformers(folder: Path):
    ours, oracle = load_tokenizer(folder), oracle_of(folder)
    assert len(ours) == len(oracle)
    assert (ours.bos_token, ours.bos_token_id) == (oracle.bos_token, oracle.bos_token_id)
    assert (ours.eos_token, ours.eos_token_id) == (oracle.eos_token, oracle.eos_token_id)
    assert set(oracle.all_special_ids) <= ours.all_special_ids
    for name, text in oracle.special_tokens_map.items():
        if isinstance(text, str):
            assert ours.special_tokens[name] == text


@pytest.mark.parametrize(
    "flags",
    [
        {"add_bos_token": True},
        {"add_bos_token": False},
        {"add_bos_token": True, "add_eos_token": True},
        {"add_eos_token": True, "bos_token": {"__type": "AddedToken", "content": "<bos>", "special": True}},
        {"eos_token": "<new-end>", "additional_special_tokens": ["<extra>"]},
        {"added_tokens_decoder": {"900": {"content": "<late>", "special": True, "lstrip": True}}},
    ],
    ids=str,
)
def test_what_the_tokenizer_config_adds_is_added_as_in_transformers(
    metaspace_folder: Path, tmp_path: Path, flags: dict[str, Any]
):
    for file in metaspace_folder.iterdir():
        shutil.copy(file, tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text()) | flags
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours, oracle = load_tokenizer(tmp_path), oracle_of(tmp_path)
    for text in ("hello world", "a <extra> b", "x<new-end> y", "z <late>"):
        ids = oracle.encode(text)
        assert ours.encode(text) == ids
        assert ours.decode(ids, True) == oracle.decode(ids, skip_special_tokens=True)


def test_truncation_and_padding_in_the_file_are_turned_off(byte_level_folder: Path, tmp_path: Path):
    content = json.loads((byte_level_folder / "tokenizer.json").read_text())
    content["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert len(load_tokenizer(tmp_path).encode("the quick brown fox jumps")) > 2


def test_the_text_of_one_token_is_decoded_alone(metaspace: Tokenizer):
    fox = metaspace.encode("fox", add_special_tokens=False)[0]
    assert metaspace.token_text(fox) == "fox"
    assert metaspace.token_text(1) == "<s>"


@pytest.mark.parametrize(
    "steps",
    [
        [decoders.ByteFallback(), decoders.Fuse(), decoders.Metaspace()],
        [decoders.BPEDecoder(), decoders.ByteFallback()],
        [decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 0, 1)],
    ],
    ids=["spaces last", "suffixes", "end"],
)
def test_bytes_that_would_not_become_characters_are_refused(
    steps: list[decoders.Decoder], metaspace_folder: Path, tmp_path: Path
):
    backend = Backend.from_file(str(metaspace_folder / "tokenizer.json"))
    backend.decoder = decoders.Sequence(steps)
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelError, match=r"tokenizer\.json decoder=.*followed token by token"):
        load_tokenizer(tmp_path)


def test_a_missing_tokenizer_names_the_file(tmp_path: Path):
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_an_unreadable_tokenizer_is_a_model_error(tmp_path: Path):
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


@refusals("tokenizer_config")
def test_what_cannot_be_followed_is_refused_by_file_and_field(
    refusal: Refusal, byte_level_folder: Path, tmp_path: Path
):
    def load(config: dict[str, Any]) -> Tokenizer:
        shutil.copy(byte_level_folder / "tokenizer.json", tmp_path)
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        return load_tokenizer(tmp_path)

    refusal.check(load)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"])
def test_a_fifo_in_a_files_place_is_refused_by_name(name: str, byte_level_folder: Path, tmp_path: Path):
    shutil.copy(byte_level_folder / "tokenizer.json", tmp_path)
    os.mkfifo(tmp_path / name)
    with pytest.raises(ModelError, match=rf"{name}.*a regular file"):
        load_tokenizer(tmp_path)
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to("gone")
    with pytest.raises(ModelError, match=rf"{name}.*a link to a file that is there"):
        load_tokenizer(tmp_path)


def test_the_jinja_file_wins_over_the_config(byte_level_folder: Path, tmp_path: Path):
    for file in byte_level_folder.iterdir():
        shutil.copy(file, tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "listed"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": named}))
    messages = [{"role": "user", "content": "hi"}]
    assert load_tokenizer(tmp_path).render_chat(messages) == "listed"
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }} from a file")
    assert load_tokenizer(tmp_path).render_chat(messages) == "hi from a file"


def test_a_template_for_tools_renders_conversations_with_tools(byte_level_folder: Path, tmp_path: Path):
    for file in byte_level_folder.iterdir():
        shutil.copy(file, tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    with_tools = "{{ tools }} {{ messages }}<tool_call>"
    named = [{"name": "tool_use", "template": with_tools}, {"name": "default", "template": "plain"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": named}))
    messages: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}

    def check(plain: str) -> None:
        tokenizer = load_tokenizer(tmp_path)
        template = tokenizer.find_chat_template()
        assert template.render(messages) == plain
        assert "lookup" in template.render(messages, tools=[Tool("lookup")])
        assert "'name': 'f'" in template.render([*messages, {"role": "assistant", "tool_calls": [call]}])
        output_format = choose_output_format(tokenizer)
        assert output_format is not None
        assert output_format.name == "hermes"

    check("plain")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "chat_template.jinja").write_text("a file")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(with_tools)
    check("a file")


def test_a_model_without_a_template_needs_one_from_the_caller(byte_level: Tokenizer):
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(ModelError, match="chat_template"):
        byte_level.render_chat(messages)
    assert byte_level.render_chat(messages, "{{ messages[0].role }}") == "user"


def test_apply_chat_template_speaks_transformers_dialect():
    ours, oracle = load_tokenizer(pocket_folder()), oracle_of(pocket_folder())
    messages = [{"role": "user", "content": "What is 2 plus 3?"}, {"role": "assistant", "content": "5"}]
    for prompt in (True, False):
        expected = oracle.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        assert ours.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt) == expected
    ids = oracle.apply_chat_template(messages, tokenize=True, return_dict=False)
    assert ours.apply_chat_template(messages) == ids


@pytest.mark.parametrize("name", ["byte_level", "metaspace"])
@pytest.mark.parametrize("adds", [False, True])
def test_long_texts_have_the_ids_of_the_librarys_slower_call(
    name: str, adds: bool, request: pytest.FixtureRequest
):
    tokenizer: Tokenizer = request.getfixturevalue(name)
    text = "the quick \u00e9\U0001f600 fox<|im_end|> </s>\n " * 200
    ids = tokenizer.backend.encode(text, add_special_tokens=adds).ids
    assert tokenizer.encode(text, adds) == ids
    (encoding,) = tokenizer.encode_texts([text], adds)
    assert (len(encoding), encoding.ids) == (len(ids), ids)


def test_ids_are_the_same_where_the_library_starts_no_threads(
    byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    without = Tokenizer(byte_level.backend, {}, None)
    text = "the quick \u00e9\U0001f600 fox<|im_end|> </s>"
    assert without.encode(text) == byte_level.encode(text)
    assert without._locked_length == 0 < byte_level._locked_length
