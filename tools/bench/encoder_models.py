"""The bench's sentence encoders: shapes of well-known ones, random weights, sentence-transformers' files.

`python -m quire.tools.bench.encoder_models NAME` writes one if it is not there yet and prints its folder.
Loads torch only to write weights.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

from .model_configs import ENCODERS

_FIRST_WORD = 4  # the ids before it are special tokens
_SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
_POOLING = "sentence_transformers.models.Pooling"
_MODULES = {"": "sentence_transformers.models.Transformer", "1_Pooling": _POOLING}
_NORMALIZE = "sentence_transformers.models.Normalize"


def list_encoder_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of BERT's checkpoint with its shape, by Hugging Face's names."""
    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (config["vocab_size"], hidden),
        "embeddings.position_embeddings.weight": (config["max_position_embeddings"], hidden),
        "embeddings.token_type_embeddings.weight": (config["type_vocab_size"], hidden),
        "pooler.dense.weight": (hidden, hidden),
        "pooler.dense.bias": (hidden,),
    }
    linears = {"intermediate.dense": (ffn, hidden), "output.dense": (hidden, ffn)}
    linears["attention.output.dense"] = (hidden, hidden)
    linears |= {f"attention.self.{part}": (hidden, hidden) for part in ("query", "key", "value")}
    norms = ["embeddings.LayerNorm"]
    for layer in range(config["num_hidden_layers"]):
        at = f"encoder.layer.{layer}."
        norms += [at + "attention.output.LayerNorm", at + "output.LayerNorm"]
        for name, shape in linears.items():
            shapes |= {f"{at}{name}.weight": shape, f"{at}{name}.bias": shape[:1]}
    for name in norms:
        shapes |= {f"{name}.weight": (hidden,), f"{name}.bias": (hidden,)}
    return shapes


def make_texts(name: str, num_texts: int, low: int, high: int, contents: str) -> list[str]:
    """Texts of `low` to `high` tokens, [CLS] and [SEP] among them. Lengths depend on the numbers alone."""
    lengths, words = random.Random(f"{num_texts} {low} {high}"), random.Random(contents)
    last = ENCODERS[name]["vocab_size"] - 1
    return [
        " ".join(f"t{words.randint(_FIRST_WORD, last)}" for _ in range(lengths.randint(low, high) - 2))
        for _ in range(num_texts)
    ]


def count_tokens(text: str) -> int:
    """Tokens of a text of `make_texts`."""
    return text.count(" ") + 3


def write_encoder(config: dict[str, Any], folder: Path) -> None:
    """Write what sentence-transformers reads, with weights of a fixed seed, into a new `folder`."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.ones(shape)
        if name.endswith("LayerNorm.weight")
        else torch.empty(shape).normal_(0.0, config["initializer_range"], generator=generator)
        for name, shape in list_encoder_shapes(config).items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    modules = {**_MODULES, "2_Normalize": _NORMALIZE}
    entries = [
        {"idx": index, "name": str(index), "path": path, "type": kind}
        for index, (path, kind) in enumerate(modules.items())
    ]
    pooling = {"word_embedding_dimension": config["hidden_size"], "pooling_mode_mean_tokens": True}
    limits = {"max_seq_length": config["max_position_embeddings"], "do_lower_case": False}
    (folder / "1_Pooling").mkdir()
    files = {
        "config.json": config,
        "modules.json": entries,
        "1_Pooling/config.json": pooling | {"pooling_mode_cls_token": False},
        "sentence_bert_config.json": limits,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": config["max_position_embeddings"],
            **dict(zip(("pad_token", "unk_token", "cls_token", "sep_token"), _SPECIAL_TOKENS, strict=True)),
        },
    }
    for name, contents in files.items():
        (folder / name).write_text(json.dumps(contents))
    (folder / "tokenizer.json").write_text(_make_tokenizer(config["vocab_size"]))


def _make_tokenizer(vocab_size: int) -> str:
    """A tokenizer.json whose words are t4, t5, ... between [CLS] and [SEP]."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    names = (*_SPECIAL_TOKENS, *(f"t{token_id}" for token_id in range(_FIRST_WORD, vocab_size)))
    vocab = {name: token_id for token_id, name in enumerate(names)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.add_special_tokens(list(_SPECIAL_TOKENS))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(name, vocab[name]) for name in ("[CLS]", "[SEP]")],
    )
    return tokenizer.to_str()


def main() -> None:
    """Write the named encoders and print their folders."""
    from .models import ensure_folder

    for name in sys.argv[1:]:
        print(ensure_folder(name, lambda folder, name=name: write_encoder(ENCODERS[name], folder)))


if __name__ == "__main__":
    main()
