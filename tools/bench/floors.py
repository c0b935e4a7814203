"""The least time that a workload can take on this machine: the cost model's floors at the rates that it has.

A step takes at least as long as reading what it must (every weight once, the keys and values of its requests)
and at least as long as its operations. So a floor is optimistic: it has no norms, no sampling, no calls, and
lets all requests run at once and a shared prefix be computed and read once, by itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...ipc.spec.model_spec import Dtype, ModelSpec
from .ceilings import MachineRates
from .cost_model import Card, StepShape, StepWork, compute_step_work
from .workloads import WORKLOADS, Workload


@dataclass(frozen=True, slots=True)
class Floor:
    """Of all steps of a workload."""

    num_steps: int
    seconds: float


def make_card(rates: MachineRates) -> Card:
    """This machine as the cost model knows cards."""
    return Card(rates.device, rates.read_bytes_per_s / 1e9, rates.flops_per_s / 1e12, 1.0)


def compute_floor(workload: Workload, spec: ModelSpec, dtype: Dtype, rates: MachineRates) -> Floor:
    """One step for all prompts, then a step for each token of the longest output."""
    kind, card = WORKLOADS.get(workload.name), make_card(rates)
    prefix = 0 if kind is None else kind.shared_prefix_len
    lengths = [len(request.prompt_token_ids) - prefix for request in workload.requests]
    seconds = compute_prompts_work(spec, dtype, [*([prefix] if prefix else []), *lengths]).find_floor_s(card)
    num_steps = max(request.num_output_tokens for request in workload.requests)
    for number in range(1, num_steps):  # the prompts' step sampled token 0
        running = [
            length + number
            for length, request in zip(lengths, workload.requests, strict=True)
            if request.num_output_tokens > number
        ]
        keys = (prefix + sum(running)) // len(running)
        seconds += compute_step_work(spec, dtype, StepShape(len(running), keys)).find_floor_s(card)
    return Floor(num_steps, seconds)


def compute_prompts_work(spec: ModelSpec, dtype: Dtype, lengths: list[int]) -> StepWork:
    """A step of several prompts, for which weights are read once."""
    works = {
        length: compute_step_work(spec, dtype, StepShape(0, 0, length)) for length in sorted(set(lengths))
    }
    every = [works[length] for length in lengths]
    return StepWork(
        weight_bytes=max(work.weight_bytes for work in every),
        kv_bytes=sum(work.kv_bytes for work in every),
        flops=sum(work.flops for work in every),
        attention_flops=sum(work.attention_flops for work in every),
        num_launches=0,
    )
