"""The second start of a quantized model reads what the first one has packed, or packs again."""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Recipe, make_checkpoint
from msgspec.structs import replace
from paged import compute_alone
from quantized_checkpoints import FORMATS, quantize_checkpoint
from quire.frontend.options.engine_args import EngineArgs
from quire.ipc.errors import ConfigError
from quire.kernels.linear.linear import Variant
from quire.kernels.program.build import cache_folder
from quire.worker.models import builder, load_model
from quire.worker.weights import packed_cache
from quire.worker.weights.packed_cache import PackedCache, open_packed_cache
from quire.worker.weights.weights import WeightSource
from safetensors.torch import load_file, save_file

CPU = torch.device("cpu")
PACKAGE = Path(packed_cache.__file__).parents[2]
RECIPE = Recipe(family="qwen3", num_layers=2, hidden_size=64, intermediate_size=128, tied=True)
EXPERTS = Recipe(family="qwen3_moe", num_layers=1, hidden_size=64, intermediate_size=128, num_experts=4)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]

pytestmark = pytest.mark.usefixtures("library")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[PackedCache]:
    """A cache of this test's own, for models of any size; the ones that were opened."""
    opened: list[PackedCache] = []

    def open_one(*arguments: Any) -> PackedCache:
        opened.append(open_packed_cache(*arguments))
        return opened[-1]

    monkeypatch.setattr(packed_cache, "MIN_BYTES", 0)
    monkeypatch.setattr(packed_cache, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(builder, "open_packed_cache", open_one)
    assert cache_folder() != tmp_path / "cache"
    return opened


def find_files(tmp_path: Path) -> list[Path]:
    folder = tmp_path / "cache" / "packed"
    return sorted(folder.iterdir()) if folder.is_dir() else []


def make_folder(tmp_path: Path, name: str, recipe: Recipe = RECIPE) -> Path:
    checkpoint, folder = make_checkpoint(tmp_path / "plain", recipe), tmp_path / "quantized"
    values, writer = FORMATS[name]
    quantize_checkpoint(checkpoint.folder, folder, checkpoint.spec, values, writer)
    return folder


def start(folder: Path, opened: list[PackedCache], **arguments: Any) -> tuple[torch.Tensor, int, set[str]]:
    """Logits, bytes of the weights, and which layers came from the file."""
    args = {"skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 64, **arguments}
    config = EngineArgs(str(folder), **args).create_engine_config()
    taken: set[str] = set()
    take: Callable[..., Any] = PackedCache.take

    def note(cache: PackedCache, names: Sequence[str], weights: WeightSource) -> Any:
        weight = take(cache, names, weights)
        taken.update(names[:1] if weight is not None else [])
        return weight

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PackedCache, "take", note)
        model = load_model(config, CPU)
    opened[-1].wait()
    return compute_alone(model, config, PROMPT), model.weight_bytes, taken


@pytest.mark.parametrize("name", ["gptq-4", "gptq-4-act-order", "fp8-block", "w8a8", "nf4"])
def test_a_second_start_has_the_bits_of_the_first(
    tmp_path: Path, own_cache: list[PackedCache], name: str
) -> None:
    folder = make_folder(tmp_path, name)
    first, second = start(folder, own_cache), start(folder, own_cache)
    assert torch.equal(first[0], second[0])
    assert first[1] == second[1]
    assert not first[2]
    assert len(second[2]) == 8
    assert len(find_files(tmp_path)) == 1


@pytest.mark.parametrize("quantization", ["int4", "int8", "fp8"])
def test_weights_quantized_while_they_are_read_are_kept_too(
    tmp_path: Path, own_cache: list[PackedCache], quantization: str
) -> None:
    folder = make_checkpoint(tmp_path / "plain", RECIPE).folder
    first = start(folder, own_cache, quantization=quantization)
    second = start(folder, own_cache, quantization=quantization)
    assert torch.equal(first[0], second[0])
    assert "lm_head" in second[2]
    other = start(folder, own_cache, quantization="int8" if quantization == "int4" else "int4")
    assert not other[2]


def test_experts_are_kept_one_by_one(tmp_path: Path, own_cache: list[PackedCache]) -> None:
    folder = make_folder(tmp_path, "gptq-4", EXPERTS)
    first, second = start(folder, own_cache), start(folder, own_cache)
    assert torch.equal(first[0], second[0])
    assert len(second[2]) == 2 + 2 * 4


def test_a_plain_model_keeps_nothing(tmp_path: Path, own_cache: list[PackedCache]) -> None:
    start(make_checkpoint(tmp_path / "plain", RECIPE).folder, own_cache)
    assert not find_files(tmp_path)


def test_nothing_is_kept_where_the_bound_is_zero_or_too_small(
    tmp_path: Path, own_cache: list[PackedCache]
) -> None:
    folder = make_folder(tmp_path, "gptq-4")
    for bound in (0, 1000):
        start(folder, own_cache, packed_cache_bytes=bound)
    assert not find_files(tmp_path)


def test_other_weights_are_another_file(tmp_path: Path, own_cache: list[PackedCache]) -> None:
    folder = make_folder(tmp_path, "gptq-4")
    start(folder, own_cache)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.scales"] *= 2
    (folder / "model.safetensors").unlink()
    save_file(tensors, folder / "model.safetensors")
    assert not start(folder, own_cache)[2]
    assert len(find_files(tmp_path)) == 2


def test_a_damaged_tensor_is_packed_again_and_the_file_made_anew(
    tmp_path: Path, own_cache: list[PackedCache]
) -> None:
    folder = make_folder(tmp_path, "gptq-4")
    first = start(folder, own_cache)
    [file] = find_files(tmp_path)
    with file.open("r+b") as stream:
        stream.seek(100)
        byte = stream.read(1)
        stream.seek(100)
        stream.write(bytes([byte[0] ^ 1]))
    second = start(folder, own_cache)
    assert torch.equal(first[0], second[0])
    assert len(second[2]) == 7
    assert len(start(folder, own_cache)[2]) == 8


@pytest.mark.parametrize("length", [0, 10, -1, -4000])
def test_a_truncated_file_is_made_anew(tmp_path: Path, own_cache: list[PackedCache], length: int) -> None:
    folder = make_folder(tmp_path, "gptq-4")
    first = start(folder, own_cache)
    [file] = find_files(tmp_path)
    os.truncate(file, length if length >= 0 else file.stat().st_size + length)
    second = start(folder, own_cache)
    assert torch.equal(first[0], second[0])
    assert not second[2]
    assert len(start(folder, own_cache)[2]) == 8


def test_starts_at_the_same_time_leave_one_whole_file(tmp_path: Path, own_cache: list[PackedCache]) -> None:
    folder = make_folder(tmp_path, "gptq-4")
    args = EngineArgs(str(folder), skip_tokenizer_init=True, max_model_len=64)
    config = args.create_engine_config()
    threads = [threading.Thread(target=load_model, args=(config, CPU)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for cache in own_cache:
        cache.wait()
    assert len(find_files(tmp_path)) == 1
    assert len(start(folder, own_cache, dtype=config.model.dtype)[2]) == 8


def test_the_longest_unused_files_go_first(tmp_path: Path, own_cache: list[PackedCache]) -> None:
    folder = make_folder(tmp_path, "gptq-4")
    start(folder, own_cache)
    [kept] = find_files(tmp_path)
    size = kept.stat().st_size
    others = [kept.with_name(name) for name in ("a" * 32, "b" * 32, "new-left")]
    for age_s, other in zip((200, 100, 7200), others, strict=True):
        shutil.copy(kept, other)
        os.utime(other, (time.time() - age_s,) * 2)
    kept.unlink()
    start(folder, own_cache, packed_cache_bytes=2 * size + size // 2)
    assert find_files(tmp_path) == sorted([kept, others[1]])


def test_a_folder_in_the_cache_does_not_stop_a_file_from_being_written(
    tmp_path: Path, own_cache: list[PackedCache]
) -> None:
    strange = tmp_path / "cache" / "packed" / "of-someone-else"
    strange.mkdir(parents=True, mode=0o700)
    strange.parent.chmod(0o700)
    os.utime(strange, (0, 0))
    start(make_folder(tmp_path, "gptq-4"), own_cache)
    assert strange.is_dir()
    assert [path for path in find_files(tmp_path) if path.is_file()]


def test_others_may_not_write_what_is_read(tmp_path: Path, own_cache: list[PackedCache]) -> None:
    folder = make_folder(tmp_path, "gptq-4")
    start(folder, own_cache)
    (tmp_path / "cache" / "packed").chmod(0o777)
    assert not start(folder, own_cache)[2]


def test_a_rank_has_a_file_of_its_own(tmp_path: Path) -> None:
    args = EngineArgs(str(make_folder(tmp_path, "gptq-4")), skip_tokenizer_init=True)
    config = args.create_engine_config()
    caches = [open_packed_cache(config, CPU, rank, 2) for rank in (0, 1)]
    same = open_packed_cache(replace(config, log_level="ERROR"), CPU, 0, 2)
    assert len({cache._name for cache in (*caches, same)}) == 2


def test_a_bound_below_zero_is_refused(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "plain", RECIPE).folder
    with pytest.raises(ConfigError, match="packed_cache_bytes=-1"):
        EngineArgs(str(folder), skip_tokenizer_init=True, packed_cache_bytes=-1).create_engine_config()


def find_name(folder: Path) -> str:
    """That of the file which a start of this model looks for."""
    config = EngineArgs(str(folder), skip_tokenizer_init=True, max_model_len=64).create_engine_config()
    return open_packed_cache(config, CPU, 0, 1)._name


def test_another_variant_of_the_kernels_has_another_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same library on the same processor has AMX under one operating system and not under another."""
    folder, names = make_folder(tmp_path, "gptq-4"), set[str]()
    for variant in Variant:
        monkeypatch.setattr(packed_cache, "choose_variant", lambda _, variant=variant: variant)
        names.add(find_name(folder))
    assert len(names) == len(Variant)


@pytest.mark.parametrize(
    "source", ["kernels/linear/linear.py", "kernels/linear/quantize_groups.py", "worker/models/builder.py"]
)
def test_whatever_makes_packed_weights_is_in_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    folder = make_folder(tmp_path, "gptq-4")
    before, read_bytes = find_name(folder), Path.read_bytes

    def read_edited(path: Path) -> bytes:
        return read_bytes(path) + (b"#" if path == PACKAGE / source else b"")

    monkeypatch.setattr(Path, "read_bytes", read_edited)
    assert find_name(folder) != before


def test_a_change_between_samples_that_keeps_size_and_time_is_seen(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "gptq-4", dataclasses.replace(RECIPE, hidden_size=256, vocab_size=2048))
    file, before = folder / "model.safetensors", find_name(folder)
    status = file.stat()
    with file.open("r+b") as stream:
        stream.seek(status.st_size * 3 // 128)  # half way from a sample to the next
        stream.write(b"changed")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert file.stat().st_size == status.st_size > 2 * 64 * 4096
    assert find_name(folder) != before


def test_a_cache_that_may_only_be_read_is_read(
    tmp_path: Path, own_cache: list[PackedCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder(tmp_path, "gptq-4")
    start(folder, own_cache)

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "utime", refuse)
    assert len(start(folder, own_cache)[2]) == 8


def test_what_the_disk_does_not_give_back_is_packed_again(
    tmp_path: Path, own_cache: list[PackedCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder(tmp_path, "gptq-4")
    first = start(folder, own_cache)

    def fail(*_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    second = start(folder, own_cache)
    assert torch.equal(first[0], second[0])
    assert not second[2]


def test_pages_in_another_order_have_another_checksum() -> None:
    memory = torch.arange(3 * 4096 + 77).to(torch.uint8)
    memory[:4096] += 1
    swapped = torch.cat([memory[4096:8192], memory[:4096], memory[8192:]])
    assert packed_cache._sum(memory) != packed_cache._sum(swapped)
    for place in (0, 5000, 3 * 4096 + 76):
        changed = memory.clone()
        changed[place] ^= 128
        assert packed_cache._sum(memory) != packed_cache._sum(changed)
