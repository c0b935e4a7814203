"""The sampling options that `quire generate` and `quire chat` share, and what they default to.

One that is not given takes the model's recommendation (generation_config.json), else the command's default.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...ipc.errors import SamplingParamsError
from ...ipc.params.sampling_params import SAMPLING_FIELDS, RequestOutputKind, SamplingParams
from ...ipc.params.structured_outputs import StructuredOutputsParams

# One sequence is printed, without logprobs.
_NOT_PRINTED = ("n", "best_of", "logprobs", "prompt_logprobs")
# Numbers that can be set, of SamplingParams.
NUMBERS = [
    field
    for name, field in SAMPLING_FIELDS.items()
    if field.kind in (int, float) and name not in _NOT_PRINTED
]


def add_sampling_options(group: Any) -> None:
    """Add `--max-tokens`, ... `--stop`, `--json-schema`, ... to an argument group, without defaults."""
    for field in NUMBERS:
        # The destination has a prefix because the engine's arguments have a `seed` as well.
        flag, text = f"--{field.name.replace('_', '-')}", field.meta.description
        group.add_argument(flag, dest=f"sampling_{field.name}", type=field.kind, metavar="N", help=text)
    text = f"{SAMPLING_FIELDS['stop'].meta.description} (repeatable)"
    group.add_argument("--stop", dest="sampling_stop", action="append", metavar="TEXT", help=text)
    structured = group.add_mutually_exclusive_group()
    text = "JSON that satisfies this schema, or the one in this file"
    structured.add_argument("--json-schema", metavar="FILE|TEXT", help=text)
    text = "text that all of this regular expression matches"
    structured.add_argument("--regex", metavar="REGEX", help=text)
    text = "one of these texts (repeatable)"
    structured.add_argument("--choice", action="append", metavar="TEXT", help=text)


def read_sampling_options(options: argparse.Namespace) -> dict[str, Any]:
    """The fields that the user gave, checked. Raises SamplingParamsError."""
    names = [*(field.name for field in NUMBERS), "stop"]
    fields = {name: getattr(options, f"sampling_{name}") for name in names}
    fields["structured_outputs"] = _read_structured(options)
    fields = {name: value for name, value in fields.items() if value is not None}
    SamplingParams(**fields)
    return fields


def _read_structured(options: argparse.Namespace) -> StructuredOutputsParams | None:
    """What the output has to look like, None for any text."""
    fields = {"json": options.json_schema, "regex": options.regex, "choice": options.choice}
    fields = {name: value for name, value in fields.items() if value is not None}
    if not fields:
        return None
    schema = fields.get("json")
    if schema is not None and not schema.lstrip().startswith("{"):
        fields["json"] = _read_file(schema)
    return StructuredOutputsParams(**fields)


def _read_file(name: str) -> str:
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise SamplingParamsError(
            "--json-schema", name, f"a JSON schema, or a file with one ({error})"
        ) from None


def make_sampling_params(
    fields: Mapping[str, Any], model_defaults: Mapping[str, Any], command_defaults: Mapping[str, Any]
) -> SamplingParams:
    """Params for a request whose output is wanted piece by piece; the first mapping that has a field wins."""
    merged = {**command_defaults, **model_defaults, **fields}
    return SamplingParams(**merged, output_kind=RequestOutputKind.DELTA)
