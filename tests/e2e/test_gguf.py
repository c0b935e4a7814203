"""Greedy tokens of GGUF files against transformers' own loading of the same files, in float32."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import Recipe, make_checkpoint
from gguf_files import add_vocabulary, convert_checkpoint, fill_with_blocks
from quire import LLM, SamplingParams, StructuredOutputsParams
from quire.frontend.models.gguf import folder
from quire.frontend.models.model_folder import pocket_folder
from quire.ipc.files.private_cache import lock_to_remove

# Where transformers does not read a size of the file, it is its default here. mixtral and gemma are missing:
# their files transformers does not read (tests/worker/weights/test_gguf.py compares their tensors).
_WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512}
SIZES: dict[str, dict[str, Any]] = {
    "llama": {**_WIDE, "head_size": 64},
    "qwen2": {**_WIDE, "head_size": 64},
    "qwen3": {**_WIDE, "head_size": 128},
    "qwen3_moe": {"hidden_size": 256, "intermediate_size": 1536, "head_size": 64},  # half of it an expert's
    "phi3": {**_WIDE, "head_size": 64},
    "gemma2": {**_WIDE, "head_size": 256, "tied": True, "sliding_window": 13},
    "gemma3_text": {**_WIDE, "head_size": 256, "tied": True, "sliding_window": 13, "num_layers": 7},
}
USUAL = ("llama", "qwen3_moe", "gemma3_text")  # of the others test_gguf.py of the worker compares tensors
PROMPTS = [[5, 9, 100, 3, 77], list(range(10, 60)), [7]]
NUM_TOKENS = 24


@pytest.fixture(autouse=True)
def _cache(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setattr(folder, "cache_folder", lambda: tmp_path / "cache")


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


@pytest.mark.parametrize(
    "family", [pytest.param(one, marks=[] if one in USUAL else [pytest.mark.slow]) for one in SIZES]
)
def test_tokens_are_those_of_transformers(family: str, tmp_path: Path):
    for library in ("gguf", "accelerate"):
        pytest.importorskip(library, reason="transformers reads GGUF files with it")
    make_checkpoint(tmp_path / "plain", Recipe(family=family, vocab_size=512, **SIZES[family]))
    writer = fill_with_blocks(convert_checkpoint(tmp_path / "plain"))
    if family == "phi3":  # whose default is beyond the table
        writer.metadata["tokenizer.ggml.padding_token_id"] = 0
    if family == "gemma2":
        writer.metadata |= {"gemma2.attn_logit_softcapping": 50.0, "gemma2.final_logit_softcapping": 30.0}
    if family == "gemma3_text":
        writer.metadata |= {
            "gemma3.attention.sliding_window_pattern": 6,
            "gemma3.rope.freq_base_swa": 10000.0,
        }
    file = writer.write(tmp_path / "model.gguf")
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
    arguments: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 128}
    with LLM(str(file), distributed_executor_backend="uni", **arguments) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == generate_with_transformers(file)


def test_a_file_with_its_vocabulary_is_all_that_is_needed(tmp_path: Path):
    """Through all processes: text, chat template, what ends an answer, a grammar, and a worker that is lost.

    The folder beside it names that end only in its tokenizer's files, the GGUF file only by its text.
    """
    writer = add_vocabulary(convert_checkpoint(pocket_folder(), "BF16"), pocket_folder())
    writer.metadata["tokenizer.ggml.eos_token_id"] = 0
    file = writer.write(tmp_path / "pocket.gguf")
    plain = Path(shutil.copytree(pocket_folder(), tmp_path / "plain"))
    ends = {"config": {"eos_token_id": -1}, "generation_config": {"eos_token_id": [99999]}}
    for name, end in (ends | {"tokenizer_config": {"eos_token": "<|im_end|>"}}).items():
        values = json.loads((plain / f"{name}.json").read_text()) | end
        (plain / f"{name}.json").write_text(json.dumps(values))
    question = [{"role": "user", "content": "Who are you?"}]
    schema = StructuredOutputsParams(json={"type": "object", "properties": {"a": {"type": "integer"}}})
    greedy, whole = (SamplingParams(temperature=0, max_tokens=most) for most in (12, 120))
    constrained = SamplingParams(temperature=0, max_tokens=24, structured_outputs=schema)
    answers: list[list[str]] = []
    for model, backend in ((str(file), "mp"), (str(plain), "uni")):
        with LLM(model, dtype="bfloat16", max_model_len=256, distributed_executor_backend=backend) as llm:
            outputs = llm.chat(question, constrained, use_tqdm=False)
            if backend == "mp":
                assert llm.llm_engine.facts.weights == "gguf BF16"
                with lock_to_remove(Path(llm.llm_engine.facts.model)) as is_free:
                    assert not is_free  # as long as the engine serves it
                os.kill(llm.llm_engine.facts.pids["worker"], signal.SIGKILL)
            outputs += llm.generate(["Once upon"], greedy, use_tqdm=False)
            outputs += llm.chat(question, whole, use_tqdm=False)
            assert outputs[-1].outputs[0].finish_reason == "stop"
            assert outputs[-1].outputs[0].token_ids[-1] == 2
            answers.append([output.outputs[0].text for output in outputs])
    assert answers[0] == answers[1]
    assert all(answers[0])
