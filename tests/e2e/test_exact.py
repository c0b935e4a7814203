"""Exact replays: a request's tokens and logprobs are the same bit for bit, whatever runs beside it.

Every kind of request of crowd.py, with the packaged model and with a random one of each family whose layers
have other operations.
"""

from __future__ import annotations

import os
import shutil
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from checkpoints import OTHERS, RECIPES, Recipe, make_checkpoint
from crowd import (
    NUM_NEIGHBOURS,
    OVERRIDES,
    PROCESSORS,
    Answer,
    Ask,
    answer,
    answer_alone,
    answer_through,
    list_asks,
)
from decoders import DECODERS, add_tokenizer, make_decoder
from gguf_files import add_vocabulary, convert_checkpoint, fill_with_blocks
from quire import LLM, SamplingParams
from quire.frontend.models.model_folder import POCKET, pocket_folder
from quire.frontend.options.engine_args import EngineArgs
from quire.ipc.errors import ConfigError
from quire.kernels.program.build import cache_folder
from quire.kernels.program.native import SWITCH


class Model(NamedTuple):
    """A folder and how it is run."""

    folder: str
    dtype: str
    kv_cache_dtype: str = "auto"


# The type in which the default suite runs a model. Sums over experts in another order show in float32 only:
# rounded to bfloat16 most are the same.
DTYPES = {
    POCKET: "bfloat16",
    "gemma2": "bfloat16",
    "qwen3-moe": "float32",
    "gpt-oss": "float32",
    "gemma4-inputs": "float32",
    "int8-cache": "bfloat16",
    "gpt-oss-fp8-cache": "bfloat16",
    "deepseek_v3": "bfloat16",
    "lfm2": "float32",
    "deepseek_v3-int8-cache": "bfloat16",
}
# Models with their KV in 8 bits; of two the layers are in groups by their windows.
CACHES = {
    "int8-cache": (POCKET, "int8"),
    "fp8-cache": (POCKET, "fp8"),
    "gpt-oss-fp8-cache": ("gpt-oss", "fp8"),
    "deepseek_v3-int8-cache": ("deepseek_v3", "int8"),
    "minicpm3-fp8-cache": ("minicpm3", "fp8"),
    "gemma3-int8-cache": ("gemma3", "int8"),
    "gemma4-int8-cache": ("gemma4", "int8"),
}
QUANTIZATIONS = {"olmo2": "int4", "qwen3-moe": "int8"}  # of weights, while they are read
GGUF = "gguf"  # blocks of mixed types
SLOW = (
    GGUF,
    "fp8-cache",
    "gemma3-int8-cache",
    "gemma4-int8-cache",
    "minicpm3-fp8-cache",
    "phi3-partial",
    "mixtral",
    "olmo2",
    "glm4-moe",
    "qwen2-moe",
    "ernie4.5-moe",
    "granite-moe",
    "gemma4-experts",
    "deepseek_v2",
    "minicpm3",
)  # whose layers are those of others, with other weights and angles
MODELS = [
    pytest.param((name, dtype), marks=[] if dtype == usual else [pytest.mark.slow], id=f"{name}-{dtype}")
    for name, usual in DTYPES.items()
    for dtype in ("float32", "bfloat16")
] + [
    pytest.param((name, dtype), marks=pytest.mark.slow, id=f"{name}-{dtype}")
    for name in SLOW
    for dtype in ("float32", "bfloat16")
]


def make_llm(model: Model, backend: str = "uni", **changes: Any) -> LLM:
    """Of a decoder that generates and embeds."""
    sizes = {"num_gpu_blocks_override": 2048, "max_model_len": 512, "max_logprobs": -1}
    sizes |= {"runner": "generate", "convert": "embed", "hf_overrides": OVERRIDES}
    fields: dict[str, Any] = sizes | {"logits_processors": PROCESSORS} | changes
    fields = {"quantization": QUANTIZATIONS.get(Path(model.folder).name)} | model._asdict() | fields
    return LLM(fields.pop("folder"), exact=True, distributed_executor_backend=backend, **fields)


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    request.getfixturevalue("library")
    name, dtype = request.param
    name, kv_cache_dtype = CACHES.get(name, (name, "auto"))
    return Model(make_folder(name, tmp_path_factory), dtype, kv_cache_dtype)


