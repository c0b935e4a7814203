"""What follows a grammar of a turn is read back by the format's parser: thoughts, answers and calls."""

from __future__ import annotations

import json
import random
import re
from functools import cache
from typing import Any

import msgspec
import pytest
from frontend_fakes import make_facts
from grammar_judge import find_faults
from llguidance import LLMatcher, LLTokenizer
from quire.frontend.events import AssistantMessage
from quire.frontend.formats.grammars.grammar import make_output_grammar
from quire.frontend.formats.grammars.rules import OutputRules, make_output_rules
from quire.frontend.formats.known_formats import FORMATS
from quire.frontend.formats.offered_tools import ToolFields
from quire.frontend.formats.output_format import OutputFormat
from quire.frontend.formats.reading.output_parser import OutputParser
from quire.frontend.formats.schemas.compiler import GrammarCompiler
from quire.frontend.formats.schemas.grammar_text import make_grammar_text
from quire.frontend.http.text_process.jobs import GrammarJob, decode_job, encode_body
from quire.frontend.requests.input_processor import InputProcessor, PreparedParams
from quire.frontend.text.tokenizer import Tokenizer
from quire.frontend.tools import Tool, ToolChoice
from quire.ipc.errors import SamplingParamsError
from quire.ipc.params.sampling_params import SamplingParams
from quire.ipc.params.structured_outputs import StructuredOutputsParams
from transcripts import END, SLIPS, USER, make_tokenizer

# What of a marker is a token in the models' own tokenizers.
TOKEN = re.compile(r"<(?!/?parameter|/?function)[^<>\s=]+>|\[[A-Z_/]+\]")
OBJECT: dict[str, Any] = {"type": "object", "additionalProperties": False}
WEATHER = OBJECT | {
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "units": {"enum": ["metric", "imperial"]},
        "exact": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 2},
        "where": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/Place"}]},
        "level": {"$ref": "#/$defs/Level"},
    },
    "$defs": {
        "Place": OBJECT | {"properties": {"x": {"type": "number"}, "in": {"$ref": "#/$defs/Place"}}},
        "Level": {"type": "string", "enum": ["low", "high"]},
    },
    "required": ["city", "units"],
}
RUN = OBJECT | {"properties": {"in": {"type": "string"}}, "required": ["in"]}
TOOLS = [
    Tool("run", parameters=RUN),
    Tool("run_in", parameters=WEATHER),
    Tool("now", parameters={"type": "object", "properties": {}}),
    Tool("ping"),
]
STRICT = [Tool(tool.name, None, tool.parameters, True) for tool in TOOLS]


def find_tokens(name: str) -> tuple[str, ...]:
    found = (token for marker in FORMATS[name].list_markers() for token in TOKEN.findall(marker))
    return tuple(dict.fromkeys(found))


NONE = "no such marker"


@cache
def bind(name: str, kept: str = "") -> tuple[Tokenizer, OutputFormat, LLTokenizer]:
    """A tokenizer with a format's markers as tokens, the format, and llguidance's tokenizer.

    kept: the markers that are tokens have this in their text.
    """
    tokenizer = make_tokenizer((), tuple(token for token in find_tokens(name) if kept in token))
    ends = [tokenizer.eos_token_id]
    inner = LLTokenizer(tokenizer.backend.to_str(), n_vocab=tokenizer.vocab_size, eos_token=ends)
    return tokenizer, FORMATS[name].bind(tokenizer), inner


def make_rules(name: str, tools: list[Tool], kept: str = "", **fields: Any) -> OutputRules:
    tokenizer, output_format, _ = bind(name, kept)
    choice = fields.pop("choice", ToolChoice())
    return make_output_rules(output_format, [tokenizer.eos_token_id], tools, choice, **fields)


def list_bits(mask: bytes) -> list[int]:
    return [8 * place + bit for place, byte in enumerate(mask) if byte for bit in range(8) if byte >> bit & 1]


