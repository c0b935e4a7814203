"""Structured output of the whole engine: what ends by itself is valid, whatever else a request asks for."""

from __future__ import annotations

import itertools
import json
import random
import re
from dataclasses import replace
from typing import Any

import pytest
from checkpoints import RECIPES, make_checkpoint
from crowd import read_answer
from grammar_judge import find_faults, follows
from quire import LLM, RequestOutput, SamplingParams, StructuredOutputsParams
from quire.frontend.events import AssistantMessage
from quire.frontend.formats.grammars.rules import make_output_rules
from quire.frontend.formats.known_formats import FORMATS
from quire.frontend.formats.output_format import is_reasoning_open
from quire.frontend.formats.reading.output_parser import OutputParser
from quire.frontend.models.model_folder import POCKET, pocket_folder
from quire.frontend.tools import Tool, ToolChoice
from schemas import all_schemas
from tokenizers import AddedToken, Tokenizer

FOLLOWED = [case for case in all_schemas() if case.refused is None]
MARKERS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
LOAD = pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])


@pytest.fixture(scope="module", params=["random", POCKET])
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder, dtype = POCKET, "bfloat16"
    if request.param == "random":
        folder, dtype = tmp_path_factory.mktemp("structured") / "random", "float32"
        make_checkpoint(folder, replace(RECIPES["llama"], vocab_size=2056, rope="default"))
        backend = Tokenizer.from_file(str(pocket_folder() / "tokenizer.json"))
        backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKERS])
        backend.save(str(folder / "tokenizer.json"))
    # Blocks for less than all requests at once, so that some are preempted.
    sizes = {"max_model_len": 128, "num_gpu_blocks_override": 20, "block_size": 8}
    with LLM(str(folder), dtype=dtype, distributed_executor_backend="uni", **sizes) as llm:
        yield llm


@pytest.mark.parametrize("count", [32, LOAD])
def test_what_ends_by_itself_satisfies_its_schema(llm: LLM, count: int) -> None:
    cases = random.Random(count).sample(FOLLOWED, min(count, len(FOLLOWED)))
    asked = [cases[number % len(cases)] for number in range(count)]
    params = [
        SamplingParams(
            max_tokens=96, seed=number, structured_outputs=StructuredOutputsParams(json=case.schema)
        )
        for number, case in enumerate(asked)
    ]
    outputs = llm.generate(["Once"] * count, params, use_tqdm=False)
    num_ended = 0
    for case, output in zip(asked, outputs, strict=True):
        [one] = output.outputs
        assert one.finish_reason in ("stop", "length"), output.error
        if one.finish_reason == "stop":
            num_ended += 1
            assert find_faults(case.schema, json.loads(one.text)) == [], (case.name, one.text)
    print(f"{num_ended} of {count} ended with stop")
    assert num_ended > count / 2


