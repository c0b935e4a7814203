"""The pocket corpus keeps its promises, and the shipped model folder is what the README says."""

import hashlib
import json
import re
from collections.abc import Iterator
from itertools import islice, pairwise
from random import Random

import pytest
import torch
from quire.tools.pocket import MODEL_DIR
from quire.tools.pocket.asking import Pocket, ask
from quire.tools.pocket.batches import Batch, encode_documents, render
from quire.tools.pocket.calls import CALCULATOR, LOOKUP, make_tool
from quire.tools.pocket.encoder.corpus import draw_pairs
from quire.tools.pocket.evaluate import find_story_fault, has_form_asked_for, read_calls, split_words
from quire.tools.pocket.json_tasks import draw_copying_task, draw_json_task
from quire.tools.pocket.loss import ROPE_THETA, compute_loss
from quire.tools.pocket.phrases import make_word
from quire.tools.pocket.reading import read_story
from quire.tools.pocket.stories import PLOTS, tell_story
from quire.tools.pocket.sums import ADD_FORMS, HELD_OUT, Sum, draw_sum, draw_sum_turn
from quire.tools.pocket.text import Chat, Document, draw_documents, think_about_sum
from quire.tools.pocket.tokenizer import (
    END_OF_TEXT,
    MARKERS,
    THINK_START,
    TURN_END,
    TURN_START,
    VOCAB_SIZE,
    render_chat,
    train_tokenizer,
)
from quire.tools.pocket.train import make_config
from quire.tools.pocket.wiring import wire
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

pytestmark = pytest.mark.slow

SIZE_LIMIT_BYTES = 8_000_000
CHAT = [
    {"role": "system", "content": "You are Pocket."},
    {"role": "user", "content": "Hi!"},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "What is 12 plus 30?"},
]


@pytest.fixture(scope="module")
def documents() -> list[Document]:
    return list(islice(draw_documents(seed=7), 6_000))


@pytest.fixture(scope="module")
def tokenizer(documents: list[Document]) -> Tokenizer:
    return train_tokenizer(map(render, documents))


@pytest.fixture(scope="module")
def shipped() -> Iterator[Pocket]:
    """The shipped model, with one engine for all who ask it."""
    pocket = Pocket(MODEL_DIR)
    yield pocket
    pocket.engine.close()


@pytest.fixture(scope="module")
def turns(documents: list[Document]) -> list[tuple[str, str]]:
    """Every question of the corpus with its answer."""
    return [
        (first["content"], second["content"])
        for chat in documents
        if isinstance(chat, Chat)
        for first, second in pairwise(chat.messages)
        if (first["role"], second["role"]) == ("user", "assistant")
    ]


def test_the_corpus_is_the_one_that_the_shipped_models_were_trained_on() -> None:
    drawn = [render(document) for document in islice(draw_documents(seed=1), 1000)]
    drawn += [f"{pair.query}|{pair.answer.text}|{pair.wrong.text}" for pair in islice(draw_pairs(1), 1000)]
    assert hashlib.sha256("\n".join(drawn).encode()).hexdigest()[:16] == "9c33d53613f579ae"


def find_number_pairs(text: str) -> set[tuple[int, int]]:
    """Pairs of numbers that follow each other within a sentence or formula, smaller first."""
    lines = [[int(number) for number in re.findall(r"\d+", line)] for line in text.splitlines()]
    return {(min(pair), max(pair)) for numbers in lines for pair in pairwise(numbers)}


def test_no_sum_of_a_held_out_pair_is_in_the_corpus_in_any_form(turns: list[tuple[str, str]]) -> None:
    for question, answer in turns:
        is_json = question.startswith(("Give", "Write", "Turn", "Make")) or answer.startswith(("{", "["))
        is_declined = "only" in answer or "smaller" in answer
        is_subtraction = re.search(r" minus | - |-|away|[Ss]ubtract|eats", question)  # checked below
        if answer and not (is_json or is_declined or is_subtraction):
            assert not find_number_pairs(question) & HELD_OUT, question


def test_equations_of_the_corpus_are_right_and_show_no_held_out_pair(documents: list[Document]) -> None:
    text = "\n".join(render(document) for document in documents)
    found = re.findall(r"(\d+) (plus|minus|\+|-) (\d+) (?:is|=) (\d+)", text)
    assert len(found) > 2300
    for a, sign, b, c in ((int(a), sign, int(b), int(c)) for a, sign, b, c in found):
        asked = Sum(a, b, is_minus=sign in ("minus", "-"))
        assert asked.result == c
        assert not asked.is_held_out


