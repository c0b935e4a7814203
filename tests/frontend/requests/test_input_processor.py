"""Requests are checked against the model's limits and tokenized before anything is sent."""

from __future__ import annotations

import array
from collections import deque
from typing import Any

import msgspec
import numpy as np
import pytest
from frontend_fakes import make_facts, prompt_ids
from quire.frontend.formats.grammars.rules import make_output_rules
from quire.frontend.formats.known_formats import FORMATS
from quire.frontend.requests.input_processor import InputProcessor, list_bad_word_texts
from quire.frontend.text.tokenizer import Tokenizer
from quire.frontend.tools import Tool
from quire.ipc.errors import InputError, PromptError, SamplingParamsError
from quire.ipc.params.request_options import RequestOptions, read_options
from quire.ipc.params.sampling_params import MAX_SEED, SamplingParams
from quire.ipc.protocol.messages import EngineCoreRequest
from quire.ipc.protocol.token_ids import decode_token_ids, encode_token_ids
from quire.ipc.protocol.token_lists import unpack_bad_words
from refusals import Refusal, refusals


@pytest.fixture
def processor(byte_level: Tokenizer) -> InputProcessor:
    return InputProcessor(make_facts(vocab_size=len(byte_level) + 10), byte_level)


@pytest.mark.parametrize(
    "prompt", ["the fox", {"prompt": "the fox"}, {"prompt": "the fox", "cache_salt": None}], ids=str
)
def test_texts_are_tokenized_with_the_models_special_tokens(metaspace: Tokenizer, prompt: Any):
    request = InputProcessor(make_facts(), metaspace).process("a", prompt, SamplingParams())
    assert request.prompt == "the fox"
    assert request.prompt_token_ids == metaspace.encode("the fox")
    assert request.prompt_token_ids[0] == metaspace.bos_token_id
    assert prompt_ids(request.sequences[0]) == request.prompt_token_ids


@pytest.mark.parametrize(
    "prompt",
    [
        [5, 6],
        (5, 6),
        np.array([5, 6]),
        [np.int64(5), np.int32(6)],
        array.array("i", [5, 6]),
        {"prompt_token_ids": [5, 6]},
        {"prompt_token_ids": (5, 6), "cache_salt": "s"},
        {"prompt_token_ids": np.array([5, 6], dtype=np.uint16)},
    ],
    ids=repr,
)
def test_token_ids_are_taken_as_they_are(processor: InputProcessor, prompt: Any):
    request = processor.process("a", prompt, SamplingParams())
    assert (request.prompt, request.prompt_token_ids) == (None, [5, 6])
    assert request.sequences[0].options.cache_salt == ("s" if "cache_salt" in prompt else "")


def test_a_text_beside_token_ids_is_only_shown(processor: InputProcessor):
    request = processor.process("a", {"prompt": "shown", "prompt_token_ids": [5]}, SamplingParams())
    assert (request.prompt, request.prompt_token_ids) == ("shown", [5])


def test_many_prompts_are_tokenized_as_one_by_one(processor: InputProcessor):
    prompts: list[Any] = ["the fox", [7, 8], {"prompt": "hello"}, "the dog"]
    together = processor.tokenize(prompts, is_many=True)
    assert together[1].token_ids == [7, 8]
    for place in (0, 2, 3):
        assert together[place].token_ids == processor.tokenize([prompts[place]])[0].token_ids


@refusals("prompts")
def test_a_prompt_that_cannot_run_is_refused_by_name(byte_level: Tokenizer, refusal: Refusal):
    processor = InputProcessor(make_facts(), byte_level)
    refusal.check(lambda prompt: processor.process("a", prompt, SamplingParams()))