def write(grammar: str, inner: LLTokenizer, favoured: list[list[int]], seed: object) -> list[int] | None:
    """Random token ids that follow a grammar, often those of `favoured`; None if they come to no end."""
    chance, matcher = random.Random(str(seed)), LLMatcher(inner, grammar, log_level=0)
    token_ids: list[int] = []
    while len(token_ids) < 2000:
        assert not matcher.is_error(), matcher.get_error()
        tokens = chance.choice(favoured if token_ids else favoured[:3])
        if matcher.validate_tokens(tokens) < len(tokens) or chance.random() < 0.5:
            tokens = [chance.choice(list_bits(matcher.compute_bitmask()))]
        token_ids += tokens
        if token_ids[-1] == inner.eos_token:
            return token_ids
        assert matcher.consume_tokens(tokens), matcher.get_error()
    return None


def read(
    rules: OutputRules, tokenizer: Tokenizer, tools: list[Tool], token_ids: list[int]
) -> AssistantMessage:
    prompt = tokenizer.encode(USER + ("<think>" if rules.is_reasoning_open else ""), add_special_tokens=False)
    parser = OutputParser(rules.format, tokenizer, prompt, tools)
    message = AssistantMessage()
    text = tokenizer.decode(token_ids[:-1], skip_special_tokens=False)
    for event in parser.take(text, token_ids, is_finished=True):
        message.add(event)
    assert parser.num_errors == 0, text
    return message


def generate(
    name: str, rules: OutputRules, tools: list[Tool], kept: str, seed: object
) -> AssistantMessage | None:
    tokenizer, _, inner = bind(name, kept)
    made = make_output_grammar(rules)
    assert made is not None
    calls = rules.format.calls
    assert calls is not None
    head = (
        f'{{"name": "run", "{calls.arguments_key}": '
        if calls.name_key
        else f"{calls.open}run{calls.name_close}"
    )
    thinking = rules.format.thinking
    begins = [END, calls.section_open + head, thinking.open.strip() if thinking else END]
    texts = [*begins, *'"}]),', *map(str.strip, rules.format.list_markers())]
    favoured = [tokenizer.encode(text, add_special_tokens=False) for text in filter(None, texts)]
    token_ids = write(made.text, inner, favoured, seed)
    return None if token_ids is None else read(rules, tokenizer, tools, token_ids)


CHOICES = {
    "auto": ToolChoice(),
    "required": ToolChoice("required"),
    "named": ToolChoice("required", frozenset({"run_in"})),
    "allowed": ToolChoice("auto", frozenset({"run", "now"})),
}


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("name", FORMATS)
def test_what_is_generated_is_read_back(name: str, choice: str) -> None:
    chosen = CHOICES[choice]
    rules = make_rules(name, TOOLS, choice=chosen)
    num_ended = num_calls = 0
    for seed in range(7):
        message = generate(name, rules, TOOLS, "", seed)
        if message is None:
            continue
        num_ended += 1
        num_calls += len(message.tool_calls)
        check(message, TOOLS, chosen)
    assert num_ended > 1
    assert num_calls > 0


def check(message: AssistantMessage, tools: list[Tool], choice: ToolChoice) -> None:
    offered = {tool.name: tool for tool in tools if choice.names is None or tool.name in choice.names}
    for call in message.tool_calls:
        tool, arguments = offered[call.name], json.loads(call.arguments)
        assert isinstance(arguments, dict)
        if tool.parameters is None or tool.parameters.get("properties") == {}:
            assert arguments == {}
        elif tool.strict or choice.mode == "required":
            assert find_faults(tool.parameters, arguments) == [], call.arguments
    if choice.mode == "required":
        assert message.content == ""
        assert message.tool_calls
    if choice.mode == "required" and len(offered) == 1:
        assert len(message.tool_calls) == 1


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        *((name, NONE) for name in ("hermes", "qwen3_coder", "llama3_json", "mistral_list", "glm45")),
        *(("hermes", "tool_call"), ("hermes", "think"), ("mistral", "[TOOL")),
    ],
)
def test_markers_that_are_no_tokens_are_followed_as_text(name: str, kept: str) -> None:
    rules = make_rules(name, STRICT, kept)
    messages = [generate(name, rules, STRICT, kept, seed) for seed in range(20)]
    ended = [message for message in messages if message is not None]
    assert any(message.tool_calls for message in ended)
    assert any(message.reasoning for message in ended) == (rules.format.thinking is not None)
    for message in ended:
        check(message, STRICT, ToolChoice())


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_without_parallel_calls_there_is_one_at_most(choice: str) -> None:
    rules = make_rules("hermes", TOOLS, choice=CHOICES[choice], is_parallel=False)
    counts = [
        len(message.tool_calls)
        for seed in range(40)
        if (message := generate("hermes", rules, TOOLS, "", seed)) is not None
    ]
    assert set(counts) == ({0, 1} if choice == "auto" else {1})


