"""Measures a pocket model: `python -m quire.tools.pocket.evaluate [MODEL]`.

Asks only what training never showed: held-out additions, held-out JSON prompts, questions about new stories,
and tools, half of whose sums are held-out ones. A call is right when its tool and its arguments are.
"""

import argparse
import json
import re
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

from ..words import ANIMALS, a
from . import MODEL_DIR
from .asking import SEED, Case, Pocket, Score, ask, judge
from .calls import (
    CALCULATOR,
    LOOKUP,
    OTHERS,
    Asked,
    Offer,
    ToolKind,
    ask_calculation,
    exchange_calls,
    make_offer,
)
from .json_tasks import JsonTask, draw_copying_task, draw_json_task
from .reading import read_sentence, read_sentences, read_story
from .sums import ADD_FORMS, HELD_OUT, Sum
from .talk import draw_small_talk, draw_unknown
from .text import draw_documents
from .tokenizer import render_chat

STORY_STARTS = ("Once upon a time", "The cat", "One day, a little", "There was a", "Lily went to the", "Tom")
MAX_STORY_TOKENS = 300
_CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)


def _score_sums(pocket: Pocket, scale: int) -> Iterator[Score]:
    """Every held-out pair in both orders, each in a phrasing drawn at random; and all sums of two digits."""
    rng = Random(SEED)
    pairs = [pair for a, b in sorted(HELD_OUT) for pair in {(a, b), (b, a)}]
    rng.shuffle(pairs)
    sums = [Sum(first, second) for first, second in pairs[: None if scale == 1 else 200]]
    held_out = [_ask_sum(each.fill(rng.choice(ADD_FORMS)[0]), each) for each in sums]
    yield pocket.score("held-out additions right", held_out)
    digits = [_ask_sum(f"What is {x} plus {y}?", Sum(x, y)) for x in range(10) for y in range(10)]
    yield pocket.score("one-digit additions right", digits)


def _ask_sum(question: str, asked: Sum) -> Case:
    return ask(question, lambda text: re.findall(r"\d+", text)[-1:] == [str(asked.result)])