@pytest.mark.parametrize(
    ("prompt", "field", "text"),
    [
        (b"bytes", "prompt", "a text, a list of token ids"),
        ({"prompt": "x", "cache_salt": "s\ud800"}, "prompt.cache_salt", "lone surrogate at character 1"),
        (np.array([True]), "prompt", "prompt=True: expected integers"),
        ([np.int64(3), "x"], "prompt", "prompt='x': expected token ids from 0 to "),
        (np.array([1.5]), "prompt", "prompt=1.5: expected token ids from 0 to "),
        (np.array([[1, 2]]), "prompt", "prompt=[1, 2]: expected token ids from 0 to "),
        (np.array(5), "prompt", "a text, a list of token ids"),
        (memoryview(b"ab"), "prompt", "a text, a list of token ids"),
        ({"prompt_token_ids": bytearray(b"ab")}, "prompt.prompt_token_ids", "a list of token ids"),
        ("a \ud800 b", "prompt", "lone surrogate at character 2"),
        ("fox " * 500, "prompt", "at most 63 (max_model_len=64"),
    ],
    ids=lambda value: repr(value)[:40].split(" at ")[0],
)
def test_a_prompt_that_is_no_json_is_refused_by_name(
    processor: InputProcessor, prompt: Any, field: str, text: str
):
    with pytest.raises(PromptError) as caught:
        processor.process("a", prompt, SamplingParams())
    assert caught.value.field == field
    assert text in str(caught.value)


def test_the_longest_prompt_leaves_one_token_to_generate(processor: InputProcessor):
    assert len(processor.process("a", [1] * 63, SamplingParams()).prompt_token_ids) == 63


def test_one_bad_prompt_among_many_is_named_by_its_place(processor: InputProcessor):
    with pytest.raises(PromptError, match=r"prompts\[2\]"):
        processor.tokenize(["fine", [1], "bad \udfff", "fine"], is_many=True)
    with pytest.raises(PromptError, match=r"prompts\[1\]"):
        processor.tokenize(["fine", [999999]], is_many=True)


def test_a_prompt_larger_than_the_kv_cache_names_what_to_raise(byte_level: Tokenizer):
    small = InputProcessor(make_facts(max_model_len=64, num_gpu_blocks=2), byte_level)
    with pytest.raises(PromptError, match=r"at most 31.*kv_cache_memory_bytes"):
        small.process("a", [1] * 32, SamplingParams())


@refusals("sampling_limits")
def test_parameters_outside_the_models_limits_are_refused(byte_level: Tokenizer, refusal: Refusal):
    processor = InputProcessor(make_facts(), byte_level)

    def process(values: dict[str, Any]) -> object:
        values = {name: {500: 1.0} if name == "logit_bias" else one for name, one in values.items()}
        return processor.process("a", [1], SamplingParams(**values))

    refusal.check(process)


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 3}, slice(97, 100)),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, slice(0, 3)),
        ({"truncate_prompt_tokens": -1, "max_tokens": 24}, slice(60, 100)),  # of 64
        ({"truncate_prompt_tokens": -1, "max_tokens": None}, slice(37, 100)),
    ],
    ids=str,
)
def test_a_prompt_that_is_too_long_is_cut_where_the_request_asks_for_it(
    byte_level: Tokenizer, fields: dict[str, Any], kept: slice
):
    processor = InputProcessor(make_facts(), byte_level)
    for prompt in ([*range(5, 105)], tuple(range(5, 105)), {"prompt_token_ids": deque(range(5, 105))}):
        made = processor.process("a", prompt, SamplingParams(**fields))
        assert made.prompt_token_ids == list(range(5, 105))[kept]
        sent = made.sequences[0].sampling_params
        assert (sent.truncate_prompt_tokens, sent.truncation_side) == (None, "left")
    text = "the quick brown fox jumps over the lazy dog " * 10
    ids, num_kept = byte_level.encode(text), kept.stop - kept.start
    cut = processor.process("a", text, SamplingParams(**fields)).prompt_token_ids
    assert cut == (ids[-num_kept:] if kept.start else ids[:num_kept])
    assert processor.process("a", [5, 6], SamplingParams(**fields)).prompt_token_ids == [5, 6]


