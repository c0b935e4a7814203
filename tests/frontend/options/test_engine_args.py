"""EngineArgs refuse what cannot work, and resolve the rest into one EngineConfig."""

from __future__ import annotations

import argparse
import json
import operator
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from quire.frontend.engine_start import load_named_tokenizer
from quire.frontend.models.model_folder import pocket_folder
from quire.frontend.options.engine_args import EngineArgs, parse_size_bytes
from quire.ipc.errors import ConfigError, ModelError
from quire.ipc.spec.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    RecoveryConfig,
    SchedulerConfig,
)
from quire.ipc.spec.options import read_options
from refusals import Refusal, refusals


def copy_pocket(folder: Path, **changes: Any) -> str:
    """A copy of the pocket model's folder with changes in config.json."""
    for file in pocket_folder().iterdir():
        shutil.copy(file, folder / file.name)
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_the_pocket_model_is_the_default():
    config = EngineArgs().create_engine_config()
    assert config.model.model == str(pocket_folder())
    assert config.model.served_model_name == "pocket"
    assert config.model.dtype == "float32"
    assert config.model.eos_token_ids == (0, 2)
    assert (config.scheduler.max_num_batched_tokens, config.scheduler.max_num_seqs) == (2048, 256)
    assert (config.scheduler.run_ahead, config.parallel.executor_backend) == (2, "mp")