# -- slips


def end(matcher: LLMatcher, tokenizer: Tokenizer, output_format: OutputFormat, seed: object) -> list[int]:
    """Write on as a model that wants to end; returns the tokens that it has to write first."""
    closers = ['"', "}", "]", ")", "'", "\n", "0"]
    chance, closers = random.Random(str(seed)), [*closers, *map(str.strip, output_format.list_markers())]
    encoded = [tokenizer.encode(text, add_special_tokens=False) for text in filter(None, closers)]
    written: list[int] = []
    while not (matcher.is_stopped() or matcher.validate_tokens([tokenizer.eos_token_id])):
        fitting = [ids for ids in encoded if matcher.validate_tokens(ids) == len(ids)]
        if not fitting or chance.random() < 0.1:
            fitting = [[token] for token in list_bits(matcher.compute_bitmask())]
        assert fitting, "neither the end nor anything else may be written"
        ids = chance.choice(fitting)
        assert matcher.consume_tokens(ids)
        written += ids
        assert len(written) < 3000
    return written


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("name", FORMATS)
def test_a_turn_comes_to_its_end_from_wherever_it_is(name: str, choice: str) -> None:
    for seed, kept in ((0, ""), (1, ""), (2, NONE)):
        rules = make_rules(name, STRICT if seed else TOOLS, kept, choice=CHOICES[choice])
        made, (tokenizer, output_format, inner) = make_output_grammar(rules), bind(name, kept)
        assert made is not None
        matcher, chance = LLMatcher(inner, made.text, log_level=0), random.Random(seed)
        for _ in range(chance.randrange(300)):
            allowed = list_bits(matcher.compute_bitmask())
            if matcher.is_stopped() or allowed == [inner.eos_token]:
                break
            assert matcher.consume_token(
                chance.choice([token for token in allowed if token != inner.eos_token])
            )
        end(matcher, tokenizer, output_format, seed)


@pytest.mark.parametrize("case", SLIPS)
def test_a_slip_is_followed_or_led_back_from(case: str) -> None:
    """The model writes the slip as far as it may, and then wants to end: calls are those that are read."""
    slip, tokenizer, output_format = SLIPS[case], SLIPS[case].tokenizer, SLIPS[case].output_format
    inner = LLTokenizer(tokenizer.backend.to_str(), tokenizer.vocab_size, tokenizer.eos_token_id)
    for tools in (slip.tools, [Tool(tool.name, None, tool.parameters, True) for tool in slip.tools]):
        rules = make_output_rules(output_format, [tokenizer.eos_token_id], tools)
        made = make_output_grammar(rules)
        assert made is not None
        matcher = LLMatcher(inner, made.text, log_level=0)
        ids = tokenizer.encode(slip.text.removesuffix(END), add_special_tokens=False)
        num_followed = matcher.validate_tokens(ids)
        assert matcher.consume_tokens(ids[:num_followed])
        written = [*ids[:num_followed], *end(matcher, tokenizer, output_format, case), tokenizer.eos_token_id]
        message = read(rules, tokenizer, list(tools), written)
        check(message, list(tools), ToolChoice())
        if num_followed == len(ids):
            calls = [(call.name, call.arguments) for call in message.tool_calls]
            assert calls[: len(slip.calls)] == list(slip.calls)