def _score_json(pocket: Pocket, scale: int) -> Iterator[Score]:
    """Held-out prompts: how many answers parse and have the form asked for, and how many state the facts."""
    rng = Random(SEED)
    tasks = [draw_json_task(rng, is_held_out=True) for _ in range(500 // scale)]
    answers = pocket.answer(ask(task.prompt, lambda _: True) for task in tasks)
    pairs = list(zip(tasks, answers, strict=True))
    formed = [(case, text, has_form_asked_for(task, text)) for task, (case, text) in pairs]
    stated = [(case, text, text == task.answer) for task, (case, text) in pairs if task.is_extraction]
    yield judge("held-out JSON prompts: valid, right keys", formed)
    yield judge("held-out JSON prompts: facts copied right", stated)


def has_form_asked_for(task: JsonTask, answer: str) -> bool:
    """Whether `answer` parses and has the keys, or the length, that the task asks for."""
    try:
        value = json.loads(answer)
    except json.JSONDecodeError:
        return False
    if isinstance(task.value, dict):
        return isinstance(value, dict) and set(value) == set(task.value)
    return isinstance(value, list) and len(value) == len(task.value)


def _draw_copy(rng: Random) -> tuple[str, str]:
    task = draw_copying_task(rng)
    return task.prompt, task.answer


def _score_answers(pocket: Pocket, scale: int) -> Iterator[Score]:
    """Prompts whose answer is known word for word: strange facts, a story, what it has never read."""
    draws: tuple[tuple[str, int, Callable[[Random], tuple[str, str]]], ...] = (
        ("JSON of strange facts copied right", 300, _draw_copy),
        (
            "questions about a given story right",
            400,
            lambda rng: (read_sentences if rng.random() < 0.6 else read_story)(rng)[0],
        ),
        ("questions outside its world declined", 300, draw_unknown),
    )
    for name, count, draw in draws:
        rng = Random(SEED)
        turns = [draw(rng) for _ in range(count // scale)]
        yield pocket.score(name, (ask(question, answer.__eq__) for question, answer in turns))


def _score_stories(pocket: Pocket, scale: int) -> Iterator[Score]:
    """Raw completions of `STORY_STARTS`, greedy and not, and stories asked for, which are of their animal."""
    documents = islice(draw_documents(SEED), 40_000 // scale)
    words = {word for text in documents if isinstance(text, str) for word in split_words(text)}
    asked = [ask(f"Tell me a story about {a(kind)}.", bool).prompt for kind in ANIMALS]
    runs = (  # prompts, temperature, what a story begins with and has to mention
        ("raw stories fluent, greedy", STORY_STARTS, 0.0, STORY_STARTS, ()),
        ("raw stories fluent, temperature 1", STORY_STARTS * (20 // scale), 1.0, STORY_STARTS * 20, ()),
        ("chat stories fluent and on their subject", asked, 0.0, (), ANIMALS),
    )
    for name, prompts, temperature, starts, subjects in runs:
        failures: list[str] = []
        for index, (text, ended) in enumerate(pocket.complete(list(prompts), MAX_STORY_TOKENS, temperature)):
            told, subject = "".join(starts[index : index + 1]) + text, "".join(subjects[index : index + 1])
            fault = find_story_fault(told, ended, words) or (None if subject in told else f"no {subject}")
            failures += [f"{fault}: {told}"] if fault else []
        yield Score(name, len(prompts), failures)


def split_words(text: str) -> list[str]:
    """The words of a text, without digits and punctuation."""
    return re.findall(r"[A-Za-z']+", text)


def find_story_fault(text: str, has_ended: bool, words: set[str]) -> str | None:
    """What is wrong with a story, or None: it must end by itself, with punctuation, in known words."""
    unknown = [word for word in split_words(text) if word not in words]
    if not has_ended:
        return "does not end"
    if not text.rstrip().endswith((".", "!", "?", '"')):
        return "ends without punctuation"
    if unknown:
        return f"unknown words {unknown}"
    return None if 40 <= len(text.split()) <= 180 else f"{len(text.split())} words"


def _score_calls(pocket: Pocket, scale: int) -> Iterator[Score]:
    """Calls, answers that use their results word for word as in training, and answers that take no call."""
    rng, count = Random(SEED), 200 // scale
    single = [_draw_calls(rng, [kind], 1) for kind in (CALCULATOR, LOOKUP) for _ in range(count // 2)]
    two = [_draw_calls(rng, [CALCULATOR, LOOKUP], 1) for _ in range(count)]
    other = [_draw_calls(rng, list(rng.sample(OTHERS, 2)), 1) for _ in range(count)]
    both = [_draw_calls(rng, [CALCULATOR, LOOKUP], 2) for _ in range(count)]
    yield pocket.score("calls right, one tool offered", (call for call, _ in single))
    yield pocket.score("calls right, two tools offered", (call for call, _ in two))
    yield pocket.score("calls right, other tools offered", (call for call, _ in other))
    yield pocket.score("two calls in one turn right", (call for call, _ in both))
    yield pocket.score("results used in the answer", (result for _, result in two))
    yield pocket.score("two results used in the answer", (result for _, result in both))
    rng = Random(SEED)
    tools = [make_offer(kind, rng, is_usual=1.0).tool for kind in (CALCULATOR, LOOKUP)]
    asked = [draw(rng)[0] for draw in (draw_small_talk, read_sentence) for _ in range(count // 2)]
    quiet = (ask(question, lambda text: "<tool_call>" not in text, tools=tools) for question in asked)
    yield pocket.score("no call where none is needed", quiet)


def _draw_calls(rng: Random, kinds: list[ToolKind], num_calls: int) -> tuple[Case, Case]:
    """A question with tools on offer: whether the right calls follow, and the right answer their results."""
    offers = [make_offer(kind, rng, is_usual=1.0) for kind in rng.sample(kinds, len(kinds))]
    called = rng.sample(offers, num_calls)
    exchange = exchange_calls(rng, [(offer, _ask_tool(rng, offer)) for offer in called])
    tools = [offer.tool for offer in offers]
    calls = [call["function"] for call in exchange[1]["tool_calls"]]
    call_prompt, result_prompt = (render_chat(part, True, tools) for part in (exchange[:1], exchange[:-1]))
    return (
        Case(exchange[0]["content"], call_prompt, lambda text: read_calls(text) == calls),
        Case(exchange[-2]["content"], result_prompt, exchange[-1]["content"].__eq__),
    )


def _ask_tool(rng: Random, offer: Offer) -> Asked:
    if offer.kind is CALCULATOR and rng.random() < 0.5:
        a, b = rng.choice(sorted(HELD_OUT))
        return ask_calculation(a, "+", b, rng)
    return offer.kind.draw(rng)


def read_calls(text: str) -> list[Any]:
    """The calls that `text` makes; what cannot be read as JSON is None."""

    def read(call: str) -> Any:
        try:
            return json.loads(call)
        except json.JSONDecodeError:
            return None

    return [read(call) for call in _CALL.findall(text)]


def _score_thoughts(pocket: Pocket, scale: int) -> Iterator[Score]:
    """Held-out sums and questions about a text, asked for with thinking: whether it thinks, and is right."""
    rng, count = Random(SEED), 200 // scale
    sums = [Sum(a, b) for a, b in rng.sample(sorted(HELD_OUT), count)]
    added = [each.ask(rng) for each in sums]
    read = [(question, answer) for question, _, answer in (read_sentence(rng) for _ in range(count))]
    for name, cases in (("held-out additions", added), ("questions about a text", read)):
        answers = pocket.answer(ask(q, expected.__eq__, is_thinking=True) for q, expected in cases)
        parts = [(case, text, text.partition("\n</think>\n\n")) for case, text in answers]
        thinks = [(case, text, bool(closed and thought)) for case, text, (thought, closed, _) in parts]
        yield judge(f"{name}: thinks when asked to", thinks)
        right = [(case, text, case.is_right(answer)) for case, text, (_, _, answer) in parts]
        yield judge(f"{name}: right after thinking", right)


def evaluate(pocket: Pocket, is_quick: bool = False) -> Iterator[Score]:
    """All scores, each yielded when it is known."""
    for score in (_score_sums, _score_json, _score_answers, _score_stories, _score_calls, _score_thoughts):
        yield from score(pocket, 5 if is_quick else 1)


def main() -> None:
    """Print the scores of a model folder."""
    parser = argparse.ArgumentParser(prog="python -m quire.tools.pocket.evaluate", description=__doc__)
    parser.add_argument("model", nargs="?", type=Path, default=MODEL_DIR, help="a model folder")
    parser.add_argument("--quick", action="store_true", help="a fifth of the cases")
    parser.add_argument("--show", type=int, default=2, help="failures shown per score")
    parser.add_argument("--quantization", help="of the weights while they are read: int4, int8 or fp8")
    parser.add_argument(
        "--dtype", default="auto", help="of the activations: that of the weights, or float32, bfloat16"
    )
    parser.add_argument("--kv-cache-dtype", default="auto", help="of the KV cache: auto, int8 or fp8")
    options = parser.parse_args()
    pocket = Pocket(options.model, options.quantization, options.dtype, options.kv_cache_dtype)
    show(evaluate(pocket, options.quick), options.show)


def show(scores: Iterator[Score], num_failures: int) -> None:
    """Print each as it comes, with some of what failed."""
    for score in scores:
        print(score, flush=True)
        for failure in score.failures[:num_failures]:
            print(f"    {failure}")


if __name__ == "__main__":
    main()
