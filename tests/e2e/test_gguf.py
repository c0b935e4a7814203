"""Greedy tokens of GGUF files against transformers' own loading of the same files, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import Recipe, make_checkpoint
from gguf_files import GgufWriter, convert_checkpoint
from quire import LLM, SamplingParams
from quire.frontend.gguf import folder

pytest.importorskip("gguf", reason="transformers reads GGUF files with it")

# Where transformers does not read a size of the file, it is its default here. mixtral is missing: its files
# transformers does not read at all (tests/worker/test_gguf.py compares its tensors).
_WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512}
SIZES: dict[str, dict[str, Any]] = {
    "llama": {**_WIDE, "head_size": 64},
    "qwen2": {**_WIDE, "head_size": 64},
    "qwen3": {**_WIDE, "head_size": 128},
    "qwen3_moe": {"hidden_size": 256, "intermediate_size": 1536, "head_size": 64},  # half of it an expert's
    "gemma2": {**_WIDE, "head_size": 256, "tied": True, "sliding_window": 13},
}
# As in files of llama.cpp's mixed types: each of them is in every layer, next to others.
TYPES: dict[str, Any] = {
    "token_embd": "Q6_K",
    "output.": "Q5_0",
    "attn_q.": "Q4_K",
    "attn_k.": "Q4_K",
    "attn_v.": "Q6_K",
    "attn_output": "Q5_K",
    "ffn_gate": "Q4_0",
    "ffn_up": "Q4_1",
    "ffn_down": "Q8_0",
}
PROMPTS = [[5, 9, 100, 3, 77], list(range(10, 60)), [7]]
NUM_TOKENS = 24


def quantize(writer: GgufWriter) -> GgufWriter:
    """Random blocks in the place of its matrices."""
    for seed, (name, (_, shape, _)) in enumerate(list(writer.tensors.items())):
        type_ = next((type_ for part, type_ in TYPES.items() if part in name), None)
        if type_ is not None and len(shape) > 1 and "norm" not in name and "inp" not in name:
            writer.add_blocks(name, type_, shape, seed)
    return writer


def generate_with_transformers(file: Path) -> list[list[int]]:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    with torch.inference_mode():
        outs = [
            model.generate(
                torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None
            )
            for prompt in PROMPTS
        ]
    return [out[0, len(prompt) :].tolist() for out, prompt in zip(outs, PROMPTS, strict=True)]


@pytest.mark.parametrize("family", SIZES)
def test_tokens_are_those_of_transformers(family: str, tmp_path: Path, monkeypatch: Any):
    monkeypatch.setattr(folder, "cache_folder", lambda: tmp_path / "cache")
    make_checkpoint(tmp_path / "plain", Recipe(family=family, vocab_size=512, **SIZES[family]))
    writer = quantize(convert_checkpoint(tmp_path / "plain"))
    if family == "gemma2":
        writer.metadata |= {"gemma2.attn_logit_softcapping": 50.0, "gemma2.final_logit_softcapping": 30.0}
    file = writer.write(tmp_path / "model.gguf")
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
    arguments: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 128}
    with LLM(str(file), distributed_executor_backend="uni", **arguments) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == generate_with_transformers(file)
