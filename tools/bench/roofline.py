"""`quire bench roofline`: the cost model's table, of any model and card, without either being here."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ...ipc.spec.model_spec import DTYPE_SIZE_BYTES, Dtype
from ...ipc.spec.weight_format import Quantization
from ..options import COUNT, INDEX, option
from .bench_model import load_spec
from .cost_model import CARDS, Card, StepShape, StepWork, compute_step_work
from .machine import write_json
from .table import format_table


@dataclass(frozen=True, slots=True)
class Options:
    """What a step costs on a card by its data sheet; no GPU is needed."""

    card: tuple[str, ...] = option(
        ("h200",), f"of {', '.join(CARDS)} (h200)", choices=tuple(CARDS), metavar="C"
    )
    model: str = option(
        "qwen3-0.6b", "tiny, small, qwen3-0.6b, llama-8b, a folder, or a GGUF file (%(default)s)"
    )
    batch: tuple[int, ...] = option((1, 8, 32, 256), "requests that decode (1 8 32 256)", INDEX, metavar="N")
    context: tuple[int, ...] = option((208,), "tokens of each (208)", COUNT, metavar="N")
    prompt_tokens: tuple[int, ...] = option(
        (0,), "tokens of a prompt in the same step (0)", INDEX, metavar="N"
    )
    dtype: Dtype = option(  # noqa: RUF009
        "bfloat16", "of what is not narrow (bfloat16)", choices=tuple(DTYPE_SIZE_BYTES)
    )
    quantization: Quantization | None = option(  # noqa: RUF009
        None, "int4, int8 or fp8, where config.json names no format", choices=("int4", "int8", "fp8")
    )
    tensor_parallel_size: int = option(1, "cards that share the model (1)", metavar="N")
    json: str | None = option(None, "write every figure to a file too", metavar="FILE")


def run(options: Options) -> int:
    """Print a row for each card, batch, context and number of prompt tokens."""
    spec = load_spec(options.model, options.quantization)
    rows: list[list[str]] = []
    records: list[dict[str, Any]] = []
    for name in options.card:
        for shape in _list_shapes(options):
            work = compute_step_work(spec, options.dtype, shape, options.tensor_parallel_size)
            rows.append(_format_row(CARDS[name], shape, work))
            records.append({"card": name, **asdict(shape), **asdict(work), **_times(CARDS[name], work)})
    print(
        f"{options.model}, {options.dtype}, by data sheets: floors are certain, the other times estimates\n"
    )
    print(format_table(_HEADER, rows))
    write_json(options.json, records)
    return 0


_HEADER = [
    *("card, step", "weights MB", "KV MB", "GFLOP", "launches"),
    *("floor ms", "estimate ms", "host ms, graph", "host ms, eager", "tokens/s"),
]


def _list_shapes(options: Options) -> list[StepShape]:
    return [
        StepShape(batch, context, prompt)
        for prompt in options.prompt_tokens
        for context in options.context
        for batch in options.batch
        if batch or prompt
    ]


def _times(card: Card, work: StepWork) -> dict[str, float]:
    return {
        "floor_s": work.find_floor_s(card),
        "estimate_s": work.estimate_s(card),
        "graph_host_s": work.estimate_host_s(is_graph=True),
        "eager_host_s": work.estimate_host_s(is_graph=False),
    }


def _format_row(card: Card, shape: StepShape, work: StepWork) -> list[str]:
    prompt = f" + {shape.num_prompt_tokens} of a prompt" if shape.num_prompt_tokens else ""
    times = _times(card, work)
    return [
        f"{card.name}, {shape.num_decodes} x {shape.context}{prompt}",
        f"{work.weight_bytes / 1e6:,.0f}",
        f"{work.kv_bytes / 1e6:,.1f}",
        f"{(work.flops + work.attention_flops) / 1e9:,.1f}",
        str(work.num_launches),
        *(f"{seconds * 1e3:.3f}" for seconds in times.values()),
        f"{shape.num_tokens / times['estimate_s']:,.0f}",
    ]
