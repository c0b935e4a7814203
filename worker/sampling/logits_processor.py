"""LogitsProcessor: what an operator's class is to be, which `--logits-processors module:Class` names.

The classes are loaded once, when a worker starts; a request can neither name nor bring one.
Legend: V vocabulary.
"""

from __future__ import annotations

import importlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from typing import Any, Self

from torch import Tensor

from ...ipc.errors import ConfigError
from ...ipc.params.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class LogitsRequest:
    """What a processor may know of the sequence that it is made for.

    params: without lists of token ids and texts.
    extra_args: SamplingParams.extra_args, over HTTP vllm_xargs; empty: none were given.
    output_token_ids: not empty for one that goes on after a preemption or a restart.
    """

    params: SamplingParams
    extra_args: dict[str, Any]
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    vocab_size: int


class LogitsProcessor(ABC):
    """Changes the logits of one sequence before a token is sampled. One object a sequence, never shared.

    Its state must follow from the request and the tokens generated: after a preemption or a lost worker
    another object is made, with the output so far. It may keep nothing that depends on other requests, so
    that a request's tokens are the same whatever runs beside it. An exception ends its request and no other,
    with code poison_request; others do not notice. It runs in the engine's step: what it takes, every request
    waits, and its own is charged for it.
    """

    @classmethod
    @abstractmethod
    def for_request(cls, request: LogitsRequest) -> Self | None:
        """The processor of this sequence; None if it asks for none, and then it costs nothing."""

    def append(self, token_id: int) -> None:
        """The sequence has got this token. Called for each one, in order, where a class defines it; those of
        `LogitsRequest.output_token_ids` are not repeated.
        """
        del token_id

    @abstractmethod
    def apply(self, logits: Tensor) -> Tensor | None:
        """Edit `logits`, float32 [V] on their device, in place (None), or return others of the same shape.

        Minus infinity forbids a token. Allowed ids, bad words, min_tokens and biases came before, penalties
        and temperature come afterwards. A sum over many numbers can differ in its last bits with the number
        of threads; elementwise operations, maxima, sorting and softmax do not.
        """


def load_logits_processors(names: Iterable[str], folders: Iterable[str]) -> tuple[type[LogitsProcessor], ...]:
    """Import the classes `module:Class`, looked for in `folders` at last. Raises ConfigError.

    It runs code, which the operator has asked for by name when the engine was started.
    """
    sys.path.extend(folder for folder in folders if folder not in sys.path)
    return tuple(map(_load, names))


def _load(name: str) -> type[LogitsProcessor]:
    module, _, path = name.partition(":")
    try:
        loaded: Any = reduce(getattr, path.split("."), importlib.import_module(module))
    except (Exception, SystemExit) as error:  # whatever a module does when it is imported
        raise _make_load_error(name, f"{type(error).__name__}: {error}") from error
    if not isinstance(loaded, type) or not issubclass(loaded, LogitsProcessor):
        raise _make_load_error(name, "it is not a subclass of quire.LogitsProcessor")
    if missing := sorted(loaded.__abstractmethods__):
        raise _make_load_error(name, f"it does not define {', '.join(missing)}")
    return loaded


def _make_load_error(name: str, reason: str) -> ConfigError:
    return ConfigError("logits_processors", name, f"a class that can be loaded ({reason})")
