"""What a step of any ModelSpec costs on a card: bytes, operations, launches, and how long that takes.

Floors follow from the model and the card's data sheet: nothing can be faster. Estimates add what kernels have
reached elsewhere (EFFICIENCY) and the gaps between launches; they are no measurements. One token of each of
`num_decodes` requests with `context` keys, beside `num_prompt_tokens` of one prompt with none before them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ...ipc.errors import InputError
from ...ipc.spec.linear_shapes import LinearShape, list_linears
from ...ipc.spec.model_spec import DTYPE_SIZE_BYTES, AttentionSpec, Dtype, ExpertsSpec, LayerSpec, ModelSpec
from ...ipc.spec.weight_format import LM_HEAD


@dataclass(frozen=True, slots=True)
class Card:
    """By its maker's data sheet: 10^9 bytes and 10^12 dense operations of 16 bits a second."""

    name: str
    memory_gb_per_s: float
    tflops: float
    link_gb_per_s: float  # to the other ranks, one way


CARDS = {
    card.name: card
    for card in (
        Card("a100", 2039, 312, 300),
        Card("h100", 3350, 989, 450),
        Card("h100-pcie", 2000, 756, 64),
        Card("h200", 4800, 989, 450),
        Card("b200", 8000, 2250, 900),
        Card("l4", 300, 121, 32),
        Card("l40s", 864, 362, 32),
        Card("rtx4090", 1008, 165, 32),
    )
}
# Of the memory's rate and the matrix units' peak, what good kernels reach.
EFFICIENCY = (0.85, 0.65)
_GAP_S = 1.0e-6  # between kernels of a graph
_EAGER_LAUNCH_S = 19e-6  # of the host: Python and driver, as timed on a CPU
_GRAPH_STEP_S = 150e-6  # of the host: inputs, a replay, sampling, copies


@dataclass(frozen=True, slots=True)
class StepShape:
    """What is in a step."""

    num_decodes: int
    context: int
    num_prompt_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        """That go through the layers."""
        return self.num_decodes + self.num_prompt_tokens

    @property
    def num_sampled(self) -> int:
        """That go through the projection to logits."""
        return self.num_decodes + (1 if self.num_prompt_tokens else 0)


@dataclass(frozen=True, slots=True)
class StepWork:
    """What one rank does in a step."""

    weight_bytes: int
    kv_bytes: int  # of recurrent states too, which a step reads and writes once
    flops: int
    attention_flops: int
    num_launches: int
    link_bytes: int = 0  # that a rank sends for sums
    has_graph: bool = True  # not where the host asks which experts have tokens

    def find_floor_s(self, card: Card) -> float:
        """No step takes less."""
        read_s = (self.weight_bytes + self.kv_bytes) / (card.memory_gb_per_s * 1e9)
        compute_s = (self.flops + self.attention_flops) / (card.tflops * 1e12)
        return max(read_s, compute_s) + self.link_bytes / (card.link_gb_per_s * 1e9)

    def estimate_s(self, card: Card) -> float:
        """What a step may take, as a graph where it can be one: the host does not wait for its launches."""
        memory, matrix = EFFICIENCY
        read_s = (self.weight_bytes + self.kv_bytes) / (card.memory_gb_per_s * 1e9) / memory
        compute_s = (self.flops + self.attention_flops) / (card.tflops * 1e12) / matrix
        link_s = self.link_bytes / (card.link_gb_per_s * 1e9)
        device_s = max(read_s, compute_s) + link_s + self.num_launches * _GAP_S
        return max(device_s, self.estimate_host_s(self.has_graph))

    def estimate_host_s(self, is_graph: bool) -> float:
        """Of Python and the driver; run-ahead hides it where it is shorter than the step."""
        return _GRAPH_STEP_S if is_graph else self.num_launches * _EAGER_LAUNCH_S


