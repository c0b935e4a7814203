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
from .tokenizer import (
    END_OF_TEXT,
    MARKERS,
    SPECIAL_TOKENS,
    THINK_END,
    THINK_START,
    TURN_START,
    VOCAB_SIZE,
    render_chat,
)

Row: TypeAlias = tuple[list[int], list[bool]]  # token ids, and for each whether predicting it counts

# Rows and positions of a step: some 5,120 predictions each.
SHORT_SHAPE, LONG_SHAPE = (16, 321), (10, 513)
END_OF_TEXT_ID, TURN_START_ID, TURN_END_ID = range(len(SPECIAL_TOKENS))


@dataclass(frozen=True, slots=True)
class Batch:
    """Token ids and, for each, whether predicting it counts. Both are [rows, length]."""

    ids: Tensor
    is_target: Tensor


def encode_documents(tokenizer: Tokenizer, documents: Iterator[Document]) -> Iterator[Row]:
    """Ids and targets of each document and the separator after it."""
    while chunk := list(islice(documents, 500)):
        texts = [render(document) for document in chunk]
        encodings = tokenizer.encode_batch([text + END_OF_TEXT for text in texts])
        for document, encoding in zip(chunk, encodings, strict=True):
            ids = encoding.ids
            yield ids, [True] * len(ids) if isinstance(document, str) else find_answers(tokenizer, ids)


def render(document: Document) -> str:
    """A document as the model reads it."""
    if isinstance(document, str):
        return document
    if document.thought is None:
        return render_chat(document.messages, tools=document.tools)
    prompt = render_chat(document.messages[:-1], True, document.tools, is_thinking=True)
    whole = render_chat(document.messages, tools=document.tools)
    header = len(render_chat(document.messages[:-1], True, document.tools))
    return f"{prompt}{document.thought}\n{THINK_END}\n\n{whole[header:]}"


def find_answers(tokenizer: Tokenizer, ids: list[int]) -> list[bool]:
    """Which tokens of a chat the assistant writes: its text and the end of its turn."""
    assistant = tokenizer.encode(f"{TURN_START}assistant\n").ids
    thinking = assistant + tokenizer.encode(f"{THINK_START}\n").ids
    targets, is_answer = [False] * len(ids), False
    for index, token in enumerate(ids):
        targets[index] = is_answer
        if ids[max(0, index + 1 - len(thinking)) : index + 1] == thinking:
            targets[index - 1 : index + 1] = False, False  # the prompt opens thoughts, not the model
        if token == TURN_END_ID:
            is_answer = False
        elif ids[max(0, index + 1 - len(assistant)) : index + 1] == assistant:
            is_answer = True
    return targets


class Packer:
    """Packs documents into batches, some rows of which are sequences to copy.

    Sequences that mean nothing teach to look up what followed a token before; text alone takes long to, and a
    model that has not learned it answers with names of the right kind, but not with those of the prompt.
    """

    def __init__(self, rows: Iterator[Row], seed: int) -> None:
        self._rows = rows
        self._rng = Random(seed)

    def pack(self, shape: tuple[int, int], copy_share: float) -> Batch:
        """A batch of `shape`, of whose rows `copy_share` are to copy; other rows begin with a document.

        The last document or sequence of a row is cut at its end.
        """
        num_rows, length = shape
        num_copies = round(num_rows * copy_share)
        copies = [_draw_copy_row(self._rng, length) for _ in range(num_copies)]
        return _stack(copies + [_pack_row(self._rows, length) for _ in range(num_rows - num_copies)])


def _pack_row(rows: Iterator[Row], length: int) -> Row:
    ids: list[int] = []
    targets: list[bool] = []
    while len(ids) < length:
        more_ids, more_targets = next(rows)
        ids += more_ids
        targets += more_targets
    return ids[:length], targets[:length]


def _draw_copy_row(rng: Random, length: int) -> Row:
    """Sequences of different tokens that are said two or three times; only what repeats counts."""
    ids: list[int] = []
    targets: list[bool] = []
    while len(ids) < length:
        parts = _draw_parts(rng)
        for repeat in range(rng.randint(2, 3)):
            for part in rng.sample(parts, len(parts)):
                ids += part
                # The first token of a part is a surprise: nothing tells which part comes next.
                targets += [repeat > 0 and index > 0 for index in range(len(part))]
    return ids[:length], targets[:length]


def _draw_parts(rng: Random) -> list[list[int]]:
    """One long sequence, or up to eight short ones whose order changes, as facts do between text and JSON."""
    tokens = range(len(SPECIAL_TOKENS), VOCAB_SIZE - len(MARKERS))
    if rng.random() < 0.5:
        return [rng.sample(tokens, rng.randint(3, 20))]
    size = rng.randint(2, 5)
    drawn = rng.sample(tokens, size * rng.randint(2, 8))
    return [drawn[start : start + size] for start in range(0, len(drawn), size)]


def _stack(rows: list[Row]) -> Batch:
    return Batch(torch.tensor([ids for ids, _ in rows]), torch.tensor([targets for _, targets in rows]))
