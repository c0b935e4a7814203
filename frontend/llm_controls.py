"""LLMControls: what an LLM can be asked about its engine, beside generating."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ..ipc.engine_views import DEFAULT_METRICS_PREFIX, SchedulerStats
from ..ipc.errors import InputError
from ..ipc.sampling_params import SamplingParams
from .llm_engine import LLMEngine
from .text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from .metric_values import Metric

_NO_CODE = (
    "not possible: Quire's processes take typed messages and run nobody's code. stats(), get_metrics(), "
    "start_profile() and reset_prefix_cache() ask an engine; logits_processors brings code to a worker"
)


class LLMControls:
    """The part of LLM that needs no prompts."""

    llm_engine: LLMEngine
    _profile_folder: str  # where `stop_profile` writes

    def get_tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None with skip_tokenizer_init."""
        return self.llm_engine.get_tokenizer()

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        """What the model can be asked for: "generate", tasks of PoolingParams, "score"."""
        return self.llm_engine.facts.tasks

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` uses when it is given none."""
        return self.llm_engine.get_default_sampling_params()

    def reset_prefix_cache(self) -> bool:
        """Forget cached prompt beginnings; True if that was done."""
        return self.llm_engine.reset_prefix_cache()

    def stats(self) -> SchedulerStats:
        """A look at the engine at this moment."""
        return self.llm_engine.stats()

    def get_metrics(self, prefix: str = DEFAULT_METRICS_PREFIX) -> list[Metric]:
        """What the engine has counted since it started: the series of /metrics as Counter, Gauge, Histogram.

        prefix: what their names begin with, 'vllm:' for scripts that look for vLLM's.
        """
        from .engine_series import EnginesCollector
        from .metric_values import read_metrics

        name = self.llm_engine.facts.served_model_name
        found = {name: self.llm_engine.metrics_by_engine()}
        return read_metrics(EnginesCollector(found, prefix).collect())

    def start_profile(self) -> None:
        """Have the engine note its steps until `stop_profile`; nothing is noted at other times.

        Raises RequestFailedError if somebody profiles the engine already.
        """
        self.llm_engine.start_profile()

    def stop_profile(self) -> Path:
        """Write what was noted to a new file in the folder that profiler_config names, and say which.

        ui.perfetto.dev opens it. Raises RequestFailedError if no profile was started, or the engine was lost
        since.
        """
        return self.llm_engine.stop_profile(self._profile_folder)

    def collective_rpc(self, method: str | Callable[..., Any], *_args: Any, **_options: Any) -> NoReturn:
        """vLLM's way to run code in workers; raises InputError with the reason why there is none."""
        raise InputError("collective_rpc", method, _NO_CODE)

    def apply_model(self, function: Callable[..., Any]) -> NoReturn:
        """As `collective_rpc`."""
        raise InputError("apply_model", function, _NO_CODE)
