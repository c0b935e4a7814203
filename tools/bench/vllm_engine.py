"""vLLM as a contestant: `PEER_PYTHON -P tools/bench/vllm_engine.py SETTINGS_JSON`.

Run as a file by the Python of vLLM's own environment, where Quire is not installed: it imports nothing of
ours and speaks the lines of contest.py with the standard library. `peers.py` sets the variables it needs.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def main() -> None:
    """Load the model and take jobs."""
    started_at = time.perf_counter()
    reports = os.dup(1)
    os.dup2(2, 1)  # what libraries print goes to standard error
    from vllm import LLM  # pyright: ignore[reportMissingImports]

    llm: Any = LLM(**json.loads(sys.argv[1]))
    _report(reports, {"ready_s": time.perf_counter() - started_at, "rss_bytes": _measure_rss()})
    for line in sys.stdin:
        try:
            report = {"result": _run(llm, json.loads(line)), "rss_bytes": _measure_rss()}
        except Exception as error:
            report = {"error": f"{type(error).__name__}: {error}"}
        _report(reports, report)


def _run(llm: Any, job: dict[str, Any]) -> dict[str, Any]:
    """One `generate` call with all requests, EOS ignored, token ids in and out."""
    from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

    prompts = [{"prompt_token_ids": request["prompt_token_ids"]} for request in job["requests"]]
    params: list[Any] = [
        SamplingParams(
            temperature=job["temperature"],
            max_tokens=request["num_output_tokens"],
            ignore_eos=True,
            detokenize=False,
            structured_outputs=_pick_schema(job["json_schemas"], number),
        )
        for number, request in enumerate(job["requests"])
    ]
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    return {
        "seconds": seconds,
        "num_requests": len(outputs),
        "num_output_tokens": sum(len(output.outputs[0].token_ids) for output in outputs),
        "num_cached_tokens": sum(output.num_cached_tokens or 0 for output in outputs),
    }


def _pick_schema(schemas: list[str], number: int) -> Any:
    if not schemas:
        return None
    from vllm.sampling_params import StructuredOutputsParams  # pyright: ignore[reportMissingImports]

    return StructuredOutputsParams(json=schemas[number % len(schemas)])


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
