"""Requests of every kind for "alone equals in a crowd": whatever runs beside a request, and whatever is lost
on its way, its tokens and logprobs are the same bit for bit.

A capability registers its requests with `kind`; `e2e/test_exact.py` runs them alone and in every situation.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import psutil
from quire import LLM, PoolingParams, RequestOutput, SamplingParams, StructuredOutputsParams
from quire.frontend.client.async_requests import Collector
from quire.frontend.formats.grammars.grammar import make_output_grammar
from quire.frontend.formats.grammars.rules import make_output_rules
from quire.frontend.formats.known_formats import FORMATS
from quire.frontend.formats.output_format import OutputFormat
from quire.frontend.llm_engine import LLMEngine
from quire.frontend.models.model_folder import pocket_folder
from quire.frontend.requests.input_processor import PreparedParams, PreparedSearch
from quire.frontend.requests.vectors.processor import PoolingProcessor
from quire.frontend.requests.vectors.state import PoolingInput
from quire.frontend.text.tokenizer import load_tokenizer
from quire.frontend.tools import Tool, ToolChoice
from quire.ipc.params.beam_search import BeamSearch

NUM_NEIGHBOURS = 64
PROCESSORS = ("own_processors:Unlike",)  # of an engine that runs these requests
OVERRIDES = {"is_matryoshka": True}  # likewise, of config.json
EOS_TOKEN_IDS = (0, 2)  # of the pocket model
STORY = "Once upon a time there was a little fox who lived near the river with her mother and her brothers. "


AskedParams = SamplingParams | PreparedParams | PoolingParams


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. `number` tells those of a kind apart."""

    kind: str
    number: int
    prompt: Any
    params: AskedParams

    @property
    def num_tokens(self) -> int:
        """All that it may generate."""
        if isinstance(self.params, PoolingParams):
            return 0
        own = self.params if isinstance(self.params, SamplingParams) else self.params.sampling_params
        return own.num_sequences * (own.max_tokens or 0)

    @property
    def name(self) -> str:
        return f"{self.kind} {self.number}"


MakeAsk = Callable[[int], tuple[Any, AskedParams]]
_KINDS: dict[str, MakeAsk] = {}


def kind(make: MakeAsk) -> MakeAsk:
    """Register a kind of request: the function makes the prompt and parameters of its i-th one."""
    _KINDS[make.__name__] = make
    return make


def list_asks() -> list[Ask]:
    """More than NUM_NEIGHBOURS requests, as many of each kind; prompts share beginnings."""
    num_each = NUM_NEIGHBOURS // len(_KINDS) + 1
    return [Ask(name, i, *make(i)) for i in range(num_each) for name, make in _KINDS.items()]


def make_prompt(i: int) -> str:
    """Of 25 to 70 tokens: with the story once, twice or three times before what is its own."""
    return STORY * (1 + i % 3) + f"On day {i} the fox"


def params(i: int, **fields: Any) -> SamplingParams:
    """Sampled with a seed, for a few tokens, with logprobs; `fields` come on top."""
    plain = {"temperature": 0.9, "seed": i, "max_tokens": 16 + i % 5, "ignore_eos": True, "logprobs": 2}
    return SamplingParams(**(plain | fields))


Sequence = tuple[list[int], str, str | None, int | str | None, list[dict[int, float]]]
Answer = tuple[list[Sequence], list[dict[int, float] | None]] | bytes  # these are of a vector


def read_answer(output: RequestOutput) -> Answer:
    """All that must be equal: of each sequence tokens, text, end and logprobs, then the prompt's logprobs."""
    sequences = [
        (
            list(one.token_ids),
            one.text,
            one.finish_reason,
            one.stop_reason,
            [_read_position(step) or {} for step in one.logprobs or []],
        )
        for one in output.outputs
    ]
    return sequences, [_read_position(entry) for entry in output.prompt_logprobs or []]


def _read_position(entry: Any) -> dict[int, float] | None:
    return None if entry is None else {token_id: one.logprob for token_id, one in entry.items()}


def answer(llm: LLM, asks: list[Ask]) -> dict[str, Answer]:
    """Run requests at once; by name."""
    return answer_through(llm, asks, [])


def answer_together(llm: LLM, asks: list[Ask]) -> dict[str, Answer]:
    """Run requests at once; the core, a process of its own, sees none before all are sent."""
    return answer_through(llm, asks, [], sending=stopped_core(llm))


