"""CustomProcessors: the logit edit that runs the engine's logits processors (logits_processor.py) for a row.

Legend: S sampling rows, V vocabulary.
"""

from __future__ import annotations

from typing import Self

import msgspec
from torch import Tensor

from .logit_edit import EditedRows, LogitEdit, RowStart
from .logits_processor import LogitsProcessor, LogitsRequest


class CustomProcessors(LogitEdit["CustomProcessors"]):
    """A row's processors, in the order in which the engine's arguments name their classes."""

    def __init__(self, processors: list[LogitsProcessor]) -> None:
        self._processors = processors
        self._readers = [one for one in processors if type(one).append is not LogitsProcessor.append]
        self.needs_history = bool(self._readers)

    @classmethod
    def make(cls, start: RowStart) -> Self | None:
        if not start.processors:
            return None
        asked = start.request.extra_args
        request = LogitsRequest(
            start.request.sampling_params,
            msgspec.json.decode(asked) if asked else {},
            start.prompt.tolist(),
            start.output.tolist(),
            start.vocab_size,
        )
        made = [kind.for_request(request) for kind in start.processors]
        processors = [one for one in made if one is not None]
        return cls(processors) if processors else None

    def append(self, token: int) -> None:
        for processor in self._readers:
            processor.append(token)

    @classmethod
    def apply(cls, logits: Tensor, rows: EditedRows[CustomProcessors]) -> None:
        for row, edit in rows:
            for processor in edit._processors:
                own = logits[row.index]
                changed = processor.apply(own)
                if changed is not None and changed is not own:
                    if changed.shape != own.shape:
                        name = type(processor).__name__
                        shapes = f"{list(changed.shape)}, not {list(own.shape)}"
                        raise ValueError(f"{name}.apply returned logits of shape {shapes}")
                    own.copy_(changed)