def test_a_pair_is_held_out_in_both_orders_and_as_a_subtraction_and_none_of_one_digit_is() -> None:
    assert len(HELD_OUT) == round(sum(b + 1 for b in range(10, 100)) / 10)
    assert all(0 <= a <= b and 10 <= b < 100 for a, b in HELD_OUT)
    a, b = min(HELD_OUT)
    asked = [Sum(a, b), Sum(b, a), Sum(a + b, a, is_minus=True), Sum(a + b, b, is_minus=True)]
    assert all(each.is_held_out for each in asked)
    rng = Random(1)
    assert all(draw_sum(rng, is_minus=True).result >= 0 for _ in range(2000))


def test_sums_out_of_reach_are_declined() -> None:
    rng = Random(1)
    answers = [answer for _, answer in (draw_sum_turn(rng) for _ in range(20_000))]
    declined = [answer for answer in answers if "=" not in answer and " is " not in answer]
    assert declined
    assert all("only" in answer or "cannot" in answer for answer in declined)


def test_json_answers_have_the_form_asked_for_and_extractions_state_every_value() -> None:
    rng = Random(5)
    tasks = [draw_json_task(rng) for _ in range(2000)] + [draw_copying_task(rng) for _ in range(1000)]
    for task in tasks:
        assert json.loads(task.answer) == task.value
        assert has_form_asked_for(task, task.answer)
        assert not task.is_held_out
        if isinstance(task.value, dict):
            assert all(re.search(rf"\b{key}\b", task.prompt) for key in task.value)
        if task.is_extraction:
            assert isinstance(task.value, dict)
            assert all(str(value) in task.prompt for value in task.value.values())
    assert 1500 < sum(task.is_extraction for task in tasks) < 2500


def test_held_out_json_prompts_are_never_trained_on(turns: list[tuple[str, str]]) -> None:
    rng = Random(8)
    held_out = {draw_json_task(rng, is_held_out=True).prompt for _ in range(2000)}
    assert not held_out & {question for question, _ in turns}


def test_stories_are_sound_and_differ_and_every_plot_fills_all_its_slots() -> None:
    rng = Random(10)
    stories = [tell_story(rng) for _ in range(60 * len(PLOTS))]
    texts = [story.text for story in stories]
    words = {word for text in texts for word in split_words(text)}
    assert len(set(texts)) == len(texts)
    assert [find_story_fault(text, True, words) for text in texts] == [None] * len(texts)
    told = [*texts, *(line for story in stories for question in story.questions for line in question)]
    assert not any("{" in line or "}" in line for line in told)


def test_a_requested_hero_is_named_by_kind_in_the_story() -> None:
    rng = Random(11)
    for _ in range(500):
        story = tell_story(rng, says_kind=True)
        kind = re.search(r"\b(girl|boy|[a-z]+)( named \w+)?$", story.subject)
        if story.subject.startswith(("a girl", "a boy", "a fox")) and kind:
            assert kind.group(1) in story.text


def test_answers_about_a_read_story_use_words_of_the_story() -> None:
    rng = Random(12)
    for _ in range(300):
        question, answer = read_story(rng)[0]
        names = re.findall(r"\b[A-Z][a-z]+\b", answer.split(" ", 1)[1])
        assert all(name in question for name in names)


@pytest.mark.parametrize(
    ("more", "has_ended", "fault"),
    [
        ("", True, None),
        ("", False, "does not end"),
        ("The", True, "ends without punctuation"),
        ("The cxt.", True, "unknown words ['cxt']"),
        ("The cat sat in the sun. " * 30, True, "228 words"),
    ],
)
def test_a_fault_is_found_in_each_kind_of_bad_story(more: str, has_ended: bool, fault: str | None) -> None:
    good = "The cat sat in the sun. " * 8
    assert find_story_fault(good + more, has_ended, set(split_words(good))) == fault


def test_the_tokenizer_splits_digits_and_encodes_any_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("a 123").tokens[-3:] == ["1", "2", "3"]
    strange = "naïve 日本語 🙂 \t\n\x00"
    assert tokenizer.decode(tokenizer.encode(strange).ids) == strange
    assert [tokenizer.token_to_id(token) for token in (END_OF_TEXT, TURN_START, TURN_END)] == [0, 1, 2]


