"""What metadata become in config.json, and what of them is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from quire.frontend.models.gguf import folder
from quire.frontend.models.gguf.config import read_config
from quire.frontend.models.gguf.folder import open_gguf
from quire.frontend.models.gguf.header import GgufHeader, read_header
from quire.frontend.models.gguf.rope_scaling import make_llama3_divisors
from quire.frontend.models.gguf.tensors import name_tensors
from quire.frontend.options.engine_args import EngineArgs
from quire.frontend.text.tokenizer import load_tokenizer
from quire.ipc.errors import ModelError
from quire.ipc.spec.config import ModelConfig
from quire.ipc.spec.model_spec import RopeConfig
from refusals import Refusal, refusals

from ....gguf_files import GgufWriter
from .files import make_tiny


@pytest.fixture(autouse=True)
def _cache(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setattr(folder, "cache_folder", lambda: tmp_path / "cache")


def write(tmp_path: Path, writer: GgufWriter | None = None, **changes: object) -> GgufHeader:
    """The header of the tiny model; __ in a name stands for a dot."""
    metadata = {key.replace("__", "."): value for key, value in changes.items()}
    return read_header((writer or make_tiny(**metadata)).write(tmp_path / "model.gguf"))


def read_args(file: Path, **args: Any) -> ModelConfig:
    return EngineArgs(model=str(file), **args).create_engine_config().model


def test_a_file_is_served_like_a_folder(tmp_path: Path):
    model = read_args(write(tmp_path).file)
    assert (model.spec.architecture, model.spec.tie_word_embeddings) == ("LlamaForCausalLM", True)
    assert model.served_model_name == str(tmp_path / "model.gguf")
    assert Path(model.tokenizer, "tokenizer.json").is_file()
    ends = msgspec.json.decode(Path(model.model, "generation_config.json").read_bytes())["eos_token_id"]
    assert list(model.eos_token_ids) == ends
    assert len(ends) == 2  # <|im_end|>, and <|endoftext|>, which ends a text in every model


def test_ends_are_found_by_their_text_whatever_type_they_have(tmp_path: Path):
    writer = make_tiny()
    texts = writer.metadata["tokenizer.ggml.tokens"]
    types = writer.metadata["tokenizer.ggml.token_type"]
    types[texts.index("<|im_end|>")] = 1
    writer.metadata["tokenizer.ggml.eos_token_id"] = texts.index("<|endoftext|>")
    model = read_args(writer.write(tmp_path / "model.gguf"))
    assert set(model.eos_token_ids) == {texts.index("<|im_end|>"), texts.index("<|endoftext|>")}
    assert texts.index("<|im_end|>") in load_tokenizer(model.tokenizer).all_special_ids


@pytest.mark.parametrize(
    ("text", "type_", "other", "is_end"),
    [
        ("<|eot_id|>", 1, "word", True),
        ("<turn|>", None, "word", True),  # a file without types
        ("<|end|>", 3, "word", True),
        ("<|end|>", 3, "<|call|>", False),  # gpt-oss goes on
        ("</s>", 3, "word", True),
        ("</s>", 1, "word", False),  # a tag of HTML
    ],
)
def test_an_end_is_one_in_every_file_that_has_it(
    tmp_path: Path, text: str, type_: int | None, other: str, is_end: bool
):
    writer = make_tiny()
    texts, types = (writer.metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "token_type"))
    texts[-1], types[-1], texts[-4] = text, type_, other
    if type_ is None:
        del writer.metadata["tokenizer.ggml.token_type"]
    assert (len(texts) - 1 in read_args(writer.write(tmp_path / "model.gguf")).eos_token_ids) == is_end


def test_more_heads_than_numbers_of_a_token_are_refused(tmp_path: Path):
    writer = make_tiny(**{"llama.embedding_length": 1, "llama.attention.layer_norm_epsilon": 1e-5})
    writer.metadata = {key.replace("llama.", "gptneox."): value for key, value in writer.metadata.items()}
    writer.metadata["general.architecture"] = "gptneox"
    with pytest.raises(ModelError):
        read_args(writer.write(tmp_path / "model.gguf"))


def test_files_with_the_same_header_share_a_folder_and_others_do_not(tmp_path: Path):
    first, second = make_tiny(), make_tiny()
    second.tensors["blk.0.attn_q.weight"] = ("Q4_0", (32, 32), bytes(32 * 18))
    paths = [writer.write(tmp_path / f"{index}.gguf") for index, writer in enumerate((first, second))]
    names = [open_gguf([path]).folder.name.split("-")[-1] for path in paths]
    assert names[0] == names[1]
    other = make_tiny(**{"llama.rope.freq_base": 5000.0}).write(tmp_path / "2.gguf")
    assert not open_gguf([other]).folder.name.endswith(names[0])


def test_files_whose_ropes_alone_differ_do_not_share_a_folder(tmp_path: Path):
    """Their tables lie in the data, under the same header."""
    for factor in (8.0, 32.0):
        writer = make_tiny(**{"llama.rope.freq_base": 500000.0})
        writer.add("rope_freqs.weight", torch.tensor(make_llama3_divisors(factor, 500000.0, 16)))
        assert read_args(writer.write(tmp_path / "model.gguf")).spec.rope.factor == factor


def test_a_folder_that_has_lost_a_file_is_made_again(tmp_path: Path):
    file = write(tmp_path).file
    made = open_gguf([file]).folder
    (made / "tokenizer.json").unlink()
    assert (open_gguf([file]).folder / "tokenizer.json").is_file()


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setattr(folder, "find_base", lambda: tmp_path / "cache")
    with pytest.raises(ModelError, match=r"XDG_CACHE_HOME=.*a folder that can be written"):
        open_gguf([write(tmp_path).file])


def test_parts_of_a_split_file_are_one_model(tmp_path: Path):
    whole = make_tiny(**{"split.count": 2, "split.tensors.count": 11})
    names = list(whole.tensors)
    rest = GgufWriter({"split.no": 1}, {name: whole.tensors.pop(name) for name in names[6:]})
    files = [whole.write(tmp_path / "m-00001-of-00002.gguf"), rest.write(tmp_path / "m-00002-of-00002.gguf")]
    model = read_args(files[0])
    assert [tensor.file for tensor in model.gguf_tensors] == [0] * 6 + [1] * 5
    assert model.weight_files == tuple(map(str, files))
    del rest.tensors[names[-1]]
    rest.write(files[1])
    with pytest.raises(ModelError, match=r"split\.tensors\.count=11: expected 10, which the parts hold"):
        read_args(files[0])


def test_a_table_of_divisors_is_read_from_its_part(tmp_path: Path):
    whole = make_tiny(**{"split.count": 2, "llama.rope.freq_base": 500000.0})
    whole.add("rope_freqs.weight", torch.tensor(make_llama3_divisors(32.0, 500000.0, 16)))
    rest = GgufWriter({"split.no": 1}, dict(whole.tensors))
    whole.tensors.clear()
    files = [whole.write(tmp_path / "m-00001-of-00002.gguf"), rest.write(tmp_path / "m-00002-of-00002.gguf")]
    assert read_args(files[0]).spec.rope.type == "llama3"


def test_headers_of_all_parts_are_bounded_together(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    header = write(tmp_path)
    monkeypatch.setattr(folder, "MAX_HEADER_BYTES", 2 * header.size_bytes)
    with pytest.raises(ModelError, match=r"bytes': expected headers of at most \d+ bytes in all parts"):
        open_gguf([header.file] * 3)


def test_ropes_are_read(tmp_path: Path):
    linear = {"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 4.0}
    assert read_config(write(tmp_path, **linear))["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    yarn = linear | {
        "llama__rope__scaling__type": "yarn",
        "llama__rope__scaling__original_context_length": 16,
    }
    scaling = read_config(write(tmp_path, **yarn))["rope_scaling"]
    assert scaling == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


def test_what_a_scaling_leaves_out_is_what_llama_cpp_takes_for_it(tmp_path: Path):
    factor = {"llama__rope__scaling__factor": 4.0}
    assert read_config(write(tmp_path, **factor))["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    assert "rope_scaling" not in read_config(write(tmp_path, **factor, llama__rope__scaling__type="none"))
    yarn = factor | {"llama__rope__scaling__type": "yarn", "llama__context_length": 64}
    assert read_config(write(tmp_path, **yarn))["rope_scaling"]["original_max_position_embeddings"] == 64


def test_llama_3_s_table_of_divisors_is_its_scaling_and_another_table_is_refused(tmp_path: Path):
    writer = make_tiny(**{"llama.rope.freq_base": 500000.0})
    divisors = torch.tensor(make_llama3_divisors(32.0, 500000.0, 16))
    writer.add("rope_freqs.weight", divisors)
    spec = read_args(write(tmp_path, writer).file).spec
    assert spec.rope == RopeConfig(
        theta=500000.0,
        type="llama3",
        factor=32.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    writer.add("rope_freqs.weight", divisors * 1.1)
    with pytest.raises(ModelError, match=r"rope_freqs\.weight=.*the divisors of a Llama 3"):
        read_config(write(tmp_path, writer))
    writer.add("rope_freqs.weight", divisors)
    writer.metadata["llama.rope.scaling.factor"] = 4.0  # which llama.cpp divides by, too
    with pytest.raises(
        ModelError, match=r"rope\.scaling\.factor=4\.0: expected 1 beside the tensor rope_freqs"
    ):
        read_config(write(tmp_path, writer))
    del writer.metadata["llama.rope.scaling.factor"]
    sizes = dict.fromkeys(("attention.key_length", "attention.value_length", "rope.dimension_count"), 10_000)
    writer.metadata |= {f"llama.{key}": size for key, size in sizes.items()}
    writer.add("rope_freqs.weight", torch.ones(5000))
    with pytest.raises(ModelError, match=r"rope_freqs\.weight='F32 \[5000\]': .*of at most 4096"):
        read_config(write(tmp_path, writer))


@refusals("gguf_metadata")
def test_a_bad_or_unknown_key_is_refused_by_name(refusal: Refusal, tmp_path: Path):
    refusal.check(lambda changes: read_config(write(tmp_path, **changes)))


@pytest.mark.parametrize("key", ["attention.sliding_window", "rope.freq_base"])
def test_gemma_3_without_a_key_that_others_take_for_different_values_is_refused(key: str, tmp_path: Path):
    keys = {"attention.sliding_window": 512, "rope.freq_base": 1e6}
    tiny = make_tiny()
    shared = {name.replace("llama.", "gemma3."): value for name, value in tiny.metadata.items()}
    tiny.metadata = shared | {"general.architecture": "gemma3", **{f"gemma3.{k}": v for k, v in keys.items()}}
    config = read_config(write(tmp_path, tiny))
    assert (config["sliding_window"], config["rope_theta"]) == (512, 1e6)
    del tiny.metadata[f"gemma3.{key}"]
    with pytest.raises(ModelError, match=rf"gemma3\.{re.escape(key)}=None: expected .* \(it is missing\)"):
        read_config(write(tmp_path, tiny))


def test_keys_with_one_value_a_layer_or_that_decide_nothing_are_taken(tmp_path: Path):
    known = {
        "llama__attention__head_count_kv": [1, 1],
        "llama__vocab_size": 3,
        "llama__attention__causal": True,
    }
    assert (
        read_config(write(tmp_path, **known, llama__attention__value_length=16))["num_key_value_heads"] == 1
    )


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("blk.0.ssm_a.weight", "a tensor of llama with 1 layers"),
        ("blk.1.attn_q.weight", "a tensor of llama with 1 layers"),
        ("blk.0.attn_q.weight.x", "the name of a tensor of llama"),
        ("blk.0.ffn_norm.bias.", "the name of a tensor of llama"),
        ("output_norm.bias", "another number of dimensions"),
    ],
)
def test_a_tensor_that_the_model_does_not_have_is_refused(name: str, words: str, tmp_path: Path):
    writer = make_tiny()
    writer.add(name, torch.zeros(2, 32))
    header = write(tmp_path, writer)
    with pytest.raises(ModelError, match=words):
        name_tensors([header], read_config(header))


def test_a_vector_in_blocks_is_refused(tmp_path: Path):
    writer = make_tiny()
    writer.add_blocks("output_norm.weight", "Q8_0", (32,))
    header = write(tmp_path, writer)
    with pytest.raises(
        ModelError, match=r"Q8_0\[32\]='output_norm.weight': expected one of F32, F16, BF16 for a"
    ):
        name_tensors([header], read_config(header))
