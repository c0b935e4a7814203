"""A format's markers as they stand in marked text, made once for all outputs of a tokenizer."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from ..output_format import ChannelFormat, OutputFormat
from .marked_text import MARKS, Marks
from .text_source import Stop

if TYPE_CHECKING:
    from ...text.tokenizer import Tokenizer


class Lexicon:
    """Markers cut into pieces, between which any white space may stand."""

    def __init__(self, output_format: OutputFormat, tokenizer: Tokenizer, has_tools: bool) -> None:
        token_ids, hidden = output_format.token_ids, output_format.hidden_ids
        if not has_tools:
            output_format = replace(output_format, calls=None)
            used = {
                part for marker in output_format.list_markers() for part in output_format.split_marker(marker)
            }
            unused = {token_id for token_id in token_ids.values() if token_id not in used}
            hidden = hidden | (unused & tokenizer.all_special_ids)
            token_ids = {text: token_id for text, token_id in token_ids.items() if token_id in used}
        self.format = output_format
        self.marks = Marks(tokenizer, token_ids.values(), hidden)
        self.thinking_open = self.split(output_format.thinking.open if output_format.thinking else "")
        self.thinking_close = self.split(output_format.thinking.close if output_format.thinking else "")
        self.call_openers = self._find_call_openers()
        # Where a call may begin whose marker is missing; what follows has to say that it does.
        self.named_openers = {self.format.bare_open} - {""}
        calls = output_format.calls
        has_objects = calls is not None and calls.name_key is not None
        self.bare_openers = {"{", "[", "```"} if has_objects else set(self.named_openers)
        if calls is not None and calls.form == "python" and calls.is_bare:
            self.bare_openers.add("{")  # some write objects all the same
        stops = [*self.call_openers, *self.bare_openers, *self.thinking_open[:1]]
        self.content_stop = Stop(stops, any_mark=True)
        self.thinking_stop = Stop([*self.thinking_close[:1], *self.call_openers, *self.named_openers])
        close = self.split(output_format.calls.close if output_format.calls else "")[-1:]
        if output_format.channels:
            close = [piece for end in output_format.channels.ends for piece in self.split(end)]
        self.call_stop = Stop([*self.call_openers, *close])
        self.channels = ChannelLexicon(self, output_format.channels) if output_format.channels else None

    def _find_call_openers(self) -> set[str]:
        calls = self.format.calls
        if calls is None or self.format.channels is not None:
            return set()
        markers = (calls.lead,) if calls.is_bare else (calls.lead, calls.section_open, calls.open)
        return {piece for marker in markers for piece in self.split(marker)[:1]}

    def split(self, marker: str) -> list[str]:
        """A marker's pieces: tokens, and texts between tokens and white space."""
        pieces: list[str] = []
        for part in self.format.split_marker(marker):
            if isinstance(part, int):
                pieces.append(self.marks.characters[part])
            else:  # the brackets of a list, which models leave out
                pieces += part.replace(">[", "> [").replace("]<", "] <").split()
        return pieces


class ChannelLexicon:
    """What headers of messages hold, and where messages end."""

    def __init__(self, lexicon: Lexicon, channels: ChannelFormat) -> None:
        split = lexicon.split
        self.thinking = channels.thinking
        self.openers = [pieces[0] for text in (channels.start, channels.channel) if (pieces := split(text))]
        self.header_starts = [*self.openers, *split(channels.recipient)]
        self.header_stop = Stop(split(channels.body))
        self.message_stop = Stop([*(piece for end in channels.ends for piece in split(end)), *self.openers])
        to, _, namespace = channels.recipient.partition("=")
        self._recipient = re.compile(rf"{to}=({re.escape(namespace)})?([^\s<{MARKS}]+)")
        self._channel = re.compile(rf"{re.escape(self.openers[-1])}\s*(\w+)")

    def find_recipient(self, header: str, tools: Collection[str]) -> str | None:
        """The name of the tool that a message is for; without the tools' namespace only one of `tools`."""
        match = self._recipient.search(header)
        return match[2] if match and (match[1] or match[2] in tools) else None

    def is_thinking(self, header: str) -> bool:
        """Whether a message is the model's thoughts."""
        match = self._channel.search(header)
        return match is not None and match[1] in self.thinking


@lru_cache(16)
def load_lexicon(output_format: OutputFormat, tokenizer: Tokenizer, has_tools: bool) -> Lexicon:
    """The lexicon of a bound format."""
    return Lexicon(output_format, tokenizer, has_tools)