def test_a_word_has_the_same_tokens_after_a_space_and_after_a_quote(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    assert [tokenizer.token_to_id(marker) for marker in MARKERS] == list(range(VOCAB_SIZE - 6, VOCAB_SIZE))
    rng = Random(15)
    for word in (make_word(rng) for _ in range(200)):
        spaced, quoted = tokenizer.encode(f"a {word}").tokens[1:], tokenizer.encode(f'"{word}').tokens[1:]
        assert spaced in (["Ġ", *quoted], ["Ġ" + quoted[0], *quoted[1:]])


def test_a_model_copies_sequences_before_it_is_trained() -> None:
    torch.manual_seed(1)
    model = LlamaForCausalLM(make_config())
    wire(model, ROPE_THETA)
    tokens = torch.randperm(VOCAB_SIZE)[: 8 * 60].view(8, 60)
    with torch.inference_mode():
        said = model(input_ids=tokens.repeat(1, 2)).logits.argmax(-1)
    assert (said[:, 60:-1] == tokens[:, 1:]).float().mean() > 0.9


def test_the_training_loss_is_that_of_transformers() -> None:
    torch.manual_seed(1)
    model = LlamaForCausalLM(make_config())
    ids, is_target = torch.randint(VOCAB_SIZE, (3, 40)), torch.rand(3, 40) < 0.5
    loss = compute_loss(model, Batch(ids, is_target), is_compiled=False)
    with torch.inference_mode():
        expected = model(input_ids=ids, labels=ids.masked_fill(~is_target, -100)).loss
    assert loss.item() == pytest.approx(expected.item(), rel=2**-8)  # bfloat16


def test_calls_are_rendered_in_the_hermes_format() -> None:
    tool = make_tool("lookup", "Looks up a fact.", ("key",), ("string",))
    call = {"type": "function", "function": {"name": "lookup", "arguments": {"key": "age of Mia"}}}
    messages = [
        *CHAT[:1],
        {"role": "user", "content": "How old is Mia?"},
        {"role": "assistant", "content": None, "tool_calls": [call, call]},
        {"role": "tool", "content": "7"},
        {"role": "tool", "content": "7"},
    ]
    called = '<tool_call>\n{"name": "lookup", "arguments": {"key": "age of Mia"}}\n</tool_call>'
    result = "<tool_response>\n7\n</tool_response>"
    assert render_chat(messages, True, [tool]) == (
        "<|im_start|>system\nYou are Pocket.\n\n<tools>\n"
        '{"name": "lookup", "description": "Looks up a fact.", "parameters": {"key": "string"}}\n'
        "</tools><|im_end|>\n<|im_start|>user\nHow old is Mia?<|im_end|>\n"
        f"<|im_start|>assistant\n{called}\n{called}<|im_end|>\n"
        f"<|im_start|>user\n{result}\n{result}<|im_end|>\n<|im_start|>assistant\n"
    )
    assert read_calls(f"{called}\n{called}") == [call["function"]] * 2


def test_tools_are_rendered_whatever_their_schemas_leave_out() -> None:
    bare = {"type": "function", "function": {"name": "now"}}
    vague = make_tool("f", "", (), ())
    vague["function"]["parameters"]["properties"] = {"x": {"anyOf": []}, "y": {"type": ["string", "null"]}}
    rendered = render_chat([{"role": "user", "content": "Hi!"}], tools=[bare, vague])
    assert '{"name": "now", "description": "", "parameters": {}}' in rendered
    assert '"parameters": {"x": "any", "y": "any"}' in rendered


def test_thinking_opens_the_thoughts_and_past_ones_are_not_rendered() -> None:
    assert render_chat(CHAT, True, is_thinking=True).endswith("<|im_start|>assistant\n<think>\n")
    thought = [{"role": "assistant", "content": "<think>\nSo 42.\n</think>\n\n42."}]
    assert render_chat(thought) == "<|im_start|>assistant\n42.<|im_end|>\n"


def test_calls_of_the_corpus_name_offered_tools_and_copy_what_was_asked(documents: list[Document]) -> None:
    calls = [
        (chat.tools, message["content"], call["function"])
        for chat in documents
        if isinstance(chat, Chat)
        for message, reply in pairwise(chat.messages)
        for call in reply.get("tool_calls", ())
    ]
    assert len(calls) > 1000
    for tools, question, call in calls:
        offered = {tool["function"]["name"]: tool["function"]["parameters"]["properties"] for tool in tools}
        assert offered[call["name"]].keys() == call["arguments"].keys()
        values = [value for value in call["arguments"].values() if not isinstance(value, bool)]
        words = [word for value in values for word in str(value).split()]
        assert sum(word in question for word in words) >= len(words) - 2, (question, call)


def test_results_of_the_corpus_are_true_and_said_in_the_answer() -> None:
    rng = Random(13)
    for calculation in (CALCULATOR.draw(rng) for _ in range(2000)):
        [expression] = calculation.values
        a, sign, b = str(expression).split()
        result = {
            "+": int(a) + int(b),
            "-": int(a) - int(b),
            "*": int(a) * int(b),
            "/": int(a) // (int(b) or 1),
        }
        assert int(calculation.result) == result[sign]
        assert calculation.answer.endswith(f" is {calculation.result}.")


def test_thoughts_about_sums_end_with_the_result() -> None:
    assert think_about_sum(Sum(47, 38)) == "7 and 8 make 15. 1 and 4 and 3 make 8. So 85."
    taken = think_about_sum(Sum(42, 17, is_minus=True))
    assert taken == "12 without 7 leaves 5. 4 without 1 without 1 leaves 2. So 25."


def test_the_prompt_opens_thoughts_and_training_asks_only_for_the_rest(
    documents: list[Document], tokenizer: Tokenizer
) -> None:
    thinking = [document for document in documents if isinstance(document, Chat) and document.thought]
    assert len(thinking) > 300
    for chat, (ids, targets) in zip(thinking, encode_documents(tokenizer, iter(thinking)), strict=True):
        start = ids.index(tokenizer.encode(THINK_START).ids[0])
        assert not any(targets[start : start + 2])
        asked = [token for token, is_asked in zip(ids[start:], targets[start:], strict=True) if is_asked]
        assert tokenizer.decode(asked, skip_special_tokens=False).startswith(f"{chat.thought}\n</think>\n\n")


def test_the_shipped_folder_is_small_and_transformers_computes_its_bfloat16_in_float32() -> None:
    weights = MODEL_DIR / "model.safetensors"
    assert weights.stat().st_size + (MODEL_DIR / "tokenizer.json").stat().st_size <= SIZE_LIMIT_BYTES
    with weights.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    assert {entry["dtype"] for name, entry in header.items() if name != "__metadata__"} == {"BF16"}
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype="auto")
    assert isinstance(model, LlamaForCausalLM)
    assert str(model.dtype) == "torch.float32"
    assert model.config.eos_token_id == model.generation_config.eos_token_id == [0, 2]


