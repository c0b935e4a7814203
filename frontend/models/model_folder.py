"""Finds a model's folder and checks its files before anything is loaded.

Knows file names and the safetensors header; knows nothing of what config.json says. Reads at most the
headers of weight files, so a truncated or foreign checkpoint is refused in milliseconds.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec

from ...ipc.decoding import decode_json
from ...ipc.errors import ModelError, shorten
from ...ipc.spec.gguf_tensor import GgufTensor
from .gguf.files import find_gguf_files
from .gguf.folder import open_gguf
from .model_files import (
    MAX_INDEX_BYTES,
    POCKET,
    POCKET_ENCODER,
    check_no_revision,
    download,
    is_address,
    open_regular,
    read_json,
    read_json_as,
    strip_file_scheme,
)

_ALLOWED_MODEL = (
    "an existing folder or .gguf file, 'pocket', 'pocket-encoder', a Hugging Face hub name such as "
    "'org/name' or, of a GGUF file, 'org/name:Q4_K_M', or an address such as s3://bucket/model"
)
_POCKET_FOLDER = Path(__file__).resolve().parents[2] / "tools" / "pocket"
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_TOKENIZER_FILES = [
    "tokenizer*",
    "tekken.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "*.jinja",
]
_MODEL_FILES = ["*.safetensors", "*.json", *_TOKENIZER_FILES]
_FOREIGN_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
_MAX_HEADER_BYTES = 32 << 20  # 100,000 tensors take 10 MB; the format itself allows 100
_FLOAT_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_DTYPE_BITS = {
    **{"F64": 64, "I64": 64, "U64": 64, "C64": 64, "F32": 32, "I32": 32, "U32": 32},
    **{"BF16": 16, "F16": 16, "I16": 16, "U16": 16, "BOOL": 8, "I8": 8, "U8": 8},
    **{"F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8},
    **{"F6_E2M3": 6, "F6_E3M2": 6, "F4": 4},
}


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A checked model folder.

    `stored_dtype`: of the first floating tensor (None when there is none, or weights are not read).
    `float_tensors`: the names of all, where config.json says that some others are quantized. `shapes`: of all
    tensors of safetensors files, by name.
    """

    path: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]
    weight_files: tuple[Path, ...] = ()
    stored_dtype: str | None = None
    gguf_tensors: tuple[GgufTensor, ...] = ()  # where the tensors lie in GGUF files
    float_tensors: frozenset[str] = frozenset()
    has_head: bool = False  # a tensor of a projection to logits
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


_Size = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class _Tensor(msgspec.Struct):
    """An entry of a safetensors header. Its `__metadata__`, another kind of object, has none."""

    dtype: str = ""
    shape: Annotated[tuple[_Size, ...], msgspec.Meta(max_length=16)] = ()
    data_offsets: tuple[_Size, _Size] | None = None


def pocket_folder() -> Path:
    """The folder of the chat model that ships with Quire."""
    return _POCKET_FOLDER / "model"


def pocket_encoder_folder() -> Path:
    """The folder of the sentence encoder that ships with Quire."""
    return _POCKET_FOLDER / "encoder" / "model"


def find_model_folder(
    model: str, revision: str | None = None, field_name: str = "model", download_dir: str | None = None
) -> Path:
    """Turn a folder, a packaged model's name, a hub name or an address into a local folder.

    Hub models and what is at an address are downloaded.

    Of a GGUF file it is the one that open_gguf makes. Raises ModelError when there is no such folder, or the
    hub has no such model or cannot be reached.
    """
    if files := find_gguf_files(model, revision, field_name, download_dir):
        return open_gguf(files).folder
    model = strip_file_scheme(model)
    if model in (POCKET, POCKET_ENCODER):
        check_no_revision(revision, field_name, model)
        folder = pocket_folder() if model == POCKET else pocket_encoder_folder()
        if not folder.is_dir():
            raise ModelError(field_name, model, f"the packaged model is missing from {folder}")
        return folder
    try:
        path = Path(model).expanduser()
        if path.is_dir():
            return path.resolve()
        is_file = path.exists()
    except (OSError, RuntimeError) as error:  # too long a name, no permission, ~ of an unknown user
        raise ModelError(
            field_name, model, f"{_ALLOWED_MODEL} ({getattr(error, 'strerror', None) or error})"
        ) from error
    if is_file:
        raise ModelError(field_name, model, f"{_ALLOWED_MODEL} (it is a file)")
    if not is_address(model) and (not _HUB_NAME.fullmatch(model) or model.startswith(".")):
        raise ModelError(field_name, model, f"{_ALLOWED_MODEL} (no such folder)")
    patterns = _MODEL_FILES if field_name == "model" else ["*.json", *_TOKENIZER_FILES]
    return download(model, revision, field_name, patterns, _ALLOWED_MODEL, download_dir)


def inspect_gguf(files: Sequence[Path], with_tokenizer: bool = True) -> ModelFolder:
    """The folder that stands for GGUF files. Raises as `open_gguf`."""
    model = open_gguf(files, with_tokenizer)
    folder = inspect_model_folder(model.folder, load_weights=False)
    stored = {"weight_files": model.files, "stored_dtype": model.stored_dtype, "gguf_tensors": model.tensors}
    return replace(folder, **stored)


