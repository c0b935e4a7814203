"""The token sequences that a model is calibrated with, and those that its loss is measured on."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from ...frontend.text.tokenizer import Tokenizer
from ...ipc.errors import InputError
from ..pocket.asking import SEED
from ..pocket.batches import render
from ..pocket.text import draw_documents

NUM_HELD_OUT = 16  # sequences that nothing is calibrated with
_MAX_TEXT_BYTES = 64 << 20
_CHUNK_CHARS = 1 << 16  # tokenized at a time
_SEEDS = {"calibration": 11, "held out": SEED}  # training seeds are small numbers too, from 0 on


def draw_sequences(
    tokenizer: Tokenizer, file: Path | None, count: int, length: int
) -> tuple[list[list[int]], list[list[int]]]:
    """(`count` sequences of `length` ids to calibrate with, NUM_HELD_OUT others).

    Of a text file its beginning and what follows that; else of the pocket model's corpus. Raises InputError
    for a file that cannot be read, is no text or is too short.
    """
    if file is None:
        parts = [_cut(_draw_corpus(tokenizer, seed), length) for seed in _SEEDS.values()]
        return list(islice(parts[0], count)), list(islice(parts[1], NUM_HELD_OUT))
    sequences = list(islice(_cut(_read(tokenizer, file), length), count + NUM_HELD_OUT))
    if len(sequences) < count + NUM_HELD_OUT:
        needed, there = (number * length for number in (count + NUM_HELD_OUT, len(sequences)))
        allowed = f"a text of at least {needed} tokens (it has about {there}), or fewer --samples"
        raise InputError("calibration", str(file), allowed)
    return sequences[:count], sequences[count:]


def _cut(ids: Iterator[list[int]], length: int) -> Iterator[list[int]]:
    """Sequences of `length` ids out of a stream of documents' ids; what is left at the end is dropped."""
    left: list[int] = []
    for part in ids:
        left += part
        while len(left) >= length:
            yield left[:length]
            left = left[length:]


def _draw_corpus(tokenizer: Tokenizer, seed: int) -> Iterator[list[int]]:
    documents = draw_documents(seed)
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    while True:
        yield tokenizer.encode(render(next(documents))) + end


def _read(tokenizer: Tokenizer, file: Path) -> Iterator[list[int]]:
    try:
        with file.open("rb") as stream:
            data = stream.read(_MAX_TEXT_BYTES)
    except OSError as error:
        raise InputError("calibration", str(file), f"a file that can be read ({error.strerror})") from error
    try:
        text, _ = codecs.utf_8_decode(
            data, "strict", len(data) < _MAX_TEXT_BYTES
        )  # may end within a character
    except UnicodeDecodeError as error:
        allowed = f"a text in UTF-8 (its byte {error.start} is none)"
        raise InputError("calibration", str(file), allowed) from error
    for start in range(0, len(text), _CHUNK_CHARS):
        yield tokenizer.encode(text[start : start + _CHUNK_CHARS], add_special_tokens=start == 0)
