"""Trains the pocket encoder from scratch on the CPU: `python -m quire.tools.pocket.encoder.train`.

The loss is InfoNCE: of all answers and wrong texts of a batch, a query's own answer is to be the nearest, and
of all queries an answer's own. Texts of the query's topic are left out of the comparison.
Legend: B pairs, T positions, H hidden size.
"""

import json
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional
from transformers import BertConfig, BertModel

from ..tokenizer import write_json
from ..training import (
    WARM_UP_STEPS,
    Averaged,
    Options,
    copy_files,
    parse_options,
    prepare,
    save_tensors,
    train_steps,
)
from . import ENCODER_DIR
from .corpus import draw_pairs, draw_story_pairs, draw_texts
from .pairs import Pair
from .tokenizer import PAD_ID, save_tokenizer, train_tokenizer

MAX_LENGTH = 256
TOKENIZER_PAIRS = 10_000
_SAME_FILES = (
    "modules.json",
    "1_Pooling/config.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
)
NUM_STEPS = 1000  # some 15 minutes on one core
NUM_PAIRS, NUM_STORY_PAIRS = 160, 32  # of a step
STORY_EVERY = 10  # steps
NUM_BUCKETS = 4  # of a step's texts by length, to pad little
TEMPERATURE = 0.05
MATRIX_RATE, OTHER_RATE = 0.01, 0.004  # learning rates of Muon and AdamW at factor 1


def make_config(vocab_size: int) -> BertConfig:
    """The shape of the pocket encoder, which its folder's config.json says."""
    return BertConfig.from_pretrained(ENCODER_DIR, vocab_size=vocab_size)


class Trainer(Averaged[BertModel]):
    """An encoder in training."""

    def __init__(self, model: BertModel, tokenizer: Tokenizer, num_steps: int) -> None:
        super().__init__(model, "encoder.", MATRIX_RATE, OTHER_RATE)
        self._tokenizer = tokenizer
        self._num_steps = num_steps

    def step(self, pairs: list[Pair], step: int) -> float:
        """One update; returns the loss before it. The learning rate falls in a line to zero."""
        factor = min(step / WARM_UP_STEPS, 1.0 - step / self._num_steps)
        return self.update(self._compute_loss(pairs), factor)

    def _compute_loss(self, pairs: list[Pair]) -> Tensor:
        texts = [pair.query for pair in pairs] + [pair.answer.text for pair in pairs]
        vectors = self._embed(texts + [pair.wrong.text for pair in pairs])  # [3 B, H]
        queries, passages = vectors[: len(pairs)], vectors[len(pairs) :]
        scores = queries @ passages.T / TEMPERATURE  # [B, 2 B]
        scores = scores.masked_fill(find_same_topics(pairs), float("-inf"))
        own = torch.arange(len(pairs))
        to_passages = functional.cross_entropy(scores, own)
        return to_passages + 0.5 * functional.cross_entropy(scores[:, : len(pairs)].T, own)

    def _embed(self, texts: list[str]) -> Tensor:
        """Normalised vectors of `texts`; they run in buckets of like length."""
        encodings = [encoding.ids[:MAX_LENGTH] for encoding in self._tokenizer.encode_batch(texts)]
        order = sorted(range(len(texts)), key=lambda index: len(encodings[index]))
        size = -(-len(texts) // NUM_BUCKETS)
        buckets = [
            self._embed_bucket([encodings[index] for index in order[low : low + size]])
            for low in range(0, len(order), size)
        ]
        return torch.cat(buckets)[torch.tensor(order).argsort()]

    def _embed_bucket(self, rows: list[list[int]]) -> Tensor:
        """Half begin at a position drawn at random, so that all are trained though most texts are short."""
        length = -(-max(map(len, rows)) // 8) * 8
        ids = torch.tensor([row + [PAD_ID] * (length - len(row)) for row in rows])  # [B, T]
        start = int(torch.randint(MAX_LENGTH - length + 1, ())) if torch.rand(()) < 0.5 else 0
        positions = torch.arange(start, start + length)[None]
        mask = ids != PAD_ID
        with torch.autocast("cpu", torch.bfloat16):
            hidden = self.model(ids, attention_mask=mask, position_ids=positions).last_hidden_state
        return functional.normalize(average(hidden, mask), dim=-1)


def average(hidden: Tensor, mask: Tensor) -> Tensor:
    """The mean over each row's tokens, in float32. hidden [B, T, H], mask [B, T] -> [B, H]"""
    weights = mask[..., None].float()
    return (hidden.float() * weights).sum(1) / weights.sum(1)


def find_same_topics(pairs: list[Pair]) -> Tensor:
    """Which passages not to compare a query with: those of its topic but its own answer. [B, 2 B]"""
    passages = [pair.answer for pair in pairs] + [pair.wrong for pair in pairs]
    same = [
        [pair.answer.topic is not None and passage.topic == pair.answer.topic for passage in passages]
        for pair in pairs
    ]
    return torch.tensor(same) & ~torch.eye(len(pairs), len(passages), dtype=torch.bool)


def draw_batches(seed: int) -> Iterator[list[Pair]]:
    """The pairs of each step: short texts, or stories now and then."""
    short, long = draw_pairs(seed), draw_story_pairs(seed)
    while True:
        for _ in range(STORY_EVERY - 1):
            yield list(islice(short, NUM_PAIRS))
        yield list(islice(long, NUM_STORY_PAIRS))


def train(options: Options) -> None:
    """Train, and write the model folder to `options.out`."""
    prepare(options)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = train_tokenizer(draw_texts(options.seed, TOKENIZER_PAIRS))
    model = BertModel(make_config(tokenizer.get_vocab_size()), add_pooling_layer=False)
    model.set_attn_implementation("eager")  # faster on a CPU than torch's fused attention, by a half
    trainer = Trainer(model, tokenizer, options.steps)
    batches = draw_batches(options.seed + 1)
    train_steps(
        options,
        trainer,
        lambda step: trainer.step(next(batches), step),
        lambda averaged: export(averaged, tokenizer, options.out),
    )


def export(model: BertModel, tokenizer: Tokenizer, out: Path) -> None:
    """Writes a sentence-transformers folder: tensors in bfloat16, to be computed with in float32."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    save_tensors(tensors, out)
    save_tokenizer(tokenizer, out, MAX_LENGTH)
    config = json.loads((ENCODER_DIR / "config.json").read_text(encoding="utf-8"))
    write_json(out / "config.json", config | {"vocab_size": model.config.vocab_size})
    copy_files(ENCODER_DIR, out, *_SAME_FILES)


if __name__ == "__main__":
    train(parse_options("quire.tools.pocket.encoder.train", __doc__, ENCODER_DIR, NUM_STEPS))
