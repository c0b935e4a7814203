"""Trains the encoder's tokenizer: WordPiece without case, as BERT's.

An inflected form has no token of its own where its stem and a common ending have: "lamps" is "lamp", "##s".
Pieces are learned from words each counted once, so that they suit words that the corpus does not have.
"""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from string import ascii_lowercase, digits, punctuation

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from ..phrases import read_phrases
from ..tokenizer import write_json

PAD, UNKNOWN, START, SEPARATOR, MASK = SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
PAD_ID = 0
VOCAB_SIZE = 6144
NUM_PIECES = 3000  # of these tokens all but the special ones are letters and parts of words
LETTERS = [*ascii_lowercase, *digits, *map(chr, range(0x3B1, 0x3CA)), *map(chr, range(0x430, 0x450))]
SIGNS = [*punctuation, *"€£§°…•", *map(chr, (0x2013, 0x2014, 0x2018, 0x2019, 0x201C, 0x201D))]
ENDINGS: list[str] = read_phrases("words")["endings"]


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """A tokenizer of at most `VOCAB_SIZE` tokens with the words of `texts`, the most frequent first."""
    counts = _count_words(texts)
    pieces = _train_pieces(counts)
    words = [
        word for word, _ in counts.most_common() if word not in pieces and not _is_inflected(word, counts)
    ]
    vocab = {token: index for index, token in enumerate((pieces + words)[:VOCAB_SIZE])}
    return _make_tokenizer(models.WordPiece(vocab, unk_token=UNKNOWN, max_input_chars_per_word=64))


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Writes tokenizer.json and tokenizer_config.json."""
    tokenizer.save(str(folder / "tokenizer.json"))
    roles = {
        "pad_token": PAD,
        "unk_token": UNKNOWN,
        "cls_token": START,
        "sep_token": SEPARATOR,
        "mask_token": MASK,
    }
    config = {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "model_max_length": max_length}
    write_json(folder / "tokenizer_config.json", config | roles)
    write_json(folder / "special_tokens_map.json", roles)


def _count_words(texts: Iterable[str]) -> Counter[str]:
    normalizer, splitter = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    counts: Counter[str] = Counter()
    for text in texts:
        words = splitter.pre_tokenize_str(normalizer.normalize_str(text))
        counts.update(word for word, _ in words if word.isalpha() and word.isascii())
    return counts


def _train_pieces(counts: Counter[str]) -> list[str]:
    """Special tokens, letters, signs, endings, and parts of words, each word counted once."""
    fixed = [*SPECIAL_TOKENS, *LETTERS, *(f"##{letter}" for letter in LETTERS), *SIGNS]
    fixed += [f"##{ending}" for ending in ENDINGS if len(ending) > 1]
    learner = _make_tokenizer(models.WordPiece(unk_token=UNKNOWN))
    trainer = trainers.WordPieceTrainer(vocab_size=NUM_PIECES, show_progress=False)
    learner.train_from_iterator(sorted(counts), trainer)
    learned = sorted(learner.get_vocab().items(), key=lambda item: item[1])
    return list(dict.fromkeys([*fixed, *(token for token, _ in learned)]))


def _is_inflected(word: str, counts: Counter[str]) -> bool:
    return any(
        word.endswith(ending) and counts[word.removesuffix(ending)] > 0
        for ending in ENDINGS
        if len(word) > len(ending) + 2
    )


def _make_tokenizer(model: models.WordPiece) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    vocab = tokenizer.get_vocab()
    if vocab:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{START} $A {SEPARATOR}",
            pair=f"{START} $A {SEPARATOR} $B:1 {SEPARATOR}:1",
            special_tokens=[(START, vocab[START]), (SEPARATOR, vocab[SEPARATOR])],
        )
        tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer
