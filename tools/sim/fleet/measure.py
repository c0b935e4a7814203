"""`python -m quire.tools.sim.fleet.measure MODEL`: an entry of STEP_COSTS for a bench model."""

from __future__ import annotations

import argparse
import datetime
import time
from pathlib import Path

from ....frontend.llm import LLM
from ....ipc.params.sampling_params import SamplingParams
from ...bench.machine import describe_machine, format_machine
from ...bench.models import ensure_model
from .step_costs import MAX_DECODED, MEASURED_TOKENS

_NUM_STEPS = 8
_PROMPT_TOKENS = 16


def measure(model: Path, num_rounds: int) -> tuple[list[float], float]:
    """Seconds of a step for each of MEASURED_TOKENS, and from the core's start until it was ready."""
    most = max(MEASURED_TOKENS)
    with LLM(
        str(model),
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=most + 1,
        max_num_batched_tokens=most,
        num_gpu_blocks_override=most // 16 + 1 + MAX_DECODED * 4,
        log_level="ERROR",
    ) as llm:
        ready_s = sum(seconds for _, seconds in llm.llm_engine.facts.startup)
        return [_measure_one(llm, number, num_rounds) for number in MEASURED_TOKENS], ready_s


def _measure_one(llm: LLM, num_tokens: int, num_rounds: int) -> float:
    if num_tokens > MAX_DECODED:
        return _time(llm, [list(range(1, num_tokens + 1))], 1, num_rounds)
    prompts = [[number, *range(1, _PROMPT_TOKENS)] for number in range(1, num_tokens + 1)]
    with_steps, without = (_time(llm, prompts, count, num_rounds) for count in (1 + _NUM_STEPS, 1))
    return (with_steps - without) / _NUM_STEPS


def _time(llm: LLM, prompts: list[list[int]], max_tokens: int, num_rounds: int) -> float:
    """The best of some rounds."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    best = float("inf")
    for _ in range(num_rounds):
        began = time.perf_counter()
        llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        best = min(best, time.perf_counter() - began)
    return best


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="quire.tools.sim.fleet.measure", description=__doc__)
    parser.add_argument("model", metavar="MODEL", help="a bench model: tiny, small")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="of which the best counts (5)")
    options = parser.parse_args()
    seconds, ready_s = measure(ensure_model(options.model), options.rounds)
    print(f"# {format_machine(describe_machine())}")
    print(
        f'"{options.model}": StepCosts(\n    measured="{datetime.date.today()}",\n    ready_s={ready_s:.3g},'
    )
    print(f"    tokens={MEASURED_TOKENS},")
    print(f"    seconds=({', '.join(f'{one:.3g}' for one in seconds)}),\n),")


if __name__ == "__main__":
    main()