def answer_alone(llm: LLM, asks: list[Ask]) -> dict[str, Answer]:
    """Run requests one after the other."""
    answers: dict[str, Answer] = {}
    for ask in asks:
        answers |= answer(llm, [ask])
    return answers


def answer_through(
    llm: LLM,
    asks: list[Ask],
    accidents: list[Callable[[], None]],
    sending: AbstractContextManager[None] | None = None,
) -> dict[str, Answer]:
    """Run requests at once, sent within `sending`, with accidents at equal distances among their outputs."""
    engine = llm.llm_engine
    found: dict[str, Answer] = {}
    with sending or contextlib.nullcontext():
        add(engine, asks, found)
    num_tokens = sum(ask.num_tokens for ask in asks)
    waiting, num_seen = list(accidents), 0
    seen: dict[str, int] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            seen[output.request_id] = sum(len(one.token_ids) for one in output.outputs)
            if output.finished:
                found[output.request_id] = read_answer(output)
        num_seen = sum(seen.values())
        if waiting and num_seen > num_tokens * (len(accidents) - len(waiting) + 1) / (len(accidents) + 2):
            waiting.pop(0)()
    assert not waiting, "the load ended before the last accident"
    return {ask.name: found[ask.name] for ask in asks}


@contextlib.contextmanager
def stopped_core(llm: LLM) -> Generator[None]:
    """The core stands still, so that all that is sent meanwhile is there at its next turn."""
    core = psutil.Process(llm.llm_engine.facts.pids["core"])
    core.suspend()
    try:
        yield
    finally:
        core.resume()


def add(engine: LLMEngine, asks: list[Ask], found: dict[str, Answer]) -> None:
    """Send requests; a vector comes into `found` by itself."""
    vectors = PoolingProcessor(engine.facts, engine.tokenizer)
    for ask in asks:
        if isinstance(ask.params, PoolingParams):
            (prompt,) = vectors.tokenize([ask.prompt], [ask.params], [ask.name])
            add_vector(engine, vectors.make_input(ask.name, prompt, ask.params), found)
        else:
            engine.add_inputs([engine.input_processor.process(ask.name, ask.prompt, ask.params)])
    engine.abort_request([])  # which comes after what was added before


def add_vector(engine: LLMEngine, request: PoolingInput, found: dict[str, Answer]) -> None:
    class Vector(Collector):
        def put(self, output: Any) -> None:
            assert output.finish_reason == "stop", output.error
            found[output.request_id] = output.outputs.raw

        def fail(self, error: Exception) -> None:
            raise error

    engine.add_soon(deque([request]), Vector())


# -- the kinds that there are


@kind
def greedy(i: int) -> tuple[str, SamplingParams]:
    return make_prompt(i), params(i, temperature=0.0)


@kind
def sampled(i: int) -> tuple[str, SamplingParams]:
    return make_prompt(i), params(i)


@kind
def filtered(i: int) -> tuple[str, SamplingParams]:
    filters = ({"top_k": 5 + i}, {"top_p": 0.8}, {"min_p": 0.1})
    return make_prompt(i), params(i, temperature=1.2, **filters[i % 3])


@kind
def penalized(i: int) -> tuple[str, SamplingParams]:
    fields = {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.3}
    return make_prompt(i), params(i, temperature=0.5 * (i % 2), **fields)


@kind
def several(i: int) -> tuple[str, SamplingParams]:
    return make_prompt(i), params(i, **({"n": 3} if i % 2 else {"n": 2, "best_of": 3}))


@kind
def with_prompt_logprobs(i: int) -> tuple[str, SamplingParams]:
    return make_prompt(i), params(i, prompt_logprobs=1, logprobs=5)


@kind
def without_logprobs(i: int) -> tuple[str, SamplingParams]:
    return make_prompt(i), params(i, logprobs=None)


@kind
def biased(i: int) -> tuple[str, SamplingParams]:
    return make_prompt(i), params(i, logit_bias={300 + i: 6.0, 400: -100.0})


@kind
def restricted(i: int) -> tuple[str, SamplingParams]:
    return make_prompt(i), params(i, allowed_token_ids=list(range(200 + i, 900, 3)))


@kind
def with_bad_words(i: int) -> tuple[str, SamplingParams]:
    return make_prompt(i), params(i, temperature=0.0, bad_words=["the", "was very", "little"])


@kind
def stopped(i: int) -> tuple[str, SamplingParams]:
    return make_prompt(i), params(i, stop=["the", "a"], min_tokens=i % 4, ignore_eos=False, max_tokens=24)


