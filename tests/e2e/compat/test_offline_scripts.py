"""What vLLM's example scripts do without a server, in our own words: their calls in their order, with other
imports and another model. Engines are in this process, for speed; docs/coming-from-vllm.md names the scripts.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from quire import (
    LLM,
    AsyncEngineArgs,
    AsyncLLM,
    Counter,
    EngineArgs,
    FlexibleArgumentParser,
    Gauge,
    Histogram,
    LLMEngine,
    PoolingParams,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
    TokensPrompt,
    Vector,
)
from quire.ipc.errors import ConfigError

PROMPTS = ["Hello, my name is", "The president of the country is", "The capital is", "The future is"]
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95)
HERE: dict[str, Any] = {"distributed_executor_backend": "uni"}
HERE_WORDS = ["--distributed-executor-backend", "uni"]
DUMMY: dict[str, Any] = {"load_format": "dummy", "runner": "pooling", "enforce_eager": True, **HERE}


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profile")


@pytest.fixture(scope="module")
def llm(traces: Path) -> Iterator[LLM]:
    profiler = {"profiler": "torch", "torch_profiler_dir": str(traces)}
    with LLM(model="pocket", disable_log_stats=False, profiler_config=profiler, **HERE) as made:
        yield made


def make_parser(**defaults: Any) -> FlexibleArgumentParser:
    """As a script's own: the engine's options and defaults of its own."""
    parser = FlexibleArgumentParser()
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(**defaults)
    return parser


def list_texts(outputs: list[RequestOutput]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def has_answers(outputs: list[RequestOutput]) -> bool:
    """Of any text: one that ends with its first token has none."""
    return all(output.outputs[0].token_ids for output in outputs)


def test_basic(llm: LLM) -> None:
    outputs = llm.generate(PROMPTS, SAMPLED)
    assert [output.prompt for output in outputs] == PROMPTS
    assert has_answers(outputs)


@pytest.mark.slow  # an engine of its own; test_embed_and_score has one of a command line too
def test_generate() -> None:
    parser = make_parser(model="pocket")
    sampling = parser.add_argument_group("Sampling parameters")
    for name, kind in (("--max-tokens", int), ("--temperature", float), ("--top-p", float), ("--top-k", int)):
        sampling.add_argument(name, type=kind)
    args = vars(parser.parse_args([*HERE_WORDS, "--max_tokens", "5", "--top-k=3"]))
    chosen = {name: args.pop(name) for name in ("max_tokens", "temperature", "top_p", "top_k")}
    with LLM(**args) as llm:
        params = llm.get_default_sampling_params()
        for name, value in chosen.items():
            if value is not None:
                setattr(params, name, value)
        assert [len(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, params)] == [5] * 4


def test_chat(llm: LLM) -> None:
    conversation = [
        {"role": "system", "content": "You are a helpful assistant"},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hello! How can I assist you today?"},
        {"role": "user", "content": "Write an essay about higher education."},
    ]
    params = llm.get_default_sampling_params()
    params.max_tokens, params.temperature = 8, 0.0
    (alone,) = llm.chat(conversation, params, use_tqdm=False)
    assert list_texts(llm.chat([conversation] * 10, params, use_tqdm=True)) == list_texts([alone]) * 10
    template = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    own = llm.chat([conversation] * 2, params, use_tqdm=False, chat_template=template)
    assert own[0].prompt_token_ids != alone.prompt_token_ids


def test_classify() -> None:
    overrides = {"architectures": ["LlamaForSequenceClassification"], "num_labels": 3}
    with LLM(model="pocket", hf_overrides=overrides, **DUMMY) as llm:
        for output in llm.classify(PROMPTS):
            probs = output.outputs.probs
            assert len(probs) == 3
            assert sum(probs) == pytest.approx(1.0)


@pytest.mark.slow  # an engine of its own
def test_reward() -> None:
    overrides = {"architectures": ["Qwen2ForRewardModel"], "model_type": "qwen2"}
    with LLM(model="pocket", hf_overrides=overrides, max_model_len=1024, **DUMMY) as llm:
        outputs = llm.reward(PROMPTS)
        assert [len(output.outputs.data) for output in outputs] == [
            len(output.prompt_token_ids) for output in outputs
        ]


def test_embed_and_score() -> None:
    args = make_parser(model="pocket-encoder", runner="pooling", enforce_eager=True).parse_args(HERE_WORDS)
    with LLM(**vars(args)) as llm:
        assert {len(output.outputs.embedding) for output in llm.embed(PROMPTS)} == {128}
        question, texts = "What is the capital?", ["The sun is hot.", "A capital is the first city."]
        scores = [output.outputs.score for output in llm.score(question, texts)]
        assert scores[1] > scores[0]


def test_structured_outputs(llm: LLM) -> None:
    class CarType(StrEnum):
        SEDAN = "sedan"
        TRUCK = "truck"

    class Car(BaseModel):
        brand: str
        car_type: CarType

    def generate(prompt: str, *, stop: list[str] | None = None, **wanted: Any) -> str:
        structured = StructuredOutputsParams(**wanted)
        params = SamplingParams(structured_outputs=structured, stop=stop, max_tokens=100, seed=1)
        return llm.generate(prompts=prompt, sampling_params=params)[0].outputs[0].text

    assert generate("Classify: it is wonderful!", choice=["Positive", "Negative"]) in ("Positive", "Negative")
    assert "@" in generate("Generate an address", regex=r"[a-z]{1,9}@[a-z]{1,9}\.com\n", stop=["\n"])
    schema = Car.model_json_schema()
    schema["properties"]["brand"]["maxLength"] = 20
    Car.model_validate_json(generate("Generate a JSON", json=schema))
    grammar = """
