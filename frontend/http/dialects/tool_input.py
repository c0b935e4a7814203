"""A call's input as it is written, told only as far as it can be closed where it is cut.

So what a stream tells adds up to one JSON object, cut or not, which is the input of the whole answer.
"""

from __future__ import annotations

import re

import msgspec

from ....ipc.decoding import decode_json

NO_INPUT = msgspec.Raw(b"{}")
_TEXT = re.compile(r'[^"\\]+')  # within a text
# Of a character; one beyond 16 bits takes two, of which the first alone is refused by readers.
_ESCAPE = re.compile(r"\\(?:[^u]|u(?![dD][89abAB])[0-9a-fA-F]{4}|u[0-9a-fA-F]{4}\\u[0-9a-fA-F]{4})")
_MAX_ESCAPE = 12
_WORD = re.compile(r'[^\s"{}\[\],:]+')  # a number, or true, false or null, or a part of it
_CLOSERS = {"{": "}", "[": "]"}


class ToolInput:
    """JSON in pieces -> pieces that end within a text or after a value, and what closes them there.

    A key waits for its value, a number or a word for what ends it, an opening quote for what follows.
    """

    def __init__(self) -> None:
        self._waiting: list[str] = []
        self._closers: list[str] = []  # of what is open, the innermost last
        self._is_key = False  # whether a text that begins would be a key
        self._in_text = self._in_word = False
        self._escape = ""  # as far as it has come

    def take(self, text: str) -> str:
        """What can be told now."""
        shown: list[str] = []
        place = 0
        while place < len(text):
            can_tell, place = self._step(text, place)
            if can_tell:
                shown += self._waiting
                self._waiting = []
        return "".join(shown)

    def end(self) -> str:
        """What waits; the call is complete."""
        return "".join([*self._waiting, self._escape])

    def close(self) -> str:
        """What closes it; the call was cut."""
        is_told = self._in_text and not self._waiting
        return '"' * is_told + "".join(reversed(self._closers))

    def _step(self, text: str, place: int) -> tuple[bool, int]:
        """Read some characters; whether what waits can be told, and where to go on."""
        if self._in_text:
            return self._step_text(text, place)
        if word := _WORD.match(text, place):
            self._in_word = True
            self._waiting.append(word[0])
            return False, word.end()
        sign = text[place]
        if self._in_word:
            self._in_word = False
            return True, place
        self._waiting.append(sign)
        is_object = self._closers[-1:] == ["}"]
        match sign:
            case '"':
                self._in_text = True
            case "{" | "[":
                self._closers.append(_CLOSERS[sign])
                self._is_key = sign == "{"
                return True, place + 1
            case "}" | "]":
                del self._closers[-1:]
                self._is_key = False
                return True, place + 1
            case "," | ":":
                self._is_key = sign == "," and is_object
            case _:
                pass
        return False, place + 1

    def _step_text(self, text: str, place: int) -> tuple[bool, int]:
        if self._escape or text[place] == "\\":
            self._escape += text[place]
            if not (_ESCAPE.fullmatch(self._escape) or len(self._escape) >= _MAX_ESCAPE):
                return False, place + 1
            self._waiting.append(self._escape)
            self._escape = ""
            return not self._is_key, place + 1
        if run := _TEXT.match(text, place):
            self._waiting.append(run[0])
            return not self._is_key, run.end()
        self._waiting.append('"')
        self._in_text = False
        return not self._is_key, place + 1


def read_input(text: str) -> msgspec.Raw:
    """A call's input as JSON; of a call that could not be read, whose input was no object, nothing."""
    try:
        decode_json(text or "{}", dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, RecursionError):
        return NO_INPUT
    return msgspec.Raw(text.encode() or b"{}")
