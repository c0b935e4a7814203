"""Which tokens end an answer: the union of a checkpoint's files, whatever they were made from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from quire.frontend.models.model_folder import pocket_folder
from quire.frontend.options.engine_args import EngineArgs
from quire.frontend.text.end_tokens import describe_ends, read_eos_token_id
from quire.frontend.text.tokenizer import load_tokenizer

TEXT, TURN = "<|endoftext|>", "<|im_end|>"  # tokens 0 and 2


def make_folder(folder: Path, config: Any, generation: Any, tokenizer: Any) -> str:
    """The pocket model with these ends; None: the file does not say."""
    shutil.copytree(pocket_folder(), folder, dirs_exist_ok=True)
    (folder / "special_tokens_map.json").unlink()
    files = {
        "config.json": ("eos_token_id", config),
        "generation_config.json": ("eos_token_id", generation),
        "tokenizer_config.json": ("eos_token", tokenizer),
    }
    for name, (key, value) in files.items():
        values = json.loads((folder / name).read_text()) | {key: value}
        (folder / name).write_text(json.dumps(values))
    return str(folder)


def find_ends(model: str, **args: Any) -> set[int]:
    return set(EngineArgs(model=model, **args).create_engine_config().model.eos_token_ids)


@pytest.mark.parametrize(
    ("config", "generation", "tokenizer", "expected"),
    [
        (0, [0], TURN, {0, 2}),
        (0, None, TURN, {0, 2}),
        (0, [0, 2], TEXT, {0, 2}),
        (None, None, TURN, {2}),
        (0, [0], TEXT, {0}),  # the template closes turns by <|im_end|>, which alone ends nothing
        (0, 2, None, {0, 2}),
        (-1, None, {"content": TURN, "special": True}, {2}),
        (None, None, None, {2}),  # nothing is named: the template's end of a turn
        (-1, [99999], None, {2}),
    ],
)
def test_ends_are_those_of_all_files(
    tmp_path: Path, config: Any, generation: Any, tokenizer: Any, expected: set[int]
):
    assert find_ends(make_folder(tmp_path, config, generation, tokenizer)) == expected


def test_an_end_of_turn_need_not_be_special(tmp_path: Path):
    model = Path(make_folder(tmp_path, None, None, None))
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    turn = next(token for token in tokenizer["added_tokens"] if token["content"] == TURN)
    turn["special"] = False
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    (model / "tokenizer_config.json").write_text(
        json.dumps(
            {"chat_template": json.loads((model / "tokenizer_config.json").read_text())["chat_template"]}
        )
    )
    assert find_ends(str(model)) == {2}


ROLES = "{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}"
# By model: the tokens that its files may name, its template's turns, and what ends an answer by the template.
VOCABULARIES = {
    "gpt-oss": (
        ("<|return|>", "<|call|>", "<|end|>"),
        "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}"
        "{{ '<|return|>' if loop.last and m.role == 'assistant' else '<|end|>' }}{% endfor %}",
        "<|return|>",
    ),
    "llama 3": (
        ("<|end_of_text|>", "<|eot_id|>", "<|eom_id|>"),
        f"{ROLES}<|eot_id|>{{% endfor %}}",
        "<|eot_id|>",
    ),
    "phi": (("<|endoftext|>", "<|end|>", "<|assistant|>"), f"{ROLES}<|end|>\n{{% endfor %}}", "<|end|>"),
    "gemma": (
        ("<eos>", "<start_of_turn>", "<end_of_turn>"),
        "{% for message in messages %}<start_of_turn>{{ message.role }}\n{{ message.content | trim }}"
        "<end_of_turn>\n{% endfor %}",
        "<end_of_turn>",
    ),
    "glm": (("<|endoftext|>", "<|user|>", "<|observation|>"), f"{ROLES}{{% endfor %}}", "<|user|>"),
}


@pytest.mark.parametrize("model", VOCABULARIES)
def test_ends_are_found_in_the_vocabulary_of_a_family(tmp_path: Path, model: str):
    texts, template, turn_end = VOCABULARIES[model]
    folder = Path(make_folder(tmp_path, None, None, None))
    tokenizer = (folder / "tokenizer.json").read_text()
    for number, text in enumerate((TEXT, "<|im_start|>", TURN)):
        tokenizer = tokenizer.replace(f'"{text}"', f'"token {number}"')
    for number, text in enumerate(texts):
        tokenizer = tokenizer.replace(f'"token {number}"', f'"{text}"')
    (folder / "tokenizer.json").write_text(tokenizer)
    (folder / "chat_template.jinja").write_text(template)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("added_tokens_decoder", None)

    def name_ends(eos_token: str | None, generation: list[int] | None) -> set[int]:
        (folder / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": eos_token}))
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
        return find_ends(str(folder))

    assert name_ends(None, None) == {texts.index(turn_end)}
    assert name_ends(texts[0], [1, 2]) == {0, 1, 2}
    assert name_ends(texts[2], [1]) == {1, 2}


def test_without_ends_and_template_nothing_ends_an_answer(tmp_path: Path):
    model = make_folder(tmp_path, None, None, None)
    plain = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
    assert find_ends(model, chat_template=plain) == set()
    assert find_ends(model, skip_tokenizer_init=True) == set()
    assert describe_ends(None, []) == "nothing: an answer runs to max_tokens"


def test_a_tokenizer_of_another_folder_says_what_ends(tmp_path: Path):
    tokenizer = make_folder(tmp_path / "tokenizer", None, None, TURN)
    model = make_folder(tmp_path / "model", 0, None, TEXT)
    assert find_ends(model, tokenizer=tokenizer) == {0, 2}


def test_the_end_is_the_one_that_the_tokenizer_has_when_it_is_loaded(tmp_path: Path):
    for token in (TURN, TEXT, None, "a", "a token of its own"):
        folder = make_folder(tmp_path, None, None, token)
        assert read_eos_token_id(folder) == load_tokenizer(folder).eos_token_id


def test_ends_are_told_by_their_text():
    assert describe_ends(load_tokenizer(pocket_folder()), [2, 0]) == f"'{TURN}' (2), '{TEXT}' (0)"
    assert describe_ends(None, range(12)) == "0, 1, 2, 3, 4, 5, 6, 7 and 4 more"
