"""Every variant of a Triton kernel that serving a model launches, and what the compiler makes of it.

`python -m quire.tools.gpu.variants [FILE]` compiles all of them for all architectures, no GPU needed, and
writes the table that a test keeps: registers, spills, shared memory, copies on their way. Launches are
recorded on tensors without memory, and are those of a warm-up (worker/steps/warm_up.py): steps of one row, of
16 and of another number, which is all that Triton tells apart.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...frontend.models.families import read_model_spec
from ...ipc.spec.linear_shapes import LinearShape, list_linears
from ...ipc.spec.model_spec import AttentionSpec, ModelSpec
from ...kernels.attention.attention_plan_triton import launch_plan, plan_attention
from ...kernels.attention.paged_attention_triton import launch_paged_attention
from ...kernels.attention.rotate_and_write import QKNorm
from ...kernels.attention.rotate_and_write_triton import launch_rotate_and_write
from ...kernels.linear.gated_activation_triton import launch_gated_activation
from ...kernels.linear.linear_triton import launch_linear
from ...kernels.linear.narrow_linear_triton import INT4, TritonNarrowWeight, launch_narrow_linear
from ...kernels.norm.rms_norm_triton import launch_rms_norm
from ...kernels.program.gather_rows_triton import launch_gather_rows
from ...kernels.sampling.log_totals_triton import launch_log_totals
from ...kernels.sampling.penalties_triton import launch_penalties
from ...kernels.sampling.sample_triton import NUM_PARAMETERS, launch_sample
from ...kernels.sampling.token_bitmask_triton import launch_token_bitmask
from ..bench.model_configs import COMPILED_MODELS
from .compiler import ARCHITECTURES, SHARED_BYTES, Compiled, Launch, compile_launch, make, record_launches

TABLE = Path(__file__).parents[2] / "tests" / "kernels" / "compiled_kernels.json"
MAX_NUM_SEQS = 1024  # of the largest cards
_ROWS = (1, 3, 16)
_MANY_ROWS = (40, MAX_NUM_SEQS, 2048)
_BLOCK_SIZE = 16
_MAX_LEN = 4096
_NUM_PROCESSORS = {80: 108, 89: 58, 90: 132, 100: 148}  # of an A100, L4, H100, B200
_INT4_GROUP = 64  # as `quantization="int4"` has it


@dataclass(frozen=True, slots=True)
class Case:
    """A model as it is served."""

    model: str
    is_exact: bool = False
    is_int4: bool = False


CASES = {
    "qwen3-0.6b": Case("qwen3-0.6b"),
    "llama-8b, int4": Case("llama-8b", is_int4=True),
    "llama-8b, exact": Case("llama-8b", is_exact=True),
    "gemma2-2b": Case("gemma2-2b"),
    "gemma2-2b, exact": Case("gemma2-2b", is_exact=True),
}


def record_case(case: Case, architecture: int) -> list[Launch]:
    """A launch of each variant."""
    return record_model(read_model_spec(COMPILED_MODELS[case.model]), case, architecture)


def record_model(spec: ModelSpec, case: Case, architecture: int) -> list[Launch]:
    """The same of any model."""
    found: dict[str, Launch] = {}
    for call in _list_calls(spec, case, architecture):
        for launch in record_launches(call, architecture):
            found.setdefault(launch.key, launch)
    return list(found.values())


def summarize(variants: list[Compiled]) -> dict[str, dict[str, Any]]:
    """By kernel: how many, and of registers, spills and shared bytes the most."""
    table: dict[str, dict[str, Any]] = {}
    for name in sorted({each.name for each in variants}):
        own = [each for each in variants if each.name == name]
        table[name] = {
            "variants": len(own),
            "registers": max(each.num_registers for each in own),
            "spills": max(each.num_spills for each in own),
            "shared_bytes": max(each.shared_bytes for each in own),
            "copies_in_flight": min(each.copies_in_flight for each in own),
        }
    return table


def compile_case(case: Case, architecture: int) -> dict[str, dict[str, Any]]:
    """`summarize` of all variants."""
    launches = record_case(case, architecture)
    with ThreadPoolExecutor(2) as pool:
        return summarize(list(pool.map(compile_launch, launches)))


def _list_calls(spec: ModelSpec, case: Case, architecture: int) -> Iterator[Callable[[], object]]:
    hidden, vocab = spec.hidden_size, spec.vocab_size
    for rows in (*_ROWS, *_MANY_ROWS):
        yield lambda rows=rows: _launch_layers(spec, rows)
        for shape in _list_weights(spec) if case.is_exact or case.is_int4 else ():
            if shape.name == "lm_head" and rows > MAX_NUM_SEQS:
                continue
            yield lambda rows=rows, shape=shape: _launch_linear(shape, rows, case)
    for singles, chunks in ((1, 0), (3, 0), (16, 0), (2, 1), (0, 1), (MAX_NUM_SEQS, 0)):
        for attention in dict.fromkeys(layer.attention for layer in spec.layers):
            yield lambda own=attention, singles=singles, chunks=chunks: _launch_attention(
                own, spec.norm_eps, singles, chunks, case.is_exact, architecture
            )
    for rows in _ROWS:
        ids = make(rows, dtype=torch.int64)
        yield lambda ids=ids: launch_gather_rows(make(vocab, hidden), ids)
        yield lambda rows=rows, ids=ids: _launch_sampling(rows, ids, spec)


def _launch_layers(spec: ModelSpec, rows: int) -> None:
    hidden, dense = make(rows, spec.hidden_size), spec.layers[0].ffn
    weight = make(spec.hidden_size)
    numbers = spec.norm_eps, spec.norm_weight_offset, spec.norm_rounds_normed
    for residual in (None, hidden):
        launch_rms_norm(hidden, residual, weight, *numbers)
    launch_gated_activation(make(rows, 2 * dense.intermediate_size), dense.activation)


def _list_weights(spec: ModelSpec) -> list[LinearShape]:
    """Of one layer, what is multiplied together as one; and the projection to logits."""
    groups = [group for group in list_linears(spec) if group[0].name.startswith(spec.layer_prefix.format(0))]
    shapes = [LinearShape("", sum(each.num_out for each in group), group[0].num_in) for group in groups]
    return [*shapes, LinearShape("lm_head", spec.vocab_size, spec.hidden_size)]


def _launch_linear(shape: LinearShape, rows: int, case: Case) -> None:
    x = make(rows, shape.num_in)
    if case.is_exact:
        launch_linear(x, make(shape.num_out, shape.num_in))
        return
    if shape.name == "lm_head":
        int8 = make(shape.num_out, shape.num_in, dtype=torch.int8)
        launch_linear(x, int8, None, make(shape.num_out, dtype=torch.float32))
        return
    codes = make(shape.num_out, shape.num_in // 2, dtype=torch.uint8)
    scales = make(shape.num_in // _INT4_GROUP, shape.num_out)
    launch_narrow_linear(x, TritonNarrowWeight(INT4, shape.num_in, _INT4_GROUP, 64, codes, scales))


def _launch_attention(
    attention: AttentionSpec, eps: float, singles: int, chunks: int, is_exact: bool, architecture: int
) -> None:
    heads, kv_heads, size = attention.num_heads, attention.num_kv_heads, attention.head_size
    requests, tokens = singles + chunks, singles + 40 * chunks
    cache, qkv = make(8, kv_heads, _BLOCK_SIZE, size), make(tokens, attention.qkv_size)
    norm = None if attention.qk_norm is None else QKNorm(make(size), make(size), eps)
    angles = make(tokens, size // 2, dtype=torch.float32)
    slots = make(tokens, dtype=torch.int64)
    launch_rotate_and_write(qkv, heads, angles, angles, norm, cache, cache, slots)
    starts, lengths = _ints(requests + 1), _ints(requests)
    plan = plan_attention(
        singles, chunks, requests, kv_heads, _MAX_LEN, _NUM_PROCESSORS[architecture], is_exact,
        shared_bytes=SHARED_BYTES[architecture],
    )  # fmt: skip
    work = launch_plan(plan, starts, lengths, attention.window)
    tables = make(requests, _MAX_LEN // _BLOCK_SIZE, dtype=torch.int32)
    tensors = (cache, cache, tables, starts, lengths)
    launch_paged_attention(
        qkv, attention.qkv_size, heads, *tensors, attention.window, plan, work,
        attention.soft_cap, attention.scale,
    )  # fmt: skip


def _launch_sampling(rows: int, ids: Tensor, spec: ModelSpec) -> None:
    vocab = spec.vocab_size
    logits = make(rows, vocab, dtype=torch.float32)
    parameters = make(rows, NUM_PARAMETERS, dtype=torch.float64)
    # Edited ones and those with a cap are float32, others as the model has them.
    for own_logits in (logits, logits if spec.logit_soft_cap else make(rows, vocab)):
        for has_filters in (False, True):
            launch_sample(own_logits, parameters, has_filters)
    launch_log_totals(logits, ids)
    launch_token_bitmask(logits, make(rows, -(-vocab // 32), dtype=torch.int32), ids)
    seen = make(rows, dtype=torch.float32)
    launch_penalties(logits.view(-1), ids, seen, make(3, rows, dtype=torch.float32))


def _ints(size: int) -> Tensor:
    return make(size, dtype=torch.int32)


def main(argv: list[str]) -> int:
    """Compile all and write the table."""
    path = Path(argv[0]) if argv else TABLE
    table: dict[str, dict[str, Any]] = {}
    for name, case in CASES.items():
        for architecture in ARCHITECTURES:
            print(f"{name}, sm_{architecture} ...", file=sys.stderr, flush=True)
            table.setdefault(name, {})[f"sm_{architecture}"] = compile_case(case, architecture)
            path.write_text(json.dumps(table, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
