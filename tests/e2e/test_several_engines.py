"""Several engines behind one LLM: the tokens of one, whatever becomes of the others."""

from __future__ import annotations

import os
import signal

from quire import LLM, BeamSearchParams, SamplingParams

PROMPTS = [f"Once upon a time there were {number} foxes" for number in range(12)]
PARAMS = SamplingParams(max_tokens=40, temperature=0.8, seed=3, ignore_eos=True)


def generate(llm: LLM) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


def generate_while_one_is_killed(llm: LLM) -> list[list[int]]:
    """An engine's core and worker are killed when every request has some tokens."""
    engine = llm.llm_engine
    tokens = {f"r{number}": list[int]() for number in range(len(PROMPTS))}
    for name, prompt in zip(tokens, PROMPTS, strict=True):
        engine.add_request(name, prompt, PARAMS)
    victims = dict(engine._client.engines[1].pids)
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert output.error is None
            tokens[output.request_id] = list(output.outputs[0].token_ids)
        if victims and all(tokens.values()):
            for role in ("core", "worker"):
                os.kill(victims[role], signal.SIGKILL)
            victims = {}
    assert not victims
    return list(tokens.values())


def test_two_engines_say_what_one_says_also_when_one_is_killed() -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=10)
    with LLM(max_model_len=512) as llm:
        expected, (found,) = generate(llm), llm.beam_search(PROMPTS[:1], params)
    with LLM(max_model_len=512, data_parallel_size=2) as llm:
        assert generate(llm) == expected
        stats = llm.llm_engine.stats_by_engine()
        assert [stats[index].generation_tokens_total for index in range(2)] == [240, 240]
        assert generate_while_one_is_killed(llm) == expected
        (again,) = llm.beam_search(PROMPTS[:1], params)
        assert [one.tokens for one in again.sequences] == [one.tokens for one in found.sequences]
