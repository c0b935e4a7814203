"""Loading: single files, shards, dummy numbers, and an error that names the culprit for every flaw."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from checkpoints import Checkpoint, Recipe, make_checkpoint
from decoders import make_decoder
from paged import compute_alone
from quire.frontend.options.engine_args import EngineArgs
from quire.ipc.errors import ModelError
from quire.worker.models import load_model
from quire.worker.weights import weights
from quire.worker.weights.weights import DummySource, SafetensorsSource, TensorSlice, WeightSource
from safetensors.torch import load_file, save_file
from simulated_copies import LateCopies

CPU = torch.device("cpu")
RECIPE = Recipe(num_layers=1, attention_bias=True)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


def logits_of(checkpoint: Checkpoint, dtype: str = "float32", **model: object) -> torch.Tensor:
    config = checkpoint.engine_config(dtype, **model)
    return compute_alone(load_model(config, CPU), config, PROMPT)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return make_checkpoint(tmp_path / "model", RECIPE)


def rewrite(checkpoint: Checkpoint, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = checkpoint.folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    path.unlink()
    save_file(tensors, path)


def test_shards_give_the_single_files_numbers(tmp_path: Path, checkpoint: Checkpoint) -> None:
    sharded = make_checkpoint(tmp_path / "sharded", RECIPE, max_shard_size="30KB")
    assert len(list(sharded.folder.glob("model-*.safetensors"))) > 2
    assert torch.equal(logits_of(sharded), logits_of(checkpoint))


def test_files_without_an_index_are_all_read(checkpoint: Checkpoint) -> None:
    expected = logits_of(checkpoint)
    path = checkpoint.folder / "model.safetensors"
    tensors = load_file(path)
    path.unlink()
    first = {name: tensors.pop(name) for name in list(tensors)[:3]}
    save_file(first, checkpoint.folder / "one.safetensors")
    save_file(tensors, checkpoint.folder / "two.safetensors")
    assert torch.equal(logits_of(checkpoint), expected)


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float64])
def test_stored_types_are_converted(checkpoint: Checkpoint, stored: torch.dtype) -> None:
    def convert(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            tensors[name] = tensor.to(stored)

    expected = logits_of(checkpoint)
    rewrite(checkpoint, convert)
    actual = logits_of(checkpoint)
    if stored == torch.float64:
        assert torch.equal(actual, expected)
    else:
        rounding = torch.finfo(stored).eps
        assert 0 < (actual - expected).abs().max() < 64 * rounding * expected.abs().max()


def test_a_tied_checkpoint_uses_the_embedding_with_and_without_a_stored_lm_head(
    checkpoint: Checkpoint,
) -> None:
    def tie(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    spec = msgspec.structs.replace(checkpoint.spec, tie_word_embeddings=True)
    with_a_foreign_copy = logits_of(checkpoint, spec=spec)
    rewrite(checkpoint, tie)
    expected = logits_of(checkpoint)
    assert torch.equal(with_a_foreign_copy, expected)
    rewrite(checkpoint, drop_the_lm_head_from)
    assert torch.equal(logits_of(checkpoint, spec=spec), expected)


def test_stored_rotary_tables_are_ignored(checkpoint: Checkpoint) -> None:
    expected = logits_of(checkpoint)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(checkpoint, lambda tensors: tensors.update({name: torch.ones(8)}))
    assert torch.equal(logits_of(checkpoint), expected)


def test_a_checkpoint_may_leave_the_models_prefix_out(checkpoint: Checkpoint) -> None:
    expected = logits_of(checkpoint)

    def shorten(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    rewrite(checkpoint, shorten)
    assert torch.equal(logits_of(checkpoint), expected)


def test_berts_first_exports_have_other_names_for_a_norm(tmp_path: Path) -> None:
    tensors = {"e.LayerNorm.gamma": torch.ones(2), "bert.e.LayerNorm.beta": torch.zeros(2)}
    save_file({**tensors, "cls.bias": torch.zeros(1), "pooler.x": torch.zeros(1)}, tmp_path / "m.safetensors")
    source = SafetensorsSource(tmp_path, ["m.safetensors"], torch.float32, CPU, "bert.", ("cls.",))
    assert source.take("bert.e.LayerNorm.weight", (2,)).tolist() == [1.0, 1.0]
    assert source.take("bert.e.LayerNorm.bias", (2,)).tolist() == [0.0, 0.0]
    with pytest.raises(ModelError, match=r"1 tensors .* 'pooler.x'"):
        source.finish()


def test_loaded_weights_outlive_their_file(checkpoint: Checkpoint) -> None:
    config = checkpoint.engine_config()
    expected = logits_of(checkpoint)
    model = load_model(config, CPU)
    path = checkpoint.folder / "model.safetensors"
    path.write_bytes(b"\0" * path.stat().st_size)
    assert torch.equal(compute_alone(model, config, PROMPT), expected)


def drop_the_lm_head_from(tensors: dict[str, torch.Tensor]) -> None:
    tensors.pop("lm_head.weight")


def drop_the_lm_head(checkpoint: Checkpoint) -> None:
    rewrite(checkpoint, drop_the_lm_head_from)


def drop_a_tensor(checkpoint: Checkpoint) -> None:
    rewrite(checkpoint, lambda tensors: tensors.pop(Q_PROJ))


def misshape_a_tensor(checkpoint: Checkpoint) -> None:
    rewrite(checkpoint, lambda tensors: tensors.update({Q_PROJ: torch.zeros(64, 47)}))


def quantize_a_tensor(checkpoint: Checkpoint) -> None:
    rewrite(checkpoint, lambda tensors: tensors.update({Q_PROJ: torch.zeros(64, 48, dtype=torch.int8)}))


def add_a_tensor(checkpoint: Checkpoint) -> None:
    rewrite(checkpoint, lambda tensors: tensors.update({"model.layers.1.extra": torch.zeros(2)}))


def truncate_the_file(checkpoint: Checkpoint) -> None:
    path = checkpoint.folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def empty_the_file(checkpoint: Checkpoint) -> None:
    (checkpoint.folder / "model.safetensors").write_bytes(b"")


def leave_nothing(checkpoint: Checkpoint) -> None:
    (checkpoint.folder / "model.safetensors").unlink()


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (drop_a_tensor, [Q_PROJ]),
        (drop_the_lm_head, ["'lm_head.weight'"]),
        (misshape_a_tensor, [Q_PROJ, "[64, 47]", "[64, 48]"]),
        (quantize_a_tensor, [Q_PROJ, "int8"]),
        (add_a_tensor, ["model.layers.1.extra"]),
        (truncate_the_file, ["model.safetensors", "truncated"]),
        (empty_the_file, ["model.safetensors", "truncated"]),
        (leave_nothing, ["model.safetensors", "No such file"]),
    ],
)
def test_a_flawed_folder_is_refused_by_name(
    checkpoint: Checkpoint, spoil: Callable[[Checkpoint], None], named: list[str]
) -> None:
    config = checkpoint.engine_config()
    spoil(checkpoint)
    with pytest.raises(ModelError) as caught:
        load_model(config, CPU)
    for text in named:
        assert text in str(caught.value)


@pytest.mark.usefixtures("restored_torch")
@pytest.mark.parametrize("family", ["gpt-oss", "glm4-moe", "gpt2", "deepseek_v3"])
def test_a_number_that_is_not_finite_names_its_tensor_at_the_start(tmp_path: Path, family: str) -> None:
    """Of norms, biases, tables, sinks, routers and experts: every answer would be refused, one by one."""
    checkpoint = make_decoder(tmp_path, family)
    config = checkpoint.engine_config()
    stored = load_file(tmp_path / "model.safetensors")
    load_model(config, CPU)
    for place, name in enumerate(sorted(stored)):
        spoilt = stored[name].clone()
        spoilt.view(-1)[-1] = (torch.nan, torch.inf, -torch.inf)[place % 3]
        save_file(stored | {name: spoilt}, tmp_path / "model.safetensors")
        with pytest.raises(
            ModelError, match=r"=-?(nan|inf): expected finite numbers; 1 of \d+ are not"
        ) as caught:
            load_model(config, CPU)
        assert caught.value.field.startswith(name.partition(".experts.")[0])


def test_large_numbers_are_finite_unless_the_type_has_no_such(checkpoint: Checkpoint) -> None:
    rewrite(checkpoint, lambda tensors: tensors[Q_PROJ].view(-1)[:8].fill_(3e38))
    load_model(checkpoint.engine_config(), CPU)
    with pytest.raises(ModelError, match=rf"{Q_PROJ}=inf: .* 8 of 3072 .* in float16, which ends at 65504"):
        load_model(checkpoint.engine_config("float16"), CPU)


def test_no_second_copy_of_a_tensor_is_kept(checkpoint: Checkpoint) -> None:
    model = load_model(checkpoint.engine_config(), CPU)
    stored = sum(tensor.nbytes for tensor in load_file(checkpoint.folder / "model.safetensors").values())
    # Packing rounds each output size up to a panel of 64; the rotary tables come on top.
    padded = sum(
        -(-tensor.shape[0] // 64) * 64 * tensor[0].nbytes
        for tensor in load_file(checkpoint.folder / "model.safetensors").values()
    )
    assert stored < model.weight_bytes <= padded + 2 * 256 * 8 * 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dummy_weights_are_the_seeds_and_give_finite_logits(checkpoint: Checkpoint, dtype: str) -> None:
    first = logits_of(checkpoint, dtype, load_format="dummy", seed=1)
    again = logits_of(checkpoint, dtype, load_format="dummy", seed=1)
    other = logits_of(checkpoint, dtype, load_format="dummy", seed=2)
    assert torch.isfinite(first).all()
    assert first.std() > 0
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_dummy_tensors_differ_by_name_and_by_row() -> None:
    source = DummySource(0, torch.float32, CPU)
    first, second = source.take("a.weight", (3000, 1024)), source.take("b.weight", (3000, 1024))
    assert not torch.equal(first, second)
    assert len(torch.unique(first[:, 0])) > 2900
    assert 0.019 < first.std() < 0.021
    assert torch.equal(source.take("model.norm.weight", (4,)), torch.ones(4))


def test_tensors_are_read_one_by_one(checkpoint: Checkpoint) -> None:
    source = SafetensorsSource(checkpoint.folder, ["model.safetensors"], torch.float32, CPU)
    tensor = source.take(Q_PROJ, (64, 48))
    assert torch.equal(tensor, checkpoint.reference.state_dict()[Q_PROJ])
    with pytest.raises(ModelError, match="tensors that this architecture does not have"):
        source.finish()


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "intermediate_size"])
def test_sizes_of_config_json_that_nobody_could_allocate_are_held_against_the_files(
    checkpoint: Checkpoint, key: str
) -> None:
    config = checkpoint.engine_config()
    spec, size = config.model.spec, {key: 2**31 - 1}
    if key == "intermediate_size":
        layers = tuple(
            msgspec.structs.replace(layer, ffn=msgspec.structs.replace(layer.ffn, **size))
            for layer in spec.layers
        )
        spec = msgspec.structs.replace(spec, layers=layers)
    else:
        spec = msgspec.structs.replace(spec, **size)
    config = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, spec=spec))
    with pytest.raises(ModelError, match=r"which config\.json calls for"):
        load_model(config, CPU)


def test_the_files_that_are_loaded_are_those_that_were_checked(checkpoint: Checkpoint) -> None:
    expected = logits_of(checkpoint)
    (checkpoint.folder / "model.safetensors").rename(checkpoint.folder / "all.safetensors")
    save_file({"tok_embeddings.weight": torch.zeros(2)}, checkpoint.folder / "consolidated.safetensors")
    config = EngineArgs(str(checkpoint.folder), skip_tokenizer_init=True).create_engine_config()
    assert torch.equal(logits_of(checkpoint, weight_files=config.model.weight_files), expected)


CUT = TensorSlice((range(1, 3), range(4, 6), range(4, 5)), range(1, 3))


@pytest.mark.parametrize("source_name", ["files", "dummy"])
def test_a_cut_is_that_part_of_what_is_stacked(tmp_path: Path, source_name: str) -> None:
    parts = {name: torch.randn(3, 4) for name in ("a", "b")}
    save_file(parts, tmp_path / "model.safetensors")

    def make_source() -> WeightSource:
        if source_name == "dummy":
            return DummySource(0, torch.float32, CPU)
        return SafetensorsSource(tmp_path, ["model.safetensors"], torch.float32, CPU)

    whole = make_source().take_stacked(["a", "b"], [3, 3], 4)
    source = make_source()
    assert torch.equal(source.take_stacked(["a", "b"], [3, 3], 4, CUT), whole[[1, 2, 4, 5, 4]][:, 1:3])
    source.finish()  # what was cut counts as read
    with pytest.raises(ModelError, match=r"a=.* which config.json calls for"):
        SafetensorsSource(tmp_path, ["model.safetensors"], torch.float32, CPU).take("a", (2, 4), CUT)


def test_a_cut_of_a_file_reads_no_other_pages(tmp_path: Path) -> None:
    rows, width = 1 << 12, 1 << 10  # 16 MiB
    save_file({"a": torch.ones(rows, width)}, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path, ["model.safetensors"], torch.float32, CPU)
    before = count_mapped_bytes(tmp_path / "model.safetensors")
    source.take("a", (rows, width), TensorSlice((range(rows // 4),)))
    assert 0 < count_mapped_bytes(tmp_path / "model.safetensors") - before <= 6 << 20


def count_mapped_bytes(path: Path) -> int:
    """Of a file, in this process's memory."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    kib = 0
    for line in lines:
        if line.endswith(str(path)):
            kib += next(int(part.split()[1]) for part in lines if part.startswith("Rss:"))
    return kib << 10


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
def test_a_gpus_weights_come_through_two_pinned_buffers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(3)
    tensors = {
        "a": torch.randn(70, 9, generator=generator).to(stored),
        "b": torch.randn(31, 9, generator=generator).to(stored),
        "c": torch.randn(500, generator=generator).to(stored),
        "wide": torch.randn(2, 400, generator=generator).to(stored),
    }
    save_file(tensors, tmp_path / "w.safetensors")
    monkeypatch.setattr(weights, "_UPLOAD_BYTES", 400)
    late = LateCopies(monkeypatch)
    source = SafetensorsSource(tmp_path, ["w.safetensors"], torch.bfloat16, torch.device("cuda"))
    taken = {
        "ab": source.take_stacked(["a", "b"], [70, 31], 9),
        "cut": source.take("a", (70, 9), TensorSlice(rows=(range(60, 70), range(3, 5)), columns=range(2, 7))),
        "c": source.take("c", (500,)),
        "wide": source.take("wide", (2, 400)),
    }
    source.finish()
    late.finish()
    assert late.num_bytes_pinned == 2 * 400
    assert late.num_started == 4 + 2 + 2 + 3  # parts of at most 400 bytes; a row of 800 goes by itself
    expected = {
        "ab": torch.cat([tensors["a"], tensors["b"]]),
        "cut": torch.cat([tensors["a"][60:, 2:7], tensors["a"][3:5, 2:7]]),
        "c": tensors["c"],
        "wide": tensors["wide"],
    }
    for name, tensor in expected.items():
        assert torch.equal(taken[name], tensor.to(torch.bfloat16)), name