def test_an_object_is_no_call_where_its_arguments_would_be_free() -> None:
    rules = make_rules("pythonic", STRICT)
    made = make_output_grammar(rules)
    assert made is not None
    matcher = LLMatcher(bind("pythonic")[2], made.text, log_level=0)
    for text, is_free in (
        ('So: {"name": "rum", "parameters": {}}', True),
        ('So: {"name": "run", "pa', False),
    ):
        ids = bind("pythonic")[0].encode(text, add_special_tokens=False)
        assert (matcher.validate_tokens(ids) == len(ids)) is is_free


def test_text_begins_no_call_without_its_marker_where_too_many_kinds_of_calls_are_offered() -> None:
    schemas = [OBJECT | {"properties": {f"p{number}": {"type": "integer"}}} for number in range(70)]
    tools = [Tool(f"f{number}", None, schema, True) for number, schema in enumerate(schemas)]
    text = 'So: {"name": "f9", "arguments": {"p9": 1}}\n</tool_call>'
    assert follows(start(make_rules("hermes", tools[:20])), text)
    many = make_rules("hermes", tools)
    assert not follows(start(many), text)
    assert follows(start(many), text.replace("f9", "g9").partition("\n")[0])
    assert follows(start(many), f"So: <tool_call>\n{text[4:]}")


def test_thoughts_that_are_not_closed_end_with_the_marker_of_a_call() -> None:
    for budget in (None, 0, 5):
        for is_open in (True, False):
            rules = make_rules("hermes", TOOLS, thinking_token_budget=budget, is_reasoning_open=is_open)
            text = f"{'' if is_open else '<think>'}{'' if budget == 0 else 'Hm.'}{CALL}"
            assert follows(start(rules), text)
            assert not follows(start(rules), text + "b")


# -- thoughts


