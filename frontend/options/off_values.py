"""vLLM's engine arguments that scripts carry along for what Quire does not have, with the values that leave
it off: those are taken and dropped, so that a script runs unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

OFF_VALUES: dict[str, tuple[Any, ...]] = {
    "cpu_offload_gb": (0, 0.0),
    "disable_custom_all_reduce": (False, True),
    "disable_log_requests": (False, True),
    "disable_log_stats": (False, True),
    "download_dir": (None,),
    "enable_log_requests": (False,),
    "enable_lora": (False,),
    "enable_prompt_embeds": (False,),
    "kv_cache_dtype": ("auto",),
    "limit_mm_per_prompt": (None,),
    "profiler_config": (None,),
    "speculative_config": (None,),
    "swap_space": (0, 0.0, 4, 4.0),
    "task": ("auto", "generate"),
    "tokenizer_mode": ("auto",),
    "tokenizer_revision": (None,),
}


class DropsOffValues(type):
    """A class whose keyword arguments are dropped where they are one of OFF_VALUES."""

    if not TYPE_CHECKING:  # a type checker goes by the class' own fields

        def __call__(cls, *args: Any, **values: Any) -> Any:
            return super().__call__(*args, **drop_off_values(values))


def drop_off_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that ask for something."""
    return {name: value for name, value in values.items() if not _is_off(name, value)}


def describe_off_values(name: str) -> str:
    """What an argument for something that Quire does not have may be."""
    is_task = name == "task"
    reason = "a model is asked for vectors by runner='pooling'" if is_task else "Quire does not have it"
    return f"{' or '.join(map(repr, OFF_VALUES[name]))}: {reason}"


def _is_off(name: str, value: Any) -> bool:
    return any(value == off and type(value) is type(off) for off in OFF_VALUES.get(name, ()))