# -- beside everything else that a request may ask for

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "pattern": "^[a-z]{1,6}$"}, "age": {"enum": [1, 12, 99]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
ANY_LENGTH = "[a-e ]*"
ASKED: dict[str, list[Any]] = {
    "structured_outputs": [
        StructuredOutputsParams(json=SCHEMA),
        StructuredOutputsParams(regex=ANY_LENGTH),
        StructuredOutputsParams(choice=["red", "reddish", "a colour"]),
    ],
    "n": [1, 3],
    "temperature": [1.0, 0.0],
    "presence_penalty": [0.0, 1.5],
    "repetition_penalty": [1.0, 1.8],
    "logit_bias": [None, {300: 30.0, 0: -100.0, 2: -100.0}],
    "min_tokens": [0, 6],
    "max_tokens": [9, 48],
    "stop": [None, ["e", "dis"]],
    "ignore_eos": [False, True],
    "logprobs": [None, 0, 4],
    "prompt_logprobs": [None, 1],
}


def make_pairwise() -> list[dict[str, Any]]:
    """Random requests in which each value of a field meets each of every other."""
    rng = random.Random(3)
    requests = [{name: rng.randrange(len(values)) for name, values in ASKED.items()} for _ in range(48)]
    for one, other in itertools.combinations(ASKED, 2):
        assert len({(r[one], r[other]) for r in requests}) == len(ASKED[one]) * len(ASKED[other])
    return [{name: ASKED[name][place] for name, place in request.items()} for request in requests]


def test_a_grammar_holds_beside_all_other_fields(llm: LLM) -> None:
    asked = make_pairwise()
    for fields in asked:
        fields["n"] = 1 if fields["temperature"] == 0 else fields["n"]
    params = [SamplingParams(seed=number, **fields) for number, fields in enumerate(asked)]
    prompts = [f"Day {number}" for number in range(len(asked))]
    # First come some that outgrow the pool together, whatever the others' lengths.
    crowd = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    before = llm.stats().num_preemptions_total
    outputs = llm.generate(["Once"] * 6 + prompts, [crowd] * 6 + params, use_tqdm=False)[6:]
    assert llm.stats().num_preemptions_total > before
    again = llm.generate(prompts[::-1], params[::-1], use_tqdm=False)[::-1]
    for fields, one, output, other in zip(asked, params, outputs, again, strict=True):
        assert read_answer(output) == read_answer(other)
        grammar = llm.llm_engine.input_processor.prepare_params(one).grammar
        check_output(fields, grammar, output)
    check_logprobs(llm, asked, outputs)


def check_output(fields: dict[str, Any], grammar: str, output: RequestOutput) -> None:
    """That every sequence follows the grammar as far as it goes, and whole where nothing has cut it."""
    assert len(output.outputs) == fields["n"], output.error
    for one in output.outputs:
        is_whole = one.finish_reason == "stop" and one.stop_reason is None
        assert follows(grammar, one.text, is_whole), (fields, one)
        assert len(one.token_ids) <= fields["max_tokens"]
        if fields["structured_outputs"].regex:
            assert re.fullmatch(ANY_LENGTH, one.text)
            assert len(one.token_ids) >= min(fields["min_tokens"], fields["max_tokens"])
        elif is_whole and fields["structured_outputs"].json:
            assert find_faults(SCHEMA, json.loads(one.text)) == []
        if fields["stop"] and not fields["min_tokens"]:  # before which no stop string is looked for
            assert not re.search("e|dis", one.text)


def check_logprobs(llm: LLM, asked: list[dict[str, Any]], outputs: list[RequestOutput]) -> None:
    """That logprobs are those of a prompt with the same tokens, which nothing constrains."""
    chosen = [(output, one) for output in outputs for one in output.outputs if one.logprobs and one.token_ids]
    assert len(chosen) > len(asked) / 2
    prompts: list[Any] = [
        {"prompt_token_ids": [*output.prompt_token_ids, *one.token_ids]} for output, one in chosen
    ]
    plain = llm.generate(prompts, SamplingParams(max_tokens=1, prompt_logprobs=4), use_tqdm=False)
    for (_, one), forced in zip(chosen, plain, strict=True):
        assert one.logprobs is not None
        assert forced.prompt_logprobs is not None
        steps = forced.prompt_logprobs[-len(one.token_ids) :]
        for found, expected in zip(one.logprobs, steps, strict=True):
            assert found is not None
            assert expected is not None
            for token_id in found.keys() & expected.keys():
                assert found[token_id].logprob == expected[token_id].logprob
            assert len(found.keys() & expected.keys()) == len(found)


# -- calls and thoughts

CALL_LOAD = pytest.param(2000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])
TOOLS = [
    Tool("find", parameters=SCHEMA, strict=True),
    Tool(
        "find_all",
        parameters={
            "type": "object",
            "properties": {
                "kind": {"enum": ["a", "b"]},
                "limit": {"type": "integer", "minimum": 1, "maximum": 50},
                "exact": {"type": ["boolean", "null"]},
            },
            "required": ["kind"],
            "additionalProperties": False,
        },
        strict=True,
    ),
    Tool("now"),
]
BUDGET = 5


@pytest.mark.parametrize("count", [40, CALL_LOAD])
def test_every_call_is_of_an_offered_tool_with_arguments_of_its_schema(llm: LLM, count: int) -> None:
    tokenizer, processor = llm.get_tokenizer(), llm.llm_engine.input_processor
    assert tokenizer is not None
    output_format = FORMATS["hermes"].bind(tokenizer)
    has_budget = "</think>" in output_format.token_ids  # where it is one token
    prompts = [
        f"Day {number}<think>" if number % 2 and has_budget else f"Day {number}" for number in range(count)
    ]
    asked = [
        processor.bind_rules(
            processor.prepare_params(SamplingParams(max_tokens=96, seed=number, skip_special_tokens=False)),
            make_output_rules(
                output_format,
                llm.llm_engine.facts.eos_token_ids,
                TOOLS,
                ToolChoice("required"),
                is_reasoning_open=is_reasoning_open(output_format, tokenizer.encode(prompt)),
                is_parallel=number % 3 == 0,
                thinking_token_budget=BUDGET if has_budget else None,
            ),
        )
        for number, prompt in enumerate(prompts)
    ]
    num_calls = num_ended = 0
    for output in llm.generate(prompts, asked, use_tqdm=False):
        [one] = output.outputs
        assert one.finish_reason in ("stop", "length"), output.error
        parser = OutputParser(output_format, tokenizer, output.prompt_token_ids, TOOLS)
        message = AssistantMessage()
        for event in parser.take(one.text, one.token_ids, is_finished=True):
            message.add(event)
        assert parser.num_reasoning_tokens <= (BUDGET if has_budget else 96)
        num_ended += one.finish_reason == "stop"
        num_calls += len(message.tool_calls)
        if one.finish_reason == "stop":
            assert message.tool_calls
            assert (message.content.strip(), parser.num_errors) == ("", 0)
            for call in message.tool_calls:
                schema = next(tool.parameters for tool in TOOLS if tool.name == call.name)
                assert find_faults(schema or {"maxProperties": 0}, json.loads(call.arguments)) == [], one.text
    print(f"{num_ended} of {count} ended with stop, {num_calls} calls")
    assert num_ended > count / 2 or not has_budget
