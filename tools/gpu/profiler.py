"""Where a step's time goes on this GPU, by torch.profiler: each kernel's time, kinds of them beside their
floors, and the gaps in which nothing runs.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from ...ipc.protocol.step import SchedulerOutput
from ..bench.bench_model import load_spec
from ..bench.cost_model import Card, StepShape, StepWork, compute_step_work
from ..bench.models import ensure_model
from .rows import Row, Say
from .steps import StepDriver
from .targets import find_card, judge_step

_MAX_TOKENS = 8192
_DECODE_LEN = 208  # tokens of a request that decodes
_NUM_STEPS = 8
_NUM_KERNELS = 6  # that are listed
_MIXED_TOKENS = 512
_MIXED_DECODES = 64
_KINDS = {
    "attention": re.compile(r"paged_attention|_combine|_plan_kernel|flash|attend", re.I),
    "products": re.compile(r"gemm|gemv|cutlass|nvjet|splitk|linear|matmul|cublas|::mm", re.I),
    "copies": re.compile(r"memcpy|memset|copy_", re.I),
}


@dataclass(frozen=True, slots=True)
class Span:
    """A kernel or copy that ran, in microseconds."""

    name: str
    start: float
    end: float


def profile_steps(say: Say, device: str = "cuda", model: str = "qwen3-0.6b", scale: int = 1) -> None:
    """Decodes of 1 and 256, a mixed step, prompts of 2048 and 8192. `scale` divides all, without a GPU."""
    folder = str(ensure_model(model))
    card, spec = find_card(say, device), load_spec(model)
    length = max(1, _DECODE_LEN // scale)
    many = max(2, 256 // scale)
    driver = StepDriver(
        model=folder, load_format="dummy", skip_tokenizer_init=True, device=device, max_num_seqs=many + 1,
        max_model_len=_MAX_TOKENS // scale + 64, max_num_batched_tokens=max(many + 1, _MAX_TOKENS // scale),
    )  # fmt: skip
    for batch, most in ((1, 1.2), (many, 1.05)):
        rows = list(range(batch))
        for row in rows:
            driver.run([driver.enter([row], length, room=2 * _NUM_STEPS)])
        steps = [driver.decode(rows) for _ in range(2 * _NUM_STEPS)]
        work = compute_step_work(spec, "bfloat16", StepShape(batch, length + _NUM_STEPS))
        _say_profile(say, f"decode {batch}", driver, steps, work, card, most)
    # Some decode on beside the prompts of one more row, which takes a new request in every step.
    driver.reset()
    few = max(2, _MIXED_DECODES // scale)
    prompt = max(2, _MIXED_TOKENS // scale - few)
    rows = list(range(few))
    for row in rows:
        driver.run([driver.enter([row], length, room=2 * _NUM_STEPS)])
    steps = [driver.decode(rows, few, prompt) for _ in range(2 * _NUM_STEPS)]
    work = compute_step_work(spec, "bfloat16", StepShape(few, length + _NUM_STEPS, prompt))
    _say_profile(say, f"mixed {few} + {prompt}", driver, steps, work, card, 1.2)
    for prompt in (2048 // scale, _MAX_TOKENS // scale):
        driver.reset()
        steps = [driver.enter([0], prompt) for _ in range(6)]
        work = compute_step_work(spec, "bfloat16", StepShape(0, 0, prompt))
        _say_profile(say, f"prefill {prompt}", driver, steps, work, card, 1.3)
    _say_peak(say, driver, device)


def _say_profile(
    say: Say,
    name: str,
    driver: StepDriver,
    steps: list[SchedulerOutput],
    work: StepWork,
    card: Card,
    most: float,
) -> None:
    """Half of the steps timed without the profiler, half with it."""
    half = len(steps) // 2
    step_s = driver.run(steps[:half]) / half
    say(judge_step(f"{name}, step", step_s, work, card, most if torch.cuda.is_available() else None))
    spans = _record(driver, steps[half:])
    if not spans:
        say(Row(f"{name}, kernels", "the profiler saw none", "some", False))
        return
    for row in explain_spans(name, spans, half, work, card):
        say(row)


def _record(driver: StepDriver, steps: list[SchedulerOutput]) -> list[Span]:
    is_gpu = torch.cuda.is_available()
    activity = torch.profiler.ProfilerActivity.CUDA if is_gpu else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as profile:
        driver.run(steps)
        if is_gpu:
            torch.cuda.synchronize()
    events: Any = profile.events()
    wanted = torch.autograd.DeviceType.CUDA if is_gpu else torch.autograd.DeviceType.CPU
    return [
        Span(event.name, event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type == wanted
    ]


def explain_spans(name: str, spans: list[Span], num_steps: int, work: StepWork, card: Card) -> Iterable[Row]:
    """Of what ran in `num_steps` steps: idle time, kinds beside their floors, the longest kernels."""
    spans = sorted(spans, key=lambda span: span.start)
    gaps, busy_us = _find_gaps(spans)
    whole_us = busy_us + sum(gaps)
    yield Row(
        f"{name}, idle",
        f"{sum(gaps) / whole_us:.0%} of {whole_us / num_steps / 1e3:.3f} ms, the longest gap "
        f"{max(gaps, default=0.0):.0f} us, {len(spans) / num_steps:.0f} kernels a step",
    )
    floors = _find_floors(work, card)
    by_kind: dict[str, float] = defaultdict(float)
    by_kernel: dict[str, list[float]] = defaultdict(list)
    for span in spans:
        by_kind[_find_kind(span.name)] += span.end - span.start
        by_kernel[span.name].append(span.end - span.start)
    for kind, total_us in sorted(by_kind.items(), key=lambda item: -item[1]):
        step_us, floor_us = total_us / num_steps, floors.get(kind)
        beside = (
            "" if floor_us is None else f", floor {floor_us:.0f} us ({floor_us / max(step_us, 1e-9):.0%})"
        )
        yield Row(f"{name}, {kind}", f"{step_us:.0f} us a step{beside}")
    longest = sorted(by_kernel.items(), key=lambda item: -sum(item[1]))[:_NUM_KERNELS]
    for kernel, times in longest:
        detail = f"{len(times) / num_steps:.0f} a step, {sum(times) / len(times):.1f} us each"
        yield Row(f"{name}: {kernel[:60]}", f"{detail}, {sum(times) / max(busy_us, 1e-9):.0%}")


def _find_gaps(spans: list[Span]) -> tuple[list[float], float]:
    """Between the first and the last: stretches without any, and microseconds with one or more."""
    gaps: list[float] = []
    busy, end = 0.0, spans[0].start
    for span in spans:
        if span.start > end:
            gaps.append(span.start - end)
        busy += max(0.0, span.end - max(span.start, end))
        end = max(end, span.end)
    return gaps, busy


def _find_kind(kernel: str) -> str:
    return next((kind for kind, names in _KINDS.items() if names.search(kernel)), "other kernels")


def _find_floors(work: StepWork, card: Card) -> dict[str, float]:
    """Microseconds of a step."""
    byte_us, operation_us = 1e-3 / card.memory_gb_per_s, 1e-6 / card.tflops
    return {
        "products": max(work.weight_bytes * byte_us, work.flops * operation_us),
        "attention": max(work.kv_bytes * byte_us, work.attention_flops * operation_us),
    }


def _say_peak(say: Say, driver: StepDriver, device: str) -> None:
    """What torch took at most beside what was planned, after the largest steps."""
    if device == "cpu":
        say(Row("memory peak", f"not asked of a CPU; the ledger has {driver.ledger_bytes / 1e6:,.0f} MB"))
        return
    peak = torch.cuda.max_memory_reserved()
    detail = f"{peak / 1e6:,.0f} MB reserved, {torch.cuda.max_memory_allocated() / 1e6:,.0f} MB allocated"
    say(
        Row(
            "memory peak",
            detail,
            f"at most the ledger's {driver.ledger_bytes / 1e6:,.0f} MB",
            peak <= driver.ledger_bytes,
        )
    )
