"""Measures a pocket model: `python -m quire.tools.pocket.evaluate [MODEL]`.

Asks only what training never showed: held-out additions, held-out JSON prompts, questions about new stories,
and tools, half of whose sums are held-out ones. A call is right when its tool and its arguments are.
"""

import argparse
import json
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

from ..words import ANIMALS, a
from . import MODEL_DIR
from .asking import SEED, Case, Pocket, Score, ask, judge
from .calls import CALCULATOR, LOOKUP, OTHERS, Asked, Kind, Offer, ask_calculation, exchange_calls, make_offer
from .json_tasks import JsonTask, draw_copying_task, draw_held_out_json_task
from .reading import draw_reading, read_sentence
from .sums import ADD_FORMS, HELD_OUT, Sum
from .talk import ONLY_KNOW, draw_small_talk, draw_unknown
from .text import draw_documents
from .tokenizer import render_chat

STORY_STARTS = (
    "Once upon a time",
    "The cat",
    "One day, a little",
    "There was a",
    "Lily went to the",
    "Tom",
)
MAX_STORY_TOKENS = 300
_CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)


def score_sums(pocket: Pocket, limit: int | None = None) -> Iterator[Score]:
    """Every held-out pair in both orders, each in a phrasing drawn at random; and all sums of two digits."""
    rng = Random(SEED)
    pairs = [pair for a, b in sorted(HELD_OUT) for pair in {(a, b), (b, a)}]
    rng.shuffle(pairs)
    sums = [Sum(first, second) for first, second in pairs[:limit]]
    held_out = [_ask_sum(each.fill(rng.choice(ADD_FORMS)[0]), each) for each in sums]
    yield pocket.score("held-out additions right", held_out)
    digits = [_ask_sum(f"What is {x} plus {y}?", Sum(x, y)) for x in range(10) for y in range(10)]
    yield pocket.score("one-digit additions right", digits)


def _ask_sum(question: str, asked: Sum) -> Case:
    return ask(question, lambda text: re.findall(r"\d+", text)[-1:] == [str(asked.result)])


def score_json(pocket: Pocket, count: int) -> Iterator[Score]:
    """Held-out prompts: how many answers parse and have the form asked for, and how many state the facts."""
    rng = Random(SEED)
    tasks = [draw_held_out_json_task(rng) for _ in range(count)]
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