def make_folder(name: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    if name == POCKET:
        return name
    folder = tmp_path_factory.mktemp(name) / name
    if name == GGUF:
        return str(make_gguf(folder))
    if name in DECODERS:
        return str(add_tokenizer(make_decoder(folder, name, vocab_size=2048).folder))
    make_checkpoint(folder, replace((RECIPES | OTHERS)[name], vocab_size=2048, rope="default"))
    return str(add_tokenizer(folder))


def make_gguf(folder: Path) -> Path:
    make_checkpoint(folder, Recipe(hidden_size=256, intermediate_size=512, head_size=64, vocab_size=2048))
    writer = add_vocabulary(fill_with_blocks(convert_checkpoint(folder)), pocket_folder())
    return writer.write(folder.with_suffix(".gguf"))


@pytest.fixture(scope="module")
def asks() -> list[Ask]:
    return list_asks()


@pytest.fixture(scope="module")
def alone(model: Model, asks: list[Ask]) -> dict[str, Answer]:
    """Each request on its own, with its whole prompt at once and no prefix hits."""
    with make_llm(model, enable_prefix_caching=False) as llm:
        assert llm.llm_engine.facts.batch_variance_reason == ""
        return answer_alone(llm, asks)


def test_neighbours_and_prefix_hits_change_no_bit(
    model: Model, asks: list[Ask], alone: dict[str, Answer]
) -> None:
    assert len(asks) > NUM_NEIGHBOURS
    with make_llm(model) as llm:
        assert answer(llm, asks) == alone
        stats = llm.stats()
        assert answer(llm, asks) == alone  # prompts are found but for their last part
        hits = llm.stats().prefix_cache_hits_total - stats.prefix_cache_hits_total
        assert hits > len(asks) * 16


@pytest.mark.slow
@pytest.mark.parametrize("hits", [False, True])
@pytest.mark.parametrize("chunk", [1, 16])
def test_no_size_of_chunks_changes_a_bit(
    model: Model, asks: list[Ask], alone: dict[str, Answer], chunk: int, hits: bool
) -> None:
    with make_llm(model, max_num_batched_tokens=chunk, enable_prefix_caching=hits) as llm:
        assert answer(llm, asks) == alone
        assert answer_alone(llm, asks[-4:]) == {ask.name: alone[ask.name] for ask in asks[-4:]}


def test_chunks_and_preemptions_change_no_bit(
    model: Model, asks: list[Ask], alone: dict[str, Answer]
) -> None:
    sizes: dict[str, Any] = {"block_size": 8, "max_model_len": 128, "max_num_batched_tokens": 32}
    cache: Any = {"kv_cache_dtype": model.kv_cache_dtype}
    config = EngineArgs(model.folder, **sizes, **cache).create_engine_config()
    num_blocks = config.max_blocks_per_request
    with make_llm(model, num_gpu_blocks_override=num_blocks, **sizes) as llm:
        assert answer(llm, asks) == alone
        # What windows free is enough for most of the others.
        assert llm.stats().num_preemptions_total > (0 if any(config.model.spec.kv_windows) else 4)


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(
            model, marks=[] if model[0] in (POCKET, "gpt-oss", "lfm2") else [pytest.mark.slow], id=model[0]
        )
        for model in [*DTYPES.items(), (GGUF, "bfloat16")]
    ],
    indirect=True,
)
def test_a_lost_worker_and_a_lost_core_change_no_bit(
    model: Model, asks: list[Ask], alone: dict[str, Answer]
) -> None:
    with make_llm(model, backend="mp", max_num_seqs=32) as llm:

        def kill(role: str) -> None:
            os.kill(llm.llm_engine.facts.pids[role], signal.SIGKILL)

        assert answer_through(llm, asks, [partial(kill, "worker"), partial(kill, "core")]) == alone


def test_a_configuration_that_cannot_promise_it_is_refused() -> None:
    with pytest.raises(ConfigError, match="exact=True: not here, since torch multiplies"):
        make_llm(Model(POCKET, "float16"), device="cpu")


def test_a_refusal_names_the_switch_that_keeps_the_exact_kernels_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "0")
    with pytest.raises(ConfigError, match=f"exact=True: not here, since torch .*; {SWITCH}=0 keeps them off"):
        make_llm(Model(POCKET, "float16"), device="cpu")


def test_without_the_promise_the_same_configuration_starts_and_says_why() -> None:
    with LLM(dtype="float16", device="cpu", distributed_executor_backend="uni") as llm:
        assert "torch multiplies" in llm.llm_engine.facts.batch_variance_reason


@pytest.mark.usefixtures("fake_worker")
def test_a_restarted_worker_that_says_that_it_computes_in_another_way_is_logged(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with LLM(max_model_len=128, served_model_name="varies") as llm:
        assert llm.llm_engine.facts.batch_variance_reason == ""
        os.kill(llm.llm_engine.facts.pids["worker"], signal.SIGKILL)
        llm.generate("Once", SamplingParams(max_tokens=2), use_tqdm=False)
    assert "computes in another way: replays are semantic: it varies" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("library")
def test_a_restarted_worker_that_computes_in_another_way_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "quire"
    own.mkdir(mode=0o700)
    for library in cache_folder().glob("kernels-*.so"):
        shutil.copy2(library, own)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with LLM(max_model_len=128) as llm:
        assert llm.llm_engine.facts.batch_variance_reason == ""
        own.chmod(0o777)  # from a folder like this nothing is loaded
        os.kill(llm.llm_engine.facts.pids["worker"], signal.SIGKILL)
        llm.generate("Once", SamplingParams(max_tokens=2), use_tqdm=False)
    assert "computes in another way: replays are semantic: torch" in capfd.readouterr().err