root ::= "SELECT " column " from " table
column ::= "col_1" | "col_2"
table ::= "table_1" | "table_2"
"""
    assert generate("Generate an SQL query", grammar=grammar).startswith("SELECT col_")


def test_prefix_caching(llm: LLM) -> None:
    prefix = "You are an expert school principal, skilled in effectively managing faculty and staff. " * 3
    prompts = [prefix + prompt for prompt in PROMPTS]
    params = SamplingParams(temperature=0.0, max_tokens=8)
    assert llm.reset_prefix_cache()
    regular = list_texts(llm.generate(prompts, params))
    llm.generate(prompts[0], params)
    outputs = llm.generate(prompts, params)
    assert list_texts(outputs) == regular
    assert all(output.num_cached_tokens for output in outputs)


async def stream(engine: AsyncLLM, prompt: str, request_id: str) -> str:
    params = SamplingParams(max_tokens=10, temperature=0.8, seed=42, output_kind=RequestOutputKind.DELTA)
    text = ""
    async for output in engine.generate(request_id=request_id, prompt=prompt, sampling_params=params):
        text += "".join(completion.text for completion in output.outputs)
        if output.finished:
            break
    return text


@pytest.mark.slow  # an engine with processes of its own
def test_async_llm_streaming() -> None:
    async def main() -> list[str]:
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model="pocket", enforce_eager=True))
        try:
            return [
                await stream(engine, prompt, f"stream-example-{place}")
                for place, prompt in enumerate(PROMPTS)
            ]
        finally:
            engine.shutdown()

    assert all(asyncio.run(main()))


def test_llm_engine_example() -> None:
    args = make_parser(model="pocket").parse_args(HERE_WORDS)
    engine = LLMEngine.from_engine_args(EngineArgs.from_cli_args(args))
    waiting = [
        ("A robot may not injure a human", SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1)),
        ("To be or not to be,", SamplingParams(temperature=0.8, top_k=5, presence_penalty=0.2)),
        ("What is the meaning?", SamplingParams(n=2, temperature=0.8, top_p=0.95, frequency_penalty=0.1)),
    ]
    finished: list[RequestOutput] = []
    number = 0
    with engine:
        while waiting or engine.has_unfinished_requests():
            if waiting:
                engine.add_request(str(number), *waiting.pop(0))
                number += 1
            finished += [output for output in engine.step() if output.finished]
    assert sorted((output.request_id, len(output.outputs)) for output in finished) == [
        ("0", 1),
        ("1", 1),
        ("2", 2),
    ]


def test_metrics(llm: LLM) -> None:
    llm.generate(PROMPTS, SAMPLED)
    shown: dict[str, Any] = {}
    for metric in llm.get_metrics("vllm:"):
        match metric:
            case Gauge() | Counter():
                shown[metric.name] = metric.value
            case Vector():
                shown[metric.name] = metric.values
            case Histogram():
                shown[metric.name] = (metric.sum, metric.count, list(metric.buckets.items()))
            case _:
                pytest.fail(f"{metric} is of no kind")
    assert shown["vllm:generation_tokens"] > 0
    assert shown["vllm:num_requests_running"] == 0
    _, count, buckets = shown["vllm:time_to_first_token_seconds"]
    assert buckets[-1] == ("+Inf", count)


def test_simple_profiling(llm: LLM, traces: Path) -> None:
    llm.start_profile()
    outputs = llm.generate(PROMPTS, SAMPLED)
    path = llm.stop_profile()
    assert has_answers(outputs)
    assert path.parent == traces
    steps = [event for event in json.loads(path.read_bytes())["traceEvents"] if event["name"] == "step"]
    num_tokens = sum(len(output.prompt_token_ids) - output.num_cached_tokens for output in outputs)
    assert sum(event["args"]["tokens"] for event in steps) >= num_tokens


@pytest.mark.slow  # two engines; test_llm.py has the seeds that they draw, test_exact.py that tokens follow
def test_reproducibility() -> None:
    def run() -> list[str]:
        with LLM(model="pocket", seed=42, **HERE) as llm:
            return list_texts(llm.generate(PROMPTS, SAMPLED))

    state = random.getstate()
    assert run() == run()
    assert random.getstate() == state  # which vLLM seeds, and Quire leaves alone


def test_embed_matryoshka() -> None:
    args = make_parser(model="pocket-encoder", runner="pooling").parse_args(HERE_WORDS)
    args.hf_overrides = {"is_matryoshka": True}
    with LLM(**vars(args)) as llm:
        outputs = llm.embed(PROMPTS, pooling_params=PoolingParams(dimensions=32))
        assert {len(output.outputs.embedding) for output in outputs} == {32}


def test_prompts_of_token_ids(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    prompts = [TokensPrompt(prompt_token_ids=tokenizer.encode(prompt)) for prompt in PROMPTS]
    params = SamplingParams(temperature=0.0, max_tokens=4)
    assert list_texts(llm.generate(prompts, params)) == list_texts(llm.generate(PROMPTS, params))


def test_batches_that_are_enqueued(llm: LLM) -> None:
    ids = llm.enqueue(PROMPTS, SAMPLED)
    assert [output.request_id for output in llm.wait_for_completion()] == ids


@pytest.mark.parametrize(
    "arguments", [{"tokenizer_mode": "mistral"}, {"config_format": "mistral"}, {"enable_prompt_embeds": True}]
)
def test_what_the_other_scripts_ask_for_is_refused_by_name(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(arguments))):
        LLM(model="pocket", **arguments)


def test_code_for_workers_is_refused_with_the_reason(llm: LLM) -> None:
    for ask in (lambda: llm.collective_rpc("reload"), lambda: llm.apply_model(lambda model: model)):
        with pytest.raises(ValueError, match="run nobody's code"):
            ask()
