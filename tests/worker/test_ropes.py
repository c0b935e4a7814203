"""Every rope of every family, in every spelling of config.json, is transformers' or refused by name."""

from __future__ import annotations

import contextlib
import json
import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import ROPES, TRAINED_LEN, Checkpoint, Recipe, find_tolerance, make_checkpoint
from paged import compute_alone
from quire import LLM, SamplingParams
from quire.frontend.models.families import read_model_spec
from quire.ipc.errors import ModelError
from quire.worker.models import load_model

CPU = torch.device("cpu")
SHORT, LONG = 20, 45
LENGTHS = (SHORT, TRAINED_LEN, LONG)
THETA, SLIDING_THETA = 5000.0, 700.0
FULL, SLIDING = "full_attention", "sliding_attention"
KINDS = ("default", "linear", "dynamic", "llama3", "yarn")
RECIPES = {
    **{family: Recipe(family=family) for family in ("llama", "mistral", "qwen2", "qwen3", "gemma", "olmo2")},
    "gemma2": Recipe(family="gemma2", sliding_window=13),
    "gemma3_text": Recipe(family="gemma3_text", sliding_window=13, num_layers=3),
    "mixtral": Recipe(family="mixtral", num_kv_heads=1),
    "phi3": Recipe(family="phi3", hidden_size=64),
    "qwen3_moe": Recipe(family="qwen3_moe", num_layers=3, mlp_only_layers=(1,)),
    "smollm3": Recipe(family="smollm3", num_layers=5),
}
_REMOVED = ("rope_parameters", "rope_theta", "rope_scaling", "original_max_position_embeddings")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ropes")


@cache
def make_base(root: Path, family: str) -> tuple[Checkpoint, dict[str, Any]]:
    """A checkpoint of the family with its config.json, in which nothing is said of the rope."""
    base = make_checkpoint(root / family, RECIPES[family])
    config: dict[str, Any] = json.loads((base.folder / "config.json").read_bytes())
    return base, {key: value for key, value in config.items() if key not in _REMOVED}


def make_settings(kind: str) -> dict[str, Any]:
    return {"rope_type": kind, **ROPES[kind]}


def spell(family: str, kind: str, spelling: str) -> dict[str, Any]:
    """What config.json says of the rope of all layers, or of those without a window."""
    settings = make_settings(kind)
    has_two = family == "gemma3_text"
    match spelling:
        case "rope_parameters":
            inside = settings | {"rope_theta": THETA}
            local = {"rope_type": "default", "rope_theta": SLIDING_THETA}
            return {"rope_parameters": {FULL: inside, SLIDING: local} if has_two else inside}
        case "theta outside":
            thetas = {"rope_theta": THETA} | ({"rope_local_base_freq": SLIDING_THETA} if has_two else {})
            return {"rope_parameters": {FULL: settings, SLIDING: {}} if has_two else settings, **thetas}
        case "type":
            settings["type"] = settings.pop("rope_type")
        case _:
            pass
    thetas = {"rope_theta": THETA} | ({"rope_local_base_freq": SLIDING_THETA} if has_two else {})
    return {"rope_scaling": settings, **thetas}


def find_max_positions(kind: str) -> int:
    return TRAINED_LEN if kind == "dynamic" else 512


def check_equal(root: Path, family: str, values: dict[str, Any], lengths: tuple[int, ...] = LENGTHS) -> None:
    """The logits of prompts of these lengths are transformers', in chunks; of the last in Python, too."""
    base, config = make_base(root, family)
    config = config | values
    spec = read_model_spec(json.loads(json.dumps(config)))
    checkpoint = replace(base, spec=spec, reference=make_oracle(base, config))
    # Of longrope's two sets an engine has that of its longest sequence, transformers that of each prompt.
    engine = checkpoint.engine_config(max_model_len=max(lengths))
    decoder = load_model(engine, CPU)
    native = decoder.native
    for length in lengths:
        token_ids = checkpoint.draw_tokens(length, seed=length)
        expected = checkpoint.compute_reference(token_ids)
        for decoder.native in (native, None) if length == lengths[-1] else (native,):
            actual, atol = compute_alone(decoder, engine, token_ids, 7), find_tolerance(checkpoint, expected)
            torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