def inspect_model_folder(path: Path, load_weights: bool = True) -> ModelFolder:
    """Check that a folder can be loaded; with `load_weights` False only config.json is needed.

    Raises ModelError for a missing config.json, weights that are not safetensors, an incomplete index, or a
    file whose size is not what its header declares.
    """
    config_file = path / "config.json"
    if not config_file.is_file():
        raise ModelError("model", str(path), "a folder with a config.json, or a .gguf file")
    config, generation_config = read_json(config_file), read_json(path / "generation_config.json")
    if not _is_quantized(config):
        config |= _read_old_quantization(path)
    if not load_weights:
        return ModelFolder(path, config, generation_config)
    files = _find_weight_files(path)
    dtypes, shapes = _read_tensors(files)
    floats = {name: _FLOAT_DTYPES[dtype] for name, dtype in dtypes.items() if dtype in _FLOAT_DTYPES}
    return ModelFolder(
        path,
        config,
        generation_config,
        weight_files=tuple(files),
        stored_dtype=next(iter(floats.values()), None),
        has_head=any(name.endswith("lm_head.weight") for name in dtypes),
        float_tensors=frozenset(floats) if _is_quantized(config) else frozenset(),
        shapes=shapes,
    )


def _read_tensors(files: Sequence[Path]) -> tuple[dict[str, str], dict[str, tuple[int, ...]]]:
    """dtypes and shapes by name. ModelError for a name that two files have, and nothing says which counts."""
    dtypes: dict[str, str] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        header = read_header(file)
        if twice := next((name for name in header if name in shapes), None):
            raise ModelError("model", str(file), f"no tensor of another file; {shorten(twice)} is in two")
        dtypes.update((name, dtype) for name, (dtype, _) in header.items())
        shapes.update((name, shape) for name, (_, shape) in header.items())
    return dtypes, shapes


def _is_quantized(config: dict[str, Any]) -> bool:
    return any(config.get(key) is not None for key in ("quantization_config", "compression_config"))


def _read_old_quantization(path: Path) -> dict[str, Any]:
    """What GPTQ's and AWQ's tools wrote into a file of their own before config.json had a place for it."""
    for name, method in (("quantize_config.json", "gptq"), ("quant_config.json", "awq")):
        values = read_json(path / name)
        if values:
            return {"quantization_config": {"quant_method": method, **values}}
    return {}


def _find_weight_files(path: Path) -> list[Path]:
    """The safetensors files to load: what an index names, or model.safetensors, or all there are."""
    index = path / "model.safetensors.index.json"
    if os.path.lexists(index):  # whatever it is: no other file stands in for it
        return _read_index(index)
    if (path / "model.safetensors").is_file():
        return [path / "model.safetensors"]
    files = sorted(file for file in path.glob("*.safetensors") if not file.name.startswith("consolidated"))
    if files:
        return files
    foreign = sorted(file.name for file in path.glob("*") if file.suffix in _FOREIGN_SUFFIXES)
    if foreign:
        allowed = f"safetensors only (it holds {foreign[0]}, which can run code when read)"
        raise ModelError("model", str(path), allowed)
    allowed = "a folder with *.safetensors weights (consolidated* are another layout), or load_format='dummy'"
    raise ModelError("model", str(path), allowed)


def _read_index(index: Path) -> list[Path]:
    weight_map = read_json_as(index, MAX_INDEX_BYTES, _Index).weight_map
    if not weight_map:
        raise ModelError("model", str(index), "an index with a 'weight_map' of tensor names to files")
    names = sorted(set(weight_map.values()))
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelError("model", name, f"a *.safetensors file beside {index.name}")
    folder = index.parent
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        shown = ", ".join(missing[:3]) + (" ..." if len(missing) > 3 else "")
        raise ModelError("model", str(folder), f"all of {len(names)} shards; {len(missing)} missing: {shown}")
    return [folder / name for name in names]


def read_header(file: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The tensors' dtypes and shapes by name from a safetensors header, or ModelError.

    It is held against the file's size: tensors lie one after the other, without gaps, up to its end.

    Layout (safetensors README): uint64 header length, JSON header, tensor data; offsets count from the data.
    """
    try:
        with open_regular(file) as stream:
            size = os.fstat(stream.fileno()).st_size
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > _MAX_HEADER_BYTES:
                most = f"no header of at most {_MAX_HEADER_BYTES} bytes"
                raise ModelError("model", str(file), f"a safetensors file (its {size} bytes have {most})")
            if size < 8 + length:
                raise _truncated(file, size, 8 + length)
            entries = decode_json(stream.read(length), dict[str, _Tensor])
    except OSError as error:
        raise ModelError("model", str(file), f"a file that can be read ({error.strerror})") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError("model", str(file), "a safetensors file (its header does not parse)") from error
    entries.pop("__metadata__", None)
    tensors = entries.values()
    offsets = [entry.data_offsets for entry in tensors if entry.data_offsets is not None]
    if len(offsets) < len(tensors):
        raise ModelError("model", str(file), "a safetensors file (tensors without data_offsets)")
    declared = 8 + length + max((last for _, last in offsets), default=0)
    if size < declared:
        raise _truncated(file, size, declared)
    if size > declared:
        raise ModelError("model", str(file), f"{declared} bytes as its header declares; it has {size}")
    end, places = 0, zip(offsets, entries.items(), strict=True)
    for (first, last), (name, entry) in sorted(places, key=lambda place: place[0]):
        num_bits = math.prod(entry.shape) * _DTYPE_BITS.get(entry.dtype, -1)
        if first != end or (last - first) * 8 != num_bits:
            shown = f"{entry.dtype} {list(entry.shape)} at {first} to {last}"
            allowed = f"tensors one after the other, each of its size; {shorten(name)} is {shorten(shown)}"
            raise ModelError("model", str(file), allowed)
        end = last
    return {name: (entry.dtype, entry.shape) for name, entry in entries.items()}


def _truncated(file: Path, size: int, declared: int) -> ModelError:
    return ModelError(
        "model", str(file), f"a complete file: its header declares {declared} bytes, it has {size}"
    )
