"""Quire, an LLM inference engine. This face is lazy: `import quire` loads nothing but this file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .frontend.async_llm import AsyncLLM as AsyncLLM
    from .frontend.cli.parser import FlexibleArgumentParser as FlexibleArgumentParser
    from .frontend.llm import LLM as LLM
    from .frontend.llm_engine import LLMEngine as LLMEngine
    from .frontend.observe.metric_values import Counter as Counter
    from .frontend.observe.metric_values import Gauge as Gauge
    from .frontend.observe.metric_values import Histogram as Histogram
    from .frontend.observe.metric_values import Metric as Metric
    from .frontend.observe.metric_values import Vector as Vector
    from .frontend.options.engine_args import EngineArgs as EngineArgs
    from .frontend.outputs import CompletionOutput as CompletionOutput
    from .frontend.outputs import RequestOutput as RequestOutput
    from .frontend.requests.beam_search import BeamSearchOutput as BeamSearchOutput
    from .frontend.requests.prompts import PromptType as PromptType
    from .frontend.requests.prompts import TextPrompt as TextPrompt
    from .frontend.requests.prompts import TokensPrompt as TokensPrompt
    from .frontend.requests.vectors.outputs import ClassificationOutput as ClassificationOutput
    from .frontend.requests.vectors.outputs import ClassificationRequestOutput as ClassificationRequestOutput
    from .frontend.requests.vectors.outputs import EmbeddingOutput as EmbeddingOutput
    from .frontend.requests.vectors.outputs import EmbeddingRequestOutput as EmbeddingRequestOutput
    from .frontend.requests.vectors.outputs import PoolingOutput as PoolingOutput
    from .frontend.requests.vectors.outputs import PoolingRequestOutput as PoolingRequestOutput
    from .frontend.requests.vectors.outputs import ScoringOutput as ScoringOutput
    from .frontend.requests.vectors.outputs import ScoringRequestOutput as ScoringRequestOutput
    from .ipc.params.beam_search import BeamSearchParams as BeamSearchParams
    from .ipc.params.pooling_params import PoolingParams as PoolingParams
    from .ipc.params.repetition_detection import RepetitionDetectionParams as RepetitionDetectionParams
    from .ipc.params.sampling_params import RequestOutputKind as RequestOutputKind
    from .ipc.params.sampling_params import SamplingParams as SamplingParams
    from .ipc.params.structured_outputs import StructuredOutputsParams as StructuredOutputsParams
    from .worker.sampling.logits_processor import LogitsProcessor as LogitsProcessor
    from .worker.sampling.logits_processor import LogitsRequest as LogitsRequest

    AsyncEngineArgs = EngineArgs
    AsyncLLMEngine = AsyncLLM

__version__ = "0.1.0"

_HOME_OF = {
    "LLM": "frontend.llm",
    "AsyncLLM": "frontend.async_llm",
    "LLMEngine": "frontend.llm_engine",
    "EngineArgs": "frontend.options.engine_args",
    "FlexibleArgumentParser": "frontend.cli.parser",
    "RequestOutput": "frontend.outputs",
    "CompletionOutput": "frontend.outputs",
    "Metric": "frontend.observe.metric_values",
    "Counter": "frontend.observe.metric_values",
    "Gauge": "frontend.observe.metric_values",
    "Histogram": "frontend.observe.metric_values",
    "Vector": "frontend.observe.metric_values",
    "PoolingOutput": "frontend.requests.vectors.outputs",
    "EmbeddingOutput": "frontend.requests.vectors.outputs",
    "ClassificationOutput": "frontend.requests.vectors.outputs",
    "ScoringOutput": "frontend.requests.vectors.outputs",
    "PoolingRequestOutput": "frontend.requests.vectors.outputs",
    "EmbeddingRequestOutput": "frontend.requests.vectors.outputs",
    "ClassificationRequestOutput": "frontend.requests.vectors.outputs",
    "ScoringRequestOutput": "frontend.requests.vectors.outputs",
    "TextPrompt": "frontend.requests.prompts",
    "TokensPrompt": "frontend.requests.prompts",
    "PromptType": "frontend.requests.prompts",
    "BeamSearchOutput": "frontend.requests.beam_search",
    "BeamSearchParams": "ipc.params.beam_search",
    "PoolingParams": "ipc.params.pooling_params",
    "RepetitionDetectionParams": "ipc.params.repetition_detection",
    "SamplingParams": "ipc.params.sampling_params",
    "RequestOutputKind": "ipc.params.sampling_params",
    "StructuredOutputsParams": "ipc.params.structured_outputs",
    # For a module of logits processors; this one loads torch.
    "LogitsProcessor": "worker.sampling.logits_processor",
    "LogitsRequest": "worker.sampling.logits_processor",
}

# vLLM's names for a class that has another one here.
_SAME_AS = {"AsyncEngineArgs": "EngineArgs", "AsyncLLMEngine": "AsyncLLM"}

__all__ = ["__version__", *_HOME_OF, *_SAME_AS]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    name = _SAME_AS.get(name, name)
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f".{home}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
