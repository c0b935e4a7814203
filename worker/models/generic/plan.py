"""What transformers' class computes, seen by a run of three tokens without memory: a ModelSpec, or why not.

As a program it answers the frontend: config.json in, msgspec's JSON out. Each attention call of the run
becomes a layer of the spec. Whatever a call brings beside queries, keys and values is covered or refused by
name: a keyword left out would change every token in silence. So would a mask, which is looked at where it
could change.
Legend: T tokens, H query heads, G kv heads, D head size, N positions.
"""

from __future__ import annotations

import inspect
import json
import math
import resource
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, cast

import msgspec
import torch
from torch import Tensor, nn

from ....ipc.errors import ModelError, shorten
from ....ipc.spec.generic_spec import GenericSpec
from ....ipc.spec.model_spec import AttentionSpec, DenseSpec, LayerSpec, ModelSpec, RopeConfig
from .architecture import (
    OWN_ATTENTION,
    explain,
    find_body,
    find_class,
    find_experts,
    make_config,
    make_empty,
    run_empty,
)

_NAME = "quire_plan"  # of our functions in transformers' registers
_NUM_TOKENS = 3
_MAX_BYTES = 8 << 30  # of this process as a program: some 100,000 modules take 1 GiB
_HEAD_UNIT = 8  # of the kernels' head sizes; narrower heads end in zeros
# Keywords of attention that decide nothing, whatever they hold.
_IGNORED = frozenset(
    {
        *("dropout", "position_ids", "cache_position", "use_cache", "output_attentions", "return_dict"),
        *(
            "output_hidden_states",
            "output_router_logits",
            "logits_to_keep",
            "position_embeddings",
            "is_causal",
        ),
    }
)
_POSITION_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "n_ctx")
_CHOSEN_KEYS = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", "num_experts_per_token")
_ARCHITECTURES = "config.json architectures"


def plan(values: Mapping[str, Any]) -> ModelSpec:
    """The spec of a config.json. ModelError names what is not covered."""
    config = make_config(values)
    cls = find_class(config, values)
    recorder = _Recorder(config)
    recorder.register()
    model = make_empty(cls, config, _NAME, _NAME)
    _check_modules(model)
    logits = _run(model)
    recorder.check(model)
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    return ModelSpec(
        architecture=cls.__name__,
        vocab_size=int(logits.shape[-1]),
        hidden_size=int(table.weight.shape[1]),
        layers=tuple(
            LayerSpec(attention=spec, ffn=DenseSpec(intermediate_size=0)) for spec in recorder.layers
        ),
        max_position_embeddings=_find_max_positions(config),
        rope=RopeConfig(type="none"),
        tie_word_embeddings=head is not None and head.weight is table.weight,
        generic=_count(model, values, head),
    )


def _run(model: Any) -> Tensor:
    ids = torch.zeros((1, _NUM_TOKENS), dtype=torch.int64, device="meta")
    positions = torch.arange(_NUM_TOKENS, device="meta")[None]
    try:
        return run_empty(model, ids, positions)
    except ModelError:
        raise
    except Exception as error:
        text = "one whose code runs without weights, which shows what it computes; it ends with"
        raise ModelError(_ARCHITECTURES, type(model).__name__, f"{text} {explain(error)}") from error


def _check_modules(model: Any) -> None:
    """A step's tokens are of several requests: the body must take positions, and mix tokens by attention."""
    if "position_ids" not in inspect.signature(find_body(model).forward).parameters:
        text = "one that is told its tokens' positions (position_ids)"
        raise ModelError(_ARCHITECTURES, type(model).__name__, text)
    for module in model.modules():
        if isinstance(module, (nn.Conv1d, nn.RNNBase)):
            text = "one without convolutions and recurrences over tokens, which have no place in our cache"
            raise ModelError(_ARCHITECTURES, type(model).__name__, f"{text} ({type(module).__name__})")
        kind = getattr(module, "rope_type", None)
        kinds: Any = cast(dict[str, str], kind).values() if isinstance(kind, dict) else [kind]
        if "dynamic" in kinds or (isinstance(kind, dict) and "longrope" in kinds):
            text = "another by transformers' code, whose angles would depend on a step's longest sequence"
            raise ModelError("config.json rope_type", kind, text)


def _find_max_positions(config: Any) -> int:
    values = (getattr(config, name, None) for name in _POSITION_KEYS)
    return next((value for value in values if isinstance(value, int) and value > 0), 2048)


