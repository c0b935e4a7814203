"""The sampling options that `quire generate` and `quire chat` share, and what they default to.

One that is not given takes the model's recommendation (generation_config.json), else the command's default.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from ...ipc.sampling_params import SAMPLING_FIELDS, RequestOutputKind, SamplingParams

# One sequence is printed, without logprobs.
_NOT_PRINTED = ("n", "best_of", "logprobs", "prompt_logprobs")
# Numbers that can be set, of SamplingParams.
NUMBERS = [
    field
    for name, field in SAMPLING_FIELDS.items()
    if field.kind in (int, float) and name not in _NOT_PRINTED
]


def add_sampling_options(group: Any) -> None:
    """Add `--max-tokens`, `--temperature`, ... `--stop` to an argument group; nothing has a default here."""
    for field in NUMBERS:
        # The destination has a prefix because the engine's arguments have a `seed` as well.
        flag, text = f"--{field.name.replace('_', '-')}", field.meta.description
        group.add_argument(flag, dest=f"sampling_{field.name}", type=field.kind, metavar="N", help=text)
    text = f"{SAMPLING_FIELDS['stop'].meta.description} (repeatable)"
    group.add_argument("--stop", dest="sampling_stop", action="append", metavar="TEXT", help=text)


def read_sampling_options(options: argparse.Namespace) -> dict[str, Any]:
    """The fields that the user gave, checked. Raises SamplingParamsError."""
    names = [*(field.name for field in NUMBERS), "stop"]
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