def test_a_model_with_large_states_has_as_many_sequences_a_step_as_these_take_2_gib(tmp_path: Path):
    kinds = ["conv", "full_attention"] * 8
    hybrid = {"architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "layer_types": kinds}
    hybrid |= {"hidden_size": 65536, "conv_L_cache": 9, "num_hidden_layers": 16, "norm_eps": 1e-5}
    folder = copy_pocket(tmp_path, **hybrid)
    written = json.loads((tmp_path / "config.json").read_text())
    kept = {name: value for name, value in written.items() if name not in ("hidden_act", "rms_norm_eps")}
    (tmp_path / "config.json").write_text(json.dumps(kept))
    config = EngineArgs(folder, load_format="dummy").create_engine_config()
    assert config.state_bytes == 8 * 65536 * 8 * 4
    assert config.scheduler.max_num_seqs == 128  # of 16 MiB
    few = EngineArgs(folder, load_format="dummy", num_state_slots=20).create_engine_config()
    assert few.scheduler.max_num_seqs == 20
    given = EngineArgs(folder, load_format="dummy", max_num_seqs=200).create_engine_config()
    assert given.scheduler.max_num_seqs == 200


PLACES: dict[str, tuple[Any, str]] = {  # argument -> a value, and where it is in the config
    "served_model_name": ("mine", "model.served_model_name"),
    "dtype": ("bfloat16", "model.dtype"),
    "max_model_len": (100, "model.max_model_len"),
    "load_format": ("dummy", "model.load_format"),
    "quantization": ("int8", "model.quantization"),
    "max_logprobs": (-1, "model.max_logprobs"),
    "tool_call_parser": ("hermes", "model.tool_call_parser"),
    "reasoning_parser": ("qwen3", "model.reasoning_parser"),
    "gpu_memory_utilization": (0.5, "cache.gpu_memory_utilization"),
    "num_gpu_blocks_override": (7, "cache.num_gpu_blocks_override"),
    "block_size": (8, "cache.block_size"),
    "enable_prefix_caching": (False, "cache.enable_prefix_caching"),
    "max_num_batched_tokens": (50, "scheduler.max_num_batched_tokens"),
    "max_num_seqs": (3, "scheduler.max_num_seqs"),
    "scheduling_policy": ("priority", "scheduler.policy"),
    "long_prefill_token_threshold": (9, "scheduler.long_prefill_token_threshold"),
    "max_gap_ms": (250, "scheduler.max_gap_ms"),
    "device": ("cpu", "parallel.device"),
    "distributed_executor_backend": ("uni", "parallel.executor_backend"),
    "num_threads": (1, "parallel.num_threads"),
}


def test_every_argument_reaches_its_place():
    values = {name: value for name, (value, _) in PLACES.items()}
    others = {"seed": None, "kv_cache_memory_bytes": "2MiB", "async_scheduling": False, "log_level": "debug"}
    config = EngineArgs(**values, **others).create_engine_config()
    for value, place in PLACES.values():
        assert operator.attrgetter(place)(config) == value, place
    assert (config.model.seed, config.cache.kv_cache_memory_bytes) == (0, 2 * 2**20)
    assert (config.scheduler.run_ahead, config.log_level) == (1, "DEBUG")


@pytest.mark.parametrize("make", [EngineArgs, lambda **values: EngineArgs.from_dict(values)])
def test_an_unknown_argument_is_refused_with_the_nearest_known_one(make: Any):
    with pytest.raises(
        ConfigError, match="max_modellen=5: no such engine argument, did you mean 'max_model_len'"
    ):
        make(max_modellen=5)
    with pytest.raises(ConfigError, match=r"no such engine argument$"):
        make(zzzzzz=5)


@refusals("engine_args")
def test_a_value_out_of_range_is_refused_by_name(refusal: Refusal):
    refusal.check(lambda values: EngineArgs(**values).create_engine_config())


def test_a_step_holds_a_whole_prompt_when_prompts_are_not_split(tmp_path: Path):
    model = copy_pocket(tmp_path, max_position_embeddings=5000)
    config = EngineArgs(model=model, enable_chunked_prefill=False).create_engine_config()
    assert config.scheduler.max_num_batched_tokens == 5000


def test_a_folder_without_a_tokenizer_runs_only_when_asked_to(tmp_path: Path):
    model = copy_pocket(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match="skip_tokenizer_init"):
        EngineArgs(model=model).create_engine_config()
    assert EngineArgs(model=model, skip_tokenizer_init=True).create_engine_config().model.tokenizer == ""
    other = EngineArgs(model=model, tokenizer="pocket").create_engine_config()
    assert other.model.tokenizer == str(pocket_folder())


def test_a_tokenizer_has_a_revision_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import huggingface_hub

    calls: list[tuple[Any, ...]] = []

    def download(name: str, revision: str | None, cache_dir: Any, **_options: Any) -> str:
        calls.append((name, revision, cache_dir))
        return str(pocket_folder())

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    where = {"revision": "v1", "download_dir": str(tmp_path)}
    for others in ({}, {"tokenizer_revision": "v2"}, {"tokenizer": "a/b"}):
        EngineArgs(model="x/y", **where, **others).create_engine_config()
    where.pop("revision")
    EngineArgs(model="pocket", tokenizer="a/b", tokenizer_revision="v2", **where).create_engine_config()
    wanted = [("x/y", "v1"), ("x/y", "v1"), ("x/y", "v2"), ("x/y", "v1"), ("a/b", None), ("a/b", "v2")]
    assert calls == [(*call, tmp_path) for call in wanted]


def test_dummy_weights_need_no_weight_files(tmp_path: Path):
    model = copy_pocket(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="safetensors"):
        EngineArgs(model=model).create_engine_config()
    EngineArgs(model=model, load_format="dummy").create_engine_config()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4096", 4096),
        ("2GiB", 2 * 2**30),
        ("2gib", 2 * 2**30),
        ("1.5 GB", 1_500_000_000),
        ("512M", 512 * 2**20),
        ("3KiB", 3072),
        ("1tb", 10**12),
        (7, 7),
        (None, None),
    ],
)
def test_sizes_may_have_units(text: Any, expected: int | None):
    assert parse_size_bytes("kv_cache_memory_bytes", text) == expected


def test_the_command_line_offers_every_field_and_gives_the_same_arguments():
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    assert EngineArgs.from_cli_args(parser.parse_args([])) == EngineArgs()
    line = "--model m --logits-processors a:A --logits-processors b:B the prompt"
    parser.add_argument("prompt", nargs="*")
    assert parser.parse_args(shlex.split(line)).prompt == ["the", "prompt"]
    assert EngineArgs.from_cli_args(parser.parse_args(shlex.split(line))).logits_processors == ["a:A", "b:B"]
    line = "--model m --max-model-len 5 --no-enable-prefix-caching --kv-cache-memory-bytes 1GiB"
    line += " --gpu-memory-utilization 0.3 --async-scheduling --scheduling-policy priority --engines 2"
    given = parser.parse_args(shlex.split(line))
    assert EngineArgs.from_cli_args(given) == EngineArgs(
        model="m",
        max_model_len=5,
        enable_prefix_caching=False,
        kv_cache_memory_bytes="1GiB",
        gpu_memory_utilization=0.3,
        async_scheduling=True,
        scheduling_policy="priority",
        data_parallel_size=2,
    )


