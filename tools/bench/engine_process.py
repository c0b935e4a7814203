"""An engine as a contestant: `PYTHON -P tools/bench/engine_process.py NAME SETTINGS`.

Run as a file, by the Python of the peer's own environment where it is a peer: it imports nothing of ours, and
speaks the lines of contest.py. `peers.py` sets the variables that a peer needs.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from typing import Any

_PAD_TOKEN_ID = 0
_NO_EOS = -1  # what transformers' continuous batching takes for "never stop"
_RESULT_TIMEOUT_S = 600.0
_PAGE_SIZE = 32  # tokens


class _LLM:
    """Quire and vLLM, whose faces are the same. No text is made: token ids in and out, with EOS ignored."""

    def __init__(self, package: str, settings: dict[str, Any]) -> None:
        self._package: Any = importlib.import_module(package)
        self._llm: Any = self._package.LLM(**settings)

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        """One call with all texts or requests."""
        if job["texts"]:
            start = time.perf_counter()
            outputs = self._llm.embed(job["texts"], use_tqdm=False)
            return _make_result(time.perf_counter() - start, len(outputs))
        prompts = [{"prompt_token_ids": request["prompt_token_ids"]} for request in job["requests"]]
        params = [
            self._package.SamplingParams(
                temperature=0.0, max_tokens=request["num_output_tokens"], ignore_eos=True, detokenize=False
            )
            for request in job["requests"]
        ]
        start = time.perf_counter()
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        num_output_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        num_cached_tokens = sum(output.num_cached_tokens or 0 for output in outputs)
        return _make_result(seconds, len(outputs), num_output_tokens, num_cached_tokens)


class _SentenceTransformers:
    def __init__(self, settings: dict[str, Any]) -> None:
        import torch  # pyright: ignore[reportMissingImports]
        from sentence_transformers import SentenceTransformer  # pyright: ignore[reportMissingImports]

        torch.set_num_threads(len(os.sched_getaffinity(0)))
        arguments = {"torch_dtype": getattr(torch, settings["dtype"])}
        self._model: Any = SentenceTransformer(settings["model"], device="cpu", model_kwargs=arguments)
        self._batch_size: int = settings["batch_size"]

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        """One call with all texts, which it sorts by length."""
        start = time.perf_counter()
        vectors = self._model.encode(job["texts"], batch_size=self._batch_size, show_progress_bar=False)
        return _make_result(time.perf_counter() - start, len(vectors))


class _Transformers:
    """`generate` on one batch that is padded on the left, and its continuous batching: the faster counts."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import torch
        import transformers

        transformers.utils.logging.set_verbosity_error()
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        self._torch, self._transformers = torch, transformers
        make: Any = transformers.AutoModelForCausalLM
        self._model: Any = make.from_pretrained(settings["model"], dtype="auto").eval()

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        """Each way once; padding that a batch generates besides does not count."""
        requests = job["requests"]
        seconds = min(run(requests) for run in (self._run_static, self._run_continuous))
        num_output_tokens = sum(request["num_output_tokens"] for request in requests)
        return _make_result(seconds, len(requests), num_output_tokens)

    def _run_static(self, requests: list[dict[str, Any]]) -> float:
        torch: Any = self._torch
        width = max(len(request["prompt_token_ids"]) for request in requests)
        ids = torch.full((len(requests), width), _PAD_TOKEN_ID)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(requests):
            start = width - len(request["prompt_token_ids"])
            ids[row, start:] = torch.tensor(request["prompt_token_ids"])
            mask[row, start:] = 1
        longest = max(request["num_output_tokens"] for request in requests)
        settings = self._make_settings(longest, None)
        begin = time.perf_counter()
        with torch.inference_mode():
            out = self._model.generate(ids, attention_mask=mask, generation_config=settings)
        seconds = time.perf_counter() - begin
        _expect_length(out.shape[1] - width, longest)
        return seconds

    def _run_continuous(self, requests: list[dict[str, Any]]) -> float:
        """From the first request added to the last result; the manager's set-up is not counted."""
        lengths = [request["num_output_tokens"] for request in requests]
        # By default its cache takes most of the machine's memory. Each request's last page is not full.
        num_tokens = sum(len(request["prompt_token_ids"]) for request in requests) + sum(lengths)
        batching = self._transformers.ContinuousBatchingConfig(
            page_size=_PAGE_SIZE,
            num_blocks=num_tokens // _PAGE_SIZE + 2 * len(requests),
            max_batch_tokens=2048,
        )
        manager: Any = self._model.continuous_batching_context_manager(
            generation_config=self._make_settings(max(lengths), _NO_EOS),
            continuous_batching_config=batching,
            block=True,
            timeout=5,
        )
        # Not inference_mode: the manager updates its buffers from a thread of its own.
        with self._torch.no_grad(), manager as running:
            start = time.perf_counter()
            for request, length in zip(requests, lengths, strict=True):
                ids = request["prompt_token_ids"]
                running.add_request(ids, max_new_tokens=length, eos_token_id=_NO_EOS)
            _expect_length(_take_results(running, len(requests)), sum(lengths))
            return time.perf_counter() - start

    def _make_settings(self, max_new_tokens: int, eos_token_id: int | None) -> Any:
        return self._transformers.GenerationConfig(
            do_sample=False,
            max_new_tokens=max_new_tokens,
            pad_token_id=_PAD_TOKEN_ID,
            eos_token_id=eos_token_id,
        )


def _take_results(manager: Any, num_requests: int) -> int:
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


def _expect_length(found: int, expected: int) -> None:
    if found != expected:
        raise RuntimeError(f"generated {found} tokens instead of {expected}")


def _make_engine(name: str, settings: dict[str, Any]) -> Any:
    if name in ("quire", "vllm"):
        return _LLM(name, settings)
    return {"sentence-transformers": _SentenceTransformers, "transformers": _Transformers}[name](settings)


def main() -> None:
    """Load the model and take jobs until standard input ends."""
    started_at = time.perf_counter()
    reports = os.dup(1)
    os.dup2(2, 1)  # what libraries print goes to standard error
    engine = _make_engine(sys.argv[1], json.loads(sys.argv[2]))
    _report(reports, {"ready_s": time.perf_counter() - started_at, "rss_bytes": _measure_rss()})
    for line in sys.stdin:
        try:
            report = {"result": engine.run(json.loads(line)), "rss_bytes": _measure_rss()}
        except Exception as error:
            report = {"error": f"{type(error).__name__}: {error}"}
        _report(reports, report)


def _make_result(
    seconds: float, num_requests: int, num_output_tokens: int = 0, num_cached_tokens: int | None = None
) -> dict[str, Any]:
    """contest.JobResult."""
    return {
        "seconds": seconds,
        "num_requests": num_requests,
        "num_output_tokens": num_output_tokens,
        "num_cached_tokens": num_cached_tokens,
    }


def _measure_rss() -> dict[str, int]:
    """This process, and each below it by the last word of its command, which is its role in Quire."""
    import psutil

    sizes = {"frontend": psutil.Process().memory_info().rss}
    for child in psutil.Process().children(recursive=True):
        try:
            role = (child.cmdline() or ["child"])[-1]
            role = role if role.replace("-", "").isalnum() else "child"
            sizes[role] = sizes.get(role, 0) + child.memory_info().rss
        except psutil.Error:
            continue
    return sizes


def _report(reports: int, report: dict[str, Any]) -> None:
    os.write(reports, json.dumps(report).encode() + b"\n")


if __name__ == "__main__":
    main()
