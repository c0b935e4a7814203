"""What every family is held to, in half a second of processor time: all it needs is a row of decoders.py.

An engine's greedy tokens are transformers'. A model's bits are the same in chunks, in company, natively and
in Python, on ranks and in stages. Narrower types and weights stay near.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from checkpoints import Checkpoint, find_tolerance
from decoders import FAMILIES, make_decoder
from generated import find_tokens
from msgspec.structs import replace
from paged import PagedRun, assert_same_logits, compute_alone
from quire import LLM, SamplingParams
from quire.frontend.options.engine_args import EngineArgs
from quire.ipc.spec.config import CacheConfig, EngineConfig
from quire.ipc.spec.model_spec import KVCacheDtype
from quire.kernels.group.shared_group import SharedGroup
from quire.worker.models import Decoder, load_model
from ranks import Pipeline, run_ranks, with_ranks
from torch import Tensor

CPU = torch.device("cpu")
# Around the borders of blocks; the last ones share the beginning of the longest.
PROMPT_LENGTHS = (1, 3, 15, 16, 17, 31, 33, 47, 64, 70)
# Those that begin with few tokens grow most: what windows free is then too little for all.
OUTPUT_LENGTHS = (40, 40, 40, 40, 24, 9, 5, 2, 7, 18)
NUM_SHARING = 3

pytestmark = pytest.mark.usefixtures("library", "restored_torch")


@dataclass(frozen=True, slots=True)
class Family:
    """A checkpoint and its model in float32."""

    checkpoint: Checkpoint
    config: EngineConfig
    model: Decoder


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    checkpoint = make_decoder(tmp_path_factory.mktemp("decoder"), request.param)
    config = checkpoint.engine_config()
    return Family(checkpoint, config, load_model(config, CPU))


def test_an_engines_greedy_tokens_are_those_of_transformers(family: Family) -> None:
    """In chunks, with prefix hits, and through a shortage of blocks that preempts requests."""
    checkpoint = family.checkpoint
    prompts = [checkpoint.draw_tokens(length, length) for length in PROMPT_LENGTHS]
    for index in range(-NUM_SHARING, -1):
        prompts[index] = prompts[-1][: PROMPT_LENGTHS[index]]
    params = [
        SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False)
        for length in OUTPUT_LENGTHS
    ]
    arguments = EngineArgs(
        str(checkpoint.folder),
        skip_tokenizer_init=True,
        distributed_executor_backend="uni",
        max_model_len=96,
        dtype="float32",
        block_size=8,
        max_num_batched_tokens=16,
    )
    config = arguments.create_engine_config()
    num_blocks = config.max_blocks_per_request
    with LLM(**vars(arguments) | {"num_gpu_blocks_override": num_blocks}) as llm:
        outputs = find_tokens(llm.generate(prompts, params, use_tqdm=False))
        stats = llm.stats()
    rope = checkpoint.spec.rope
    # An engine turns by what max_model_len asks for, transformers by the length so far.
    longest_with_others = (rope.original_max_position_embeddings or 0) if rope.type == "longrope" else 0
    for prompt, output in zip(prompts, outputs, strict=True):
        if len(prompt) <= longest_with_others:
            continue
        logits = checkpoint.compute_reference([*prompt, *output[:-1]])[len(prompt) - 1 :]
        assert output == logits.argmax(-1).tolist()
    assert stats.num_preemptions_total > 0
    assert stats.prefix_cache_hits_total > 0


def test_logits_have_the_same_bits_in_any_chunks_and_company_natively_and_in_python(family: Family) -> None:
    checkpoint, config, model = family.checkpoint, family.config, family.model
    prompts = {name: checkpoint.draw_tokens(length, length) for name, length in (("a", 45), ("b", 70))}
    run = PagedRun(model, config)
    for name, token_ids in prompts.items():
        run.add(name, token_ids)
    parts: dict[str, list[Tensor]] = {name: [] for name in prompts}
    for step in ({"a": 17, "b": 1}, {"b": 50, "a": 1}, {"a": 1, "b": 1}, {"b": 18, "a": 26}):
        for name, logits in run.step(step).items():
            parts[name].append(logits)
    assert model.native is not None
    for name, token_ids in prompts.items():
        expected, together = checkpoint.compute_reference(token_ids), torch.cat(parts[name])
        torch.testing.assert_close(together, expected, rtol=0, atol=find_tolerance(checkpoint, expected))
        for chunk in (None, 1, 7):
            assert_same_logits(compute_alone(model, config, token_ids, chunk), together, config)
    native, model.native = model.native, None
    try:
        in_python = compute_alone(model, config, prompts["b"], 16)
    finally:
        model.native = native
    assert_same_logits(in_python, torch.cat(parts["b"]), config)


@pytest.mark.parametrize("quantization", [None, "int4", "fp8"])
def test_narrow_logits_are_near_with_the_same_bits_in_chunks_and_in_python(
    family: Family, quantization: str | None
) -> None:
    checkpoint, token_ids = family.checkpoint, family.checkpoint.draw_tokens(45)
    config = checkpoint.engine_config("bfloat16", quantization=quantization)
    model = load_model(config, CPU)
    whole = compute_alone(model, config, token_ids)
    assert_same_logits(compute_alone(model, config, token_ids, 7), whole, config)
    model.native = None
    assert_same_logits(compute_alone(model, config, token_ids, 16), whole, config)
    expected = checkpoint.compute_reference(token_ids)
    # What other weights would give has a median around 0; int4 of so few random weights 0.89 at least.
    nearest = {None: 0.999, "int4": 0.8, "fp8": 0.98}[quantization]
    assert torch.cosine_similarity(whole, expected, dim=-1).median() > nearest


@pytest.mark.parametrize("family", ["deepseek_v3", "minicpm3", "gpt-oss"], indirect=True)
@pytest.mark.parametrize(("kv_cache_dtype", "nearest"), [("int8", 0.999), ("fp8", 0.99)])
def test_logits_of_a_cache_in_8_bits_are_near_with_the_same_bits_in_chunks_and_in_python(
    family: Family, kv_cache_dtype: KVCacheDtype, nearest: float
) -> None:
    checkpoint, token_ids = family.checkpoint, family.checkpoint.draw_tokens(45)
    config = replace(family.config, cache=CacheConfig(kv_cache_dtype=kv_cache_dtype))
    model = load_model(config, CPU)
    whole = compute_alone(model, config, token_ids)
    assert_same_logits(compute_alone(model, config, token_ids, 7), whole, config)
    model.native = None
    assert_same_logits(compute_alone(model, config, token_ids, 16), whole, config)
    expected = checkpoint.compute_reference(token_ids)
    assert torch.cosine_similarity(whole, expected, dim=-1).median() > nearest
    assert not torch.equal(whole, compute_alone(family.model, family.config, token_ids))


def test_two_ranks_alone_and_of_two_stages_compute_transformers_logits(family: Family) -> None:
    config = with_ranks(family.config, 2)
    token_ids = family.checkpoint.draw_tokens(45)

    def compute(group: SharedGroup) -> list[Tensor]:
        parts: list[Decoder | Pipeline] = [load_model(config, CPU, group)]
        if config.model.spec.max_stages > 1:
            parts.append(Pipeline(config, 2, group))
        return [
            compute_alone(part, config.for_rank(), token_ids, chunk) for part in parts for chunk in (None, 7)
        ]

    whole, *others = run_ranks(2, compute)[0]
    expected = family.checkpoint.compute_reference(token_ids)
    torch.testing.assert_close(whole, expected, rtol=0, atol=find_tolerance(family.checkpoint, expected))
    assert all(torch.equal(other, whole) for other in others)