def test_a_field_that_is_declared_for_users_is_an_argument_with_its_default_and_its_range() -> None:
    for part in (ModelConfig, ParallelConfig, CacheConfig, SchedulerConfig, RecoveryConfig, EngineConfig):
        for option in read_options(part):
            if option.text is None:  # of what users do not set
                assert not hasattr(EngineArgs(), option.field) or option.choices
                continue
            default = getattr(EngineArgs(), option.name)
            if option.get("is_size"):
                default = parse_size_bytes(option.name, default)
            assert default == option.get("default", option.default)
            if option.type in (int, float):
                with pytest.raises(ConfigError, match=f"^{option.name}="):
                    EngineArgs(**{option.name: -2}).create_engine_config()


@pytest.mark.parametrize(("alias", "dtype"), [("half", "float16"), ("float", "float32")])
def test_number_formats_have_vllms_aliases(alias: str, dtype: str):
    assert EngineArgs(dtype=alias).create_engine_config().model.dtype == dtype


def test_folders_may_be_path_objects():
    folder = pocket_folder()
    model = EngineArgs.from_dict({"model": folder, "tokenizer": folder}).create_engine_config().model
    assert (model.model, model.tokenizer, model.served_model_name) == (str(folder), str(folder), str(folder))


def test_names_of_other_commands_in_a_namespace_are_ignored():
    assert EngineArgs.from_cli_args(argparse.Namespace(command="x", seed=3)) == EngineArgs(seed=3)


def test_vllms_arguments_are_taken_at_the_value_that_asks_for_nothing() -> None:
    off = {"tokenizer_mode": "auto", "quantization": None, "enable_lora": False, "cpu_offload_gb": 0}
    assert EngineArgs.from_dict({"max_num_seqs": 3, **off}) == EngineArgs(max_num_seqs=3)
    for name, value in {"enable_lora": True, "cpu_offload_gb": False}.items():
        with pytest.raises(ConfigError, match=name):
            EngineArgs.from_dict({name: value})
    with pytest.raises(
        ConfigError, match=r"task='embed': expected 'auto' or 'generate': .* by runner='pooling'"
    ):
        EngineArgs(task="embed")  # type: ignore[call-arg]


def test_a_model_may_have_several_names() -> None:
    config = EngineArgs(served_model_name=["chat", "best", "chat"]).create_engine_config()
    assert (config.model.served_model_name, config.model.served_model_aliases) == ("chat", ("best",))
    assert EngineArgs(served_model_name="one").create_engine_config().model.served_model_aliases == ()
    for names in ("", [""], ["a", 1]):
        with pytest.raises(ConfigError, match="served_model_name="):
            EngineArgs(served_model_name=names).create_engine_config()  # type: ignore[arg-type]


def test_a_chat_template_is_a_file_or_a_text_and_is_checked_at_once(tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text("{{ messages[0].content }}")
    for given in (str(file), file.read_text()):
        config = EngineArgs(chat_template=given).create_engine_config()
        assert config.model.chat_template == "{{ messages[0].content }}"
        tokenizer = load_named_tokenizer(config.model.tokenizer, config.model.chat_template)
        assert tokenizer is not None
        assert tokenizer.render_chat([{"role": "user", "content": "Hi"}]) == "Hi"
    for given, allowed in (
        ("/no/such.jinja", "a file that can be read, or the text of a template"),
        ("{% if %}", "a Jinja template"),
        ("{{ x }}" * 10**6, "bytes"),
    ):
        with pytest.raises(ConfigError, match=rf"chat_template=.*{allowed}"):
            EngineArgs(chat_template=given).create_engine_config()


def test_ray_is_refused_with_the_name_of_its_extra_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"^distributed_executor_backend='ray': .*install 'quire\[ray\]'"):
        EngineArgs(distributed_executor_backend="ray").create_engine_config()
    monkeypatch.setitem(sys.modules, "ray", argparse)  # whatever is there
    with pytest.raises(
        ConfigError, match=r"^warm_spare=True: expected off with distributed_executor_backend='ray'"
    ):
        EngineArgs(distributed_executor_backend="ray", warm_spare=True).create_engine_config()
