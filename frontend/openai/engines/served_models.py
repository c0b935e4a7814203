"""ServedModels: the models of one HTTP process, and the one that a request means."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import Self

from ....ipc.errors import shorten
from ...async_llm import AsyncLLM
from ..bodies.schema import ModelCard
from ..errors import ApiError
from ..options import ServerOptions
from ..serving import Serving
from .server_parts import ServerParts


class ServedModel:
    """One model of the process, and the Serving of its engine."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    @property
    def serving(self) -> Serving:
        """Its engine's."""
        return self._serving

    @property
    def name(self) -> str:
        """What requests call it."""
        return self.serving.model_id

    @property
    def max_model_len(self) -> int:
        """Tokens that a sequence may have."""
        return self.serving.llm.facts.max_model_len

    @property
    def status(self) -> str:
        """As Serving's."""
        return self.serving.status


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
    def only(self) -> Serving:
        """The Serving of a server that has one engine."""
        (model,) = self.models
        return model.serving

    @property
    def status(self) -> str:
        """As Serving's."""
        return self.only.status

    def check_open(self) -> None:
        """ApiError 503 while no engine takes requests, whatever model is asked for."""
        self.only.check_open()

    def find(self, name: str | None) -> ServedModel:
        """The model of this name; None: the only one. ApiError 404 for one that is not served."""
        (model,) = self.models
        if name is None or name == model.name:
            return model
        raise ApiError(
            HTTPStatus.NOT_FOUND,
            f"model={shorten(name)}: {model.name!r} is what this server has",
            param="model",
            code="model_not_found",
        )

    def make_card(self, model: ServedModel) -> ModelCard:
        """What is told of a model."""
        return ModelCard(id=model.name, created=self.parts.created, max_model_len=model.max_model_len)

    def close(self) -> None:
        """End the text processes, and keep no response any more. Idempotent."""
        for model in self.models:
            model.serving.close()
        self.parts.close()
