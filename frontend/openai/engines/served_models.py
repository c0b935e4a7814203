"""ServedModels: the models of one HTTP process, and the one that a request means."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from http import HTTPStatus
from typing import Self

import msgspec

from ....ipc.errors import shorten
from ...async_llm import AsyncLLM
from ...output_formats.summary import summarize
from ..bodies.schema import ModelCard
from ..errors import ApiError, FieldError, unavailable
from ..options import ServerOptions
from ..serving import Serving
from .daemon_model import DaemonModel
from .server_parts import ServerParts

WELL = ("ready", "degraded")  # statuses of who takes requests
_BEST_FIRST = ("ready", "recovering", "loading", "draining", "stalled", "unresponsive", "away", "dead")


def sum_up(statuses: Iterable[str]) -> str:
    """What is told of several engines: that of the best; 'degraded': it is ready, and another is not."""
    known = set(statuses)
    best = min(known, key=_BEST_FIRST.index)
    return "degraded" if best == "ready" and len(known) > 1 else best


class ServedModel:
    """One model of the process, and the Serving of its engine while that is here."""

    def __init__(self, serving: Serving | None = None, known: DaemonModel | None = None) -> None:
        """`known`: of a daemon beside others, which may come and go. Else `serving` is here for good."""
        self._serving = serving
        self._known = known
        self.away_because = ""

    def arrive(self, serving: Serving) -> None:
        """Its daemon is here: requests may enter."""
        assert self._known is not None
        facts = serving.llm.facts
        self._known = DaemonModel(self.daemon, facts.served_model_name, facts.max_model_len)
        self._serving, self.away_because = serving, ""
        serving.open()
        serving.start_text()

    def leave(self, because: str) -> None:
        """Its daemon is away."""
        serving, self._serving, self.away_because = self._serving, None, because
        if serving is not None:
            serving.close()

    @property
    def is_here(self) -> bool:
        """Whether there is a Serving."""
        return self._serving is not None

    @property
    def serving(self) -> Serving:
        """Its engine's; ApiError 503 while that is away."""
        if self._serving is not None:
            return self._serving
        if not self.away_because:
            raise unavailable(f"the model {self.name!r} is being loaded", "loading")
        raise unavailable(f"the model {self.name!r} is away: {self.away_because}", "engine_away")

    @property
    def daemon(self) -> str:
        """Its daemon's name, beside others'."""
        return "" if self._known is None else self._known.daemon

    @property
    def name(self) -> str:
        """What requests call it."""
        return self.serving.model_id if self._known is None else self._known.model

    @property
    def max_model_len(self) -> int:
        """Tokens that a sequence may have."""
        return self.serving.llm.facts.max_model_len if self._known is None else self._known.max_model_len

    @property
    def status(self) -> str:
        """As Serving's; also 'away'."""
        if self._serving is not None:
            return self._serving.status
        return "away" if self.away_because else "loading"


class ServedModels:
    """The models that are served here; each name is one's."""

    def __init__(self, parts: ServerParts, models: Sequence[ServedModel]) -> None:
        self.parts = parts
        self.models = models

    @classmethod
    def of_one(cls, llm: AsyncLLM, options: ServerOptions) -> Self:
        """Those of a server with one engine."""
        parts = ServerParts(options)
        return cls(parts, [ServedModel(Serving(llm, parts))])

    @property
    def has_several(self) -> bool:
        """Whether a request has to say which it means."""
        return len(self.models) > 1

    @property
    def only(self) -> Serving:
        """The Serving of a server that has one engine."""
        (model,) = self.models
        return model.serving

    @property
    def servings(self) -> list[Serving]:
        """Those of the engines that are here."""
        return [model.serving for model in self.models if model.is_here]

    @property
    def status(self) -> str:
        """As Serving's, of all of them."""
        return "draining" if self.parts.is_draining else sum_up(model.status for model in self.models)

    def check_open(self) -> None:
        """ApiError 503 while no request is taken, whatever model it asks for."""
        self.parts.check_open()
        if not self.has_several:
            self.only.check_open()

    def find(self, name: str | None) -> ServedModel:
        """The model of this name; None: the only one. ApiError 404 for one that is not here, 400 for none."""
        for model in self.models:
            if (name is None and not self.has_several) or model.name == name:
                return model
        names = ", ".join(repr(model.name) for model in self.models)
        if name is None:
            raise FieldError("model", None, f"one of {names}", code="missing_field")
        message = f"model={shorten(name)}: {names} {'are' if self.has_several else 'is'} what this server has"
        raise ApiError(HTTPStatus.NOT_FOUND, message, param="model", code="model_not_found")

    def make_card(self, model: ServedModel) -> ModelCard:
        """What is told of a model."""
        card = ModelCard(id=model.name, created=self.parts.created, max_model_len=model.max_model_len)
        if not model.is_here:
            return card
        facts = model.serving.llm.facts
        size = facts.embedding_size or msgspec.UNSET
        return msgspec.structs.replace(card, tasks=list(facts.tasks), embedding_size=size)

    def describe_formats(self) -> str:
        """How thoughts and tool calls are read, of each model that is here."""
        texts = {one.model_id: summarize(one.output_format, one.llm.facts) for one in self.servings}
        if not self.has_several:
            return "".join(texts.values())
        return "; ".join(f"{name}: {text}" for name, text in texts.items())

    def close(self) -> None:
        """End the text processes, and keep no response any more. Idempotent."""
        for serving in self.servings:
            serving.close()
        self.parts.close()