def test_what_a_prompt_cannot_be_cut_to_is_refused(byte_level: Tokenizer):
    processor = InputProcessor(make_facts(), byte_level)
    with pytest.raises(SamplingParamsError, match="truncate_prompt_tokens=64: expected -1, or from 1 to 63"):
        processor.process("a", [5], SamplingParams(truncate_prompt_tokens=64))
    with pytest.raises(SamplingParamsError, match="-1: expected max_tokens below 64"):
        processor.process("a", [5], SamplingParams(truncate_prompt_tokens=-1, max_tokens=70))
    with pytest.raises(PromptError, match="100 tokens"):
        processor.process("a", [5] * 100, SamplingParams())


@pytest.mark.parametrize("cap", [-1, 1000])
def test_the_whole_vocabularys_logprobs_need_the_cap_to_allow_it(byte_level: Tokenizer, cap: int):
    processor = InputProcessor(make_facts(max_logprobs=cap), byte_level)
    request = processor.process("a", [1], SamplingParams(logprobs=-1, prompt_logprobs=500))
    assert request.sequences[0].sampling_params.logprobs == 500  # which the core can count with
    for name in ("logprobs", "prompt_logprobs"):
        with pytest.raises(SamplingParamsError, match=f"^{name}=501: expected at most 500, the vocabulary"):
            processor.process("a", [1], SamplingParams(**{name: 501}))


def test_parameters_are_checked_again_and_cloned(processor: InputProcessor):
    params = SamplingParams(stop=["x"])
    params.temperature = 5.0
    with pytest.raises(SamplingParamsError, match="temperature"):
        processor.process("a", [1], params)
    params.temperature = 1.0
    request = processor.process("a", [1], params)
    params.stop = ["changed"]
    assert request.params.stop == ["x"]
    assert params.seed is None
    with pytest.raises(SamplingParamsError, match="a SamplingParams"):
        processor.process("a", [1], {"temperature": 1})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("request_id", ["", "x" * 201, 5, None, "a\nb"])
def test_a_request_id_must_be_a_short_printable_text(processor: InputProcessor, request_id: Any):
    with pytest.raises(InputError, match="request_id"):
        processor.process(request_id, [1], SamplingParams())


def test_engine_ids_are_unique_though_users_repeat_theirs(processor: InputProcessor):
    ids = {processor.process("same", [1], SamplingParams()).sequences[0].request_id for _ in range(50)}
    assert len(ids) == 50
    assert all(one.startswith("same-") for one in ids)


def test_end_tokens_are_left_out_when_they_are_ignored(processor: InputProcessor):
    assert processor.process("a", [1], SamplingParams()).sequences[0].eos_token_ids == [2]
    assert processor.process("a", [1], SamplingParams(ignore_eos=True)).sequences[0].eos_token_ids == []


def test_each_sequence_has_its_own_id_and_seed(processor: InputProcessor):
    request = processor.process("a", [1], SamplingParams(n=3, seed=10, prompt_logprobs=1))
    assert [one.sampling_params.seed for one in request.sequences] == [10, 11, 12]
    assert [one.sampling_params.n for one in request.sequences] == [1, 1, 1]
    assert [one.sampling_params.prompt_logprobs for one in request.sequences] == [1, None, None]
    assert [one.request_id.split("-")[0] for one in request.sequences] == ["0_a", "1_a", "2_a"]
    assert len({one.request_id for one in request.sequences}) == 3


def test_requests_without_a_seed_have_the_same_ones_in_every_run_with_an_engines_seed(byte_level: Tokenizer):
    def draw(seed: int | None) -> list[int | None]:
        processor = InputProcessor(make_facts(), byte_level, seed)
        params = [SamplingParams(), SamplingParams(seed=7), SamplingParams(n=2)]
        made = [processor.process("a", [1], one) for one in params]
        return [one.sampling_params.seed for request in made for one in request.sequences]

    first = draw(3)
    assert first == draw(3)
    assert first[1] == 7
    assert len({*first, *draw(4), *draw(None), *draw(None)}) == 4 * 3 + 1
    assert all(seed is not None and 0 <= seed <= MAX_SEED for seed in first)


