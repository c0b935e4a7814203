"""Measures a pocket encoder with transformers: `python -m quire.tools.pocket.encoder.evaluate [MODEL]`.

Asks only what training never showed: other questions, about combinations of people, places and things that
are in no training text, and words that mean nothing.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional
from transformers import BertModel

from ..asking import SEED, Score
from ..evaluate import show
from . import ENCODER_DIR
from .corpus import draw_story_pairs
from .episodes import draw_episode
from .everyday import MATTERS
from .facts import draw_fact
from .pairs import Pair
from .strange import draw_shared_words
from .tokenizer import PAD_ID
from .train import MAX_LENGTH, average

NUM_PASSAGES = 200
# A query, and a text that is nearer to it than the other is.
ORDERS = [
    tuple(line.split(" | "))
    for line in Path(__file__).with_name("orders.txt").read_text(encoding="utf-8").splitlines()
]


@dataclass(frozen=True)
class Encoder:
    """A loaded encoder that turns texts into vectors."""

    folder: Path
    batch_size: int = 32

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The folder's."""
        return Tokenizer.from_file(str(self.folder / "tokenizer.json"))

    @cached_property
    def model(self) -> BertModel:
        """The folder's, in the dtype of its weights."""
        return BertModel.from_pretrained(self.folder, dtype="auto", add_pooling_layer=False).eval()

    def embed(self, texts: Sequence[str]) -> Tensor:
        """Normalised vectors of `texts`, [texts, hidden size]."""
        parts = [
            self._embed_batch(texts[low : low + self.batch_size])
            for low in range(0, len(texts), self.batch_size)
        ]
        return torch.cat(parts)

    @torch.inference_mode()
    def _embed_batch(self, texts: Sequence[str]) -> Tensor:
        rows = [encoding.ids[:MAX_LENGTH] for encoding in self.tokenizer.encode_batch(list(texts))]
        length = max(map(len, rows))
        ids = torch.tensor([row + [PAD_ID] * (length - len(row)) for row in rows])
        mask = ids != PAD_ID
        hidden = self.model(ids, attention_mask=mask.long()).last_hidden_state
        return functional.normalize(average(hidden, mask), dim=-1)


def draw_distinct(draw: Callable[[Random], Pair], count: int = NUM_PASSAGES) -> list[Pair]:
    """`count` pairs whose answers are different texts on different topics."""
    rng, found = Random(SEED), dict[str, Pair]()
    while len(found) < count:
        pair = draw(rng)
        found.setdefault(pair.answer.topic or pair.answer.text, pair)
    return list(found.values())


def draw_held_out_episodes() -> list[Pair]:
    """What the encoder is judged by: each query is to find its answer among the answers of all."""
    return draw_distinct(lambda rng: draw_episode(rng, is_held_out=True))


def score_retrieval(encoder: Encoder, name: str, pairs: list[Pair], num_best: int) -> Score:
    """How many queries have their own answer among the `num_best` nearest of all answers."""
    scores = (
        encoder.embed([pair.query for pair in pairs]) @ encoder.embed([pair.answer.text for pair in pairs]).T
    )
    ranks = (scores > scores.diagonal()[:, None]).sum(1)
    failures = [
        f"{pair.query!r}: {pair.answer.text!r}, but nearest is {pairs[nearest].answer.text!r}"
        for pair, rank, nearest in zip(pairs, ranks.tolist(), scores.argmax(1).tolist(), strict=True)
        if rank >= num_best
    ]
    return Score(f"{name}: among the {num_best} nearest of {len(pairs)}", len(pairs), failures)


def score_everyday(encoder: Encoder, num_best: int) -> Score:
    """How many questions have an answer of their matter among the `num_best` nearest of all answers."""
    answers = [(matter.title, answer) for matter in MATTERS for answer in matter.answers]
    vectors = encoder.embed([answer for _, answer in answers])
    nearest = (
        (encoder.embed([matter.held_out_question for matter in MATTERS]) @ vectors.T).topk(num_best).indices
    )
    failures = [
        f"{matter.held_out_question!r}: {answers[best[0]][1]!r}"
        for matter, best in zip(MATTERS, nearest.tolist(), strict=True)
        if matter.title not in [answers[index][0] for index in best]
    ]
    return Score(
        f"everyday questions: among the {num_best} nearest of {len(answers)}", len(MATTERS), failures
    )


def score_orders(encoder: Encoder) -> Score:
    """How many of `ORDERS` the encoder sees likewise."""
    queries, nearer, farther = (encoder.embed(texts) for texts in zip(*ORDERS, strict=True))
    margins = (queries * nearer).sum(1) - (queries * farther).sum(1)
    failures = [
        " | ".join(order) for order, margin in zip(ORDERS, margins.tolist(), strict=True) if margin <= 0
    ]
    return Score("the nearer of two texts", len(ORDERS), failures)


def evaluate(folder: Path) -> Iterator[Score]:
    """All scores, each yielded when it is known."""
    encoder = Encoder(folder)
    stories = draw_story_pairs(SEED)
    cases = {
        "episodes": draw_held_out_episodes(),
        "facts": draw_distinct(lambda rng: draw_fact(rng, is_held_out=True)),
        "stories": draw_distinct(lambda _: next(stories)),
        "words without meaning": draw_distinct(draw_shared_words),
    }
    for name, pairs in cases.items():
        for num_best in (1, 5):
            yield score_retrieval(encoder, name, pairs, num_best)
    yield score_everyday(encoder, 1)
    yield score_everyday(encoder, 5)
    yield score_orders(encoder)


def main() -> None:
    """Print the scores of a model folder."""
    parser = argparse.ArgumentParser(
        prog="python -m quire.tools.pocket.encoder.evaluate", description=__doc__
    )
    parser.add_argument("model", nargs="?", type=Path, default=ENCODER_DIR, help="a model folder")
    parser.add_argument("--show", type=int, default=2, help="failures shown per score")
    options = parser.parse_args()
    show(evaluate(options.model), options.show)


if __name__ == "__main__":
    main()