def compute_step_work(spec: ModelSpec, dtype: Dtype, step: StepShape, num_ranks: int = 1) -> StepWork:
    """The work of one of `num_ranks` ranks, which share the model evenly."""
    sizes = spec.find_tensor_parallel_sizes()
    if num_ranks not in sizes:
        raise InputError("tensor_parallel_size", num_ranks, f"one of {', '.join(map(str, sizes))}")
    own, size = spec.for_rank(num_ranks), DTYPE_SIZE_BYTES[dtype]
    shares = _find_shares(own, step.num_tokens)
    weight_bytes = sum(
        round(_count_weight_bytes(own, linear, size) * share) for linear, share in _list_weights(own, shares)
    )
    head = own.vocab_size // num_ranks * own.hidden_size if own.has_logits else 0
    if own.has_logits:
        weight_bytes += _count_head_bytes(own, num_ranks, size)
    body = sum(layer.count_active_params(own.hidden_size) for layer in own.layers)
    pairs = [_count_pairs(layer.attention, step) for layer in own.layers]
    sums_bytes = 2 * len(own.layers) * step.num_tokens * own.hidden_size * size
    return StepWork(
        weight_bytes=weight_bytes,
        kv_bytes=sum(_count_kv_bytes(layer.attention, step, size) for layer in own.layers)
        + 2 * DTYPE_SIZE_BYTES["float32"] * own.state_size * step.num_sampled,
        flops=2 * (body * step.num_tokens + head * step.num_sampled),
        attention_flops=sum(
            4 * layer.attention.query_size * count for layer, count in zip(own.layers, pairs, strict=True)
        ),
        num_launches=sum(_count_launches(layer, step, num_ranks) for layer in own.layers) + 9,
        link_bytes=2 * (num_ranks - 1) * sums_bytes // num_ranks,
        has_graph=not any(isinstance(layer.ffn, ExpertsSpec) for layer in own.layers),
    )


def _find_shares(spec: ModelSpec, num_tokens: int) -> list[float]:
    """Of each layer's experts, those that a step of so many tokens is expected to read."""
    shares: list[float] = []
    for layer in spec.layers:
        ffn = layer.ffn
        is_dense = not isinstance(ffn, ExpertsSpec)
        shares.append(1.0 if is_dense else 1 - (1 - ffn.num_experts_per_tok / ffn.num_experts) ** num_tokens)
    return shares


def _list_weights(spec: ModelSpec, shares: list[float]) -> Iterable[tuple[LinearShape, float]]:
    """Linear layers but the projection to logits, and which part of each is read."""
    prefixes = [f"{spec.layer_prefix.format(index)}." for index in range(spec.num_layers)]
    experts = [
        layer.ffn.gate.partition("{}")[0] if isinstance(layer.ffn, ExpertsSpec) else None
        for layer in spec.layers
    ]
    index = 0
    for group in list_linears(spec):
        for linear in group:
            if not linear.name.startswith("lm_head"):
                while not linear.name.startswith(prefixes[index]):
                    index += 1
                rest, expert = linear.name.removeprefix(prefixes[index]), experts[index]
                is_expert = expert is not None and rest.startswith(expert)
                yield linear, shares[index] if is_expert else 1.0


def _count_weight_bytes(spec: ModelSpec, linear: LinearShape, size: int) -> int:
    format = spec.weight_formats.find(linear.name)
    count = linear.num_out * linear.num_in
    return count * size if format is None else format.count_bytes(linear.num_out, linear.num_in)


def _count_head_bytes(spec: ModelSpec, num_ranks: int, size: int) -> int:
    """Of a tied table that is the copy in a form of its own, if there is one."""
    formats, rows = spec.weight_formats, spec.vocab_size // num_ranks
    format = formats.find(LM_HEAD)
    if spec.tie_word_embeddings and (format is None or format.layout is not None):
        format = formats.exceptions.get(spec.embedding.tokens)
    return rows * spec.hidden_size * size if format is None else format.count_bytes(rows, spec.hidden_size)


def _count_pairs(attention: AttentionSpec, step: StepShape) -> int:
    """Of a query and a key that it sees."""
    most = attention.window or step.context + step.num_prompt_tokens
    tokens = step.num_prompt_tokens
    if not attention.is_causal:
        return step.num_decodes * min(step.context, most) + tokens * min(tokens, 2 * most)
    whole = min(tokens, most)
    prompt = whole * (whole + 1) // 2 + (tokens - whole) * most
    return step.num_decodes * min(step.context, most) + prompt


def _count_kv_bytes(attention: AttentionSpec, step: StepShape, size: int) -> int:
    """Keys and values that are read once and those that are written."""
    read = step.num_decodes * min(step.context, attention.window or step.context) + step.num_prompt_tokens
    return (read + step.num_tokens) * 2 * attention.kv_size * size


def _count_launches(layer: LayerSpec, step: StepShape, num_ranks: int) -> int:
    """Two norms, two projections, rotation, attention of both kinds; the feed-forward part; sums of ranks."""
    names = (layer.attention_norm, layer.ffn_norm, layer.attention_out_norm, layer.ffn_out_norm)
    attention = (2 if step.num_decodes else 0) + (1 if step.num_prompt_tokens else 0)
    ffn = 3
    if isinstance(layer.ffn, ExpertsSpec):
        ffn = 4 + 3 * min(layer.ffn.num_experts, layer.ffn.num_experts_per_tok * step.num_tokens)
    return sum(name is not None for name in names) + 3 + attention + ffn + (2 if num_ranks > 1 else 0)
