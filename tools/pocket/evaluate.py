"""Measures a pocket model: `python -m quire.tools.pocket.evaluate [MODEL]`.

Asks only what training never showed: held-out additions, held-out JSON prompts, questions about new stories.
"""

import argparse
import json
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from random import Random

from ..words import ANIMALS, a
from . import MODEL_DIR
from .asking import SEED, Pocket, Score, ask, score_chat
from .evaluate_calls import score_calls, score_thoughts
from .json_tasks import JsonTask, draw_copying_task, draw_held_out_json_task
from .reading import draw_reading
from .sums import ADD_FORMS, HELD_OUT, Sum
from .talk import ONLY_KNOW, draw_unknown
from .text import draw_documents

STORY_STARTS: tuple[str, ...] = (
    "Once upon a time",
    "The cat",
    "One day, a little",
    "There was a",
    "Lily went to the",
    "Tom",
)
MAX_STORY_TOKENS = 300


def score_additions(pocket: Pocket, limit: int | None = None) -> Score:
    """Every held-out pair in both orders, each in a phrasing drawn at random."""
    rng = Random(SEED)
    pairs = [pair for a, b in sorted(HELD_OUT) for pair in {(a, b), (b, a)}]
    rng.shuffle(pairs)
    cases: list[tuple[str, str]] = []
    for first, second in pairs[:limit]:
        asked = Sum(first, second)
        cases.append((asked.fill(rng.choice(ADD_FORMS)[0]), str(asked.result)))
    return score_chat(pocket, "held-out additions right", cases, _last_number_is)


def score_one_digit_sums(pocket: Pocket) -> Score:
    """All additions of two digits."""
    cases = [(f"What is {x} plus {y}?", str(x + y)) for x in range(10) for y in range(10)]
    return score_chat(pocket, "one-digit additions right", cases, _last_number_is)


def _last_number_is(answer: str, expected: str) -> bool:
    return re.findall(r"\d+", answer)[-1:] == [expected]


def score_json(pocket: Pocket, count: int) -> tuple[Score, Score]:
    """Held-out prompts: how many answers parse and have the form asked for, and how many state the facts."""
    rng = Random(SEED)
    tasks = [draw_held_out_json_task(rng) for _ in range(count)]
    answers = pocket.chat([task.prompt for task in tasks])
    pairs = list(zip(tasks, answers, strict=True))
    bad = [f"{task.prompt!r} -> {answer!r}" for task, answer in pairs if not has_form_asked_for(task, answer)]
    stated = [(task, answer) for task, answer in pairs if task.is_extraction]
    wrong = [f"{task.prompt!r} -> {answer!r}" for task, answer in stated if answer != task.answer]
    return (
        Score("held-out JSON prompts: valid, right keys", count, bad),
        Score("held-out JSON prompts: facts copied right", len(stated), wrong),
    )


def score_copying(pocket: Pocket, count: int) -> Score:
    """Prompts that state their facts, with words that mean nothing or stand where they do not belong."""
    rng = Random(SEED)
    tasks = [draw_copying_task(rng) for _ in range(count)]
    cases = [(task.prompt, task.answer) for task in tasks]
    return score_chat(
        pocket, "JSON of strange facts copied right", cases, lambda answer, right: answer == right
    )


def has_form_asked_for(task: JsonTask, answer: str) -> bool:
    """Whether `answer` parses and has the keys, or the length, that the task asks for."""
    try:
        value = json.loads(answer)
    except json.JSONDecodeError:
        return False
    if isinstance(task.value, dict):
        return isinstance(value, dict) and set(value) == set(task.value)
    return isinstance(value, list) and len(value) == len(task.value)


def score_reading(pocket: Pocket, count: int) -> Score:
    """Questions about stories that are in the prompt."""
    rng = Random(SEED)
    cases = [draw_reading(rng)[0] for _ in range(count)]
    return score_chat(
        pocket, "questions about a given story right", cases, lambda answer, right: answer == right
    )


def score_unknown(pocket: Pocket, count: int) -> Score:
    """Questions about what it has never read, which it is to decline."""
    rng = Random(SEED)
    cases = [draw_unknown(rng) for _ in range(count)]
    return score_chat(
        pocket, "questions outside its world declined", cases, lambda answer, _: answer == ONLY_KNOW
    )


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


def score_stories(pocket: Pocket, words: set[str], count: int, temperature: float) -> Score:
    """Raw completions of `STORY_STARTS`: each once when greedy, `count` in all at a temperature."""
    starts = (
        list(STORY_STARTS) if not temperature else [STORY_STARTS[i % len(STORY_STARTS)] for i in range(count)]
    )
    texts = pocket.complete(starts, MAX_STORY_TOKENS, temperature)
    name = "raw stories fluent, " + ("greedy" if not temperature else f"temperature {temperature:g}")
    return _score_texts(
        name, [(start + text, ended) for start, (text, ended) in zip(starts, texts, strict=True)], words
    )


def score_story_requests(pocket: Pocket, words: set[str]) -> Score:
    """Stories about every kind of animal, asked for in chat; each must mention its animal."""
    prompts = [ask(f"Tell me a story about {a(kind)}.") for kind in ANIMALS]
    texts = pocket.complete(prompts, MAX_STORY_TOKENS)
    score = _score_texts("chat stories fluent and on their subject", texts, words)
    missing = [
        f"no {kind}: {text}" for kind, (text, _) in zip(ANIMALS, texts, strict=True) if kind not in text
    ]
    return Score(score.name, score.total, score.failures + missing)


def _score_texts(name: str, texts: list[tuple[str, bool]], words: set[str]) -> Score:
    faults = [(find_story_fault(text, ended, words), text) for text, ended in texts]
    return Score(name, len(texts), [f"{fault}: {text}" for fault, text in faults if fault])


def evaluate(pocket: Pocket, is_quick: bool = False) -> Iterator[Score]:
    """All scores, each yielded when it is known."""
    scale = 5 if is_quick else 1
    words = collect_words(SEED, 40_000 // scale)
    yield score_additions(pocket, limit=200 if is_quick else None)
    yield score_one_digit_sums(pocket)
    yield from score_json(pocket, 500 // scale)
    yield score_copying(pocket, 300 // scale)
    yield score_reading(pocket, 400 // scale)
    yield score_unknown(pocket, 300 // scale)
    yield score_stories(pocket, words, 0, temperature=0.0)
    yield score_stories(pocket, words, 120 // scale, temperature=1.0)
    yield score_story_requests(pocket, words)
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
    for score in evaluate(Pocket(options.model, options.quantization, options.dtype), options.quick):
        print(score, flush=True)
        for failure in score.failures[: options.show]:
            print(f"    {failure}")


if __name__ == "__main__":
    main()
