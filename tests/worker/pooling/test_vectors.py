"""Vectors of whole engines, core and worker: transformers' numbers, and the same bits in a crowd."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from encoders import EMBEDDERS, make_encoder
from numpy.typing import NDArray
from quire.core.engine.inproc_engine import InprocEngine
from quire.frontend.models.model_folder import pocket_folder
from quire.frontend.options.engine_args import EngineArgs
from quire.ipc.params.pooling_params import PoolingParams, PoolingTask
from quire.ipc.params.sampling_params import SamplingParams
from quire.ipc.protocol.messages import EngineCoreOutput, EngineCoreRequest, ErrorCode
from quire.ipc.protocol.token_ids import encode_token_ids
from quire.ipc.spec.config import EngineConfig
from quire.ipc.spec.model_spec import Pool, PoolingSpec

POOLS: list[Pool] = ["cls", "last", "mean", "max", "weighted_mean", "mean_sqrt_len"]
LENGTHS = [1, 2, 16, 17, 40, 95, 96]


@functools.cache
def make_config(pool: Pool, **fields: Any) -> EngineConfig:
    """The pocket model, which generates and pools; steps are short, so that prompts come in chunks."""
    args = EngineArgs(
        model=str(pocket_folder()),
        device="cpu",
        dtype="float32",
        max_model_len=96,
        num_gpu_blocks_override=64,
        max_num_batched_tokens=fields.pop("max_num_batched_tokens", 48),
        distributed_executor_backend="uni",
        **fields,
    )
    config = args.create_engine_config()
    spec = msgspec.structs.replace(config.model.spec, pooling=PoolingSpec(pools=(pool,), normalize=True))
    return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, spec=spec))


def make_prompt(length: int) -> list[int]:
    return [(37 * length + 11 * place * place) % 1900 + 5 for place in range(length)]


def ask(length: int, task: PoolingTask = "embed", **fields: Any) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=f"{task}-{length}-{fields}",
        prompt_token_ids=encode_token_ids(make_prompt(length)),
        sampling_params=SamplingParams(),
        arrival_time=0.0,
        pooling_params=PoolingParams(task=task, **fields),
    )


def make_text(number: int) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=f"text-{number}",
        prompt_token_ids=encode_token_ids(make_prompt(3 + 5 * number)),
        sampling_params=SamplingParams(temperature=0.8, seed=number, max_tokens=12, ignore_eos=True),
        arrival_time=0.0,
    )


def run(engine: InprocEngine, requests: list[EngineCoreRequest]) -> dict[str, list[EngineCoreOutput]]:
    """Each request's outputs."""
    outputs: dict[str, list[EngineCoreOutput]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add_request(request)
    while any(not found or found[-1].finish_reason is None for found in outputs.values()):
        for output in engine.run_step():
            outputs[output.request_id].append(output)
    return outputs


def run_vectors(engine: InprocEngine, requests: list[EngineCoreRequest]) -> list[bytes]:
    found = run(engine, requests)
    errors = [one.error for outputs in found.values() for one in outputs if one.error is not None]
    assert errors == []
    return [b"".join(one.pooled or b"" for one in found[each.request_id]) for each in requests]


@functools.cache
def find_hidden_states() -> dict[int, NDArray[np.float32]]:
    """transformers', after the last norm, of each prompt."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(pocket_folder(), dtype=torch.float32).model
    with torch.no_grad():
        return {n: model(torch.tensor([make_prompt(n)])).last_hidden_state[0].numpy() for n in LENGTHS}


def pool(kind: Pool, x: NDArray[np.float32]) -> NDArray[np.float32]:
    weights = np.arange(1, len(x) + 1)[:, None]
    return {
        "cls": lambda: x[0],
        "last": lambda: x[-1],
        "mean": lambda: x.mean(0),
        "max": lambda: x.max(0),
        "weighted_mean": lambda: (x * weights).sum(0) / weights.sum(),
        "mean_sqrt_len": lambda: x.sum(0) / len(x) ** 0.5,
    }[kind]()


@pytest.mark.parametrize(
    "kind",
    [
        "cls",
        "weighted_mean",
        "max",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("last", "mean", "mean_sqrt_len")),
    ],
)
def test_vectors_are_transformers_and_the_same_bits_in_a_crowd(kind: Pool) -> None:
    requests = [ask(length) for length in LENGTHS]
    engine = InprocEngine(make_config(kind), None)
    alone = [run_vectors(engine, [request])[0] for request in requests]
    for length, data in zip(LENGTHS, alone, strict=True):
        expected = pool(kind, find_hidden_states()[length])
        found = np.frombuffer(data, dtype=np.float32)
        np.testing.assert_allclose(found, expected / np.linalg.norm(expected), atol=1e-5, rtol=0)
    # A second time: prompts and their chunks stand beside others, and prefixes are cached.
    others = [make_text(number) for number in range(5)]
    token_wise = [ask(length, "token_embed") for length in LENGTHS]
    found = run(engine, [*others, *token_wise, *requests])
    assert [found[each.request_id][-1].pooled for each in requests] == alone
    engine.close()
    fresh = InprocEngine(make_config(kind, max_num_batched_tokens=7, max_num_seqs=4), None)
    assert run_vectors(fresh, requests) == alone, "other chunks"
    fresh.close()


def test_every_token_has_the_vector_that_a_whole_prompt_gives() -> None:
    engine = InprocEngine(make_config("mean"), None)
    together = run_vectors(engine, [ask(length, "token_embed") for length in LENGTHS])
    for length, data in zip(LENGTHS, together, strict=True):
        expected = find_hidden_states()[length]
        found = np.frombuffer(data, dtype=np.float32).reshape(length, -1)
        expected = expected / np.linalg.norm(expected, axis=1, keepdims=True)
        np.testing.assert_allclose(found, expected, atol=1e-5, rtol=0)
    engine.close()


def test_text_beside_vectors_is_the_text_alone() -> None:
    engine = InprocEngine(make_config("mean"), None)
    texts = [make_text(number) for number in range(4)]
    alone = [run(engine, [text])[text.request_id] for text in texts]
    crowd = run(engine, [*texts, *(ask(length) for length in LENGTHS)])
    engine.close()
    for text, outputs in zip(texts, alone, strict=True):
        assert list_tokens(crowd[text.request_id]) == list_tokens(outputs)


def list_tokens(outputs: list[EngineCoreOutput]) -> list[int]:
    return [token for one in outputs for token in one.new_token_ids]


def test_a_vector_that_is_not_finite_fails_alone() -> None:
    config = msgspec.structs.replace(make_config("mean"), fault_hooks="worker.vector:nan@1")
    engine = InprocEngine(config, None)
    first, second = run(engine, [ask(16), ask(17)]).values()
    engine.close()
    assert (first[-1].error_code, second[-1].error_code) == (ErrorCode.BAD_VECTOR, None)
    assert second[-1].pooled


# Encoders.


@pytest.mark.parametrize("name", ["bert", "mpnet", "modernbert", "nomic", "embeddinggemma"])
def test_encoders_pool_whole_prompts_and_nobody_changes_a_bit(name: str, tmp_path: Path) -> None:
    checkpoint = make_encoder(tmp_path / name, name)
    engine = InprocEngine(make_encoder_config(checkpoint.folder), None)
    has_types = name in ("bert", "nomic")
    requests = [ask_encoder(n, n // 2 if has_types and n % 2 else None) for n in LENGTHS]
    alone = [run_vectors(engine, [request])[0] for request in requests]
    crowd = [ask_encoder(place + 3, None, f"beside {place}") for place in range(40)]
    found = run(engine, [*crowd[:20], *requests, *crowd[20:]])
    engine.close()
    assert [found[each.request_id][-1].pooled for each in requests] == alone
    for request, data in zip(requests, alone, strict=True):
        ids = np.frombuffer(request.prompt_token_ids, dtype=np.int32)
        given: dict[str, torch.Tensor] = {"input_ids": torch.from_numpy(ids.astype(np.int64))[None]}
        if request.type_start is not None:
            given["token_type_ids"] = (torch.arange(len(ids)) >= request.type_start).long()[None]
        with torch.no_grad():
            expected = checkpoint.reference(**given).last_hidden_state[0].mean(0)
        expected /= expected.norm()
        np.testing.assert_allclose(np.frombuffer(data, dtype=np.float32), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", EMBEDDERS)
@pytest.mark.parametrize("labels", [1, 3])
def test_classifiers_give_the_probabilities_of_transformers(name: str, labels: int, tmp_path: Path) -> None:
    checkpoint = make_encoder(tmp_path / name, name, "ForSequenceClassification", num_labels=labels)
    engine = InprocEngine(make_encoder_config(checkpoint.folder, pooler_config=None), None)
    requests = [replace_prompt(ask(length, "classify"), length) for length in LENGTHS]
    found = run_vectors(engine, requests)
    assert engine.facts.num_gpu_blocks == 0, "numbers of nothing are not told"
    engine.close()
    for request, data in zip(requests, found, strict=True):
        ids = np.frombuffer(request.prompt_token_ids, dtype=np.int32)
        with torch.no_grad():
            logits = checkpoint.reference(torch.from_numpy(ids.astype(np.int64))[None]).logits[0]
        expected = logits.sigmoid() if labels == 1 else logits.softmax(0)
        np.testing.assert_allclose(np.frombuffer(data, dtype=np.float32), expected, atol=1e-5, rtol=0)


def make_encoder_config(folder: Path, **fields: Any) -> EngineConfig:
    pooler: Any = fields.pop("pooler_config", {"pooling_type": "MEAN"})
    args = EngineArgs(
        model=str(folder),
        device="cpu",
        dtype="float32",
        max_model_len=96,
        max_num_batched_tokens=192,
        skip_tokenizer_init=True,
        pooler_config=pooler,
        distributed_executor_backend="uni",
        **fields,
    )
    return args.create_engine_config()


def ask_encoder(length: int, type_start: int | None, name: str = "") -> EngineCoreRequest:
    request = replace_prompt(ask(length, use_activation=True), length)
    return msgspec.structs.replace(request, request_id=name or request.request_id, type_start=type_start)


def replace_prompt(request: EngineCoreRequest, length: int) -> EngineCoreRequest:
    """With token ids of a small vocabulary."""
    prompt = encode_token_ids(token % 120 + 4 for token in make_prompt(length))
    return msgspec.structs.replace(request, prompt_token_ids=prompt)
