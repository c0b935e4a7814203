"""Which tokens end an answer by a tokenizer's files. Loads the tokenizer only where these do not say it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ...ipc.errors import QuireError
from ..models.model_files import MAX_TOKENIZER_BYTES, read_json, read_json_as
from .tokenizer import load_tokenizer, read_named_tokens

if TYPE_CHECKING:
    from .tokenizer import Tokenizer

_ANSWER = "Answer"
_MAX_SHOWN = 8


class _Token(msgspec.Struct):
    id: int
    content: str


class _TokenizerFile(msgspec.Struct):
    added_tokens: list[_Token] = []


def read_eos_token_id(folder: str) -> int | None:
    """As `load_tokenizer(folder).eos_token_id`. Raises ModelError for a file that cannot be read."""
    path = Path(folder)
    config = read_json(path / "tokenizer_config.json")
    text = read_named_tokens(config, read_json(path / "special_tokens_map.json")).get("eos_token")
    if text is None:
        return None
    added = read_json_as(path / "tokenizer.json", MAX_TOKENIZER_BYTES, _TokenizerFile).added_tokens
    ids = (token.id for token in added if token.content == text)
    token_id = next(ids, None)
    return load_tokenizer(folder).eos_token_id if token_id is None else token_id


def find_turn_end(folder: str, chat_template: str | None = None) -> int | None:
    """The added token that a chat template, else the folder's, writes behind an answer; None: none.

    GLM's templates close no turn: its answers end where the user's next turn begins.
    """
    chat = [{"role": "user", "content": "Question"}, {"role": "assistant", "content": _ANSWER}]
    try:
        tokenizer = load_tokenizer(folder, chat_template)
        template = tokenizer.find_chat_template()
        added = tokenizer.backend.get_added_tokens_decoder().items()  # an end of turn need not be special
        for messages in (chat, [*chat, chat[0]]):
            text = template.render(messages, add_generation_prompt=False)
            behind = text.rpartition(_ANSWER)[2].lstrip()
            ends = [(len(token.content), id_) for id_, token in added if behind.startswith(token.content)]
            if ends:
                return max(ends)[1]
    except QuireError:  # a template without such chats; what cannot be read is refused where it is used
        pass
    return None


def describe_ends(tokenizer: Tokenizer | None, token_ids: Iterable[int]) -> str:
    """Such as "'<|im_end|>' (2), '<|endoftext|>' (0)", or 'nothing: ...'."""
    ids = list(token_ids)
    texts = [f"{tokenizer.backend.id_to_token(id_)!r} ({id_})" if tokenizer else str(id_) for id_ in ids]
    shown = ", ".join(texts[:_MAX_SHOWN]) + (f" and {len(ids) - _MAX_SHOWN} more" if ids[_MAX_SHOWN:] else "")
    return shown or "nothing: an answer runs to max_tokens"
