"""vLLM or sentence-transformers as a contestant: `PEER_PYTHON -P tools/bench/peer_engine.py PEER SETTINGS`.

Run as a file by the Python of the peer's own environment, where Quire is not installed: it imports nothing of
ours and speaks the lines of contest.py with the standard library. `peers.py` sets the variables it needs.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


class _VLLM:
    def __init__(self, settings: dict[str, Any]) -> None:
        from vllm import LLM  # pyright: ignore[reportMissingImports]

        self._llm: Any = LLM(**settings)

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        """One call with all texts or requests, these with EOS ignored, token ids in and out."""
        if job["texts"]:
            start = time.perf_counter()
            outputs = self._llm.embed(job["texts"], use_tqdm=False)
            return _make_result(time.perf_counter() - start, len(outputs))
        from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

        prompts = [{"prompt_token_ids": request["prompt_token_ids"]} for request in job["requests"]]
        params: list[Any] = [
            SamplingParams(
                temperature=0.0,
                max_tokens=request["num_output_tokens"],
                ignore_eos=True,
                detokenize=False,
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


_PEERS: dict[str, Any] = {"vllm": _VLLM, "sentence-transformers": _SentenceTransformers}


def main() -> None:
    """Load the model and take jobs."""
    started_at = time.perf_counter()
    reports = os.dup(1)
    os.dup2(2, 1)  # what libraries print goes to standard error
    peer = _PEERS[sys.argv[1]](json.loads(sys.argv[2]))
    _report(reports, {"ready_s": time.perf_counter() - started_at, "rss_bytes": _measure_rss()})
    for line in sys.stdin:
        try:
            report = {"result": peer.run(json.loads(line)), "rss_bytes": _measure_rss()}
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
    """The client process, and all of its children together."""
    import psutil

    me = psutil.Process()
    sizes = {"frontend": me.memory_info().rss}
    children = 0
    for child in me.children(recursive=True):
        try:
            children += child.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return {**sizes, "children": children} if children else sizes


def _report(reports: int, report: dict[str, Any]) -> None:
    os.write(reports, json.dumps(report).encode() + b"\n")


if __name__ == "__main__":
    main()