def _count(model: Any, values: Mapping[str, Any], head: nn.Module | None) -> GenericSpec:
    linears = [each for each in model.modules() if isinstance(each, nn.Linear) and each is not head]
    shapes = Counter((each.out_features, each.in_features) for each in linears)
    num_params = sum(each.numel() for each in model.parameters())
    experts = find_experts(model)
    config = model.config
    chosen = next((each for key in _CHOSEN_KEYS if type(each := getattr(config, key, None)) is int), 1)
    num_unused = 0
    for module in experts:
        for each in module.parameters():
            if each.dim() == 3:
                shapes[each.shape[1], each.shape[2]] += len(each)
        size = sum(each.numel() for each in module.parameters())
        num_experts = max(chosen, int(next(module.parameters()).shape[0]))
        num_unused += size * (num_experts - chosen) // num_experts
    num_linear = sum(num_out * num_in * count for (num_out, num_in), count in shapes.items())
    num_head = 0 if head is None else sum(each.numel() for each in head.parameters())
    is_tied = head is not None and head.weight is model.get_input_embeddings().weight
    hidden = model.get_input_embeddings().weight.shape[1]
    return GenericSpec(
        config=json.dumps(values),
        linears=tuple((num_out, num_in, count) for (num_out, num_in), count in sorted(shapes.items())),
        num_others=num_params - num_linear - (0 if is_tied else num_head),
        num_active_params=num_params - num_unused,
        num_activations=8 * hidden + 2 * _find_widest(model) + chosen * _find_expert_width(experts),
    )


def _find_widest(model: nn.Module) -> int:
    """What a layer's linear layers give for a token."""
    layers = next((each for each in model.modules() if isinstance(each, nn.ModuleList) and len(each)), ())
    return max(
        (
            sum(part.out_features for part in layer.modules() if isinstance(part, nn.Linear))
            for layer in layers
        ),
        default=0,
    )


def _find_expert_width(experts: list[nn.Module]) -> int:
    return max((sum(sum(each.shape[1:]) for each in module.parameters()) for module in experts), default=0)


