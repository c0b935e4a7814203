"""Texts and pairs to token ids: special tokens, types and cuts as transformers' tokenizers have them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from frontend_fakes import write_byte_level_folder, write_encoder_folder
from quire.frontend.requests.prompts import Truncation
from quire.frontend.requests.vectors.encoder import ModelTexts, TextEncoder, TextPair, read_model_texts
from quire.frontend.text.tokenizer import load_tokenizer
from quire.ipc.errors import InputError, PromptError
from transformers import PreTrainedTokenizerFast

TEXTS = ["the quick brown fox", "Hello world, this is a small text!", "fox", "a little dog " * 9]
PAIRS = [TextPair(first, second) for first in TEXTS[:3] for second in TEXTS]


@pytest.fixture(scope="module", params=["bert", "roberta"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder_folder(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def encoder(folder: Path) -> TextEncoder:
    return TextEncoder(load_tokenizer(folder), ModelTexts())


@pytest.fixture(scope="module")
def judge(folder: Path) -> Any:
    return PreTrainedTokenizerFast.from_pretrained(folder)


def find_type_start(types: list[int]) -> int | None:
    return types.index(1) if 1 in types else None


@pytest.mark.parametrize("most", [None, 40, 12, 5])
@pytest.mark.parametrize("side", ["right", "left"])
def test_texts_are_cut_as_transformers_cuts_them(
    encoder: TextEncoder, judge: Any, most: int | None, side: str
):
    cut = None if most is None else Truncation(most, side == "right")
    judge.truncation_side = side
    expected = judge(TEXTS, truncation=most is not None, max_length=most)["input_ids"]
    found = encoder.encode_texts([""] * len(TEXTS), TEXTS, cut)
    assert [list(one.token_ids) for one in found] == expected
    assert {one.type_start for one in found} == {None}


@pytest.mark.parametrize("most", [None, 60, 24])
def test_of_pairs_the_second_text_alone_is_cut(encoder: TextEncoder, judge: Any, most: int | None):
    pairs = [one for one in PAIRS if one.query == TEXTS[0]]
    judge.truncation_side = "right"
    expected = judge(
        [one.query for one in pairs],
        [one.document for one in pairs],
        truncation="only_second" if most else False,
        max_length=most,
        return_token_type_ids=True,
    )
    found = encoder.encode_pairs(
        [""] * len(pairs), pairs, None if most is None else Truncation(most, keeps_start=True)
    )
    assert [list(one.token_ids) for one in found] == expected["input_ids"]
    assert [one.type_start for one in found] == [find_type_start(one) for one in expected["token_type_ids"]]


def test_a_query_that_leaves_no_room_is_refused_with_both_numbers(encoder: TextEncoder):
    with pytest.raises(
        PromptError, match=r"data_2\[3\]='at least \d+ tokens': expected at most 6, of which \d+ are not"
    ):
        encoder.encode_pairs(["data_2[3]"], [TextPair(TEXTS[1], "fox")], Truncation(6, keeps_start=True))
    with pytest.raises(
        PromptError, match="prompt='at least 3 tokens': expected at most 2, of which 2 are not"
    ):
        encoder.encode_texts(["prompt"], ["the fox"], Truncation(2))


def test_qwen3s_template_is_that_of_its_model_card(tmp_path: Path):
    tokenizer = load_tokenizer(write_byte_level_folder(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    encoder = TextEncoder(tokenizer, read_model_texts(tmp_path))
    body = "<Instruct>: find\n<Query>: a fox?\n<Document>: the quick brown fox"
    text = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the "
        'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
        f"{body}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    pair = TextPair("a fox?", "the quick brown fox")
    (found,) = encoder.encode_pairs(["x"], [pair], None, "find")
    assert tokenizer.decode(list(found.token_ids)) == text
    assert found.type_start is None
    (cut,) = encoder.encode_pairs(["x"], [pair], Truncation(len(found.token_ids) - 2), "find")
    last = tokenizer.decode(tokenizer.encode(body)[-2:])
    assert tokenizer.decode(list(cut.token_ids)) == text.replace(f"{last}<|im_end|>", "<|im_end|>")
    (plain,) = encoder.encode_pairs(["x"], [pair], None)
    assert "<Instruct>: Given a web search query, retrieve" in tokenizer.decode(list(plain.token_ids))
    with pytest.raises(PromptError, match="x='at least"):
        encoder.encode_pairs(["x"], [pair], Truncation(20))


def test_other_models_take_no_instruction(encoder: TextEncoder):
    with pytest.raises(PromptError, match="instruction='find': expected absent: this model takes none"):
        encoder.encode_pairs(["x"], [TextPair("a", "b")], None, "find")


def test_a_cross_encoders_default_prompt_is_before_its_queries(folder: Path, tmp_path: Path):
    settings = {"model_type": "CrossEncoder", "prompts": {"q": "the "}, "default_prompt_name": "q"}
    file = tmp_path / "config_sentence_transformers.json"
    file.write_text(json.dumps(settings))
    tokenizer = load_tokenizer(folder)
    encoder = TextEncoder(tokenizer, read_model_texts(tmp_path))
    (found,) = encoder.encode_pairs(["x"], [TextPair("fox", "dog")], None)
    (expected,) = tokenizer.encode_pairs([("the fox", "dog")])
    assert found.token_ids == expected.ids
    file.write_text(json.dumps(settings | {"model_type": "SentenceTransformer"}))
    assert read_model_texts(tmp_path).pair_prompt == ""


@pytest.mark.parametrize("names", [["input_ids", "token_type_ids"], ["input_ids", "attention_mask"]])
def test_types_are_told_to_models_whose_tokenizer_lists_them(folder: Path, tmp_path: Path, names: list[str]):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_input_names": names}))
    pair = TextPair("the fox", "the dog")
    encoded = PreTrainedTokenizerFast.from_pretrained(tmp_path)(*pair)
    (found,) = TextEncoder(load_tokenizer(tmp_path), ModelTexts()).encode_pairs(["x"], [pair], None)
    assert found.type_start == find_type_start(encoded.get("token_type_ids", []))


def test_texts_are_prepared_as_sentence_transformers_does(folder: Path, tmp_path: Path):
    config = {"model_type": "bert", "id2label": {"1": "no", "0": "yes"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    written = {"prompts": {"query": "Query: ", "document": ""}, "default_prompt_name": "query"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(written))
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"do_lower_case": True}))
    prefix = "sentence_transformers.models."
    modules = [{"type": f"{prefix}Transformer"}, {"type": f"{prefix}Pooling", "path": "Pooling"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    texts = read_model_texts(tmp_path)
    encoder = TextEncoder(load_tokenizer(folder), texts)
    assert encoder.prepare(" The FOX ", texts.find_prompt()) == "query:  the fox "
    assert encoder.prepare("Fox", texts.find_prompt("document")) == "fox"
    assert texts.find_prompt(text="of mine: ") == "of mine: "
    assert texts.labels == ("yes", "no")
    with pytest.raises(InputError, match=r"='quary': .* 'query', 'document', did you mean 'query'"):
        texts.find_prompt("quary")
    (tmp_path / "Pooling").mkdir()
    (tmp_path / "Pooling" / "config.json").write_text(json.dumps({"include_prompt": False}))
    texts = read_model_texts(tmp_path)
    assert texts.find_prompt("document") == ""
    with pytest.raises(
        InputError, match="prompt='Query: ': expected '': this model pools a text without its prompt"
    ):
        texts.find_prompt()
