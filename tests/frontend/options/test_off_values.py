"""vLLM's arguments for what Quire lacks: by name and value what is taken, and what is said of others."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
from quire import FlexibleArgumentParser, PoolingParams, SamplingParams
from quire.frontend.cli.parser import Parser
from quire.frontend.options.engine_args import EngineArgs
from quire.frontend.options.off_values import ENGINE_ARGUMENTS, drop_off_options
from quire.ipc.errors import ConfigError, InputError
from quire.ipc.params.absent_arguments import CALL_ARGUMENTS, PARAMS_FIELDS
from quire.ipc.params.request_options import NO_OPTIONS, read_options

LORA = "Quire has no LoRA adapters yet"
REFUSED = [
    ("enable_lora", True, f"enable_lora=True: expected False: {LORA}"),
    ("max_loras", True, f"max_loras=True: expected 1: {LORA}"),
    ("speculative_config", {"a": 1}, "speculative_config={'a': 1}: expected None: Quire has no speculative"),
    ("calculate_kv_scales", 2, "calculate_kv_scales=2: expected False or True: kv_cache_dtype rules"),
    (
        "limit_mm_per_prompt",
        {"image": 1},
        "limit_mm_per_prompt={'image': 1}: expected None: Quire reads only text",
    ),
    ("compilation_config", True, "compilation_config=True: expected 0 or 1 or 2: Quire compiles"),
    ("enable_sleep_mode", True, "enable_sleep_mode=True: expected False: weights and KV cache stay"),
]


@pytest.mark.parametrize("name", ENGINE_ARGUMENTS)
def test_an_argument_that_asks_for_nothing_is_taken(name: str) -> None:
    assert name not in EngineArgs.__dataclass_fields__
    for value in (None, *ENGINE_ARGUMENTS[name].off):
        assert EngineArgs(**{name: value}) == EngineArgs()
    with pytest.raises(ConfigError, match=f"^{name}='xxx") as caught:
        EngineArgs(**{name: "x" * 10**6})
    assert str(caught.value).endswith(f": {ENGINE_ARGUMENTS[name].reason}")
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(("name", "value", "said"), REFUSED)
def test_what_quire_lacks_is_said_by_name(name: str, value: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineArgs(**{name: value})
    assert str(caught.value).startswith(said)


def parse(words: list[str], is_vllms: bool) -> argparse.Namespace:
    if is_vllms:
        return EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(words)
    parser = EngineArgs.add_cli_args(Parser("quire serve", "Serve."))
    parser.add_argument("MODEL", nargs="?")
    parser.add_argument("--config")
    return parser.parse(words)


@pytest.mark.parametrize("is_vllms", [False, True])
def test_options_are_taken_or_refused_as_arguments_are(is_vllms: bool) -> None:
    words = [
        "--no-enable-lora",
        "--disable-log-requests",
        "--swap-space",
        "4",
        "--speculative-config",
        "None",
    ]
    words += ["--calculate_kv_scales=false", "--compilation-config", '{"level": 3}', "--max-num-seqs", "3"]
    assert parse(words, is_vllms).max_num_seqs == 3
    for word, said in (
        ("--enable-lora", f"enable_lora=True: expected False: {LORA}"),
        ("--lora-modules=a=b", f"lora_modules='a=b': expected None: {LORA}"),
        ("--kv-sharing-fast-prefill=1", "kv_sharing_fast_prefill=1: expected False"),
    ):
        with pytest.raises(ConfigError) as caught:
            parse([word], is_vllms)
        assert str(caught.value).startswith(said)


def test_the_model_behind_a_switch_and_words_behind_dashes_stay() -> None:
    assert parse(["--disable-log-requests", "pocket"], False).MODEL == "pocket"
    assert drop_off_options(["--", "--enable-lora"], {}) == ["--", "--enable-lora"]


def test_a_config_file_may_have_them(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("enable-lora: false\nmax-num-seqs: 3\n")
    assert parse(["--config", str(path)], False).max_num_seqs == 3
    path.write_text("speculative_config: {method: ngram}\n")
    with pytest.raises(ConfigError, match=r"^speculative_config="):
        parse(["--config", str(path)], False)


@pytest.mark.parametrize("name", CALL_ARGUMENTS)
def test_an_argument_of_a_call_that_asks_for_nothing_is_taken(name: str) -> None:
    for value in (None, *CALL_ARGUMENTS[name].off):
        assert read_options(**{name: value}) == NO_OPTIONS
    with pytest.raises(InputError, match=f"^{name}='x': expected "):
        read_options(**{name: "x"})


@pytest.mark.parametrize("name", PARAMS_FIELDS)
@pytest.mark.parametrize("kind", [SamplingParams, PoolingParams])
def test_a_field_of_params_that_asks_for_nothing_is_taken(kind: Any, name: str) -> None:
    for value in (None, *PARAMS_FIELDS[name].off):
        assert kind(**{name: value}) == kind()
    with pytest.raises(InputError, match=f"^{name}='x': expected "):
        kind(**{name: "x"})
