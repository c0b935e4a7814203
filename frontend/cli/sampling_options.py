"""The sampling options that `quire generate` and `quire chat` share, and what they default to.

An option that is not given takes the model's recommendation (generation_config.json), else the command's
default.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from ...ipc.sampling_params import RequestOutputKind, SamplingParams

# Option name -> (type, help); each is a field of SamplingParams.
_OPTIONS: dict[str, tuple[type, str]] = {
    "max_tokens": (int, "most tokens to generate"),
    "temperature": (float, "0 takes the likeliest token always; higher is livelier"),
    "top_p": (float, "only the likeliest tokens that together have this probability"),
    "top_k": (int, "only this many of the likeliest tokens; 0: all"),
    "min_p": (float, "only tokens at least this likely, relative to the likeliest"),
    "repetition_penalty": (float, "above 1: tokens that were there become less likely"),
    "seed": (int, "same seed, same text; default: another text each time"),
}


def add_sampling_options(group: Any) -> None:
    """Add `--max-tokens`, `--temperature`, ... `--stop` to an argument group; nothing has a default here."""
    for name, (kind, text) in _OPTIONS.items():
        # The destination has a prefix because the engine's arguments have a `seed` as well.
        group.add_argument(
            f"--{name.replace('_', '-')}", dest=f"sampling_{name}", type=kind, metavar="N", help=text
        )
    group.add_argument(
        "--stop",
        dest="sampling_stop",
        action="append",
        metavar="TEXT",
        help="end before this text (repeatable)",
    )


def read_sampling_options(options: argparse.Namespace) -> dict[str, Any]:
    """The fields that the user gave, checked. Raises SamplingParamsError."""
    names = [*_OPTIONS, "stop"]
    given = {name: getattr(options, f"sampling_{name}") for name in names}
    given = {name: value for name, value in given.items() if value is not None}
    SamplingParams(**given)
    return given


def make_sampling_params(
    given: Mapping[str, Any], model_defaults: Mapping[str, Any], command_defaults: Mapping[str, Any]
) -> SamplingParams:
    """Params for a request whose output is wanted piece by piece; the first mapping that has a field wins."""
    merged = {**command_defaults, **model_defaults, **given}
    return SamplingParams(**merged, output_kind=RequestOutputKind.DELTA)
