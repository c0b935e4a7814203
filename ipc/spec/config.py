"""EngineConfig: every decision about an engine, made once in the frontend and sent to core and workers.

Frozen parts, checked at construction; nothing below the frontend changes a value or reads config.json.
Derived values (max_model_len, dtype, eos ids) are already resolved here; only what needs the device
(number of KV blocks when it is not given, `auto` device) is resolved by the worker and reported back.
"""

from __future__ import annotations

import re
from typing import Literal, get_args

import msgspec

from ..errors import ConfigError
from ..files.file_identity import NotedFiles
from ..params.param_fields import MAX_INT
from ..processes.fault_hooks import keep_lasting, parse_fault_hooks
from ..processes.log_lines import LogFormat
from ..processes.restarts import LOSS_WINDOW_S, MAX_LOSSES, MAX_WORKER_LOSSES, CoreLosses, RestartBudget
from .gguf_tensor import GgufTensor, describe_types
from .model_spec import Dtype, ModelSpec
from .weight_format import HeadQuantization, Quantization, WeightFormats, make_online_formats

AttentionBackendName = Literal["auto", "flashinfer", "triton", "torch"]
# By vLLM's names.
ATTENTION_BACKENDS: dict[str, AttentionBackendName] = {
    "FLASHINFER": "flashinfer",
    "TRITON_ATTN": "triton",
    "TORCH_SDPA": "torch",
}
LoadFormat = Literal["auto", "safetensors", "dummy"]
SchedulingPolicy = Literal["fcfs", "priority", "fair"]
ExecutorBackend = Literal["mp", "uni", "ray"]

_DEVICE = re.compile(r"auto|cpu|cuda(:\d{1,3})?")
MAX_ENGINES = 64  # of one daemon or LLM
MAX_SIZE_BYTES = 2**63 - 1
MAX_RANKS = 64
MIN_READY_TIMEOUT_S = 1.0
MAX_TIMEOUT_S = 86400.0  # a day; a poll cannot wait for any length
MIN_STEP_TIMEOUT_S = 0.1
MIN_RESTART_WINDOW_S = 0.1
# As vLLM's and SGLang's. The longest step of 2048 tokens that a slow CPU takes over an 8B model is a minute.
DEFAULT_STEP_TIMEOUT_S = 300.0


def _check_range(field: str, value: int, low: int, high: int = MAX_INT) -> None:
    is_integer = isinstance(value, int) and not isinstance(value, bool)  # pyright: ignore[reportUnnecessaryIsInstance]
    if not is_integer or not low <= value <= high:
        raise ConfigError(field, value, f"an integer from {low} to {high}")


def _check_seconds(field: str, value: float, low: float, *, may_be_none: bool = False) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)  # pyright: ignore[reportUnnecessaryIsInstance]
    is_none = may_be_none and value == 0
    if not is_number or not (is_none or low <= value <= MAX_TIMEOUT_S):  # nan compares false
        or_none = ", or 0 for none" if may_be_none else ""
        raise ConfigError(field, value, f"seconds from {low:g} to {MAX_TIMEOUT_S:g}{or_none}")


