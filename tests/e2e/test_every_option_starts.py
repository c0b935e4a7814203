"""Each value of the options that choose a path through the start has been started once, in real processes."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from quire import LLM, SamplingParams
from quire.frontend.options.engine_args import DTYPES, Convert, ModelImpl, Runner
from quire.ipc.spec.config import ATTENTION_BACKENDS, ExecutorBackend, LoadFormat, SchedulingPolicy
from quire.ipc.spec.weight_format import Quantization

LOADS: list[dict[str, Any]] = [
    {"load_format": "dummy", "dtype": "bfloat16", "quantization": "int4", "scheduling_policy": "priority"},
    {"load_format": "safetensors", "dtype": "half", "quantization": None, "scheduling_policy": "fair"},
    {"load_format": "auto", "dtype": "float", "quantization": "int8", "scheduling_policy": "fcfs"},
    {"load_format": "dummy", "dtype": "auto", "quantization": "fp8", "device": "cpu"},
]
# Each runs what is loaded in its row above.
RUNS: list[dict[str, Any]] = [
    {"runner": "generate", "convert": "embed", "distributed_executor_backend": "mp"},
    {"runner": "auto", "convert": "none", "distributed_executor_backend": "uni"},
    {"runner": "pooling", "convert": "auto", "distributed_executor_backend": "uni"},
    {
        "runner": "pooling",
        "convert": "classify",
        "distributed_executor_backend": "uni",
        "hf_overrides": {"classifier_from_token": ["a", "b"]},
    },
]
BACKENDS = ("TRITON_ATTN", "FLASHINFER", "TORCH_SDPA", "auto")  # on a CPU none changes anything
IMPLS = ("quire", "vllm", "auto", "auto")
STARTS = [
    load | run | {"attention_backend": backend, "model_impl": impl}
    for load, run, backend, impl in zip(LOADS, RUNS, BACKENDS, IMPLS, strict=True)
]
ELSEWHERE = {
    *("float16", "float32"),  # half and float
    *("ray", "transformers"),  # test_ray.py, test_generic.py
}


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("load_format", get_args(LoadFormat)),
        ("dtype", DTYPES),
        ("quantization", get_args(Quantization)),
        ("scheduling_policy", get_args(SchedulingPolicy)),
        ("runner", get_args(Runner)),
        ("convert", get_args(Convert)),
        ("distributed_executor_backend", get_args(ExecutorBackend)),
        ("attention_backend", ("auto", *ATTENTION_BACKENDS)),
        ("model_impl", get_args(ModelImpl)),
    ],
)
def test_every_value_is_started(name: str, values: tuple[str, ...]) -> None:
    started = {start.get(name) for start in STARTS} - {None}
    assert started <= set(values)
    assert set(values) - started <= ELSEWHERE


@pytest.mark.usefixtures("restored_torch")
@pytest.mark.parametrize(
    "options", STARTS, ids=lambda options: f"{options['load_format']}-{options['dtype']}"
)
def test_an_engine_starts_and_answers(options: dict[str, Any]) -> None:
    with LLM(**options, max_model_len=64, num_gpu_blocks_override=16) as llm:
        if options["runner"] == "pooling":
            made = llm.classify(["Once"]) if options["convert"] == "classify" else llm.embed(["Once"])
            assert len(made) == 1
            return
        outputs = llm.generate(["Once"], SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True))
    assert len(outputs[0].outputs[0].token_ids) == 2
