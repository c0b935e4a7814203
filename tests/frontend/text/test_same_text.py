"""The text of tokens is one, however they are cut into deliveries, and the one that tokenizers decodes."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import pytest
from frontend_fakes import write_encoder_folder, write_metaspace_folder
from quire.frontend.text.detokenizer import Detokenizer
from quire.frontend.text.tokenizer import Tokenizer, load_tokenizer
from quire.ipc.params.sampling_params import SamplingParams
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

CORPUS = [
    "The quick 狐 naïve café 你好 don't do not",
    "👩\u200d👩\u200d👧 e\u0301 a\u0308 \ufffd 한국어 हिन्दी .,!?",
    "日本語",
]
ADDED = ["<think>", "é", "漢字", "\ufffd", " two words ", "\u200d", "<0xE6>"]
HALF = "\N{REPLACEMENT CHARACTER}"
BYTES_FIRST = {
    "bytes_fused_first": [
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Replace("▁", " "),
        decoders.Strip(" ", 1, 0),
    ],
    "bytes_first": [decoders.ByteFallback(), decoders.Metaspace()],
}
KINDS = ["byte_level", "byte_fallback", *BYTES_FIRST, "wordpiece", "unigram", "words", "suffix"]


def make_backend(kind: str, folder: Path) -> Backend:
    special = ["<s>", "</s>"]
    if kind == "byte_fallback" or kind in BYTES_FIRST:
        backend = Backend.from_file(str(write_metaspace_folder(folder) / "tokenizer.json"))
        if kind in BYTES_FIRST:
            backend.decoder = decoders.Sequence(BYTES_FIRST[kind])
        return backend
    if kind == "wordpiece":
        backend = Backend.from_file(str(write_encoder_folder(folder) / "tokenizer.json"))
        backend.decoder = decoders.WordPiece(cleanup=True)
        return backend
    if kind == "unigram":
        backend = Backend(models.Unigram())
        backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=120, special_tokens=special, show_progress=False)
    elif kind == "byte_level":
        backend = Backend(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=330, initial_alphabet=alphabet, special_tokens=special, show_progress=False
        )
    elif kind == "suffix":
        backend = Backend(models.BPE(end_of_word_suffix="</w>"))
        backend.pre_tokenizer, backend.decoder = pre_tokenizers.Whitespace(), decoders.BPEDecoder()
        trainer = trainers.BpeTrainer(
            vocab_size=150, end_of_word_suffix="</w>", special_tokens=special, show_progress=False
        )
    else:
        backend = Backend(models.WordLevel(unk_token="<s>"))
        backend.pre_tokenizer = pre_tokenizers.Whitespace()
        trainer = trainers.WordLevelTrainer(special_tokens=special, show_progress=False)
    backend.train_from_iterator(CORPUS * 20, trainer)
    return backend


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp(request.param)
    backend = make_backend(request.param, folder)
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in ADDED])
    backend.save(str(folder / "tokenizer.json"))
    return load_tokenizer(folder)


def draw_ids(rng: random.Random, tokenizer: Tokenizer, most: int) -> list[int]:
    """Text, pieces of it, runs of one token, special and unknown ids."""
    ids: list[int] = []
    bytes_of = [tokenizer.backend.token_to_id(f"<0x{byte:02X}>") for byte in (0xE6, 0xBC, 0xA2, 0xF0, 0x41)]
    while len(ids) < rng.randrange(1, most):
        text = tokenizer.encode(rng.choice(CORPUS), add_special_tokens=False)
        start = rng.randrange(len(text))
        ids += rng.choice(
            [
                text[start : start + rng.randrange(1, 9)],
                [rng.randrange(len(tokenizer) + 3)] * rng.choice([1, 1, 2, 20]),
                [rng.choice([*tokenizer.all_special_ids])] * rng.choice([1, 3, 20]),
                [byte for byte in bytes_of if byte is not None],
                [rng.choice(bytes_of) or 0],
            ]
        )
    return ids


def read(
    tokenizer: Tokenizer, prompt: list[int], cuts: list[list[int]], params: SamplingParams
) -> tuple[str, int]:
    """The text as it was shown, and how many tokens it took."""
    detokenizer, shown, num_taken = Detokenizer(tokenizer, prompt, params), "", 0
    for ids in cuts:
        num_taken += detokenizer.add(ids)
        if detokenizer.stop_string is not None:
            break
        shown += detokenizer.take_delta(False)
        assert detokenizer.sendable_text(False) == shown
    detokenizer.finish()
    shown += detokenizer.take_delta(True)
    assert detokenizer.text == detokenizer.sendable_text(True) == shown
    return shown, num_taken


def check_sequence(tokenizer: Tokenizer, seed: int) -> None:
    rng = random.Random(seed)
    prompt = draw_ids(rng, tokenizer, 12) if rng.random() < 0.8 else []
    ids = draw_ids(rng, tokenizer, 40)
    borders = sorted({0, len(ids), *(rng.randrange(len(ids)) for _ in range(rng.randrange(40)))})
    cuts = [ids[start:end] for start, end in pairwise(borders)]
    skips = rng.random() < 0.5
    params = SamplingParams(skip_special_tokens=skips, spaces_between_special_tokens=rng.random() < 0.5)
    whole, _ = read(tokenizer, prompt, [ids], params)
    assert read(tokenizer, prompt, cuts, params)[0] == whole
    if whole:
        start = rng.randrange(len(whole))
        stops = [whole[start : start + rng.randrange(1, 6)], rng.choice(["zz", "é", HALF, " "])]
        params = SamplingParams(
            stop=stops, include_stop_str_in_output=rng.random() < 0.5, min_tokens=rng.choice([0, 0, 5])
        )
        assert read(tokenizer, prompt, cuts, params) == read(tokenizer, prompt, [ids], params)
    params = SamplingParams(skip_special_tokens=skips)
    check_decoded(tokenizer, prompt, ids, skips, read(tokenizer, prompt, cuts, params)[0])


def check_decoded(tokenizer: Tokenizer, prompt: list[int], ids: list[int], skips: bool, text: str) -> None:
    """As tokenizers decodes all of them, where what it decodes does not change with later tokens.

    A run of byte tokens that is no text as a whole is lost there as a whole, and it cannot cut a prompt in
    the middle of a character.
    """
    before, all_text = tokenizer.decode(prompt, skips), tokenizer.decode(prompt + ids, skips)
    has_fallback = tokenizer.backend.token_to_id("<0x41>") is not None
    if not all_text.startswith(before) or before.endswith(HALF) or (has_fallback and HALF in all_text):
        return
    assert text == all_text[len(before) :]


def test_text_is_a_function_of_its_tokens(tokenizer: Tokenizer) -> None:
    for seed in range(120):
        check_sequence(tokenizer, seed)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_text_is_a_function_of_its_tokens_for_many(tokenizer: Tokenizer, part: int) -> None:
    for seed in range(1000 + part * 1000, 2000 + part * 1000):
        check_sequence(tokenizer, seed)