def start(rules: OutputRules, answer: StructuredOutputsParams | None = None) -> LLMatcher:
    made = make_output_grammar(rules, answer)
    assert made is not None
    matcher = LLMatcher(bind("hermes")[2], made.text, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def list_allowed(matcher: LLMatcher) -> set[int]:
    return set(list_bits(matcher.compute_bitmask()))


def encode(text: str) -> list[int]:
    return bind("hermes")[0].encode(text, add_special_tokens=False)


def follows(matcher: LLMatcher, text: str) -> bool:
    """Whether a text is a whole turn."""
    return matcher.validate_tokens(encode(text + END)) == len(encode(text + END))


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("budget", [0, 1, 7, 300])
def test_thoughts_end_at_their_budget_and_not_before(budget: int, is_open: bool) -> None:
    rules = make_rules("hermes", [], is_reasoning_open=is_open, thinking_token_budget=budget)
    close, (word, *_) = encode("</think>"), encode("a")
    matcher = start(rules)
    assert matcher.consume_tokens([] if is_open else encode("<think>"))
    for _ in range(budget):
        assert {word, *close} <= list_allowed(matcher)
        assert matcher.consume_token(word)
    assert list_allowed(matcher) == set(close)
    replayed = start(rules)
    assert replayed.consume_tokens([*([] if is_open else encode("<think>")), *[word] * budget])
    assert list_allowed(replayed) == set(close)
    if budget:
        assert replayed.rollback(1)
        assert {word, *close} <= list_allowed(replayed)
        assert replayed.consume_token(word)
    assert replayed.consume_tokens(close)
    assert follows(replayed, "an answer")


def test_a_turn_may_go_without_thoughts_but_not_on_with_those_of_its_prompt() -> None:
    assert follows(start(make_rules("hermes", [], thinking_token_budget=3)), "an answer")
    is_open = make_rules("hermes", [], thinking_token_budget=30, is_reasoning_open=True)
    assert not follows(start(is_open), "an answer")
    assert not follows(start(is_open), "<think>a</think>an answer")
    assert follows(start(is_open), "a</think>an answer")


def test_a_budget_needs_an_end_of_thoughts_that_is_a_token() -> None:
    rules = make_rules("hermes", [], kept=NONE, thinking_token_budget=3)
    with pytest.raises(
        SamplingParamsError, match="thinking_token_budget=3: expected None: the end of this model's"
    ):
        make_output_grammar(rules)


# -- an answer's own format beside calls and thoughts

ANSWER = StructuredOutputsParams(
    json={"type": "object", "required": ["a"], "additionalProperties": False}
    | {"properties": {"a": {"type": "integer"}}}
)
CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize(
    ("choice", "followed", "refused"),
    [
        (ToolChoice(), ['{"a": 1}', CALL, f"<think>so</think>\n\n{CALL}"], ["text", f'{{"a": 1}}{CALL}']),
        (ToolChoice("none"), ['{"a": 1}', '<think>{</think>\n\n{"a":1}'], [CALL, "<think>so</think>text"]),
        (ToolChoice("required"), [CALL, f"<think></think>{CALL}\n{CALL}"], ['{"a": 1}', f"so {CALL}"]),
    ],
)
def test_a_turn_is_the_answer_or_calls(choice: ToolChoice, followed: list[str], refused: list[str]) -> None:
    rules = make_rules("hermes", TOOLS, choice=choice)
    assert [follows(start(rules, ANSWER), text) for text in followed] == [True] * len(followed)
    assert [follows(start(rules, ANSWER), text) for text in refused] == [False] * len(refused)


def bind_rules(processor: InputProcessor, rules: OutputRules) -> PreparedParams:
    return processor.bind_rules(processor.prepare_params(SamplingParams()), rules)


@pytest.mark.parametrize("kept", ["", NONE])
@pytest.mark.parametrize("name", FORMATS)
def test_what_begins_calls_is_kept_out_where_none_may_be_written(name: str, kept: str) -> None:
    rules = make_rules(name, TOOLS, kept, choice=ToolChoice("none"))
    calls, channels, (tokenizer, _, inner) = rules.format.calls, rules.format.channels, bind(name, kept)
    assert calls is not None
    made = make_output_grammar(rules)
    assert made is not None
    head = "" if channels is None else channels.channel + channels.final + channels.body
    opener = (calls.section_open or calls.open).split()[0] if not calls.is_bare else calls.lead
    for text, is_whole in (
        (f"{head}a", True),
        (f"{head}a{opener}b", not opener or (kept == NONE and bool(head))),
    ):
        matcher = LLMatcher(inner, made.text, log_level=0)
        token_ids = tokenizer.encode(text + END, add_special_tokens=False)
        assert (matcher.validate_tokens(token_ids) == len(token_ids)) == is_whole, text


def test_an_engine_of_token_ids_alone_takes_no_tools() -> None:
    rules = make_rules("hermes", TOOLS)
    with pytest.raises(SamplingParamsError, match="tools='given': expected None: there is no tokenizer"):
        bind_rules(InputProcessor(make_facts(), None), rules)
    without_end = make_facts(eos_token_ids=())
    with pytest.raises(
        SamplingParamsError, match="tools='given': expected None: this model names no end of sequence"
    ):
        bind_rules(InputProcessor(without_end, bind("hermes")[0]), rules)


def test_nothing_is_followed_where_nothing_is_said() -> None:
    none = ToolChoice("none")
    assert make_output_grammar(make_rules("hermes", [], choice=none)) is None
    assert make_output_grammar(make_rules("llama3_json", [], thinking_token_budget=3)) is None
    plain = make_output_grammar(make_rules("llama3_json", TOOLS, choice=none), ANSWER)
    assert plain == make_grammar_text(ANSWER)


# -- schemas


def test_a_schema_that_is_not_followed_may_say_anything() -> None:
    tools = [Tool("odd", parameters={"type": "object", "properties": {"a": {"not": {}, "format": "own"}}})]
    assert make_output_grammar(make_rules("hermes", tools)) is not None


@pytest.mark.parametrize(
    ("name", "schema", "place"),
    [
        ("hermes", {"properties": {"x": {"not": {"type": "null"}}}}, "properties.x.not"),
        ("hermes", {"type": "array"}, "type"),
        ("hermes", {"properties": {"x": {"pattern": "(?=a)"}}}, "properties.x"),
        ("qwen3_coder", {"anyOf": [{"required": ["x"]}]}, "anyOf"),
        ("qwen3_coder", {"properties": {"x": {"type": "string", "pattern": "a"}}}, "properties.x.pattern"),
        ("pythonic", {"properties": {}, "required": ["x"]}, "required"),
        ("gemma4", {"properties": {"x": {"items": {"pattern": "a"}}}}, "properties.x.items.pattern"),
    ],
)
def test_a_schema_that_cannot_be_followed_is_refused_at_its_place(
    name: str, schema: dict[str, Any], place: str
) -> None:
    tools = [TOOLS[0], Tool("bad", parameters={"type": "object"} | schema, strict=True)]
    with pytest.raises(SamplingParamsError) as caught:
        GrammarCompiler(bind(name)[0]).compile(None, rules=make_rules(name, tools))
    assert caught.value.field == f"tools[1].function.parameters.{place}"
    # A call that has to come follows schemas, too; without strict, what cannot be followed is left out.
    required = ToolChoice("required")
    free = [TOOLS[0], Tool("bad", parameters={"type": "object"} | schema)]
    other = [TOOLS[0], Tool("bad", parameters={"additionalProperties": True})]
    if place != "type":  # which is checked with the tools
        made = [make_rules(name, tools, choice=required) for tools in (free, other)]
        follow = GrammarCompiler(bind(name)[0]).compile
        assert follow(None, rules=made[0]) == follow(None, rules=drop_schema(made[1], 1))


def drop_schema(rules: OutputRules, number: int) -> OutputRules:
    tools = [*rules.tools]
    tools[number] = msgspec.structs.replace(tools[number], parameters=None)
    return msgspec.structs.replace(rules, tools=tuple(tools))


def test_a_tool_that_is_not_strict_needs_a_schema_all_the_same() -> None:
    bad = Tool("bad", parameters={"type": "object", "properties": {"x": {"type": "text"}}})
    with pytest.raises(SamplingParamsError, match=r"properties.x.type='text': expected one of null"):
        compile_required([bad])
    assert compile_required([Tool(f"t{i}", parameters=UNFOLLOWED) for i in range(16)])
    with pytest.raises(SamplingParamsError, match="no such keyword"):
        compile_required([Tool(f"t{i}", parameters=UNFOLLOWED) for i in range(17)])


UNFOLLOWED = {"type": "object", "properties": {"x": {"not": {"type": "null"}}}}


def compile_required(tools: list[Tool]) -> str:
    rules = make_rules("hermes", tools, choice=ToolChoice("required"))
    return GrammarCompiler(bind("hermes")[0]).compile(None, rules=rules)


@pytest.mark.parametrize("name", FORMATS)
def test_grammars_of_every_format_compile_within_the_limits(name: str) -> None:
    compiler = GrammarCompiler(bind(name)[0])
    for choice in CHOICES.values():
        rules = make_rules(name, STRICT, choice=choice, fields=ToolFields(schema="input_schema"))
        job = GrammarJob(rules=rules)
        sent = decode_job(encode_body(job))
        assert sent == job
        assert compiler.compile(None, rules=sent.rules) == compiler.compile(None, rules=rules)


def test_tools_that_take_too_much_are_refused_in_numbers() -> None:
    properties = {f"property_{i}": {"enum": [f"{i}-{j}" for j in range(9)]} for i in range(50)}
    schema = OBJECT | {"properties": properties}
    compiler = GrammarCompiler(bind("hermes")[0])
    tools = [Tool(f"tool_{i}", parameters=schema, strict=True) for i in range(200)]
    with pytest.raises(
        SamplingParamsError, match=r"tools='a grammar of [0-9]* characters': expected at most 262144 "
    ):
        compiler.compile(None, rules=make_rules("hermes", tools))
    free = [Tool(tool.name, parameters=schema) for tool in tools]
    assert len(compiler.compile(None, rules=make_rules("hermes", free))) < 20_000
