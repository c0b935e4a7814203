"""From an EngineConfig to a GenericModel: weights by transformers' rules of names, then our layers in place.

Tensors come of safetensors files that the frontend has found, as views of their mappings; transformers opens
no file. What is left of its own parameters at the end is copied, so that no mapping stays.
"""

from __future__ import annotations

import copy
import json
import logging
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ....ipc.errors import ModelError
from ....ipc.spec.config import EngineConfig
from ....ipc.spec.generic_spec import GenericSpec
from ....ipc.spec.model_spec import AttentionSpec
from ....ipc.spec.weight_format import LM_HEAD, WeightFormats
from ....kernels.choice import choose_kernel
from ....kernels.program.program import NotNativeError
from ...attention import AttentionBackend, make_attention
from ...first_calls import make_first_calls
from ...layers.linear import Linear, make_linear
from ...pooling.head import load_pooling_head
from ...threads import MAX_SINGLE_THREAD_WEIGHT_BYTES
from ...torch_import import load_meta_kernels
from ...weights.integer_weight import NarrowWeight
from ...weights.online import quantize
from ...weights.weights import DummySource, open_tensors
from ..builder import open_weights
from ..decoder import Decoder
from ..model import Model
from ..native_forward import make_native_forward
from .alone import check_alone, compute_alike
from .architecture import explain, find_class, is_wrapped, make_config, make_empty
from .assemble import assemble
from .attention import NAME, register
from .layers import replace_layers
from .model import GenericModel
from .trace import NotTracedError, trace_model

_log = logging.getLogger(__name__)


def load_generic(config: EngineConfig, device: torch.device) -> Model:
    """The model that `config.model.spec.generic` names, with its weights on the device.

    Raises ModelError: weights that are missing, corrupt, of a wrong shape or of no use.
    """
    load_meta_kernels()
    make_first_calls()
    generic = config.model.spec.generic
    assert generic is not None
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    register()
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    model = _Builder(config, device, dtype, _load(config, generic, dtype)).build()
    model.pooling_head = load_pooling_head(config, open_weights(config.model, dtype, device), device)
    if model.pooling_head is not None:
        model.weight_bytes += model.pooling_head.size_bytes
    return model


def _load(config: EngineConfig, generic: GenericSpec, dtype: torch.dtype) -> Any:
    """transformers' model on the CPU; its parameters are views of the files."""
    values = json.loads(generic.config)
    settings = make_config(values)
    cls = find_class(settings, values)
    empty = make_empty(cls, settings, NAME)
    tensors = _open(config, empty, dtype)
    if is_wrapped(values) and config.model.load_format != "dummy":
        tensors = _unwrap(tensors)
    del empty
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model, info = cls.from_pretrained(
                None,
                config=settings,
                state_dict=tensors,
                dtype=dtype,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are refused below, by name
            )
    except (OSError, RuntimeError, ValueError, TypeError) as error:
        raise ModelError("model", config.model.model, f"weights that fit: {explain(error)}") from error
    _check(config.model.model, info)
    return model.eval()


