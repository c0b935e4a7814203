"""Bodies of /api/chat and the other requests of Ollama's clients, as these send them.

As in bodies/schema.py a field that is not here is refused. Settings of the runner that Ollama would start are
taken and say nothing here: num_ctx neither shortens a prompt nor makes room for a longer one.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from ....ipc.params.param_fields import MAX_INT
from ....ipc.protocol.rights import CALLER_OPTIONS
from ..bodies.schema import KNOWN_TYPES_OF_TOOLS, ToolParam, declare

ModelName = Annotated[
    str, Meta(min_length=1, description="a name that /api/tags lists, with its tag or without")
]
SAMPLED = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "stop"),
    *("presence_penalty", "frequency_penalty"),
)


_SILENT: dict[str, Any] = {
    **dict.fromkeys(("num_ctx", "num_keep", "num_batch", "num_gpu", "main_gpu", "num_thread"), int),
    **dict.fromkeys(("use_mmap", "use_mlock", "numa", "low_vram", "f16_kv", "logits_all"), bool),
    # While mirostat and the penalties are off, and the last in any case, as in Ollama.
    **{"draft_num_predict": int, "mirostat_tau": float, "mirostat_eta": float, "penalize_newline": bool},
}
_Runner = msgspec.defstruct("_Runner", [(name, kind | None, None) for name, kind in _SILENT.items()])
_Sampled = declare("_Sampled", _Runner, SAMPLED)


class OllamaOptions(_Sampled, kw_only=True, forbid_unknown_fields=True):
    """How an answer is sampled. num_predict: -1 and -2 for as long as there is room."""

    num_predict: Annotated[int, Meta(ge=-2, le=MAX_INT)] | None = None
    repeat_penalty: Annotated[float, Meta(ge=0.01, le=100.0)] | None = None
    repeat_last_n: Annotated[int, Meta(ge=-1, le=MAX_INT)] | None = None
    # Refused unless they ask for nothing.
    typical_p: float | None = None
    tfs_z: float | None = None
    mirostat: int | None = None
    vocab_only: bool | None = None
    embedding_only: bool | None = None


class _OllamaFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """keep_alive: a model that is served stays loaded."""

    model: ModelName
    options: OllamaOptions | None = None
    keep_alive: float | str | None = None


_Scheduled = declare("_Scheduled", _OllamaFields, CALLER_OPTIONS)


class GenerationFields(_Scheduled, kw_only=True, forbid_unknown_fields=True):
    """truncate, shift: what is too long for the context is refused, and an answer ends with it."""

    CHOICES: ClassVar = {
        "format": '"json" or a JSON schema',
        "think": 'true, false, "low", "medium", "high" or "max"',
    }
    stream: Annotated[bool, Meta(description="default: true")] | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    truncate: bool | None = None
    shift: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None


class OllamaMessage(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A message of a conversation. tool_name: of the tool whose result it is, for who has no tool_call_id."""

    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaChatRequest(GenerationFields, kw_only=True, forbid_unknown_fields=True):
    """POST /api/chat."""

    KNOWN_TYPES: ClassVar = KNOWN_TYPES_OF_TOOLS
    messages: list[OllamaMessage] | None = None
    tools: list[ToolParam] | None = None


class OllamaGenerateRequest(GenerationFields, kw_only=True, forbid_unknown_fields=True):
    """POST /api/generate. raw: the prompt is no message of a user."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    suffix: str | None = None
    template: str | None = None
    context: Any = None
    images: list[Any] | None = None


class OllamaEmbedRequest(_Scheduled, kw_only=True, forbid_unknown_fields=True):
    """POST /api/embed. truncate: cut what is too long, which is the default."""

    input: str | list[str] | None = None
    truncate: bool | None = None
    dimensions: Annotated[int, Meta(ge=0, le=MAX_INT)] | None = None


class OllamaEmbeddingsRequest(_Scheduled, kw_only=True, forbid_unknown_fields=True):
    """POST /api/embeddings, as older clients ask for the vector of one text."""

    prompt: str | None = None


_UNREAD = ("verbose", "system", "template", "options", "insecure", "username", "password", "stream")
_Unread = msgspec.defstruct("_Unread", [(name, Any, None) for name in _UNREAD])


class OllamaModelRequest(_Unread, kw_only=True, forbid_unknown_fields=True):
    """POST /api/show and /api/pull. name: as older clients say model. The rest says nothing here."""

    model: ModelName = ""
    name: str = ""

    def __post_init__(self) -> None:
        self.model = self.model or self.name