def make_oracle(base: Checkpoint, config: dict[str, Any]) -> Any:
    values = json.loads(json.dumps(config))
    oracle = transformers.AutoConfig.for_model(**values)
    model = transformers.AutoModelForCausalLM.from_config(oracle, attn_implementation="eager").float().eval()
    model.load_state_dict(base.reference.state_dict())
    return model


CASES = [
    (family, kind) for family in RECIPES for kind in (("default", "longrope") if family == "phi3" else KINDS)
]


def check_case(root: Path, family: str, kind: str, spelling: str) -> None:
    values = {"max_position_embeddings": find_max_positions(kind), **spell(family, kind, spelling)}
    if kind != "longrope":
        check_equal(root, family, values)
        return
    values["original_max_position_embeddings"] = TRAINED_LEN
    check_equal(root, family, values, (SHORT, TRAINED_LEN))
    check_equal(root, family, values, (LONG,))


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_every_kind_in_every_family_has_transformers_logits(root: Path, family: str, kind: str) -> None:
    check_case(root, family, kind, "rope_scaling")


@pytest.mark.slow
@pytest.mark.parametrize("spelling", ["rope_parameters", "theta outside", "type"])
@pytest.mark.parametrize(("family", "kind"), CASES)
def test_every_spelling_has_transformers_logits(root: Path, family: str, kind: str, spelling: str) -> None:
    if family == "gemma3_text" and spelling == "type" and kind != "default":
        # transformers adds the scaling to an object whose rope_type stays "default".
        with pytest.raises(ModelError, match=r"rope_scaling\.\w*factor=.* rope_type 'default' is computed"):
            read_model_spec(make_base(root, family)[1] | spell(family, kind, spelling))
        return
    check_case(root, family, kind, spelling)


@pytest.mark.parametrize(
    ("kind", "sliding_kind"),
    [("dynamic", "dynamic"), ("default", "dynamic"), ("dynamic", "linear"), ("yarn", "llama3")],
)
def test_two_ropes_of_one_model_are_computed_apart(root: Path, kind: str, sliding_kind: str) -> None:
    ropes = {
        FULL: make_settings(kind) | {"rope_theta": THETA},
        SLIDING: make_settings(sliding_kind) | {"rope_theta": SLIDING_THETA},
    }
    positions = min(map(find_max_positions, (kind, sliding_kind)))
    check_equal(root, "gemma3_text", {"rope_parameters": ropes, "max_position_embeddings": positions})


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_rotates_no_layer_takes_every_kind(root: Path, kind: str) -> None:
    values = {"no_rope_layers": [0] * 5, "max_position_embeddings": find_max_positions(kind)}
    check_equal(root, "smollm3", values | spell("smollm3", kind, "rope_scaling"))


def test_an_engine_whose_model_has_a_dynamic_rope_and_rotates_no_layer_answers(root: Path) -> None:
    base, config = make_base(root, "smollm3")
    folder = root / "unrotated"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(base.folder / "model.safetensors")
    config |= {"no_rope_layers": [0] * 5, **spell("smollm3", "dynamic", "rope_scaling")}
    (folder / "config.json").write_text(json.dumps(config))
    with LLM(str(folder), skip_tokenizer_init=True, distributed_executor_backend="uni") as llm:
        params = SamplingParams(max_tokens=2, detokenize=False, ignore_eos=True)
        (output,) = llm.generate([{"prompt_token_ids": [5, 6]}], params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 2


@pytest.mark.parametrize(
    "values",
    [
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
        {"rope_parameters": {FULL: {"rope_type": "yarn", "factor": 2.0, "truncate": False}}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "truncate": False}},
        {"rope_scaling": {FULL: {"rope_type": "linear", "factor": 2.0}}},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "axial"}},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": {}},
    ],
    ids=str,
)
def test_what_transformers_ignores_where_there_are_two_ropes_is_refused(
    root: Path, values: dict[str, Any]
) -> None:
    with pytest.raises(ModelError, match="rope_"):
        read_model_spec(make_base(root, "gemma3_text")[1] | values)


def draw_number(rng: random.Random, low: float, high: float) -> float:
    return round(rng.uniform(low, high), 3)