def score_answers(pocket: Pocket, scale: int) -> Iterator[Score]:
    """Prompts whose answer is known word for word: strange facts, a story, what it has never read."""
    copying, reading, unknown = Random(SEED), Random(SEED), Random(SEED)
    tasks = [draw_copying_task(copying) for _ in range(300 // scale)]
    turns = {
        "JSON of strange facts copied right": [(task.prompt, task.answer) for task in tasks],
        "questions about a given story right": [draw_reading(reading)[0] for _ in range(400 // scale)],
        "questions outside its world declined": [
            (draw_unknown(unknown)[0], ONLY_KNOW) for _ in range(300 // scale)
        ],
    }
    for name, cases in turns.items():
        yield pocket.score(name, (ask(question, expected.__eq__) for question, expected in cases))


def score_stories(pocket: Pocket, scale: int) -> Iterator[Score]:
    """Raw completions of `STORY_STARTS`, greedy and not, and stories asked for, which are of their animal."""
    words = collect_words(SEED, 40_000 // scale)
    runs: list[tuple[str, list[str], float]] = [
        ("greedy", list(STORY_STARTS), 0.0),
        ("temperature 1", [STORY_STARTS[i % len(STORY_STARTS)] for i in range(120 // scale)], 1.0),
    ]
    for name, starts, temperature in runs:
        texts = pocket.complete(starts, MAX_STORY_TOKENS, temperature)
        told = [(start + text, ended, "") for start, (text, ended) in zip(starts, texts, strict=True)]
        yield _score_texts(f"raw stories fluent, {name}", told, words)
    prompts = [ask(f"Tell me a story about {a(kind)}.", lambda _: True).prompt for kind in ANIMALS]
    texts = pocket.complete(prompts, MAX_STORY_TOKENS)
    told = [(text, ended, kind) for kind, (text, ended) in zip(ANIMALS, texts, strict=True)]
    yield _score_texts("chat stories fluent and on their subject", told, words)


def _score_texts(name: str, texts: list[tuple[str, bool, str]], words: set[str]) -> Score:
    """Of each: whether the model ended it, and what it has to mention."""
    faults = [
        (find_story_fault(text, ended, words) or (None if subject in text else f"no {subject}"), text)
        for text, ended, subject in texts
    ]
    return Score(name, len(texts), [f"{fault}: {text}" for fault, text in faults if fault])


def collect_words(seed: int, num_documents: int) -> set[str]:
    """Every word that the generator's raw text uses."""
    documents = islice(draw_documents(seed), num_documents)
    return {word for text in documents if isinstance(text, str) for word in split_words(text)}


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


def score_calls(pocket: Pocket, count: int) -> Iterator[Score]:
    """Calls, answers that use their results word for word as in training, and answers that take no call."""
    rng = Random(SEED)
    one = [_draw_calls(rng, [kind], 1) for kind in (CALCULATOR, LOOKUP) for _ in range(count // 2)]
    two = [_draw_calls(rng, [CALCULATOR, LOOKUP], 1) for _ in range(count)]
    other = [_draw_calls(rng, list(rng.sample(OTHERS, 2)), 1) for _ in range(count)]
    both = [_draw_calls(rng, [CALCULATOR, LOOKUP], 2) for _ in range(count)]
    for name, drawn in (
        ("calls right, one tool offered", one),
        ("calls right, two tools offered", two),
        ("calls right, other tools offered", other),
        ("two calls in one turn right", both),
    ):
        yield pocket.score(name, (call for call, _ in drawn))
    yield pocket.score("results used in the answer", (result for _, result in two))
    yield pocket.score("two results used in the answer", (result for _, result in both))
    rng = Random(SEED)
    tools = [make_offer(kind, rng, is_usual=1.0).tool for kind in (CALCULATOR, LOOKUP)]
    asked = [draw_small_talk(rng)[0] for _ in range(count // 2)]
    asked += [read_sentence(rng)[0] for _ in range(count // 2)]
    quiet = (ask(question, lambda text: "<tool_call>" not in text, tools=tools) for question in asked)
    yield pocket.score("no call where none is needed", quiet)


def _draw_calls(rng: Random, kinds: list[Kind], num_calls: int) -> tuple[Case, Case]:
    """A question with tools on offer: whether the right calls follow, and the right answer their results."""
    offers = [make_offer(kind, rng, is_usual=1.0) for kind in rng.sample(kinds, len(kinds))]
    called = rng.sample(offers, num_calls)
    exchange = exchange_calls(rng, [(offer, _ask_tool(rng, offer)) for offer in called])
    tools = [offer.tool for offer in offers]
    calls = [call["function"] for call in exchange[1]["tool_calls"]]
    question, answer = exchange[0]["content"], exchange[-1]["content"]
    prompts = (render_chat(part, True, tools) for part in (exchange[:1], exchange[:-1]))
    call_prompt, result_prompt = prompts
    return (
        Case(question, call_prompt, lambda text: read_calls(text) == calls),
        Case(exchange[-2]["content"], result_prompt, answer.__eq__),
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


def score_thoughts(pocket: Pocket, count: int) -> Iterator[Score]:
    """Held-out sums and questions about a text, asked for with thinking: whether it thinks, and is right."""
    rng = Random(SEED)
    sums = [Sum(a, b) for a, b in rng.sample(sorted(HELD_OUT), count)]
    forms = [rng.choice(ADD_FORMS) for _ in sums]
    added = [(each.fill(q), each.fill(reply)) for each, (q, reply) in zip(sums, forms, strict=True)]
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
    scale = 5 if is_quick else 1
    yield from score_sums(pocket, limit=200 if is_quick else None)
    yield from score_json(pocket, 500 // scale)
    yield from score_answers(pocket, scale)
    yield from score_stories(pocket, scale)
    yield from score_calls(pocket, 200 // scale)
    yield from score_thoughts(pocket, 200 // scale)


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
    options = parser.parse_args()
    show(evaluate(Pocket(options.model, options.quantization, options.dtype), options.quick), options.show)


def show(scores: Iterator[Score], num_failures: int) -> None:
    """Print each as it comes, with some of what failed."""
    for score in scores:
        print(score, flush=True)
        for failure in score.failures[:num_failures]:
            print(f"    {failure}")


if __name__ == "__main__":
    main()
