"""From a plain checkpoint to one of 4 or 8 bits, layer by layer: memory holds one of them at a time."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from msgspec.structs import replace

from ...frontend.models.model_files import read_json
from ...frontend.options.engine_args import EngineArgs
from ...frontend.text.tokenizer import load_tokenizer
from ...ipc.errors import InputError, ModelError
from ...ipc.spec.config import EngineConfig
from ...ipc.spec.linear_shapes import LinearShape, list_layer_linears
from ...kernels.program import native
from ...worker.threads import count_cores
from ...worker.weights.finite import check_finite
from .folder import FolderWriter, make_quantization_config
from .layers import LayerStream
from .rounding import RoundedWeight, choose_scales, factor_gram, round_by_gptq, round_to_nearest
from .texts import draw_sequences

Format = Literal["gptq-int4", "int8"]
FORMATS: tuple[Format, ...] = ("gptq-int4", "int8")
GROUP_SIZES = (128, 64, 32)
_STEP_TOKENS = 2048
_MAX_TOKENS = 1 << 22  # to calibrate with: their states are held in memory


@dataclass(frozen=True, slots=True)
class QuantizeOptions:
    """`group_size` None: the largest of GROUP_SIZES that goes with all layers; of int8 a scale an output."""

    model: str
    out: Path
    format: Format
    group_size: int | None = None
    act_order: bool = True
    calibration: Path | None = None
    num_samples: int = 128
    sample_length: int = 512

    @property
    def bits(self) -> int:
        """4 or 8."""
        return 8 if self.format == "int8" else 4


def load_plain(options: QuantizeOptions) -> EngineConfig:
    """The model, its files and shapes checked. Raises ConfigError or ModelError for what stays as it is."""
    config = EngineArgs(
        options.model, device="cpu", max_num_batched_tokens=_STEP_TOKENS
    ).create_engine_config()
    spec = config.model.spec
    if config.model.gguf_tensors or spec.weight_formats.name:
        value = f"{options.model} ({spec.weight_formats.name or 'gguf'})"
        raise ModelError("model", value, "a plain checkpoint, of which something narrower can be made")
    if not spec.is_causal or spec.generic is not None:
        text = "a decoder that a family of Quire's own reads: others, and encoders, are not quantized"
        raise ModelError("model", options.model, text)
    if config.model.dtype == "float16":  # which CPUs compute slowly
        config = replace(config, model=replace(config.model, dtype="float32"))
    return config


def choose_group_size(options: QuantizeOptions, shapes: Sequence[LinearShape]) -> int | None:
    """Inputs of a group, None for a scale an output. InputError names a layer that it does not fit."""
    if options.group_size is None and options.format == "int8":
        sizes: tuple[int, ...] = (4,)  # of a word: the format has whole ones
    else:
        sizes = GROUP_SIZES if options.group_size is None else (options.group_size,)
    for size in sizes:
        if all(shape.num_in % size == 0 for shape in shapes):
            return None if size == 4 else size
    odd = next(shape for shape in shapes if shape.num_in % sizes[-1])
    fitting = [str(size) for size in GROUP_SIZES if not any(shape.num_in % size for shape in shapes)]
    allowed = f"one of {', '.join(fitting)}" if fitting else "a model whose layers' inputs divide by 32"
    raise InputError("group_size", sizes[-1], f"{allowed}: {odd.name} has {odd.num_in} inputs")


def quantize_folder(
    options: QuantizeOptions, config: EngineConfig, report: Callable[[int], None]
) -> list[list[int]]:
    """Write `options.out`; `report` is called with the number of layers that are done.

    Returns sequences of ids that nothing was calibrated with. What is there after an error is removed.
    """
    spec = config.model.spec
    shapes = [shape for together in list_layer_linears(spec) for shape in together]
    group_size = choose_group_size(options, shapes)
    length = min(options.sample_length, config.model.max_model_len)
    if options.num_samples * length > _MAX_TOKENS:
        raise InputError(
            "samples", options.num_samples, f"at most {_MAX_TOKENS // length} of {length} tokens"
        )
    tokenizer = load_tokenizer(config.model.tokenizer)
    samples, held_out = draw_sequences(tokenizer, options.calibration, options.num_samples, length)
    native.set_num_threads(count_cores())
    with _new_folder(options.out) as folder:
        writer = FolderWriter(folder)
        stream = LayerStream(config, torch.tensor(samples), max(1, _STEP_TOKENS // length))
        for index in range(spec.num_layers):
            replaced: dict[str, torch.Tensor] = {}
            for name, rounded in _round_layer(stream, index, options, group_size):
                writer.add(stream.weights.stored_name(f"{name}.weight").removesuffix(".weight"), rounded)
                replaced[f"{name}.weight"] = rounded.dequantize()
            if options.format != "int8" and index + 1 < spec.num_layers:
                stream.advance(index, replaced)
            report(index + 1)
        writer.finish(
            Path(config.model.model),
            config.model.weight_files,
            _make_config(config, options.bits, group_size),
        )
    return held_out


def _round_layer(
    stream: LayerStream, index: int, options: QuantizeOptions, group_size: int | None
) -> Iterator[tuple[str, RoundedWeight]]:
    """(name, what becomes of its weight) of each linear layer of layer `index`."""
    bits = options.bits
    for together in stream.record(index, has_grams=options.format != "int8"):
        size = group_size or together.shapes[0].num_in
        factor = None if together.gram is None else factor_gram(together.gram, options.act_order)
        for shape in together.shapes:
            stored = stream.weights.read_stored(f"{shape.name}.weight", (shape.num_out, shape.num_in))
            weight = check_finite(f"{shape.name}.weight", stored.float())
            scales = choose_scales(weight, bits, size, stored.dtype)
            if factor is None:
                yield shape.name, round_to_nearest(weight, scales, bits, size)
            else:
                yield shape.name, round_by_gptq(weight, scales, *factor, bits, size)


def _make_config(config: EngineConfig, bits: int, group_size: int | None) -> dict[str, Any]:
    values = read_json(Path(config.model.model) / "config.json")
    return {**values, "quantization_config": make_quantization_config(bits, group_size)}


@contextmanager
def _new_folder(out: Path) -> Generator[Path]:
    """A folder beside its place, which takes it at the end. Raises InputError where there can be none."""
    check_out(out)
    with _naming_out(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}-"))
    try:
        yield scratch
        scratch.chmod(0o755)
        if out.is_dir():
            out.rmdir()
        scratch.rename(out)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def check_out(out: Path) -> None:
    """Raises InputError unless a folder can be made there."""
    with _naming_out(out):
        is_free = not out.exists() or (out.is_dir() and not any(out.iterdir()))
    if not is_free:
        raise InputError("OUT", str(out), "a folder that is not there yet, or an empty one")


@contextmanager
def _naming_out(out: Path) -> Generator[None]:
    """What the file system refuses becomes an InputError."""
    try:
        yield
    except OSError as error:
        raise InputError("OUT", str(out), f"a folder that can be made ({error.strerror})") from error
