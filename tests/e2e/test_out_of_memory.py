"""A worker process whose memory runs out, and which then garbles a result: no request is lost."""

from __future__ import annotations

import pytest
import torch
from generated import find_tokens
from quire import LLM, SamplingParams
from quire.worker.devices import is_out_of_memory

PROMPTS = [f"Story number {number}" for number in range(16)]
PARAMS = [SamplingParams(temperature=1.0, seed=i, max_tokens=40, ignore_eos=True) for i in range(16)]


def generate(llm: LLM) -> list[list[int]]:
    return find_tokens(llm.generate(PROMPTS, PARAMS, use_tqdm=False))


@pytest.mark.usefixtures("fake_worker")
def test_a_shortage_of_memory_costs_no_token(capfd: pytest.CaptureFixture[str]) -> None:
    hooks = (
        ",".join(f"worker.execute:oom@{count}" for count in (5, 6, 30)) + ",worker.result_frame:corrupt@50"
    )
    with LLM(max_model_len=512, fault_hooks=hooks) as llm:
        disturbed = generate(llm)
        assert disturbed == generate(llm)
    log = capfd.readouterr().err
    assert log.count("failed: MemoryError: fault hook worker.execute:oom@") == 3
    assert "steps have at most 8 tokens and 8 requests for a while" in log
    assert "steps have at most 4 tokens and 4 requests for a while" in log
    assert log.count("starting another") == 1


def test_torch_without_memory_is_told_from_other_errors() -> None:
    with pytest.raises(RuntimeError) as short:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(short.value)
    with pytest.raises(RuntimeError) as wrong:
        torch.zeros(2, 3) @ torch.zeros(2, 3)
    assert not is_out_of_memory(wrong.value)
