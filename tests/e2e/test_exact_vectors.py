"""Exact vectors: what an encoder makes of a text, or a classifier of a pair, is the same bit for bit,
whatever runs beside it or dies.

What decoders make of texts is among the kinds of crowd.py.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from checkpoints import Recipe, make_checkpoint
from crowd import OVERRIDES, Answer, Ask, answer, answer_alone, answer_together
from encoders import ENCODERS, make_encoder
from quire import LLM, PoolingParams
from quire.frontend.models.model_folder import POCKET_ENCODER, pocket_encoder_folder, pocket_folder
from quire.frontend.requests.vectors.encoder import TextPair
from quire.ipc.spec.model_spec import Pool
from safetensors.torch import load_file, save_file

Model = tuple[str, str]  # folder and dtype

# Of pairs: with a default prompt, with a template, and one that passes over padding at the end.
CLASSIFIERS = ("cross-encoder", "reranker", "decoder")
DTYPES = {POCKET_ENCODER: "float32", "modernbert": "bfloat16", "reranker": "bfloat16"}  # of the default suite
MODELS = [
    pytest.param((name, dtype), marks=[] if DTYPES.get(name) == dtype else [pytest.mark.slow])
    for name in (POCKET_ENCODER, *ENCODERS, *CLASSIFIERS)
    for dtype in ("float32", "bfloat16")
]
NUM_ASKS = 72
POOLS: dict[str, Pool] = {"modernbert": "cls"}  # of those that have no file that says it


@pytest.fixture(scope="module", params=MODELS, ids=lambda model: "-".join(model))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    request.getfixturevalue("library")
    name, dtype = request.param
    if name != POCKET_ENCODER:
        folder = tmp_path_factory.mktemp("encoder") / name
        make_classifier(folder, name) if name in CLASSIFIERS else make_encoder(folder, name)
        name = str(folder)
    return name, dtype


def make_classifier(folder: Path, name: str) -> None:
    """One of CLASSIFIERS, with a packaged tokenizer."""
    if name == "cross-encoder":
        make_encoder(folder, "bert", "ForSequenceClassification", vocab_size=5714, num_labels=1)
        settings = {"model_type": "CrossEncoder", "prompts": {"q": "Fox asks: "}, "default_prompt_name": "q"}
        (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
        shutil.copy(pocket_encoder_folder() / "tokenizer.json", folder)
        return
    make_checkpoint(folder, Recipe(family="qwen3", vocab_size=2048))
    shutil.copy(pocket_folder() / "tokenizer.json", folder)
    changes: dict[str, Any] = {"classifier_from_token": ["no", "the"]}
    if name == "decoder":
        changes = {"architectures": ["Qwen3ForSequenceClassification"], "num_labels": 1, "pad_token_id": 0}
        weights = load_file(folder / "model.safetensors")
        weights["score.weight"] = weights.pop("lm_head.weight")[:1].clone()
        save_file(weights, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def make_llm(model: Model, backend: str = "uni", **fields: Any) -> LLM:
    folder, dtype = model
    # Some steps for all requests.
    sizes: dict[str, Any] = {"max_model_len": 256, "max_num_batched_tokens": 256}
    if folder != POCKET_ENCODER and not is_classifier(model):
        fields |= {"skip_tokenizer_init": True}
        fields |= {"pooler_config": {"pooling_type": POOLS.get(Path(folder).name, "mean").upper()}}
    fields |= {"hf_overrides": OVERRIDES}
    return LLM(folder, dtype=dtype, exact=True, distributed_executor_backend=backend, **(sizes | fields))


def is_classifier(model: Model) -> bool:
    return Path(model[0]).name in CLASSIFIERS


@pytest.fixture(scope="module")
def asks(model: Model) -> list[Ask]:
    """Vectors, cut or whole, of texts and of each of their tokens; pairs where there is a tokenizer."""
    return [Ask("text", i, make_prompt(model, i), make_params(model, i)) for i in range(NUM_ASKS)]


def make_prompt(model: Model, i: int) -> Any:
    if is_classifier(model) or (model[0] == POCKET_ENCODER and i % 4 == 0):
        padding = "<|endoftext|>" * (i % 3)  # which the last of CLASSIFIERS passes over
        document = "It found a red ball beside the river. " * (1 + i % 7)
        return TextPair(f"What did fox {i} find?", document + padding)
    return {"prompt_token_ids": [5 + (7 * i + j * j) % 120 for j in range(1 + (11 * i) % 157)]}


def make_params(model: Model, i: int) -> PoolingParams:
    if is_classifier(model):
        return PoolingParams(task="classify", use_activation=i % 2 == 0)
    task = "token_embed" if i % 3 == 2 else "embed"
    return PoolingParams(task=task, use_activation=i % 2 == 0, dimensions=(None, 5, 24, None)[i % 4])


@pytest.fixture(scope="module")
def alone(model: Model, asks: list[Ask]) -> dict[str, Answer]:
    with make_llm(model) as llm:
        assert llm.llm_engine.facts.batch_variance_reason == ""
        return answer_alone(llm, asks)


@pytest.mark.parametrize("num_tokens", [256, pytest.param(4096, marks=pytest.mark.slow)])
def test_neighbours_change_no_bit(
    model: Model, asks: list[Ask], alone: dict[str, Answer], num_tokens: int
) -> None:
    with make_llm(model, max_num_batched_tokens=num_tokens) as llm:
        assert answer(llm, asks) == alone
        assert answer(llm, asks[::-1]) == alone


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(model, marks=[] if model[0] == POCKET_ENCODER else [pytest.mark.slow], id=model[0])
        for model in DTYPES.items()
    ],
    indirect=True,
)
def test_a_shortage_of_memory_a_lost_worker_and_a_lost_core_change_no_bit(
    model: Model,
    asks: list[Ask],
    alone: dict[str, Answer],
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    faults = (
        *(f"core.schedule:slow@{count}" for count in range(1, 5)),  # until all are received
        "worker.execute:oom@3",
        "worker.execute:oom@4",
        "worker.execute:segfault@6",
        f"core.schedule:exit@{14 if is_classifier(model) else 34}",  # which takes fewer steps
    )
    with make_llm(model, "mp", max_num_batched_tokens=1024, fault_hooks=",".join(faults)) as llm:
        assert answer_together(llm, asks) == alone
    log = capfd.readouterr().err
    smaller = re.findall(r"steps have at most \d+ tokens and (\d+) requests for a while", log)
    assert len(smaller) == 2
    assert int(smaller[1]) <= int(smaller[0]) <= len(asks) // 2
    assert "was killed by SIGSEGV; starting another" in log
    assert "exited with code 1 (crashed); starting another" in caplog.text