@kind
def token_ids(i: int) -> tuple[dict[str, Any], SamplingParams]:
    return {"prompt_token_ids": [5 + (7 * i + j * j) % 900 for j in range(3 + 16 * i)]}, params(i)


@kind
def processed(i: int) -> tuple[str, SamplingParams]:
    """By a class of own_processors.py, which the engine was started with (PROCESSORS)."""
    return make_prompt(i), params(i, temperature=0.9 * (i % 2), extra_args={"unlike": 1 + i % 3})


@kind
def salted(i: int) -> tuple[dict[str, Any], SamplingParams]:
    return {"prompt": make_prompt(i), "cache_salt": f"tenant {i % 2}"}, params(i)


@kind
def with_logprobs_of_ids(i: int) -> tuple[str, SamplingParams]:
    return make_prompt(i), params(i, logprobs=None, logprob_token_ids=[300, 5, 14 + i, *range(i)])


@kind
def with_whole_vocabulary(i: int) -> tuple[str, SamplingParams]:
    return make_prompt(i), params(i, logprobs=-1, max_tokens=2)


@kind
def repeating(i: int) -> tuple[str, SamplingParams]:
    detection = {"max_pattern_size": 3, "min_count": 3}
    return make_prompt(i), params(i, allowed_token_ids=[300, 301 + i], repetition_detection=detection)


@kind
def uncached(i: int) -> tuple[str, SamplingParams]:
    return make_prompt(i), params(i, skip_reading_prefix_cache=True)


@kind
def embedded(i: int) -> tuple[str, PoolingParams]:
    """Of the last token, so that it reads the prefix cache. Some are cut."""
    dimensions = (None, 5, 24)[i % 3]
    return make_prompt(i), PoolingParams(task="embed", use_activation=i % 2 == 0, dimensions=dimensions)


@kind
def embedded_by_token(i: int) -> tuple[dict[str, Any], PoolingParams]:
    prompt = {"prompt_token_ids": [5 + (3 * i + j * j) % 900 for j in range(1 + 24 * i)]}
    return prompt, PoolingParams(task="token_embed")


@kind
def searched(i: int) -> tuple[str, PreparedParams]:
    width = 2 + i % 3
    sampling = SamplingParams(n=width, temperature=0.0, max_tokens=8 + i % 4)
    return make_prompt(i), PreparedSearch("", b"", sampling, 0.0, beam_search=BeamSearch(width, 1.0, "never"))


@kind
def constrained(i: int) -> tuple[str, SamplingParams]:
    schema = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}
    outputs = (
        StructuredOutputsParams(json=schema | {"required": ["name", "age"]}),
        StructuredOutputsParams(regex="([a-z]{2,5} ){3,9}[0-9]{2}"),
        StructuredOutputsParams(choice=["red", "green", "redder", "a colour that takes more tokens"]),
    )
    fields = {"presence_penalty": 0.7, "logit_bias": {300 + i: 2.0}} if i > 2 else {}
    return make_prompt(i), params(i, structured_outputs=outputs[i % 3], **fields)


SCHEMA = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
TOOLS = (Tool("calculator", None, SCHEMA), Tool("now", None, {"type": "object", "properties": {}}))


@functools.cache
def load_format() -> OutputFormat:
    """Hermes, as the tokenizer of all models here writes it."""
    return FORMATS["hermes"].bind(load_tokenizer(pocket_folder()))


def bind(
    sampling: SamplingParams, answer: StructuredOutputsParams | None = None, **rules: Any
) -> PreparedParams:
    """Parameters with the grammar of a turn."""
    made = make_output_grammar(make_output_rules(load_format(), EOS_TOKEN_IDS, **rules), answer)
    assert made is not None
    return PreparedParams("", b"", sampling, 0.0, grammar=made.text)


@kind
def calling(i: int) -> tuple[str, PreparedParams]:
    choice = (ToolChoice("required"), ToolChoice("auto"), ToolChoice("required", frozenset({"calculator"})))
    return make_prompt(i), bind(params(i, max_tokens=24), tools=TOOLS, choice=choice[i % 3])


@kind
def thinking(i: int) -> tuple[str, PreparedParams]:
    """With a budget where the end of thoughts is a token, which has to be forced."""
    budget = 4 + i if len(load_format().thinking_close_ids) == 1 else None
    rules = {"is_reasoning_open": i % 2 == 0, "thinking_token_budget": budget}
    return make_prompt(i), bind(params(i), StructuredOutputsParams(regex="[a-z ]{9,30}"), **rules)
