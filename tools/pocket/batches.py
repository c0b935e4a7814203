"""Batches for training the pocket model: documents packed into rows, and sequences to copy.

Rows begin with a whole document at position 0, without a separator in front, so that raw prompts start well
without a BOS token. Which tokens count is said here; the loss itself is the trainer's.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from random import Random
from typing import TypeAlias

import torch
from tokenizers import Tokenizer
from torch import Tensor

from .text import Document
from .tokenizer import END_OF_TEXT, SPECIAL_TOKENS, TURN_START, VOCAB_SIZE, render_chat

Row: TypeAlias = tuple[list[int], list[bool]]  # token ids, and for each whether predicting it counts

# Rows x length of a step: 8,192 tokens each, short rows three times in four because attention costs less.
TEXT_SHAPES = ((32, 256), (32, 256), (32, 256), (16, 512))
COPY_SHAPE = (64, 64)
COPY_SHARE = 0.9  # of the rows of a copy step; the rest is text, so that it is not forgotten
END_OF_TEXT_ID, TURN_START_ID, TURN_END_ID = range(len(SPECIAL_TOKENS))


@dataclass(frozen=True, slots=True)
class Batch:
    """Token ids and, for each, whether predicting it counts. Both are [rows, length]."""

    ids: Tensor
    is_target: Tensor


def encode_documents(tokenizer: Tokenizer, documents: Iterator[Document]) -> Iterator[Row]:
    """Ids and targets of each document and the separator after it."""
    while chunk := list(islice(documents, 500)):
        texts = [text if isinstance(text, str) else render_chat(text) for text in chunk]
        encodings = tokenizer.encode_batch([text + END_OF_TEXT for text in texts])
        for document, encoding in zip(chunk, encodings, strict=True):
            ids = encoding.ids
            yield ids, [True] * len(ids) if isinstance(document, str) else find_answers(tokenizer, ids)


def find_answers(tokenizer: Tokenizer, ids: list[int]) -> list[bool]:
    """Which tokens of a chat the assistant writes: its text and the end of its turn."""
    assistant = tokenizer.encode(f"{TURN_START}assistant\n").ids
    targets, is_answer = [False] * len(ids), False
    for index, token in enumerate(ids):
        targets[index] = is_answer
        if token == TURN_END_ID:
            is_answer = False
        elif ids[max(0, index + 1 - len(assistant)) : index + 1] == assistant:
            is_answer = True
    return targets


def pack_texts(rows: Iterator[Row]) -> Iterator[Batch]:
    """Batches whose rows each begin with a document; the last document of a row is cut at its end."""
    step = 0
    while True:
        num_rows, length = TEXT_SHAPES[step % len(TEXT_SHAPES)]
        yield _stack([_pack_row(rows, length) for _ in range(num_rows)])
        step += 1


def pack_copies(rows: Iterator[Row], seed: int) -> Iterator[Batch]:
    """Batches of meaningless token sequences that are said two or three times; only the repeats count.

    Some 200 such steps teach a model that has read a while to look up what followed a token before. Text
    alone had not taught it that in 1,250 steps of twice the size: it answered with names of the right kind,
    but not with those of the prompt. Before any text, 400 copy steps were not enough.
    """
    rng = Random(seed)
    num_rows, length = COPY_SHAPE
    while True:
        yield _stack(
            [
                _draw_copy_row(rng, length) if rng.random() < COPY_SHARE else _pack_row(rows, length)
                for _ in range(num_rows)
            ]
        )


def _pack_row(rows: Iterator[Row], length: int) -> Row:
    ids: list[int] = []
    targets: list[bool] = []
    while len(ids) < length:
        more_ids, more_targets = next(rows)
        ids += more_ids
        targets += more_targets
    return ids[:length], targets[:length]


def _draw_copy_row(rng: Random, length: int) -> Row:
    ids: list[int] = []
    targets: list[bool] = []
    while len(ids) < length:
        sequence = [rng.randrange(len(SPECIAL_TOKENS), VOCAB_SIZE) for _ in range(rng.randint(3, 20))]
        times = rng.randint(2, 3)
        ids += sequence * times
        # The first token of the second saying is a surprise: nothing tells where the sequence ends.
        targets += [index > len(sequence) for index in range(len(sequence) * times)]
    return ids[:length], targets[:length]


def _stack(rows: list[Row]) -> Batch:
    return Batch(torch.tensor([ids for ids, _ in rows]), torch.tensor([targets for _, targets in rows]))
