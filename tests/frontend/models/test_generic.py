"""The frontend's question about a decoder that no family reads, and what it says where there is no answer."""

from __future__ import annotations

import importlib.metadata
import json
import math
import subprocess
from pathlib import Path
from typing import Any

import pytest
from quire.frontend.models import generic
from quire.frontend.models.families import describe_families, find_family
from quire.frontend.models.generic import read_generic_spec
from quire.ipc.errors import EngineStartError, ModelError

CONFIG: dict[str, Any] = {"architectures": ["Olmo9ForCausalLM"], "model_type": "olmo9"}


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def answer(monkeypatch: pytest.MonkeyPatch, returncode: int, out: str, errors: str = "") -> None:
    done = subprocess.CompletedProcess[bytes]([], returncode, out.encode(), errors.encode())
    monkeypatch.setattr(generic.subprocess, "run", lambda *_, **__: done)


@pytest.mark.parametrize(("version", "words"), [(None, "5 or newer"), ("4.57.1", "4.57.1 is installed")])
def test_without_transformers_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, version: str | None, words: str
) -> None:
    def find_version(name: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", find_version)
    with pytest.raises(ModelError, match=words) as caught:
        read_generic_spec(CONFIG)
    assert "Olmo9ForCausalLM" in str(caught.value)
    assert "LlamaForCausalLM" in str(caught.value)
    assert "quire[transformers]" in str(caught.value)


def test_a_refusal_names_its_field_and_the_nearest_family(monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, 0, json.dumps([None, ["config.json layer_types", "conv", "other layers"]]))
    with pytest.raises(ModelError, match="layer_types='conv': expected other layers") as caught:
        read_generic_spec(CONFIG)
    assert "the nearest is Olmo" in str(caught.value)


def test_what_to_do_is_a_family_of_ours_or_another_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, 0, json.dumps([None, ["config.json is_encoder_decoder", True, "a decoder"]]))
    with pytest.raises(ModelError, match=r"is_encoder_decoder=True: .* vLLM may run it"):
        read_generic_spec(CONFIG | {"limit": math.inf})
    with pytest.raises(ModelError, match=r"model_impl='quire' reads LlamaForCausalLM\)"):
        read_generic_spec({"architectures": ["LlamaForCausalLM"]})


@pytest.mark.parametrize(
    ("architecture", "nearest"),
    [("Gemma3nForCausalLM", "Gemma3ForCausalLM"), ("BloomForCausalLM", None), ("XLMWithLMHeadModel", None)],
)
def test_the_nearest_family_begins_alike(architecture: str, nearest: str | None) -> None:
    text = describe_families({"architectures": [architecture]})
    assert ("nearest" in text) == (nearest is not None)
    assert nearest is None or text.endswith(nearest)


def test_a_planner_that_fails_is_no_fault_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, 1, "", "Traceback\nMemoryError: of the child")
    with pytest.raises(EngineStartError, match="MemoryError: of the child"):
        read_generic_spec(CONFIG)


def test_an_answer_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = json.dumps([None, ["config.json layer_types", "conv", "other layers"]])
    answer(monkeypatch, 0, refusal)
    for _ in range(2):  # then from the disk
        with pytest.raises(ModelError, match="other layers"):
            read_generic_spec(CONFIG)
        answer(monkeypatch, 1, "", "asked again")
    for config, version in ((CONFIG | {"hidden_size": 8}, "5.24.0"), (CONFIG, "5.99.0")):
        monkeypatch.setattr(importlib.metadata, "version", lambda _, version=version: version)
        with pytest.raises(EngineStartError, match="asked again"):
            read_generic_spec(config)


def test_families_of_ours_are_known_by_architecture_or_model_type() -> None:
    assert find_family(CONFIG) is None
    assert find_family({"architectures": ["LlamaForCausalLM"]}) == "LlamaForCausalLM"
    assert find_family({"model_type": "qwen3"}) == "Qwen3ForCausalLM"
    assert "model_impl='quire' reads LlamaForCausalLM" in describe_families(
        {"architectures": ["LlamaForCausalLM"]}
    )