def draw_settings(rng: random.Random, rotated_size: int) -> dict[str, Any]:
    """The settings of some rope, often with what its kind does not have, or without what it needs."""
    kind = rng.choice([*KINDS, *KINDS, *KINDS, "longrope", "su", "proportional", "mrope", None])
    known: dict[str, Any] = {
        "factor": draw_number(rng, 0.5, 9),
        "original_max_position_embeddings": rng.choice([16, TRAINED_LEN, 64]),
        "low_freq_factor": draw_number(rng, 0.5, 2),
        "high_freq_factor": draw_number(rng, 2.5, 6),
        "beta_fast": rng.choice([8, 32.0, 1.0, 0, None]),
        "beta_slow": rng.choice([1, 2.0, 0, None]),
        "mscale": rng.choice([0.7, 1, 0, None]),
        "mscale_all_dim": rng.choice([0.5, 1.0, 0, None]),
        "attention_factor": rng.choice([0.8, 1.2, None]),
        "truncate": rng.choice([True, False]),
        "rope_theta": draw_number(rng, 100, 1e5),
        "partial_rotary_factor": rng.choice([1.0, 0.75, 0.5]),
        "short_factor": [draw_number(rng, 1, 2) for _ in range(rotated_size // 2)],
        "long_factor": [draw_number(rng, 1, 9) for _ in range(rotated_size // 2)],
        "mrope_section": [2, 3, 3],
    }
    needs = {
        "linear": "factor rope_theta",
        "dynamic": "factor rope_theta",
        "llama3": "factor low_freq_factor high_freq_factor original_max_position_embeddings",
        "yarn": "factor original_max_position_embeddings rope_theta beta_fast beta_slow mscale "
        "mscale_all_dim attention_factor truncate",
        "longrope": "short_factor long_factor attention_factor factor original_max_position_embeddings",
    }
    keys = needs.get("longrope" if kind == "su" else str(kind), "rope_theta").split()
    if rng.random() < 0.3:
        keys = [key for key in keys if rng.random() < 0.7]
    if rng.random() < 0.15:
        keys.append(rng.choice(sorted(known)))
    settings = {key: known[key] for key in keys}
    for name in rng.choice([["rope_type"], ["rope_type"], ["type"], ["rope_type", "type"], []]):
        settings[name] = kind
    return settings


def draw_config(rng: random.Random, family: str) -> dict[str, Any]:
    """What some config.json says of the rope of the whole model."""
    values: dict[str, Any] = {"max_position_embeddings": rng.choice([TRAINED_LEN, 64, 512])}
    for key, value in {
        "rope_theta": draw_number(rng, 100, 1e5),
        "rope_local_base_freq": draw_number(rng, 100, 1e4),
        "partial_rotary_factor": rng.choice([1.0, 0.75, 0.5]),
        "original_max_position_embeddings": rng.choice([16, TRAINED_LEN]),
    }.items():
        is_usual = key == "rope_theta" or (key == "rope_local_base_freq" and family == "gemma3_text")
        if rng.random() < (0.6 if is_usual else 0.1):
            values[key] = value
    size = int(16 * values.get("partial_rotary_factor", 1.0))
    for name in rng.choice([["rope_scaling"], ["rope_parameters"], ["rope_scaling", "rope_parameters"], []]):
        by_kind = {kind: draw_settings(rng, size) for kind in (FULL, SLIDING) if rng.random() < 0.8}
        is_nested = name == "rope_parameters" and rng.random() < (0.9 if family == "gemma3_text" else 0.05)
        values[name] = by_kind if is_nested else rng.choice([draw_settings(rng, size)] * 9 + [None])
    if family == "smollm3" and rng.random() < 0.7:
        values["no_rope_layers"] = [rng.choice([0, 1]) for _ in range(5)]
    return values


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(600))
def test_random_settings_are_computed_as_by_transformers_or_refused(root: Path, seed: int) -> None:
    rng = random.Random(seed)
    family = rng.choice([*RECIPES, "gemma3_text", "gemma3_text", "phi3", "smollm3"])
    values = draw_config(rng, family)
    with contextlib.suppress(ModelError):
        read_model_spec(make_base(root, family)[1] | json.loads(json.dumps(values)))
        check_random(root, family, values)


def check_random(root: Path, family: str, values: dict[str, Any]) -> None:
    original = values.get("original_max_position_embeddings", 4096 if family == "phi3" else None)
    check_equal(root, family, values, (LONG,) if original in (16, TRAINED_LEN) else (SHORT, LONG))
