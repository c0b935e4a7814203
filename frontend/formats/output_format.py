"""How a model writes thoughts and tool calls, as data: parser and grammar are both made from it.

Markers stand here as chat templates write them, with their whitespace, for the grammar. A parser takes any
whitespace, or none, wherever a marker has some or ends. Knows no parser, no grammar and no tool.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from ..text.tokenizer import Tokenizer

ArgumentForm = Literal["json", "xml", "braces", "python"]
"""What stands for a call's arguments.

json: {"city": "Rome", "days": 2}
xml: for each one `parameter_open` city `value_open` Rome `parameter_close`; types are those of the schema
braces: {city:<escape>Rome<escape>,days:2}, texts within `quote`; objects and lists inside are written alike
python: city="Rome", days=2
"""


@dataclass(frozen=True)
class ThinkingFormat:
    """Thoughts stand between `open` and `close`. A prompt may have opened them."""

    open: str
    close: str


@dataclass(frozen=True)
class CallFormat:
    """`section_open`, calls with `separator` between them, `section_close`; often these are empty.

    A call is `open` NAME `name_close` ARGUMENTS `close`; with a `name_key` it is `open`, an object
    {`name_key`: NAME, `arguments_key`: ARGUMENTS} and `close`.
    """

    open: str = ""
    name_close: str = ""
    close: str = ""
    section_open: str = ""
    separator: str = ""
    section_close: str = ""
    name_key: str | None = None
    arguments_key: str = "arguments"
    form: ArgumentForm = "json"
    parameter_open: str = ""
    value_open: str = ""
    # In its place before a value that is no text, where the two differ.
    json_value_open: str = ""
    parameter_close: str = ""
    quote: str = ""
    # A token that announces calls and may be missing.
    lead: str = ""
    # What opens calls is no marker, only a bracket: it counts at the beginning of a turn's content, after
    # `lead`, and where the name of an offered tool follows.
    is_bare: bool = False
    # Whether names are written as functions.NAME:NUMBER, which is the call's id.
    is_numbered: bool = False
    # With a `name_key`: objects begin with this key, whose value is the call's number as a text.
    number_key: str = ""
    # A call's own id may follow its name, behind this; such ids have nine letters and digits.
    call_id_open: str = ""
    # Whether a turn may hold several calls.
    is_parallel: bool = True


@dataclass(frozen=True)
class ChannelFormat:
    """A turn is a sequence of messages: `start` HEADER `body` TEXT, and one of `ends`.

    A header holds `channel` and the channel's name; one with `recipient` and a name is a call. A prompt ends
    with `start`. Other channels than those of `thinking` are content; the answer is in `final`.
    """

    start: str
    channel: str
    body: str
    ends: tuple[str, ...]
    recipient: str
    thinking: tuple[str, ...]
    final: str


@dataclass(frozen=True)
class OutputFormat:
    """A model's format. One of the table has no `token_ids`; `bind` makes the one of a tokenizer from it.

    With `channels`, `thinking` and `calls` say how messages are written after `channels.start`.

    token_ids: by text, the single added tokens that markers consist of or begin with. Where one stands in a
    marker, only that token counts, not a text that looks alike; all other markers are text.
    hidden_ids: special tokens that are no markers. They never reach anybody's text.

    A request whose output is parsed has to have skip_special_tokens=False: markers may be special tokens.
    """

    name: str
    thinking: ThinkingFormat | None = None
    calls: CallFormat | None = None
    channels: ChannelFormat | None = None
    token_ids: Mapping[str, int] = field(default_factory=dict[str, int], hash=False)
    hidden_ids: frozenset[int] = frozenset()
    # Tokens of `thinking`'s markers, without whitespace; a prompt is searched for them.
    thinking_open_ids: tuple[int, ...] = ()
    thinking_close_ids: tuple[int, ...] = ()

    def describe(self) -> str:
        """For people: how calls are written and what thoughts stand between."""
        calls = f"calls: {self.name}" if self.calls else "calls: none"
        if self.thinking is None:
            return f"{calls}; thoughts: none"
        return f"{calls}; thoughts: {self.thinking.open.strip()} ... {self.thinking.close.strip()}"

    def list_markers(self) -> list[str]:
        """Every marker that is not empty."""
        thinking, calls, channels = self.thinking, self.calls, self.channels
        texts: list[str] = []
        if thinking:
            texts += [thinking.open, thinking.close]
        if calls:
            texts += [
                calls.section_open,
                calls.section_close,
                calls.separator,
                calls.lead,
                calls.call_id_open,
            ]
            texts += [calls.open, calls.name_close, calls.close, calls.quote]
            texts += [calls.parameter_open, calls.value_open, calls.json_value_open, calls.parameter_close]
        if channels:
            texts += [channels.start, channels.channel, channels.body, *channels.ends]
        return [text for text in texts if text]

    def split_marker(self, marker: str) -> list[int | str]:
        """A marker as token ids, where it holds added tokens, and texts between them."""
        if self._tokens_pattern is None:
            return [marker] if marker else []
        return [self.token_ids.get(part, part) for part in self._tokens_pattern.split(marker) if part]

    @cached_property
    def _tokens_pattern(self) -> re.Pattern[str] | None:
        return _compile_tokens(self.token_ids)

    @property
    def bare_open(self) -> str:
        """What calls begin with whose marker a model leaves out; '' for objects, and where there is none."""
        if self.calls is None or self.channels is not None:
            return ""
        if self.calls.form == "python":
            return "\n" + self.calls.section_open if self.calls.is_bare else ""
        match [part for piece in self.split_marker(self.calls.open) for part in _split_text(piece)]:
            case [marker, str(rest)] if isinstance(marker, int) or marker.endswith(">"):
                return "" if self.calls.form == "json" else rest
            case _:
                return ""

    def bind(self, tokenizer: Tokenizer) -> OutputFormat:
        """This format with the ids of a tokenizer.

        A token behind text in the word that opens calls is text too: only a word's first token can be looked
        for.
        """
        added = tokenizer.backend.get_added_tokens_decoder()
        ids = {token.content: token_id for token_id, token in added.items()}
        pattern = _compile_tokens(ids)
        token_ids = {text: ids[text] for marker in self.list_markers() for text in _find(pattern, marker)}
        hidden = tokenizer.all_special_ids.difference(token_ids.values())
        opener = (self.calls.section_open or self.calls.open).split() if self.calls else []
        if opener and pattern and not pattern.match(opener[0]):
            inner = pattern.findall(opener[0])
            token_ids = {text: token_id for text, token_id in token_ids.items() if text not in inner}
        bound = replace(self, token_ids=token_ids, hidden_ids=hidden)
        if self.thinking is None:
            return bound
        opened, closed = (
            tuple(tokenizer.encode(text.strip(), add_special_tokens=False))
            for text in (self.thinking.open, self.thinking.close)
        )
        return replace(bound, thinking_open_ids=opened, thinking_close_ids=closed)


def is_reasoning_open(output_format: OutputFormat, prompt_token_ids: Sequence[int]) -> bool:
    """Whether a prompt's last turn has begun thoughts and not ended them; the output goes on with them.

    Looks back no further than the last special token that is no marker, which is where a turn begins: what a
    user writes is before it.
    """
    opened, closed = output_format.thinking_open_ids, output_format.thinking_close_ids
    if not opened or output_format.channels is not None:
        return False
    for end in range(len(prompt_token_ids), 0, -1):
        last = prompt_token_ids[end - 1]
        if last in output_format.hidden_ids:
            return False
        if last == closed[-1] and tuple(prompt_token_ids[max(0, end - len(closed)) : end]) == closed:
            return False
        if last == opened[-1] and tuple(prompt_token_ids[max(0, end - len(opened)) : end]) == opened:
            return True
    return False


def _split_text(piece: int | str) -> list[int | str]:
    return [piece] if isinstance(piece, int) else list(piece.split())


def _compile_tokens(texts: Collection[str]) -> re.Pattern[str] | None:
    """What finds added tokens in a text as their tokenizer does: the longest first."""
    ordered = sorted(filter(None, texts), key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, ordered))})") if ordered else None


def _find(pattern: re.Pattern[str] | None, marker: str) -> list[str]:
    return pattern.findall(marker) if pattern else []
