"""`quire bench roofline`: the cost model's table, of any model and card, without either being here."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from ...frontend.models.families import read_model_spec
from ...frontend.models.gguf.files import find_gguf_files
from ...frontend.models.gguf.tensors import make_formats
from ...frontend.models.model_files import read_json
from ...frontend.models.model_folder import find_model_folder, inspect_gguf
from ...frontend.models.quantization import read_weight_formats
from ...ipc.errors import InputError
from ...ipc.spec.model_spec import Dtype, ModelSpec
from ...ipc.spec.weight_format import Quantization, WeightFormats, make_online_formats
from .cost_model import CARDS, Card, StepShape, StepWork, compute_step_work
from .model_configs import BENCH_MODELS, DUMMY_MODELS
from .table import format_table


@dataclass(frozen=True, slots=True)
class RooflineOptions:
    """See `quire bench roofline --help`."""

    model: str
    cards: tuple[str, ...]
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    prompts: tuple[int, ...]
    dtype: Dtype
    quantization: Quantization | None
    num_ranks: int
    json_path: str | None


def load_spec(model: str, quantization: Quantization | None = None) -> ModelSpec:
    """Of a bench's model, of a folder's config.json, or of a GGUF file's header; no weights are read.

    Raises InputError for `quantization` of a model that is narrow as it is.
    """
    config: dict[str, Any] | None = (BENCH_MODELS | DUMMY_MODELS).get(model)
    files = find_gguf_files(model) if config is None else ()
    if files:
        folder = inspect_gguf(files, with_tokenizer=False)
        spec = read_model_spec(folder.config)
        formats = make_formats(folder.gguf_tensors, spec)
    else:
        config = config or read_json(find_model_folder(model) / "config.json")
        spec = read_model_spec(config)
        formats = read_weight_formats(config, spec)
    if quantization is not None:
        if formats != WeightFormats():
            raise InputError(
                "quantization", quantization, "None for a model whose weights are narrow already"
            )
        formats = make_online_formats(quantization)
    return replace(spec, weight_formats=formats)


def run_roofline(options: RooflineOptions) -> int:
    """Print a row for each card, batch, context and number of prompt tokens."""
    spec = load_spec(options.model, options.quantization)
    rows: list[list[str]] = []
    records: list[dict[str, Any]] = []
    for name in options.cards:
        for shape in _list_shapes(options):
            work = compute_step_work(spec, options.dtype, shape, options.num_ranks)
            rows.append(_format_row(CARDS[name], shape, work))
            records.append({"card": name, **asdict(shape), **asdict(work), **_times(CARDS[name], work)})
    print(
        f"{options.model}, {options.dtype}, by data sheets: floors are certain, the other times estimates\n"
    )
    print(format_table(_HEADER, rows))
    if options.json_path is not None:
        Path(options.json_path).write_text(json.dumps(records, indent=1) + "\n")
    return 0


_HEADER = [
    *("card, step", "weights MB", "KV MB", "GFLOP", "launches"),
    *("floor ms", "estimate ms", "host ms, graph", "host ms, eager", "tokens/s"),
]


def _list_shapes(options: RooflineOptions) -> list[StepShape]:
    return [
        StepShape(batch, context, prompt)
        for prompt in options.prompts
        for context in options.contexts
        for batch in options.batches
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
