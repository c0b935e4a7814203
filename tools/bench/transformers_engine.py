"""transformers as a contestant: `python -m quire.tools.bench.transformers_engine MODE MODEL`.

Modes: sequential (`generate` one request at a time), static (`generate` on one left-padded batch) and
continuous (its continuous batching). The model runs in its checkpoint's number format on all usable cores.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import psutil
import torch
import transformers

from ...ipc.processes.cgroup import count_processors
from .contest import Engine, Job, JobResult, claim_stdout, serve

_PAD_TOKEN_ID = 0
_NO_EOS = -1  # what continuous batching takes for "never stop"
_RESULT_TIMEOUT_S = 600.0
_PAGE_SIZE = 32  # tokens


class TransformersEngine(Engine):
    """Base of the three modes: the model and greedy settings that no EOS token ends."""

    def __init__(self, model: str) -> None:
        torch.set_num_threads(count_processors())
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(model, dtype="auto").eval()

    def run(self, job: Job) -> JobResult:
        """Generate and count the tokens that the workload asked for."""
        start = time.perf_counter()
        with torch.inference_mode():
            self._generate(job)
        seconds = time.perf_counter() - start
        return JobResult(
            seconds=seconds, num_requests=len(job.requests), num_output_tokens=job.num_output_tokens
        )

    def measure_rss(self) -> dict[str, int]:
        """It is one process."""
        return {"process": psutil.Process().memory_info().rss}

    def close(self) -> None:
        """Nothing outlives the process."""

    def _generate(self, job: Job) -> None:
        raise NotImplementedError

    def _make_settings(self, max_new_tokens: int) -> transformers.GenerationConfig:
        return transformers.GenerationConfig(
            do_sample=False, max_new_tokens=max_new_tokens, pad_token_id=_PAD_TOKEN_ID, eos_token_id=None
        )


class SequentialEngine(TransformersEngine):
    """One `generate` call a request."""

    def _generate(self, job: Job) -> None:
        for request in job.requests:
            ids = torch.tensor([request.prompt_token_ids])
            settings = self._make_settings(request.num_output_tokens)
            out = self._model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
            _expect_length(out.shape[1] - ids.shape[1], request.num_output_tokens)


class StaticBatchEngine(TransformersEngine):
    """One `generate` call for all requests, padded on the left, as long as the longest output."""

    def _generate(self, job: Job) -> None:
        width = max(len(request.prompt_token_ids) for request in job.requests)
        ids = torch.full((len(job.requests), width), _PAD_TOKEN_ID)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(job.requests):
            ids[row, width - len(request.prompt_token_ids) :] = torch.tensor(request.prompt_token_ids)
            mask[row, width - len(request.prompt_token_ids) :] = 1
        longest = max(request.num_output_tokens for request in job.requests)
        out = self._model.generate(ids, attention_mask=mask, generation_config=self._make_settings(longest))
        _expect_length(out.shape[1] - width, longest)


class ContinuousBatchEngine(TransformersEngine):
    """Its continuous batching, each request with its own length."""

    def run(self, job: Job) -> JobResult:
        """Times from the first request added to the last result; the manager's set-up is not counted."""
        settings = self._make_settings(max(r.num_output_tokens for r in job.requests))
        settings.eos_token_id = _NO_EOS
        # Not inference_mode: the manager updates its buffers from a thread of its own.
        with torch.no_grad(), self._open_manager(settings, job) as manager:
            start = time.perf_counter()
            for request in job.requests:
                manager.add_request(
                    request.prompt_token_ids, max_new_tokens=request.num_output_tokens, eos_token_id=_NO_EOS
                )
            num_output_tokens = self._take_results(manager, len(job.requests))
            seconds = time.perf_counter() - start
        _expect_length(num_output_tokens, job.num_output_tokens)
        return JobResult(seconds=seconds, num_requests=len(job.requests), num_output_tokens=num_output_tokens)

    def _open_manager(self, settings: transformers.GenerationConfig, job: Job) -> Any:
        return self._model.continuous_batching_context_manager(
            generation_config=settings,
            continuous_batching_config=_make_batching_config(job),
            block=True,
            timeout=5,
        )

    def _take_results(self, manager: Any, num_requests: int) -> int:
        deadline = time.monotonic() + _RESULT_TIMEOUT_S
        num_finished = num_output_tokens = 0
        while num_finished < num_requests:
            result = manager.get_result(timeout=1)
            if result is None:
                if not manager.is_running() or time.monotonic() > deadline:
                    raise RuntimeError("continuous batching ended before its requests")
            elif result.is_finished():
                if result.error is not None:
                    raise RuntimeError(f"continuous batching failed a request: {result.error}")
                num_finished += 1
                num_output_tokens += len(result.generated_tokens)
        return num_output_tokens


def _make_batching_config(job: Job) -> Any:
    """Its defaults, but a cache that holds the job: by default it takes most of the machine's memory."""
    num_tokens = sum(len(request.prompt_token_ids) + request.num_output_tokens for request in job.requests)
    num_blocks = num_tokens // _PAGE_SIZE + 2 * len(job.requests)  # each one's last page is not full
    return transformers.ContinuousBatchingConfig(
        page_size=_PAGE_SIZE, num_blocks=num_blocks, max_batch_tokens=2048
    )


def _expect_length(found: int, expected: int) -> None:
    if found != expected:
        raise RuntimeError(f"generated {found} tokens instead of {expected}")


MODES = {"sequential": SequentialEngine, "static": StaticBatchEngine, "continuous": ContinuousBatchEngine}


def main() -> None:
    """Load the model and take jobs."""
    started_at = time.perf_counter()
    reports = claim_stdout()
    mode, model = sys.argv[1:3]
    transformers.utils.logging.set_verbosity_error()
    serve(MODES[mode](model), started_at, reports)


if __name__ == "__main__":
    main()
