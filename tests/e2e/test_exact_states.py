"""Models with recurrent layers: a request's bits are the same wherever it goes on from saved states, however
few slots there are for them; and what a chat's next turn computes.
"""

from __future__ import annotations

from typing import Any

import pytest
from crowd import OVERRIDES, PROCESSORS, Answer, Ask, answer, answer_alone, list_asks
from decoders import add_tokenizer, make_decoder
from quire import LLM, SamplingParams

MAX_NUM_SEQS = 5
LONG = {"max_position_embeddings": 4096}


@pytest.fixture(
    scope="module",
    params=[
        "lfm2",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3-next", "qwen3.5", "bamba")),
    ],
)
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> str:
    request.getfixturevalue("library")
    made = make_decoder(tmp_path_factory.mktemp("hybrid") / "hybrid", request.param, vocab_size=2048).folder
    return str(add_tokenizer(made))


@pytest.fixture(scope="module")
def asks() -> list[Ask]:
    return list_asks()


def make_llm(folder: str, **changes: Any) -> LLM:
    fields: dict[str, Any] = {"max_model_len": 512, "max_logprobs": -1, "num_gpu_blocks_override": 2048}
    fields |= {"runner": "generate", "convert": "embed", "hf_overrides": LONG | OVERRIDES}
    fields |= {"logits_processors": PROCESSORS} | changes
    return LLM(folder, dtype="float32", exact=True, distributed_executor_backend="uni", **fields)


@pytest.fixture(scope="module")
def alone(folder: str, asks: list[Ask]) -> dict[str, Answer]:
    with make_llm(folder, enable_prefix_caching=False) as llm:
        return answer_alone(llm, asks)


@pytest.mark.parametrize(
    ("chunk", "num_more"),
    [
        (7, 0),
        (64, 1),
        (129, 5),
        pytest.param(1, 5, marks=pytest.mark.slow),
        pytest.param(16, 2, marks=pytest.mark.slow),
    ],
)
def test_few_slots_and_preemptions_in_any_chunks_change_no_bit(
    folder: str, asks: list[Ask], alone: dict[str, Answer], chunk: int, num_more: int
) -> None:
    # Blocks for little more than one request: those that run are preempted all the time.
    sizes: dict[str, Any] = {"block_size": 8, "max_model_len": 128, "num_gpu_blocks_override": 20}
    slots = {"max_num_seqs": MAX_NUM_SEQS, "num_state_slots": MAX_NUM_SEQS + num_more}
    with make_llm(folder, max_num_batched_tokens=chunk, **sizes, **slots) as llm:
        assert answer(llm, asks) == alone
        stats = llm.stats()
        assert stats.num_preemptions_total > 0 or chunk == 1  # which leaves a step one row
        assert stats.prefix_cache_hits_total > 0  # where not all rows are taken, their slots have states
        assert stats.state_slots_total == MAX_NUM_SEQS + num_more


def test_a_chat_of_twenty_turns_computes_what_is_new_and_its_bits_are_those_of_the_whole(folder: str) -> None:
    def chat(**changes: Any) -> tuple[list[Any], list[tuple[int, int]]]:
        """The answers; of each turn but the first (cached tokens, those of whole blocks that could be)."""
        ids, answers, counts = [(7 * i * i + 3) % 1900 + 5 for i in range(2000)], list[Any](), []
        with make_llm(folder, max_model_len=4096, **changes) as llm:
            for turn in range(20):
                params = SamplingParams(seed=turn, max_tokens=40, ignore_eos=True, logprobs=1)
                [output] = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
                found = output.outputs[0]
                answers.append((list(found.token_ids), found.logprobs))
                counts.append((output.num_cached_tokens or 0, (len(ids) - 31) // 16 * 16))
                ids = [*ids, *found.token_ids, *((turn * 13 + i) % 1900 for i in range(30))]
        return answers, counts[1:]

    answers, counts = chat()
    assert all(cached == possible for cached, possible in counts)
    assert counts[0][0] >= 0.95 * 2070  # of the second turn at most a twentieth is computed
    assert chat(enable_prefix_caching=False)[0] == answers
