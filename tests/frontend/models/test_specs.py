"""What a model's folder is, whole: tests/golden/specs.json, which QUIRE_WRITE_GOLDEN=1 writes for a reviewer.

A case has config.json, or all `files`, and what is given to the engine; of the specification it has what is
not the default, and equal layers that follow each other once.
"""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from quire.frontend.models.families import read_model_spec
from quire.frontend.options.engine_args import EngineArgs
from quire.ipc.errors import ModelError

GOLDEN = Path(__file__).parents[2] / "golden" / "specs.json"
CASES: list[dict[str, Any]] = json.loads(GOLDEN.read_bytes())


def describe(value: Any) -> Any:
    """As JSON, without fields that are their defaults."""
    if isinstance(value, msgspec.Struct):
        defaults = {field.name: field.default for field in msgspec.structs.fields(value)}
        told = {name: getattr(value, name) for name in defaults}
        if "layers" in told:
            told["layers"] = [[len([*same]), one] for one, same in itertools.groupby(told["layers"])]
        return {name: describe(one) for name, one in told.items() if one != defaults[name]}
    return [describe(one) for one in value] if isinstance(value, (list, tuple)) else value


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["case"])
def test_a_folder_is_the_model_that_its_files_say(case: dict[str, Any], tmp_path: Path) -> None:
    files = case.get("files", {}) | ({"config.json": case["config"]} if "config" in case else {})
    for name, content in {"tokenizer.json": {}, **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(json.dumps(content))
    args = EngineArgs(str(tmp_path), load_format="dummy", **case.get("arguments", {}))
    model = args.create_engine_config().model
    spec = describe(model.spec) | {"max_model_len": model.max_model_len}
    if os.environ.get("QUIRE_WRITE_GOLDEN"):
        case["spec"] = spec
        lines = (",\n ".join(json.dumps({k: v})[1:-1] for k, v in one.items()) for one in CASES)
        GOLDEN.write_text("[\n" + ",\n".join(f"{{{line}}}" for line in lines) + "\n]\n")
    assert case.get("spec") == spec


@pytest.mark.parametrize("text", [{"model_type": "bloom"}, {"model_type": [1]}, None, [], "llama"], ids=str)
def test_a_wrapper_around_no_text_model_of_ours_is_refused_by_its_architecture(text: Any):
    config = {"architectures": ["LlavaForConditionalGeneration"], "text_config": text}
    with pytest.raises(ModelError, match=r"^config\.json architectures=\['LlavaForConditionalGeneration'\]"):
        read_model_spec(config)


@pytest.mark.parametrize(
    ("architecture", "whole", "text", "is_tied"),
    [
        ("LlavaForConditionalGeneration", True, False, True),
        ("LlavaForConditionalGeneration", None, True, True),
        ("InternVLForConditionalGeneration", None, None, True),
        ("InternVLForConditionalGeneration", False, True, False),
        ("VoxtralForConditionalGeneration", True, True, False),
        ("Qwen2AudioForConditionalGeneration", True, None, False),
    ],
)
def test_embeddings_are_tied_as_the_whole_says_then_its_text_then_its_class(
    architecture: str, whole: bool | None, text: bool | None, is_tied: bool
) -> None:
    nested = {"model_type": "llama", "hidden_size": 64, "tie_word_embeddings": text}
    config = {"architectures": [architecture], "tie_word_embeddings": whole, "text_config": nested}
    assert read_model_spec(config).tie_word_embeddings == is_tied