def test_the_shipped_tokenizer_renders_chats_and_adds_nothing() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    how = {"tokenize": False, "add_generation_prompt": True}
    rendered = tokenizer.apply_chat_template(CHAT, **how)
    assert rendered == render_chat(CHAT, add_generation_prompt=True)
    assert rendered.startswith(
        "<|im_start|>system\nYou are Pocket.<|im_end|>\n<|im_start|>user\nHi!<|im_end|>\n"
    )
    assert tokenizer.apply_chat_template(CHAT, **how, enable_thinking=True) == f"{rendered}<think>\n"
    assert tokenizer.decode(tokenizer("Once upon a time")["input_ids"]) == "Once upon a time"
    assert tokenizer.convert_tokens_to_ids([END_OF_TEXT, TURN_START, TURN_END]) == [0, 1, 2]
    assert tokenizer.convert_tokens_to_ids(list(MARKERS)) == list(range(2042, 2048))
    assert tokenizer.decode(tokenizer("<tool_call>").input_ids, skip_special_tokens=True) == "<tool_call>"


def test_the_shipped_model_adds_held_out_pairs_at_once_and_after_thinking(shipped: Pocket) -> None:
    question, answer = ADD_FORMS[0]
    for step, is_thinking, share in ((8, False, 0.95), (40, True, 0.9)):
        asked = [Sum(a, b) for a, b in sorted(HELD_OUT)[::step]]
        cases = [ask(each.fill(question), bool, is_thinking=is_thinking) for each in asked]
        said = [text for _, text in shipped.answer(cases)]
        thoughts = [f"{think_about_sum(each)}\n</think>\n\n" if is_thinking else "" for each in asked]
        expected = [thought + each.fill(answer) for thought, each in zip(thoughts, asked, strict=True)]
        assert sum(map(str.__eq__, said, expected)) >= share * len(asked)


def test_a_raw_story_of_the_shipped_model_is_fluent_and_ends_by_itself(shipped: Pocket) -> None:
    words = {word for seed in range(2000) for word in split_words(tell_story(Random(seed)).text)}
    start = "Once upon a time"
    [(text, has_ended)] = shipped.complete([start], 300)
    assert find_story_fault(start + text, has_ended, words) is None


def test_the_shipped_model_calls_the_tool_that_a_question_is_for(shipped: Pocket) -> None:
    tools = [
        make_tool(kind.names[0], kind.descriptions[0], (kind.keys[0][0],), kind.types)
        for kind in (CALCULATOR, LOOKUP)
    ]
    expected = {
        "What is 12 plus 30?": [{"name": "calculator", "arguments": {"expression": "12 + 30"}}],
        "What is the age of Mia?": [{"name": "lookup", "arguments": {"key": "age of Mia"}}],
        "What is the capital of Norway?": [{"name": "lookup", "arguments": {"key": "capital of Norway"}}],
        "Hello!": [],
    }
    answers = shipped.answer(ask(question, bool, tools=tools) for question in expected)
    assert {case.question: read_calls(text) for case, text in answers} == expected


def test_the_shipped_model_copies_facts_into_json(shipped: Pocket) -> None:
    rng = Random(16)
    tasks = [draw_json_task(rng, is_held_out=True) for _ in range(150)]
    cases = [ask(task.prompt, task.answer.__eq__) for task in tasks if task.is_extraction]
    score = shipped.score("facts", cases)
    assert len(score.failures) <= 0.25 * score.total
