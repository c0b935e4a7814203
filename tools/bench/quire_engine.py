"""Quire as a contestant: `python -m quire.tools.bench.quire_engine MODEL ENGINE_ARGS_JSON`.

A plain frontend process: it loads no torch, and its engine core and worker are processes of their own.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import psutil

from ...frontend.llm import LLM
from ...ipc.params.sampling_params import SamplingParams
from .contest import Engine, Job, JobResult, claim_stdout, serve


class QuireEngine(Engine):
    """LLM.embed on texts, and LLM.generate on token ids without detokenizing: no contestant makes text."""

    def __init__(self, model: str, engine_args: dict[str, Any]) -> None:
        defaults: dict[str, Any] = {"skip_tokenizer_init": True, "log_level": "WARNING"}
        self._llm = LLM(model=model, **{**defaults, **engine_args})
        self.pids: dict[str, int] = dict(self._llm.llm_engine.facts.pids)

    def run(self, job: Job) -> JobResult:
        """One call with all texts or requests."""
        if job.texts:
            start = time.perf_counter()
            vectors = self._llm.embed(job.texts, use_tqdm=False)
            return JobResult(
                seconds=time.perf_counter() - start, num_requests=len(vectors), num_output_tokens=0
            )
        prompts: list[Any] = [{"prompt_token_ids": r.prompt_token_ids} for r in job.requests]
        params = [
            SamplingParams(
                temperature=0.0,
                max_tokens=request.num_output_tokens,
                ignore_eos=True,
                detokenize=False,
            )
            for request in job.requests
        ]
        start = time.perf_counter()
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        return JobResult(
            seconds=seconds,
            num_requests=len(outputs),
            num_output_tokens=sum(len(output.outputs[0].token_ids) for output in outputs),
            num_cached_tokens=sum(output.num_cached_tokens or 0 for output in outputs),
        )

    def measure_rss(self) -> dict[str, int]:
        """The frontend, the core and the worker, each by itself."""
        sizes = {"frontend": psutil.Process().memory_info().rss}
        for role, pid in self.pids.items():
            sizes[role] = psutil.Process(pid).memory_info().rss
        return sizes

    def close(self) -> None:
        """End core and worker."""
        self._llm.close()


def main() -> None:
    """Load the model and take jobs."""
    started_at = time.perf_counter()
    reports = claim_stdout()
    model, engine_args = sys.argv[1:3]
    serve(QuireEngine(model, json.loads(engine_args)), started_at, reports)


if __name__ == "__main__":
    main()
