"""Writes the bench's checkpoints: random weights of a fixed seed in Hugging Face's layout.

`python -m quire.tools.bench.models NAME` writes one if it is not there yet and prints its folder. A model is
a config.json: transformers makes the weights. Generators have bfloat16 weights; encoders have float32 and
the files that sentence-transformers reads.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from .model_configs import BENCH_MODELS, DUMMY_MODELS, ENCODERS, is_encoder

_LAYOUT_VERSION = 2  # raise it when a checkpoint's contents change: the folders are cached by it
_SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")  # an encoder's
_SENTENCE_MODULES = (("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize"))


def ensure_model(name: str, cache_folder: Path | None = None) -> Path:
    """The folder of the bench model `name`, written first if it is not there (small: 1.2 GB, about 20 s)."""
    folder = (cache_folder or _find_cache_folder()) / f"{name}-v{_LAYOUT_VERSION}"
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Written beside its place and renamed, so that a run that was cut off leaves no half checkpoint there.
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{name}-") as scratch:
        part = Path(scratch) / "model"
        write_checkpoint((BENCH_MODELS | DUMMY_MODELS | ENCODERS)[name], part, name not in DUMMY_MODELS)
        try:
            part.rename(folder)
        except OSError:  # another run was faster
            if not folder.exists():
                raise
    return folder


def _find_cache_folder() -> Path:
    """`$XDG_CACHE_HOME/quire/bench`, or the same under ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quire" / "bench"


def write_checkpoint(config: dict[str, Any], folder: Path, has_weights: bool = True) -> None:
    """Write a model with what loads it into a new `folder`."""
    if has_weights:
        _write_weights(config, folder)
    files: dict[str, Any] = {"config.json": config, "tokenizer_config.json": _make_tokenizer_config(config)}
    if is_encoder(config):
        files |= _make_sentence_files(config)
    for name, contents in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(contents, indent=2) + "\n")
    (folder / "tokenizer.json").write_text(_make_tokenizer(config))


def _write_weights(config: dict[str, Any], folder: Path) -> None:
    import torch
    import transformers

    torch.manual_seed(0)
    kind = transformers.AutoModel if is_encoder(config) else transformers.AutoModelForCausalLM
    known = transformers.AutoConfig.for_model(**config)
    dtype = torch.float32 if is_encoder(config) else torch.bfloat16
    kind.from_config(known, dtype=dtype).save_pretrained(folder)  # its config.json is replaced by ours


def _make_tokenizer_config(config: dict[str, Any]) -> dict[str, Any]:
    kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if not is_encoder(config):
        return kind | {"eos_token": "t2", "bos_token": "t1"}
    roles = ("pad_token", "unk_token", "cls_token", "sep_token")
    limits = {"model_max_length": config["max_position_embeddings"]}
    return kind | limits | dict(zip(roles, _SPECIAL_TOKENS, strict=True))


def _make_sentence_files(config: dict[str, Any]) -> dict[str, Any]:
    """What sentence-transformers reads beside the rest: the mean of all tokens, normalised."""
    pooling = {"word_embedding_dimension": config["hidden_size"], "pooling_mode_mean_tokens": True}
    return {
        "modules.json": [
            {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{name}"}
            for index, (name, path) in enumerate(_SENTENCE_MODULES)
        ],
        "1_Pooling/config.json": pooling | {"pooling_mode_cls_token": False},
        "sentence_bert_config.json": {
            "max_seq_length": config["max_position_embeddings"],
            "do_lower_case": False,
        },
    }


def _make_tokenizer(config: dict[str, Any]) -> str:
    """A tokenizer.json whose words are t0, t1, ...; an encoder's first are special."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    special = _SPECIAL_TOKENS if is_encoder(config) else ()
    names = (*special, *(f"t{token_id}" for token_id in range(len(special), config["vocab_size"])))
    vocab = {name: token_id for token_id, name in enumerate(names)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=names[1 if special else 0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if special:
        tokenizer.add_special_tokens(list(special))
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[(name, vocab[name]) for name in ("[CLS]", "[SEP]")],
        )
    return tokenizer.to_str()


if __name__ == "__main__":
    for model_name in sys.argv[1:]:
        print(ensure_model(model_name))
