"""LarkRules: the rules of one grammar of a turn, and how markers and free text are written in them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

from ....ipc.errors import SamplingParamsError
from ..output_format import OutputFormat
from ..schemas.grammar_text import quote

Piece = int | str
"""A token's id, or text."""

TEXT = r"/(.|\n)*/"


class LarkRules:
    """Rules by name, which are written once. Lower-case names are rules, upper-case ones terminals."""

    def __init__(self, output_format: OutputFormat, eos_token_ids: Iterable[int]) -> None:
        self.format = output_format
        self.eos_token_ids = frozenset(eos_token_ids)
        self._lines: dict[str, str] = {}
        kept_out = sorted({*self.eos_token_ids, *output_format.token_ids.values()})
        # Also in `{0,N}` it is one rule of a few items, and 5 us a token (V=261, 2-core Xeon).
        self.any_token = f"<[^{','.join(map(str, kept_out))}]>"

    def add(self, name: str, body: str) -> str:
        """Add a rule, unless there is one of this name, which is then the same. Returns the name."""
        self._lines.setdefault(name.partition("[")[0], f"{name}: {body}")
        return name.partition("[")[0]

    def join(self) -> str:
        """The grammar's text; its rule `start` has to be there."""
        return "\n".join(["%llguidance {}", *self._lines.values()])

    def split(self, *markers: str) -> list[Piece]:
        """Markers and texts in a row, text that meets text joined. Ends of sequence are left out."""
        pieces: list[Piece] = []
        for piece in (piece for marker in markers for piece in self.format.split_marker(marker)):
            if isinstance(piece, str) and pieces and isinstance(pieces[-1], str):
                pieces[-1] += piece
            elif piece not in self.eos_token_ids:
                pieces.append(piece)
        return pieces

    def write(self, *markers: str) -> str:
        """The same as what a rule consists of."""
        return " ".join(map(_write_piece, self.split(*markers)))

    def write_alternatives(self, name: str, rows: Sequence[list[Piece]]) -> str:
        """Any one of `rows`, which differ in texts only. `name`: of the terminals that this takes."""
        columns = [list(dict.fromkeys(column)) for column in zip(*rows, strict=True)]
        return " ".join(
            _write_piece(column[0])
            if len(column) == 1
            # One terminal: as alternatives of a rule they would be an item of the parser each.
            else self.add(f"{name}_{number}", " | ".join(map(_write_piece, column)))
            for number, column in enumerate(columns)
        )

    def add_chain(self, name: str, separator: str, members: Sequence[tuple[str, bool]]) -> str:
        """A rule: members, of which some are needed, in their order, with `separator` between them."""
        after = before = ""  # what may follow a member, and what no member has come before
        for number, (member, is_needed) in reversed(list(enumerate(members))):
            rule = self.add(f"{name}_member_{number}", member)
            first, following = f"{rule} {after}", f"{quote(separator)} {rule} {after}"
            if not is_needed:
                first, following = f"{first} | {before}", f"{following} | {after}"
            before = self.add(f"{name}_first_{number}", first)
            after = self.add(f"{name}_next_{number}", following)
        return before

    def add_text(self) -> str:
        """A rule or terminal: any text that holds no beginning of thoughts or calls."""
        if self._are_openers_tokens:
            return self.add("text", f"{self.any_token}*")
        return self.add("TEXT", self.write_text())

    def write_text(self, *begins: str) -> str:
        """The same for a terminal, of text that begins with none of some regular expressions."""
        markers = "|".join(map(escape_text, sorted({*self._list_openers(), *self.format.token_ids})))
        refused = [*begins, *([f"(.|\\n)*({markers})"] if markers else [])]
        return " & ".join([TEXT, *(f"~/{text}(.|\\n)*/" for text in refused)])

    def write_tokens(self, most: int | None = None) -> str:
        """What of a rule is any tokens that are no markers, at most so many."""
        return "" if most == 0 else self.any_token + ("*" if most is None else f"{{0,{most}}}")

    def add_text_until(self, name: str, marker: str, most: int | None = None) -> str:
        """A rule: any text of at most `most` tokens, and then `marker`, without the whitespace around it.

        A bound is refused where the marker does not begin with a token: then tokens before it may hold it.
        """
        pieces = self.split(marker.strip())
        if isinstance(pieces[0], int):
            return self.add(name, f"{self.write_tokens(most)} {self.write(marker.strip())}")
        if most is not None:
            allowed = f"None: the end of this model's thoughts, {marker.strip()!r}, is not one token"
            raise SamplingParamsError("thinking_token_budget", most, allowed)
        self.add("ANY_TEXT", TEXT)
        return self.add(f"{name}[lazy]", f"ANY_TEXT {quote(marker.strip())}")

    @cached_property
    def _are_openers_tokens(self) -> bool:
        return all(opener in self.format.token_ids for opener in self._list_openers())

    def _list_openers(self) -> list[str]:
        """The first words of what begins thoughts and calls; a mere bracket does that elsewhere."""
        thinking, calls = self.format.thinking, self.format.calls
        markers = [thinking.open] if thinking else []
        if calls is not None:
            markers += [calls.lead] if calls.is_bare else [calls.lead, calls.section_open, calls.open]
        return [self._cut(marker) for marker in markers if marker]

    def _cut(self, marker: str) -> str:
        """A marker up to its first white space or token."""
        texts = {token_id: text for text, token_id in self.format.token_ids.items()}
        first = self.format.split_marker(marker)[0]
        return texts[first] if isinstance(first, int) else first.split()[0]


def _write_piece(piece: Any) -> str:
    return f"<[{piece}]>" if isinstance(piece, int) else quote(piece)


def escape_text(text: str) -> str:
    """A text as part of a regular expression between slashes."""
    return re.escape(text).replace("/", r"\/").replace("\n", r"\n")
