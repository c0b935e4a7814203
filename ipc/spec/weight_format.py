"""WeightFormat: how the weight of a linear layer is stored where it is narrower than the model's type.

Made of a checkpoint's config.json or file headers in the frontend, or of `quantization`; the worker's layers
and the memory ledger plan with it before a tensor is read.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from ..errors import ConfigError

Quantization = Literal["int4", "int8", "fp8"]  # of a plain checkpoint's weights, while they are read
# Of quantized checkpoints, as their config.json or vLLM call them; the last two are vLLM's kernels.
CHECKPOINT_METHODS = (
    *("gptq", "awq", "compressed-tensors", "fp8", "fbgemm_fp8", "bitsandbytes", "torchao", "mxfp4", "gguf"),
    *("gptq_marlin", "awq_marlin"),
)
HeadQuantization = Literal["none", "int4", "int8", "fp8"]

_SCALE_SIZE_BYTES = {"float32": 4, "bfloat16": 2}
_OFFSET_SIZE_BYTES = 4


class WeightFormat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Codes of some bits, and a scale for each group of `group_rows` outputs by `group_size` inputs; 0: all.

    kind "int": the codes are unsigned, value = (code - 2^(bits - 1)) * scale, with offsets code * scale -
    offset, with a codebook codebook[code] * scale; group_rows is 1. kind "fp8": float8_e4m3fn, value =
    code * scale.
    """

    kind: Literal["int", "fp8"] = "int"
    bits: Literal[4, 8] = 8
    group_size: int = 0
    group_rows: int = 1
    scale_dtype: Literal["float32", "bfloat16"] = "float32"
    has_offsets: bool = False
    has_permutation: bool = False  # inputs are taken in another order than x has them
    has_codebook: bool = False
    layout: str | None = None  # of a checkpoint: which reader takes it in; None: quantized while it is read

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):  # pyright: ignore[reportUnnecessaryContains]
            raise ConfigError("bits", self.bits, "4 or 8")
        if self.group_size < 0 or self.group_size % 16:
            raise ConfigError(
                "group_size", self.group_size, "a multiple of 16, or 0 for all inputs of an output"
            )

    def count_groups(self, num_in: int) -> int:
        """Groups along the inputs of an output; the last one may be shorter."""
        return -(-num_in // self.group_size) if self.group_size else 1

    def count_bytes(self, num_out: int, num_in: int) -> int:
        """Bytes of a weight [num_out, num_in] in memory, without its bias; what kernels pad is left out."""
        num_groups = num_out * self.count_groups(num_in)  # kernels keep the scales of blocks by output
        per_group = _SCALE_SIZE_BYTES[self.scale_dtype] + (_OFFSET_SIZE_BYTES if self.has_offsets else 0)
        permutation = 4 * num_in if self.has_permutation else 0
        return num_out * -(-num_in * self.bits // 8) + num_groups * per_group + permutation


class WeightFormats(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The formats of a model's linear layers, by the names of their tensors without ".weight".

    None stands for the model's type. Norms, routers of experts and tables that are looked up are in none of
    these; an exception of the embedding's name is the form in which a table that is tied is multiplied.
    """

    default: WeightFormat | None = None
    exceptions: dict[str, WeightFormat | None] = {}

    def find(self, name: str) -> WeightFormat | None:
        """The format of a layer."""
        return self.exceptions.get(name, self.default)

    @property
    def name(self) -> str:
        """What a checkpoint's narrow weights are, such as 'gptq 4-bit' or 'awq'; '' where it has none."""
        layouts = [each.layout for each in (self.default, *self.exceptions.values()) if each is not None]
        method, slash, bits = (next(filter(None, layouts), "")).partition("/")
        return f"{method} {bits}-bit" if slash else method


LM_HEAD = "lm_head"

_ONLINE: dict[HeadQuantization, WeightFormat | None] = {
    "none": None,
    "int4": WeightFormat(bits=4, group_size=64, scale_dtype="bfloat16"),
    "int8": WeightFormat(bits=8),
    "fp8": WeightFormat(kind="fp8"),
}


def make_online_formats(quantization: Quantization, lm_head: HeadQuantization | None = None) -> WeightFormats:
    """Of a plain checkpoint that is quantized while it is read; the projection to logits has its own.

    None: the same, but int8 beside int4.
    """
    default, head = (
        _ONLINE[quantization],
        _ONLINE[lm_head or ("int8" if quantization == "int4" else quantization)],
    )
    return WeightFormats(default=default, exceptions={} if head == default else {LM_HEAD: head})
