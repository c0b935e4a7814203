"""A worker calls no vector function of MKL with many numbers that it has not called with one before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Recipe, make_checkpoint
from quire.ipc.params.sampling_params import SamplingParams
from quire.ipc.protocol.step import GroupBlocks, NewRequestData, SchedulerOutput
from quire.ipc.protocol.token_ids import encode_token_ids
from quire.ipc.protocol.token_lists import TokenLists
from quire.worker.first_calls import make_first_calls
from quire.worker.worker import Worker
from torch.utils._python_dispatch import TorchDispatchMode

# torch's functions that MKL computes where numbers lie side by side (aten's cpu/vml.h).
MKL_NAMES = {
    *("acos", "asin", "atan", "cos", "cosh", "erf", "erfc", "erfinv", "exp", "exp2", "expm1", "lgamma"),
    *("log", "log10", "log1p", "log2", "sin", "sinh", "sqrt", "tan", "tanh"),
}
PROMPT = [7 * i % 131 for i in range(40)]
PARAMS = SamplingParams(temperature=1.0, seed=1, top_p=0.9, logprobs=3, prompt_logprobs=3)


class FirstCalls(TorchDispatchMode):
    """Notes how many numbers the first call of each of MKL_NAMES had, by type."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[tuple[str, torch.dtype], int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__.rstrip("_")
        if name in MKL_NAMES:
            self.sizes.setdefault((name, args[0].dtype), args[0].numel())
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("restored_torch")
@pytest.mark.parametrize("rope", ["default", "dynamic"])
def test_one_thread_makes_the_first_call_of_each_function(rope: str, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, Recipe(rope=rope))
    request = NewRequestData(
        0,
        "0",
        encode_token_ids(PROMPT),
        b"",
        PARAMS,
        [],
        TokenLists(),
        [GroupBlocks([0, 1, 2])],
        num_computed_tokens=0,
    )
    make_first_calls.cache_clear()  # as if no model had been loaded in this process
    with FirstCalls() as noted:
        worker = Worker(checkpoint.engine_config(max_model_len=64), lambda _: None)
        worker.start()
        worker.execute(SchedulerOutput(1, [0], [len(PROMPT)], [request]))
    assert ("cos", torch.float32) in noted.sizes
    assert ("exp", torch.float32) in noted.sizes
    assert {name: size for name, size in noted.sizes.items() if size != 1} == {}
