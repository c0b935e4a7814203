"""The offline workloads. Lengths depend on the workload alone, token ids also on `contents`.

So two runs with the same `contents` do the same work, and a warm-up with other contents warms every shape
and no prefix cache.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

# Ids below this are special tokens in the checkpoints that `models.py` writes and in the pocket model.
_FIRST_PLAIN_TOKEN = 16
_FIRST_WORD = 4  # of an encoder's ids; those before it are special tokens

SHARED_PREFIX_LEN = 512  # tokens, W3


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request: `prompt_token_ids` in, exactly `num_output_tokens` out, greedy, EOS ignored."""

    prompt_token_ids: list[int]
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """A list of requests that are all there at the start."""

    name: str
    requests: list[BenchRequest]

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens of all requests, shared ones counted each time."""
        return sum(len(request.prompt_token_ids) for request in self.requests)

    @property
    def num_output_tokens(self) -> int:
        """Tokens to generate, over all requests."""
        return sum(request.num_output_tokens for request in self.requests)

    @property
    def max_total_len(self) -> int:
        """The longest request's prompt and output together."""
        return max(len(r.prompt_token_ids) + r.num_output_tokens for r in self.requests)


@dataclass(frozen=True, slots=True)
class WorkloadKind:
    """How many requests, and how a request's (prompt, output) lengths are drawn."""

    summary: str
    num_requests: int
    draw_lengths: Callable[[random.Random], tuple[int, int]]
    shared_prefix_len: int = 0


WORKLOADS = {
    "W1": WorkloadKind("1 request, 128 in, 128 out", 1, lambda _: (128, 128)),
    "W2": WorkloadKind(
        "32 requests, 32-256 in, 16-128 out", 32, lambda rng: (rng.randint(32, 256), rng.randint(16, 128))
    ),
    "W3": WorkloadKind(
        "16 requests, 512 shared + 32 own in, 32 out", 16, lambda _: (32, 32), SHARED_PREFIX_LEN
    ),
    "W4": WorkloadKind(
        "256 requests, 32-64 in, 32-64 out", 256, lambda rng: (rng.randint(32, 64), rng.randint(32, 64))
    ),
    # The benchmark of nano-vllm and mini-sglang; for a GPU.
    "W5": WorkloadKind(
        "256 requests, 100-1024 in, 100-1024 out",
        256,
        lambda rng: (rng.randint(100, 1024), rng.randint(100, 1024)),
    ),
}
CPU_WORKLOADS = ("W1", "W2", "W3", "W4")
GPU_WORKLOADS = ("W1", "W5")


def make_workload(name: str, vocab_size: int, contents: str) -> Workload:
    """The workload `name` with token ids drawn from `contents`; the same arguments give the same requests."""
    kind = WORKLOADS[name]
    lengths = random.Random(f"lengths/{name}")
    ids = random.Random(f"{name}/{contents}")
    prefix = _draw_ids(ids, kind.shared_prefix_len, vocab_size)
    requests: list[BenchRequest] = []
    for _ in range(kind.num_requests):
        prompt_len, output_len = kind.draw_lengths(lengths)
        requests.append(BenchRequest(prefix + _draw_ids(ids, prompt_len, vocab_size), output_len))
    return Workload(name, requests)


def cut_outputs(workload: Workload, max_output_tokens: int) -> Workload:
    """The same requests with at most that many tokens to generate each."""
    requests = [
        BenchRequest(request.prompt_token_ids, min(max_output_tokens, request.num_output_tokens))
        for request in workload.requests
    ]
    return Workload(workload.name, requests)


def make_texts(vocab_size: int, num_texts: int, low: int, high: int, contents: str) -> list[str]:
    """Texts of `low` to `high` tokens for the bench's encoders, [CLS] and [SEP] among them."""
    lengths, ids = random.Random(f"{num_texts} {low} {high}"), random.Random(contents)
    counts = [lengths.randint(low, high) - 2 for _ in range(num_texts)]
    last = vocab_size - 1
    return [" ".join(f"t{ids.randint(_FIRST_WORD, last)}" for _ in range(count)) for count in counts]


def count_tokens(text: str) -> int:
    """Tokens of a text of `make_texts`."""
    return text.count(" ") + 3


def _draw_ids(rng: random.Random, count: int, vocab_size: int) -> list[int]:
    return [rng.randrange(_FIRST_PLAIN_TOKEN, vocab_size) for _ in range(count)]
