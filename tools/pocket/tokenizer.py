"""Trains the pocket tokenizer: byte-level BPE with every digit on its own, and the ChatML-like chat template.

Bytes are the alphabet, so any text encodes. Nothing is added in front of a text.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from ...frontend.text.chat_template import ChatTemplate

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
THINK_START, THINK_END = "<think>", "</think>"
# The vocabulary's last tokens. They are not special: who reads what the model wrote sees them.
MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", THINK_START, THINK_END)
VOCAB_SIZE = 2048
BARE_VOCAB_SIZE = 1460  # of these tokens none begins with a space
SPACE = "\u0120"  # how byte-level BPE writes it
# Only a space joins the word after it, so a word has two forms at most; digits stand alone, for sums.
SPLIT = r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
BARE_SPLIT = SPLIT.replace(" ?", "")
CHAT_TEMPLATE = (Path(__file__).parent / "chat_template.jinja").read_text(encoding="utf-8")
_TEMPLATE = ChatTemplate(CHAT_TEMPLATE, {})


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """A tokenizer of `VOCAB_SIZE` tokens fitted to `texts`; the special tokens have ids 0, 1 and 2.

    Words are merged without the space before them; then the most frequent whole words are merged with it.
    So a word that is not known has the same tokens after a space and after a quote: to copy it is to copy
    its tokens.
    """
    lines = list(texts)
    bare = _make_tokenizer(models.BPE(), BARE_SPLIT)
    trainer = trainers.BpeTrainer(
        vocab_size=BARE_VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bare.train_from_iterator(lines, trainer)
    model = json.loads(bare.to_str())["model"]
    vocab: dict[str, int] = model["vocab"]
    merges: list[tuple[str, str]] = [(first, second) for first, second in model["merges"]]
    for word in _rank_spaced_words(bare, lines, vocab)[: VOCAB_SIZE - len(MARKERS) - len(vocab)]:
        vocab[SPACE + word] = len(vocab)
        merges.append((SPACE, word))
    tokenizer = _make_tokenizer(models.BPE(vocab, merges), SPLIT)
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.add_tokens([AddedToken(marker, special=False, normalized=False) for marker in MARKERS])
    return tokenizer


def _make_tokenizer(model: models.BPE, split: str) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _rank_spaced_words(tokenizer: Tokenizer, lines: list[str], vocab: dict[str, int]) -> list[str]:
    """Pieces of text that are one token and stand after a space, the most frequent first."""
    counts: Counter[str] = Counter()
    assert tokenizer.pre_tokenizer is not None
    for line in lines:
        pieces = [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(line)]
        counts.update(word for space, word in pairwise(pieces) if space == SPACE and word in vocab)
    return [word for word, _ in counts.most_common() if not word.isdigit()]


def render_chat(
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool = False,
    tools: Sequence[Mapping[str, Any]] = (),
    is_thinking: bool = False,
) -> str:
    """What `CHAT_TEMPLATE` renders. is_thinking: the generation prompt opens the assistant's thoughts."""
    variables = {"tools": list(tools) or None, "enable_thinking": is_thinking}
    return _TEMPLATE.render(messages, add_generation_prompt, variables=variables)


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Writes tokenizer.json, tokenizer_config.json, special_tokens_map.json and chat_template.jinja."""
    tokenizer.save(str(folder / "tokenizer.json"))
    roles = {"eos_token": END_OF_TEXT, "pad_token": END_OF_TEXT}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": None,
        **roles,
        "additional_special_tokens": [TURN_START, TURN_END],
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "chat_template": CHAT_TEMPLATE,
    }
    write_json(folder / "tokenizer_config.json", config)
    write_json(
        folder / "special_tokens_map.json", roles | {"additional_special_tokens": [TURN_START, TURN_END]}
    )
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def write_json(path: Path, value: object) -> None:
    """Write a value as the model folder's files have it."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
