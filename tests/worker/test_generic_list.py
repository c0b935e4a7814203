"""Which decoders of transformers 5.24 are served by its own code, each in tiny against transformers itself.

A decoder equals it or is refused, and none answers wrong. A few of them are in the default suite.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from generic_checkpoints import make_generic_checkpoint, make_tiny_config
from paged import PagedRun
from quire.frontend.models import generic
from quire.ipc.errors import ModelError
from quire.worker.models.decoder import Decoder
from quire.worker.models.generic.load import load_generic
from quire.worker.models.generic.plan import answer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

LENGTHS = {"long": 45, "short": 21}
TOLERANCE = 1e-4  # of the largest logit; all but Gemma 4, whose scores are not scaled, are within 1e-5
# By model_type: sizes of its own for one that equals transformers, words of its refusal for another.
LIST: dict[str, dict[str, Any] | str] = json.loads(
    (Path(__file__).parents[1] / "golden" / "generic_decoders.json").read_bytes()
)
EQUAL = {name: sizes for name, sizes in LIST.items() if isinstance(sizes, dict)}
REFUSED = {name: words for name, words in LIST.items() if isinstance(words, str)}
# In the default suite: one of each way to be covered or refused.
USUAL = {"mimo_v2_flash", "diffllama", "deepseek_v3", "gpt2", "bart", "jamba", "gpt_neox", "gemma2"}


# Those that are a native program; the others' steps are transformers' code.
PROGRAMS = {
    "arcee",
    "biogpt",
    "codegen",
    "cwm",
    "ernie4_5",
    "exaone",
    "exaone4",
    "gemma",
    "gemma2",
    "gemma3_text",
    "glm",
    "glm4",
    "gpt-sw3",
    "gpt2",
    "gpt_bigcode",
    "gpt_neox",
    "gptj",
    "granite",
    "granite_swa",
    "helium",
    "hunyuan_v1_dense",
    "hyperclovax",
    "internlm3",
    "iquestcoder",
    "jais2",
    "llama",
    "ministral",
    "ministral3",
    "mistral",
    "moshi",
    "olmo",
    "olmo2",
    "olmo3",
    "opt",
    "phi",
    "phi3",
    "qwen2",
    "qwen3",
    "seed_oss",
    "smollm3",
    "stablelm",
    "starcoder2",
    "vaultgemma",
}


def list_usual(names: dict[str, Any]) -> list[Any]:
    return [pytest.param(name, marks=[] if name in USUAL else [pytest.mark.slow]) for name in names]


def test_the_list_has_every_decoder_but_those_of_towers() -> None:
    assert len(EQUAL) >= 80
    assert LIST.keys() <= set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


@pytest.mark.parametrize("model_type", list_usual(EQUAL))
def test_logits_equal_transformers(model_type: str, tmp_path: Path) -> None:
    checkpoint = make_generic_checkpoint(tmp_path, model_type, **EQUAL[model_type])
    config = checkpoint.engine_config()
    model = load_generic(config, torch.device("cpu"))
    assert isinstance(model, Decoder) == (model_type in PROGRAMS)
    generator = torch.Generator().manual_seed(1)
    prompts = {
        name: torch.randint(3, config.model.spec.vocab_size, (length,), generator=generator).tolist()
        for name, length in LENGTHS.items()
    }
    for chunk in (7, 64):
        run, parts = PagedRun(model, config), {name: list[torch.Tensor]() for name in prompts}
        for name, tokens in prompts.items():
            run.add(name, tokens)
        for first in range(0, max(LENGTHS.values()), chunk):
            step = {name: min(chunk, length - first) for name, length in LENGTHS.items() if first < length}
            for name, logits in run.step(step).items():
                parts[name].append(logits)
        for name, tokens in prompts.items():
            expected = checkpoint.compute_reference(tokens)
            atol = TOLERANCE * expected.abs().max().item()
            torch.testing.assert_close(torch.cat(parts[name]), expected, rtol=0, atol=atol)


@pytest.mark.parametrize("model_type", list_usual(REFUSED))
def test_what_cannot_be_served_is_refused_with_a_reason_and_what_to_do(
    model_type: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(generic, "_ask", lambda _, question: answer(question))
    classes = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    name = classes if isinstance(classes, str) else classes[0]
    values = make_tiny_config(model_type).to_dict()
    with pytest.raises(ModelError) as caught:
        generic.read_generic_spec(values | {"model_type": model_type, "architectures": [name]})
    text = str(caught.value)
    assert REFUSED[model_type] in text
    assert name in text
    assert "transformers' code cannot do it here; " in text
    assert ("model_impl='quire' reads" in text) != ("docs/features.md lists" in text)
