"""ServedModels: the models of one HTTP process, and the one that a request means."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from http import HTTPStatus
from typing import Self

from ....ipc.errors import describe_refusal
from ....ipc.protocol.messages import EngineFacts
from ...async_llm import AsyncLLM
from ...client.remote_daemon import Attachment
from ...formats.known_formats import summarize
from ..errors import ApiError, missing_field, unavailable
from ..options import ServerOptions
from ..serving import Serving
from ..stream import Json
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
        self._known = DaemonModel.of(self.daemon, serving.llm.facts)
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
    def daemon(self) -> Attachment:
        """Its daemon, beside others."""
        return "" if self._known is None else self._known.daemon

    @property
    def name(self) -> str:
        """What requests call it."""
        return self.serving.model_id if self._known is None else self._known.served_model_name

    @property
    def names(self) -> tuple[str, ...]:
        """All that requests may call it, `name` first."""
        return (self.facts.served_model_name, *self.facts.served_model_aliases)

    @property
    def facts(self) -> EngineFacts | DaemonModel:
        """Its engine's, or what is known of them while that is away."""
        return self.serving.llm.facts if self._known is None else self._known

    @property
    def is_known(self) -> bool:
        """Whether it is known what it can do; not of a daemon beside others that has yet to start."""
        return self.facts.max_model_len is not None

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

    def find(self, name: str | None, task: str | None = None) -> ServedModel:
        """The model of this name, with ":latest" or without; None: the only one, or of several the only one
        that can do this task.

        ApiError 404 for a name that is not here, 400 for none where it is needed or nobody can do the task.
        """
        if name is None:
            able = [model for model in self.models if not self.has_several or task in model.facts.tasks]
            if len(able) == 1:
                return able[0]
            if task is not None and not able and all(model.is_known for model in self.models):
                raise self._refuse(task)
        for model in self.models:
            if name in model.names or (name or "").removesuffix(":latest") in model.names:
                return model
        names = ", ".join(repr(model.name) for model in self.models)
        if name is None:
            raise missing_field("model", f"one of {names}")
        message = describe_refusal("model", name, f"one of {names}" if self.has_several else names)
        raise ApiError(HTTPStatus.NOT_FOUND, message, param="model", code="model_not_found")

    def _refuse(self, task: str) -> ApiError:
        each = "; ".join(f"{model.name!r} can {', '.join(model.facts.tasks)}" for model in self.models)
        return ApiError(
            HTTPStatus.BAD_REQUEST,
            f"no model here can {task}: {each}",
            param="model",
            code="unsupported_task",
        )

    def make_card(self, model: ServedModel, name: str | None = None) -> Json:
        """What is told of a model under this name of it; None: its first.

        formats: of numbers, and of weights where these are narrower. parent, permission: for vLLM's clients.
        """
        facts = model.facts
        card: Json = {
            "id": name or model.name,
            "object": "model",
            "created": self.parts.created,
            "owned_by": "quire",
            "root": facts.weight_file or facts.model,
            "parent": None,
            "max_model_len": facts.max_model_len,  # None while its engine has yet to start
            "permission": [],
            "tasks": facts.tasks,
        }
        more = {"embedding_size": facts.embedding_size, "formats": facts.formats}
        return card | {field: value for field, value in more.items() if value}

    def describe_formats(self) -> str:
        """How thoughts and tool calls are read, of each model that is here and generates."""
        able = [serving for serving in self.servings if "generate" in serving.llm.facts.tasks]
        texts = {serving.model_id: summarize(serving.output_format, serving.llm.facts) for serving in able}
        if not self.has_several:
            return "".join(texts.values())
        return "; ".join(f"{name}: {text}" for name, text in texts.items())

    def close(self) -> None:
        """End the text processes, and keep no response any more. Idempotent."""
        for serving in self.servings:
            serving.close()
        self.parts.close()
