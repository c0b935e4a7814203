"""FlexibleArgumentParser: argparse's parser for a user's own script, with vLLM's freedoms."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Iterable
from typing import Any

from .config_file import FLAG, expand_config


class FlexibleArgumentParser(argparse.ArgumentParser):
    """Options may be spelled with '_' for '-', and a `--config FILE.yaml` that it has is read.

    `EngineArgs.add_cli_args` fills it, and `LLM(**vars(parser.parse_args()))` uses what it gives.
    """

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """As argparse's."""
        known = self._option_string_actions
        words = spell_with_dashes(sys.argv[1:] if args is None else args, known)
        if FLAG in known:
            words = expand_config(known, words)
        return super().parse_known_args(words, namespace)


def spell_with_dashes(words: Iterable[str], known: Collection[str]) -> list[str]:
    """Command line words with options such as --max_tokens as `known` has them."""
    return [_with_dashes(word, known) for word in words]


def _with_dashes(word: str, known: Collection[str]) -> str:
    flag, sign, value = word.partition("=")
    dashed = flag.replace("_", "-")
    is_spelled_so = flag.startswith("--") and flag not in known and dashed in known
    return f"{dashed}{sign}{value}" if is_spelled_so else word