@pytest.mark.parametrize("seed", [MAX_SEED - 1, -3, -MAX_SEED - 1])
def test_seeds_near_the_ends_of_their_range_stay_distinct_and_set(processor: InputProcessor, seed: int):
    request = processor.process("a", [1], SamplingParams(n=4, seed=seed))
    seeds = [one.sampling_params.seed for one in request.sequences]
    assert len(set(seeds)) == 4
    assert None not in seeds


def test_best_of_asks_for_the_tokens_own_logprobs(processor: InputProcessor):
    request = processor.process("a", [1], SamplingParams(n=1, best_of=3))
    assert [one.sampling_params.logprobs for one in request.sequences] == [0, 0, 0]
    assert request.hides_cumulative_logprob
    kept = processor.process("a", [1], SamplingParams(n=2, best_of=3, logprobs=2))
    assert [one.sampling_params.logprobs for one in kept.sequences] == [2, 2, 2]
    assert not kept.hides_cumulative_logprob


def test_bad_words_are_forbidden_at_a_beginning_and_after_a_space(byte_level: Tokenizer):
    processor = InputProcessor(make_facts(), byte_level)
    request = processor.process("a", [1], SamplingParams(bad_words=["fox"]))
    forbidden = unpack_bad_words(request.sequences[0].token_lists)
    texts = {byte_level.decode(decode_token_ids(packed)) for packed in forbidden}
    assert texts == {"fox", " fox"}


def test_a_spaced_form_that_ends_in_the_plain_one_is_not_repeated(byte_level: Tokenizer):
    processor = InputProcessor(make_facts(), byte_level)
    request = processor.process("a", [1], SamplingParams(bad_words=["<|im_end|>"]))
    assert unpack_bad_words(request.sequences[0].token_lists) == [encode_token_ids([2])]


class CountingTokenizer(Tokenizer):
    """Notes how many texts each call of the library encodes."""

    def encode_texts(self, texts: Any, add_special_tokens: bool = True) -> Any:
        self.calls = [*getattr(self, "calls", []), len(texts)]
        return super().encode_texts(texts, add_special_tokens)


def test_bad_words_are_encoded_once_for_all_requests_of_their_params(byte_level: Tokenizer):
    tokenizer = CountingTokenizer(byte_level.backend, byte_level.special_tokens, None)
    processor = InputProcessor(make_facts(), tokenizer)
    params = SamplingParams(bad_words=["fox", "dog"], max_tokens=3)
    prompts = processor.tokenize(["the", "fox", "a"], is_many=True)
    tokenizer.calls = []
    requests = [
        processor.make_input(str(place), *parts)
        for place, parts in enumerate(zip(prompts, processor.prepare_each([params] * 3), strict=True))
    ]
    assert tokenizer.calls == [4]
    assert requests[0].params is not requests[1].params
    (ids, *others) = [one.token_lists for request in requests for one in request.sequences]
    assert others == [ids, ids]
    elsewhere = byte_level.encode_batch(list_bad_word_texts(["fox", "dog"]), add_special_tokens=False)
    assert processor.prepare_params(params, elsewhere).token_lists == ids
    assert tokenizer.calls == [4]


def test_bad_words_of_too_many_tokens_are_refused_with_the_number(processor: InputProcessor):
    params = SamplingParams(bad_words=["".join(map(chr, range(0x4E00, 0x4E00 + 1000)))] * 3)
    with pytest.raises(
        SamplingParamsError, match="bad_words='9000 token ids': expected words of at most 8192"
    ):
        processor.process("a", [1], params)


def test_a_prompt_that_is_too_long_is_refused_before_its_ids_are_looked_at(processor: InputProcessor):
    with pytest.raises(PromptError, match="'1000 tokens': expected at most 63"):
        processor.process("a", [True] * 1000, SamplingParams())


