"""The least time that a workload can take on this machine, and what it consists of. Computes only.

A step takes at least as long as reading what it must (every weight once, the keys and values of its
requests) and at least as long as its operations. So the floor is optimistic: it has no norms, no sampling,
no calls, and it lets all requests run at once and a shared prefix be computed and read once.
"""

from __future__ import annotations

from dataclasses import dataclass

from .ceilings import MachineRates
from .workloads import WORKLOADS, Workload


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What a step reads and multiplies."""

    num_layer_params: int  # used for every token
    num_head_params: int  # used for every sampled token
    bytes_per_param: float
    kv_bytes_per_token: int = 0  # keys and values of one position, over all layers
    attention_flops_per_key: int = 0  # for a query and one of its keys, over all layers

    @property
    def step_bytes(self) -> int:
        """Bytes of weights that a decode step reads."""
        return round((self.num_layer_params + self.num_head_params) * self.bytes_per_param)


@dataclass(frozen=True, slots=True)
class _Step:
    num_tokens: int  # that go through the layers
    num_sampled: int  # of them, through the vocabulary projection
    num_kv_tokens: int  # positions whose keys and values are read
    num_query_keys: int  # pairs of a query and a key that it sees


@dataclass(slots=True)
class Floor:
    """Seconds of a workload's parts. `seconds` is less than their sum: reading and computing overlap."""

    num_steps: int = 0
    seconds: float = 0.0
    weights_read_s: float = 0.0
    matmul_s: float = 0.0
    kv_read_s: float = 0.0
    attention_s: float = 0.0

    def add_step(self, rates: MachineRates, step: _Step, size: ModelSize) -> None:
        """Count one more step."""
        weights_read_s = size.step_bytes / rates.read_bytes_per_s
        kv_read_s = step.num_kv_tokens * size.kv_bytes_per_token / rates.read_bytes_per_s
        params = step.num_tokens * size.num_layer_params + step.num_sampled * size.num_head_params
        matmul_s = 2 * params / rates.flops_per_s
        attention_s = step.num_query_keys * size.attention_flops_per_key / rates.flops_per_s
        self.num_steps += 1
        self.weights_read_s += weights_read_s
        self.kv_read_s += kv_read_s
        self.matmul_s += matmul_s
        self.attention_s += attention_s
        self.seconds += max(weights_read_s + kv_read_s, matmul_s + attention_s)


def compute_floor(workload: Workload, size: ModelSize, rates: MachineRates) -> Floor:
    """One step for all prompts, then a step for each token of the longest output."""
    kind = WORKLOADS.get(workload.name)
    prefix_len = 0 if kind is None else kind.shared_prefix_len
    floor = Floor()
    floor.add_step(rates, _make_prefill(workload, prefix_len), size)
    for number in range(1, max(request.num_output_tokens for request in workload.requests)):
        floor.add_step(rates, _make_decode(workload, prefix_len, number), size)
    return floor


def _make_prefill(workload: Workload, prefix_len: int) -> _Step:
    own_lens = [len(request.prompt_token_ids) - prefix_len for request in workload.requests]
    query_keys = _count_causal_pairs(prefix_len)
    query_keys += sum(own * prefix_len + _count_causal_pairs(own) for own in own_lens)
    num_tokens = prefix_len + sum(own_lens)
    return _Step(num_tokens, len(own_lens), num_tokens, query_keys)


def _make_decode(workload: Workload, prefix_len: int, number: int) -> _Step:
    """The step that samples each request's token `number`, counted from 0, which the prefill sampled."""
    running = [request for request in workload.requests if request.num_output_tokens > number]
    lens = [len(request.prompt_token_ids) + number for request in running]
    num_kv_tokens = prefix_len + sum(length - prefix_len for length in lens)
    return _Step(len(running), len(running), num_kv_tokens, sum(lens))


def _count_causal_pairs(length: int) -> int:
    return length * (length + 1) // 2