class _Recorder:
    """Stands in for attention, masks and experts while the model runs without memory."""

    def __init__(self, config: Any) -> None:
        self._config = config
        self.layers: list[AttentionSpec] = []
        self._modules: list[nn.Module] = []
        self._masks: dict[int, tuple[Tensor, Callable[..., Any]]] = {}

    def register(self) -> None:
        """Put these functions into transformers' registers."""
        from transformers import AttentionInterface
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
        from transformers.masking_utils import AttentionMaskInterface

        AttentionInterface.register(_NAME, self._attend)
        AttentionMaskInterface.register(_NAME, self._make_mask)
        ALL_EXPERTS_FUNCTIONS.register(_NAME, _skip_experts)

    def _make_mask(
        self, *, q_length: int, kv_length: int, mask_function: Callable[..., Any], **_: Any
    ) -> Tensor:
        mask = torch.ones((1, 1, q_length, kv_length), dtype=torch.bool, device="meta")
        self._masks[id(mask)] = mask, mask_function
        return mask

    def _attend(
        self,
        module: nn.Module,
        query: Tensor,  # [1, H, T, D]
        key: Tensor,  # [1, G, T, D]
        value: Tensor,  # [1, G, T, size of a value]
        attention_mask: Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,  # [H], sinks
        **others: Any,
    ) -> tuple[Tensor, None]:
        where = f"attention of {type(module).__name__}"
        for name, given in others.items():
            if given is not None and name not in _IGNORED:
                raise ModelError(f"{where}: {name}", shorten(given), "None: no kernel here computes with it")
        shapes = [tuple(each.shape) for each in (query, key, value)]
        (batch, heads, tokens, size), (_, groups, keys, key_size), (*_, value_size) = shapes
        if (batch, tokens, keys, size) != (1, _NUM_TOKENS, _NUM_TOKENS, key_size) or heads % groups:
            raise ModelError(f"{where}: shapes", shapes, "a query, a key and a value of each token")
        if scaling is not None and not isinstance(scaling, (int, float)):  # pyright: ignore
            raise ModelError(f"{where}: scaling", shorten(scaling), "a number")
        if s_aux is not None and tuple(s_aux.shape) != (heads,):
            raise ModelError(f"{where}: s_aux", list(s_aux.shape), f"a sink for each of {heads} heads")
        if not getattr(module, "is_causal", True) and getattr(self._config, "is_decoder", None) is None:
            raise ModelError(f"{where}: is_causal", False, "True: no token sees those after it")
        self.layers.append(
            AttentionSpec(
                num_heads=heads,
                num_kv_heads=groups,
                head_size=-(-max(size, value_size) // _HEAD_UNIT) * _HEAD_UNIT,
                window=self._find_window(where, attention_mask, sliding_window),
                scale=1 / math.sqrt(size) if scaling is None else float(scaling),
                soft_cap=None if softcap is None else float(softcap),
                sinks=None if s_aux is None else "s_aux",
            )
        )
        self._modules.append(module)
        return torch.empty((1, tokens, heads, value_size), dtype=query.dtype, device="meta"), None

    def _find_window(self, where: str, mask: Tensor | None, keyword: int | None) -> int | None:
        """The window that the mask has: the keyword's, none, or one of config.json's numbers."""
        if mask is None:
            return keyword
        if id(mask) not in self._masks:
            text = "None, or a mask of transformers' own makers"
            raise ModelError(f"{where}: attention_mask", list(mask.shape), text)
        numbers = _list_numbers(self._config)
        positions = _choose_positions(numbers, _find_max_positions(self._config))
        seen = _look(self._masks[id(mask)][1], positions)
        for window in (keyword, None, *numbers):
            if torch.equal(seen, _see(positions, window)):
                return window
        if (seen & ~_see(positions, None)).any():
            value = getattr(self._config, "is_decoder", None)
            raise ModelError("config.json is_decoder", value, "a decoder, whose tokens see none after them")
        text = "one of what came before, all of it or a window"
        raise ModelError(f"{where}: attention_mask", "another pattern", text)

    def check(self, model: Any) -> None:
        """ModelError where layers compute attention by code of their own."""
        calling = {getattr(each, "layer_idx", None) for each in self._modules}
        number = getattr(self._config, "num_hidden_layers", 0)
        missing = [] if None in calling else [layer for layer in range(number) if layer not in calling]
        if missing or not self.layers:
            text = f"{OWN_ATTENTION}; layer {next(iter(missing), 0)} does not"
            raise ModelError(_ARCHITECTURES, type(model).__name__, text)


def _skip_experts(module: nn.Module, hidden: Tensor, *_: Any, **__: Any) -> Tensor:  # noqa: ARG001
    return torch.empty_like(hidden)


def _list_numbers(config: Any) -> list[int]:
    """Every integer above 0 of a config, each once."""
    values = cast(dict[str, Any], config.to_dict()).values()
    return sorted({each for each in values if type(each) is int and each > 0})


def _choose_positions(numbers: list[int], max_positions: int) -> Tensor:
    """int64 [N]: where a mask made of these numbers would change, and the first ones."""
    last = max_positions - 1
    edges = {number + step for number in numbers for step in (-1, 0, 1)}
    positions = {0, 1, 2, 3, last, *edges, *(last - edge for edge in edges)}
    return torch.tensor(sorted(each for each in positions if 0 <= each <= last))


def _look(mask_function: Callable[..., Any], positions: Tensor) -> Tensor:
    """bool [N, N]: which keys at these positions a query at each of them sees."""
    zero = torch.zeros((), dtype=torch.int64)
    seen = mask_function(zero, zero, positions[:, None], positions[None, :])
    return torch.as_tensor(seen).expand(len(positions), len(positions)).bool()


def _see(positions: Tensor, window: int | None) -> Tensor:
    distance = positions[:, None] - positions[None, :]
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)


def limit_memory() -> None:
    """A config may ask for any size."""
    limits = [each for each in resource.getrlimit(resource.RLIMIT_DATA) if each != resource.RLIM_INFINITY]
    most = min([_MAX_BYTES, *limits])
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def answer(question: bytes) -> bytes:
    """JSON for the JSON of a config.json: (spec, None), or (None, (field, value, allowed))."""
    try:
        return msgspec.json.encode((plan(json.loads(question)), None))
    except ModelError as error:
        is_plain = error.value is None or isinstance(error.value, (str, int, float, list))
        value: Any = error.value if is_plain else shorten(error.value)
        return msgspec.json.encode((None, (error.field, value, error.allowed)))


def main() -> None:
    """Answer the question on standard input."""
    limit_memory()
    sys.stdout.buffer.write(answer(sys.stdin.buffer.read()) + b"\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