def test_what_takes_an_event_loop_too_long_is_told(processor: InputProcessor):
    short, words = SamplingParams(), SamplingParams(bad_words=["x" * 1000] * 3)
    long = "x" * 5000
    assert [processor.takes_long(one, short) for one in ("x", [1], {"prompt": "x"})] == [False] * 3
    several: list[Any] = [long, [1] * 30_000, {"prompt": long}, {"prompt_token_ids": [1] * 30_000}]
    assert [processor.takes_long(one, short) for one in several] == [True] * 4
    assert processor.takes_long("x", words)
    assert not processor.takes_long("x", processor.prepare_params(words))


def test_without_a_tokenizer_only_token_ids_go_in_and_out():
    processor = InputProcessor(make_facts(), None)
    request = processor.process("a", [1, 2], SamplingParams())
    assert not request.params.detokenize
    with pytest.raises(PromptError, match="without a tokenizer"):
        processor.process("a", "text", SamplingParams())
    for values in ({"stop": ["x"]}, {"bad_words": ["x"]}):
        with pytest.raises(SamplingParamsError, match="there is no tokenizer"):
            processor.process("a", [1], SamplingParams(**values))


def test_every_sequence_carries_its_tenant_and_timeouts(processor: InputProcessor):
    options = read_options(tenant="team \u00e9", timeout_s=3, queue_timeout_s=0.5)
    request = processor.process("a", [1], SamplingParams(n=2), options)
    assert [one.options for one in request.sequences] == [options] * 2
    assert (options.tenant, options.timeout_s, options.queue_timeout_s) == ("team \u00e9", 3, 0.5)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tenant", "x" * 129),
        ("tenant", 7),
        ("tenant", None),
        ("tenant", "a\nb"),
        ("tenant", "\ud800"),
        ("timeout_s", 0),
        ("timeout_s", -1.0),
        ("timeout_s", float("nan")),
        ("timeout_s", float("inf")),
        ("timeout_s", True),
        ("timeout_s", "5"),
        ("queue_timeout_s", 0.0),
        ("queue_timeout_s", 1e9),
        *(("priority", value) for value in ("high", 2**40, None, True)),
    ],
)
def test_a_bad_option_is_named(field: str, value: Any):
    with pytest.raises(InputError) as caught:
        read_options(**{field: value})
    assert caught.value.field == field


def test_what_stands_for_a_plain_value_can_be_sent(processor: InputProcessor):
    class Word(str):
        __slots__ = ()

    made = processor.process(
        Word("id"),
        {"prompt": Word("the fox"), "cache_salt": Word("salt")},
        SamplingParams(stop=Word("fox")),
        read_options(
            priority=np.int64(3), tenant=Word("t"), timeout_s=np.float32(9.0), queue_timeout_s=np.int64(2)
        ),
    )
    (sent,) = made.sequences
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=EngineCoreRequest)
    assert again == sent
    assert sent.options == RequestOptions(3, "salt", "t", 9.0, 2.0)


@pytest.mark.parametrize(
    ("tools", "is_open", "purpose"),
    [((Tool("now"),), True, "tools"), ((), True, "thinking"), ((), False, "")],
)
def test_a_request_says_whether_it_offers_tools_or_thinks(
    processor: InputProcessor, byte_level: Tokenizer, tools: tuple[Tool, ...], is_open: bool, purpose: str
):
    output_format = FORMATS["hermes"].bind(byte_level)
    rules = make_output_rules(output_format, (2,), tools, is_reasoning_open=is_open)
    prepared = processor.bind_rules(processor.prepare_params(SamplingParams()), rules)
    assert processor.process("a", [5], prepared).sequences[0].purpose == purpose


def test_a_text_whose_tokens_the_model_lacks_is_refused(byte_level: Tokenizer) -> None:
    processor = InputProcessor(make_facts(vocab_size=5), byte_level)
    with pytest.raises(PromptError, match="out of vocabulary"):
        processor.process("r", "the fox", SamplingParams())
