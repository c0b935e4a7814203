"""Each value of the options that choose a path through the start has been started once, in real processes."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from quire import LLM, SamplingParams
from quire.frontend.options.engine_args import DTYPES
from quire.ipc.spec.config import LoadFormat, SchedulingPolicy
from quire.ipc.spec.weight_format import Quantization

STARTS: list[dict[str, Any]] = [
    {"load_format": "dummy", "dtype": "bfloat16", "quantization": "int4", "scheduling_policy": "priority"},
    {"load_format": "safetensors", "dtype": "half", "quantization": None, "scheduling_policy": "fair"},
    {"load_format": "auto", "dtype": "float", "quantization": "int8", "scheduling_policy": "fcfs"},
    {"load_format": "dummy", "dtype": "auto", "quantization": "fp8", "device": "cpu"},
]
SAME_AS_ANOTHER = {"float16", "float32"}  # half and float


def test_every_value_is_started() -> None:
    values = {name: {start.get(name) for start in STARTS} for name in STARTS[0]}
    assert values["load_format"] == set(get_args(LoadFormat))
    assert values["dtype"] | SAME_AS_ANOTHER == set(DTYPES)
    assert values["quantization"] - {None} == set(get_args(Quantization))
    assert values["scheduling_policy"] - {None} == set(get_args(SchedulingPolicy))


@pytest.mark.parametrize(
    "options", STARTS, ids=lambda options: f"{options['load_format']}-{options['dtype']}"
)
def test_an_engine_starts_and_answers(options: dict[str, Any]) -> None:
    with LLM(**options, max_model_len=64, num_gpu_blocks_override=16) as llm:
        outputs = llm.generate(["Once"], SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True))
    assert len(outputs[0].outputs[0].token_ids) == 2