def _check_choice(field: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(field, value, f"one of {', '.join(allowed)}")


DEFAULT_PACKED_CACHE_BYTES = 16 << 30


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Which model, from where, in which number format."""

    model: str  # a local folder, already resolved from a hub name
    served_model_name: str
    tokenizer: str  # a local folder
    spec: ModelSpec
    dtype: Dtype = "float32"
    max_model_len: int = 2048
    load_format: LoadFormat = "auto"
    # Found by the frontend, none for "dummy": names within the folder, or whole paths of GGUF files.
    weight_files: tuple[str, ...] = ()
    noted: NotedFiles | None = None  # all files of the model as they were then; None: not of interest
    quantization: Quantization | None = None
    seed: int = 0  # of dummy weights; what seeds of requests come from is the frontend's
    max_logprobs: int = 20
    generation_config: str = "auto"  # where sampling defaults come from; for frontends that attach
    tool_call_parser: str | None = None  # likewise: how tool calls are written; None: by the chat template
    reasoning_parser: str | None = None  # likewise, of thoughts
    eos_token_ids: tuple[int, ...] = ()
    enforce_eager: bool = False  # no CUDA graphs
    attention_backend: AttentionBackendName = "auto"  # on a GPU
    # With `quantization`, of the projection to logits; None: the same, but int8 with int4.
    lm_head_quantization: HeadQuantization | None = None
    chat_template: str | None = None  # for frontends: its text, in place of the tokenizer's own
    served_model_aliases: tuple[str, ...] = ()  # likewise: names beside served_model_name
    packed_cache_bytes: int = DEFAULT_PACKED_CACHE_BYTES  # on disk, of all models; 0: none
    gguf_tensors: tuple[GgufTensor, ...] = ()  # where they lie in weight_files that are GGUF; () for others

    def __post_init__(self) -> None:
        _check_range("max_model_len", self.max_model_len, 1)
        _check_choice("dtype", self.dtype, get_args(Dtype))
        _check_choice("load_format", self.load_format, get_args(LoadFormat))
        if self.quantization is not None:
            _check_choice("quantization", self.quantization, get_args(Quantization))
            if self.spec.weight_formats != WeightFormats():
                raise ConfigError(
                    "quantization", self.quantization, "None: the checkpoint is quantized itself"
                )
        _check_choice("attention_backend", self.attention_backend, get_args(AttentionBackendName))
        if self.lm_head_quantization is not None:
            _check_choice("lm_head_quantization", self.lm_head_quantization, get_args(HeadQuantization))
            if self.quantization is None:
                raise ConfigError(
                    "lm_head_quantization", self.lm_head_quantization, "None without quantization"
                )
        _check_range("max_logprobs", self.max_logprobs, -1)
        _check_range("packed_cache_bytes", self.packed_cache_bytes, 0, MAX_SIZE_BYTES)

    @property
    def weight_formats(self) -> WeightFormats:
        """The formats of the linear layers in memory: the checkpoint's own, or those of `quantization`."""
        if self.quantization is None:
            return self.spec.weight_formats
        return make_online_formats(self.quantization, self.lm_head_quantization)

    @property
    def weights_name(self) -> str:
        """What weights are where they are narrower than `dtype`, or of a GGUF file; '' where not."""
        if self.gguf_tensors:
            return f"gguf {describe_types(self.gguf_tensors)}"
        return self.quantization or self.spec.weight_formats.name


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The KV cache: its blocks and where their number comes from."""

    block_size: int = 16
    num_gpu_blocks_override: int | None = None  # wins over the two below; also on a CPU (vLLM's name)
    kv_cache_memory_bytes: int | None = None  # wins over the fraction
    gpu_memory_utilization: float = 0.9  # fraction of the whole device that this engine may use
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        if self.block_size not in (8, 16, 32, 64, 128):
            raise ConfigError("block_size", self.block_size, "one of 8, 16, 32, 64, 128")
        if self.num_gpu_blocks_override is not None:
            _check_range("num_gpu_blocks_override", self.num_gpu_blocks_override, 1)
        if self.kv_cache_memory_bytes is not None:
            _check_range("kv_cache_memory_bytes", self.kv_cache_memory_bytes, 1, MAX_SIZE_BYTES)
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError(
                "gpu_memory_utilization", self.gpu_memory_utilization, "a number above 0 and up to 1"
            )


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How many requests and tokens a step may hold, and in which order requests run."""

    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 256
    policy: SchedulingPolicy = "fcfs"
    enable_chunked_prefill: bool = True
    # Longer prompts share at most this many tokens in a step that also decodes; 0: a quarter of the budget.
    long_prefill_token_threshold: int = 0
    max_num_queued_reqs: int | None = None  # that may wait; one more is refused as OVERLOADED
    max_queued_bytes: int | None = None  # that live requests may hold (request_price.py); likewise
    run_ahead: int = 2  # steps of a request before the oldest one's token is known; 1 is lock-step
    num_stages: int = 1  # of the worker, each of which computes another step: pipeline_parallel_size

    def __post_init__(self) -> None:
        _check_range("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        _check_range("max_num_seqs", self.max_num_seqs, 1, 65536)
        _check_choice("scheduling_policy", self.policy, get_args(SchedulingPolicy))
        _check_range("long_prefill_token_threshold", self.long_prefill_token_threshold, 0)
        if self.max_num_queued_reqs is not None:
            _check_range("max_num_queued_reqs", self.max_num_queued_reqs, 1)
        if self.max_queued_bytes is not None:
            _check_range("max_queued_bytes", self.max_queued_bytes, 1, MAX_SIZE_BYTES)
        _check_range("run_ahead", self.run_ahead, 1, 2)
        _check_range("num_stages", self.num_stages, 1, MAX_RANKS)

    @property
    def max_steps_in_flight(self) -> int:
        """Steps scheduled before the oldest one's tokens are known: one in each stage, and one that waits."""
        return self.num_stages + self.run_ahead - 1

    @property
    def max_prompt_tokens_beside_decodes(self) -> int:
        """Of long prompts in a step that also decodes; under `fair` also of one tenant's beside others'."""
        return self.long_prefill_token_threshold or max(1, self.max_num_batched_tokens // 4)


class ParallelConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Devices and processes."""

    device: str = "auto"  # cpu, or cuda; cuda:1 for the second GPU, the first of this engine's
    # "uni" runs the worker inside the core's process, "ray" on a node that Ray chooses.
    executor_backend: ExecutorBackend = "mp"
    tensor_parallel_size: int = 1  # worker processes that share a model, each with a GPU or some CPU cores
    num_threads: int | None = None  # torch threads of a CPU worker; None chooses by model and cores
    data_parallel_size: int = 1  # engines that share the requests, each with the whole model
    data_parallel_rank: int = 0  # which of the shares of this machine an engine has
    pipeline_parallel_size: int = 1  # stages of the model's layers, each of tensor_parallel_size processes

    def __post_init__(self) -> None:
        if not isinstance(self.device, str) or not _DEVICE.fullmatch(self.device):  # pyright: ignore[reportUnnecessaryIsInstance]
            text = "one of auto, cpu, cuda, or a GPU by its number such as cuda:1"
            raise ConfigError("device", self.device, text)
        _check_choice("executor_backend", self.executor_backend, get_args(ExecutorBackend))
        _check_range("tensor_parallel_size", self.tensor_parallel_size, 1, MAX_RANKS)
        _check_range("pipeline_parallel_size", self.pipeline_parallel_size, 1, MAX_RANKS)
        if self.num_ranks > 1:
            self._check_ranks()
        if self.num_threads is not None:
            _check_range("num_threads", self.num_threads, 1, 1024)
        _check_range("data_parallel_size", self.data_parallel_size, 1, MAX_ENGINES)
        if self.data_parallel_size > 1 and self.executor_backend == "uni":
            text = "1 with distributed_executor_backend='uni', whose engine is in this process"
            raise ConfigError("data_parallel_size", self.data_parallel_size, text)

    @property
    def is_on_gpu(self) -> bool:
        """Whether a GPU was asked for; under "auto" only the worker knows."""
        return self.device.startswith("cuda")

    @property
    def num_ranks(self) -> int:
        """Processes that share one model."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def why_ranks(self) -> tuple[str, int]:
        """The field that asks for several ranks, and its value; for an error."""
        if self.tensor_parallel_size > 1:
            return "tensor_parallel_size", self.tensor_parallel_size
        return "pipeline_parallel_size", self.pipeline_parallel_size

    def _check_ranks(self) -> None:
        if self.executor_backend == "uni":
            raise ConfigError(*self.why_ranks, '1 with distributed_executor_backend "uni"')
        if self.is_on_gpu and self.pipeline_parallel_size > 1:
            text = "1 on a GPU, where tensor_parallel_size shares a model out; or device=cpu"
            raise ConfigError("pipeline_parallel_size", self.pipeline_parallel_size, text)
        if self.num_ranks > MAX_RANKS:
            most, size = MAX_RANKS // self.tensor_parallel_size, self.tensor_parallel_size
            text = f"at most {most} with tensor_parallel_size={size}: an engine has up to {MAX_RANKS} ranks"
            raise ConfigError("pipeline_parallel_size", self.pipeline_parallel_size, text)


class RecoveryConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How often lost processes are replaced; one more loss within the window ends the engine."""

    max_core_restarts: int = MAX_LOSSES
    max_worker_restarts: int = MAX_WORKER_LOSSES  # by one core, without those that a request explains
    restart_window_s: float = LOSS_WINDOW_S
    warm_spare: bool = False  # keep a process that has imported torch, for the next worker

    def __post_init__(self) -> None:
        _check_range("max_core_restarts", self.max_core_restarts, 0)
        _check_range("max_worker_restarts", self.max_worker_restarts, 0)
        _check_seconds("restart_window_s", self.restart_window_s, MIN_RESTART_WINDOW_S)

    def make_core_losses(self, journal_path: str) -> CoreLosses:
        """What the core's owner counts its losses with."""
        return CoreLosses(journal_path, self.max_core_restarts, self.restart_window_s)

    def make_worker_budget(self) -> RestartBudget:
        """What the core counts its worker's losses with."""
        return RestartBudget(self.max_worker_restarts, self.restart_window_s)


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Everything that core and workers need to know. Made by `EngineArgs.create_engine_config`."""

    model: ModelConfig
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    parallel: ParallelConfig = ParallelConfig()
    recovery: RecoveryConfig = RecoveryConfig()
    log_level: str = "WARNING"
    ready_timeout_s: float = 600.0
    # Whether a request's tokens are to be the same bit for bit whatever else runs; None: if dtype is float32
    # and the device's kernels give it. True refuses to start where they do not.
    exact: bool | None = None
    step_timeout_s: float = DEFAULT_STEP_TIMEOUT_S  # a longer step is hung; 0: nothing is watched
    fault_hooks: str = ""  # for tests; see fault_hooks.py
    logits_processors: tuple[str, ...] = ()  # classes that the worker loads, module:Class, in their order
    logits_processor_folders: tuple[str, ...] = ()  # where their modules lie; absolute
    log_format: LogFormat = "text"
    # KV blocks of the lost worker whose place this one takes: as many again, whatever it finds free.
    num_blocks_before: int | None = None

    def __post_init__(self) -> None:
        _check_seconds("ready_timeout_s", self.ready_timeout_s, MIN_READY_TIMEOUT_S)
        _check_seconds("step_timeout_s", self.step_timeout_s, MIN_STEP_TIMEOUT_S, may_be_none=True)
        if self.exact not in (None, True, False):
            raise ConfigError("exact", self.exact, "True, False or None")
        parse_fault_hooks(self.fault_hooks)
        if self.recovery.warm_spare and self.parallel.num_ranks > 1:
            raise ConfigError("warm_spare", True, f"off with {self.parallel.why_ranks[0]} above 1")
        backend = self.parallel.executor_backend
        if self.recovery.warm_spare and backend != "mp":  # "uni" has no process for the worker
            raise ConfigError("warm_spare", True, f"off with distributed_executor_backend={backend!r}")
        if not self.model.spec.is_causal:  # each token of a prompt sees all others: it is never split
            whole = msgspec.structs.replace(self.scheduler, enable_chunked_prefill=False)
            msgspec.structs.force_setattr(self, "scheduler", whole)
        budget = self.scheduler.max_num_batched_tokens
        if not self.scheduler.enable_chunked_prefill and budget < self.model.max_model_len:
            why = "when enable_chunked_prefill is off" if self.model.spec.is_causal else "for an encoder"
            text = f"at least max_model_len={self.model.max_model_len} {why}"
            raise ConfigError("max_num_batched_tokens", budget, text)
        self._check_ranks()

    def _check_ranks(self) -> None:
        size = self.parallel.tensor_parallel_size
        sizes = [1] if size == 1 else self.model.spec.find_tensor_parallel_sizes()
        if size not in sizes:
            allowed = f"one of {', '.join(map(str, sizes))}: what divides this model's heads and widths"
            raise ConfigError("tensor_parallel_size", size, allowed)
        if size > 1 and self.model.dtype == "float16" and not self.parallel.is_on_gpu:
            text = "1 with dtype='float16', which only ranks with device='cuda' add up"
            raise ConfigError("tensor_parallel_size", size, text)
        num_stages, num_layers = self.parallel.pipeline_parallel_size, self.model.spec.num_layers
        if num_stages > num_layers:
            text = f"at most {num_layers}: each stage has one of this model's layers or more"
            raise ConfigError("pipeline_parallel_size", num_stages, text)
        if num_stages > 1:
            staged = msgspec.structs.replace(self.scheduler, num_stages=num_stages)
            msgspec.structs.force_setattr(self, "scheduler", staged)

    @property
    def wants_exact(self) -> bool:
        """Whether the worker is to take exact kernels where it has a choice."""
        return self.model.dtype == "float32" if self.exact is None else self.exact

    @property
    def watches_core(self) -> bool:
        """Whether the core's owner asks it if it is there. A core that computes itself cannot answer."""
        return self.step_timeout_s > 0 and self.parallel.executor_backend != "uni"

    def for_engine(self, rank: int, num_engines: int) -> EngineConfig:
        """What engine `rank` of so many is started with."""
        parallel = msgspec.structs.replace(
            self.parallel, data_parallel_size=num_engines, data_parallel_rank=rank
        )
        return msgspec.structs.replace(self, parallel=parallel)

    def for_replacement(self) -> EngineConfig:
        """What a process is started with that takes a lost one's place."""
        return msgspec.structs.replace(self, fault_hooks=keep_lasting(self.fault_hooks))

    def for_next_worker(self, num_blocks: int) -> EngineConfig:
        """What a worker is started with that takes the place of one with so many blocks."""
        return msgspec.structs.replace(self, num_blocks_before=num_blocks)

    def without_graphs(self) -> EngineConfig:
        """The same with steps that are launched kernel by kernel."""
        model = msgspec.structs.replace(self.model, enforce_eager=True)
        return msgspec.structs.replace(self, model=model)

    def for_stage(self, stage: int) -> EngineConfig:
        """What the ranks of one stage of a pipeline load together."""
        num_stages = self.parallel.pipeline_parallel_size
        if num_stages == 1:
            return self
        return self._for_part(self.model.spec.for_stage(stage, num_stages), pipeline_parallel_size=1)

    def for_rank(self) -> EngineConfig:
        """What a worker plans with: the config of an engine that has its rank's share of the model alone."""
        size = self.parallel.tensor_parallel_size
        if size == 1:
            return self
        return self._for_part(self.model.spec.for_rank(size), tensor_parallel_size=1)

    def _for_part(self, spec: ModelSpec, **parallel: int) -> EngineConfig:
        change = msgspec.structs.replace
        model = change(self.model, spec=spec)
        return change(self, model=model, parallel=change(self.parallel, **parallel))

    @property
    def max_blocks_per_request(self) -> int:
        """Blocks that a request of max_model_len tokens takes."""
        return -(-self.model.max_model_len // self.cache.block_size)

    @property
    def block_size_bytes(self) -> int:
        """Bytes of one KV block over all layers."""
        return self.model.spec.kv_bytes_per_token(self.model.dtype) * self.cache.block_size