def _open(config: EngineConfig, empty: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    model = config.model
    if model.load_format == "dummy":
        source = DummySource(model.seed, dtype, torch.device("cpu"))
        return {name: source.take(name, tuple(each.shape)) for name, each in empty.state_dict().items()}
    return open_tensors([Path(model.model, name) for name in model.weight_files])


def _unwrap(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Those of the decoder among others, by the names that it has alone."""
    names: dict[str, str] = {}
    for name in tensors:
        before, _, after = name.partition("language_model.")
        if after:
            names[name] = f"model.{after}" if before == "model." else after
        elif name.startswith("lm_head."):
            names[name] = name
    return {short: tensors[name] for name, short in names.items()} or tensors


def _check(folder: str, info: dict[str, Any]) -> None:
    """ModelError names the first tensor that was missing, unknown or of another shape."""
    for name in sorted(info["missing_keys"]):
        raise ModelError("model", folder, f"its weights must hold the tensor {name!r}")
    for each in sorted(info["mismatched_keys"]):
        name, stored, wanted = each if isinstance(each, tuple) else (each, None, None)
        raise ModelError(
            str(name),
            stored and list(stored),
            f"the shape {wanted and list(wanted)}, which config.json calls for",
        )
    unexpected = sorted(info["unexpected_keys"])
    if unexpected:
        raise ModelError(
            "model",
            folder,
            f"its weights hold {len(unexpected)} tensors that this architecture does not have, "
            f"the first is {unexpected[0]!r}",
        )
    for text in info.get("error_msgs") or ():
        raise ModelError("model", folder, f"weights that fit: {text}")


def _settle_ropes(model: nn.Module, max_model_len: int) -> None:
    """Have longrope's factors go by the longest sequence of the engine, as in our own families.

    transformers chooses them by the longest one that is computed together.
    """
    for module in model.modules():
        rope: Any = module
        if getattr(rope, "rope_type", None) == "longrope":
            rope(torch.zeros(1), torch.tensor([[max_model_len - 1]]))
            rope.rope_type = "default"


class _Builder:
    """Makes a model of layers of ours of a loaded one, or puts ours into it, and counts bytes."""

    def __init__(self, config: EngineConfig, device: torch.device, dtype: torch.dtype, model: Any) -> None:
        self._config, self._device, self._dtype, self._model = config, device, dtype, model
        self._formats = config.model.weight_formats
        self._size_bytes = 0
        head = model.get_output_embeddings()
        self._head = None if head is None else head.weight.data_ptr()
        _settle_ropes(model, config.model.max_model_len)
        self._layers = self._make_layers()

    def build(self) -> Model:
        """The model as a native program, or by transformers' code where the two differ."""
        decoder = self._translate()
        if decoder is None:
            return self._put_in()
        is_narrow = self._formats != WeightFormats()  # what differs from transformers' plain layers
        reference = self._put_in() if is_narrow else GenericModel(self._model, self._layers, 0)
        if compute_alike(decoder, reference, self._config, self._device):
            return decoder
        _log.info(
            "%s is computed by transformers' code: its program gives other results",
            self._config.model.spec.architecture,
        )
        return reference if is_narrow else self._put_in()

    def _put_in(self) -> GenericModel:
        """transformers' code with our layers, on its device."""
        self._size_bytes = 0
        norm_bytes = replace_layers(self._model, self._make_linear, self._dtype, self._device)
        self._size_bytes += norm_bytes
        self._settle(self._model)
        made = GenericModel(self._model, self._layers, self._size_bytes)
        check_alone(made, self._config, self._device)
        return made

    def _make_layers(self) -> list[tuple[AttentionSpec, AttentionBackend]]:
        backends: dict[tuple[int, int, int, bool], AttentionBackend] = {}
        layers = list[tuple[AttentionSpec, AttentionBackend]]()
        for layer in self._config.model.spec.layers:
            spec = layer.attention
            heads = spec.num_heads, spec.num_kv_heads, spec.head_size, spec.sinks is not None
            if heads not in backends:
                backends[heads] = make_attention(
                    spec,
                    self._dtype,
                    self._device,
                    self._config.wants_exact,
                    self._config.model.attention_backend,
                    self._config.cache.kv_cache_dtype,
                )
            layers.append((spec, backends[heads]))
        return layers

    def _translate(self) -> Decoder | None:
        """The model as a native program; None where some part has no operation."""
        if choose_kernel("program", self._dtype, self._device) == "torch":
            return None
        model, spec, max_model_len = self._model, self._config.model.spec, self._config.model.max_model_len
        try:
            trace, logits = trace_model(type(model), copy.deepcopy(model.config), self._dtype)
            parts = trace, logits, model, self._layers, max_model_len, self._dtype
            decoder = assemble(*parts, self._make_linear)
            decoder.weight_bytes += self._size_bytes
            splits_tokens = decoder.weight_bytes <= MAX_SINGLE_THREAD_WEIGHT_BYTES
            table = torch.empty(0, dtype=self._dtype)
            program = decoder.emit, spec, table, decoder.ropes, decoder.head, splits_tokens
            decoder.native = make_native_forward(*program)
            if decoder.native is None:
                raise NotNativeError("a layer without an operation")
        except (NotTracedError, NotNativeError, RecursionError) as error:
            _log.info("%s is computed by transformers' code: %s", spec.architecture, error)
            return None
        return decoder

    def _make_linear(self, names: list[str], weights: list[Tensor], biases: list[Tensor]) -> Linear:
        """One layer of weights [out, in] that are multiplied together."""
        is_head = len(weights) == 1 and weights[0].data_ptr() == self._head
        format = self._formats.find(LM_HEAD if is_head else names[0])
        weight = torch.cat(weights) if len(weights) > 1 else weights[0]
        weight = weight.to(self._device)
        bias = torch.cat(biases).to(self._device, copy=True) if biases else None
        made: Tensor | NarrowWeight = weight if format is None else quantize(weight, format)
        linear = make_linear(made, bias, self._dtype, is_strict=self._config.wants_exact)
        if linear.weight is weight and len(weights) == 1 and weight is weights[0] and not is_head:
            linear.weight = weight.clone()  # out of the file's mapping
        self._size_bytes += linear.size_bytes
        return linear

    def _settle(self, model: nn.Module) -> None:
        """Copy what is left to the device and out of the files' mappings."""
        copies: dict[int, Tensor] = {}
        for module in model.modules():
            for store in (module._parameters, module._buffers):  # pyright: ignore[reportPrivateUsage]
                for name, each in store.items():
                    if each is None:
                        continue
                    if id(each) not in copies:
                        data = each.data.to(self._device, copy=True)
                        self._size_bytes += data.nbytes
                        is_parameter = isinstance(each, nn.Parameter)
                        copies[id(each)] = nn.Parameter(data, requires_grad=False) if is_parameter else data
                    store[name] = copies[id(each)]  # pyright: ignore[reportArgumentType]
