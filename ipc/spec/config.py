"""EngineConfig: every decision about an engine, made once in the frontend and sent to core and workers.

Frozen parts, checked at construction; nothing below the frontend changes a value or reads config.json.
Derived values (max_model_len, dtype, eos ids) are already resolved here; only what needs the device
(number of KV blocks when it is not given, `auto` device) is resolved by the worker and reported back.

A field that users set says so in its annotation (options.py): it is an argument of EngineArgs then, too.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from ..errors import ConfigError
from ..files.file_identity import NotedFiles
from ..processes.fault_hooks import keep_lasting, parse_fault_hooks
from ..processes.log_lines import LogFormat
from ..processes.restarts import LOSS_WINDOW_S, MAX_LOSSES, MAX_WORKER_LOSSES, RestartBudget
from .gguf_tensor import GgufTensor, describe_types
from .kv_groups import find_max_held, find_places
from .model_spec import DTYPE_SIZE_BYTES, Dtype, KVCacheDtype, ModelSpec, size_latents
from .options import check_options, fraction, option, seconds, size
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
MAX_RANKS = 64


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Which model, from where, in which number format."""

    model: str  # a local folder, already resolved from a hub name
    served_model_name: str
    tokenizer: str  # a local folder
    spec: ModelSpec
    dtype: Dtype = "float32"
    load_format: Annotated[LoadFormat, option("'dummy' fills the weights with noise")] = "auto"
    # Found by the frontend, none for "dummy": names within the folder, or whole paths of GGUF files.
    weight_files: tuple[str, ...] = ()
    noted: NotedFiles | None = None  # all files of the model as they were then; None: not of interest
    quantization: Quantization | None = None
    seed: int = 0  # of dummy weights; what seeds of requests come from is the frontend's
    eos_token_ids: tuple[int, ...] = ()
    attention_backend: AttentionBackendName = "auto"  # on a GPU
    lm_head_quantization: (
        Annotated[
            HeadQuantization,
            option("with quantization: of the projection to logits; default: the same, but int8 with int4"),
        ]
        | None
    ) = None
    packed_cache_bytes: Annotated[
        int,
        size(
            "disk for weights of 4 and 8 bits as a CPU's kernels take them, which the next start reads; "
            "0: none",
            low=0,
        ),
    ] = 16 << 30
    max_model_len: Annotated[
        int, option("most tokens of prompt and output; default: the model's", 1, default=None)
    ] = 2048
    max_logprobs: Annotated[int, option("most logprobs of a request; -1: the whole vocabulary", -1)] = 20
    # The next four are for frontends, also those that attach.
    generation_config: Annotated[
        Literal["auto", "vllm"], option("default sampling: from generation_config.json (auto) or vLLM's own")
    ] = "auto"
    tool_call_parser: (
        Annotated[
            str,
            option("how the model writes tool calls, by vLLM's names; default: as its chat template says"),
        ]
        | None
    ) = None
    reasoning_parser: Annotated[str, option("how the model writes its thoughts; likewise")] | None = None
    chat_template: str | None = None  # its text, in place of the tokenizer's own
    served_model_aliases: tuple[str, ...] = ()  # names beside served_model_name
    enforce_eager: Annotated[bool, option("no captured graphs; a CPU has none, so no effect there")] = False
    gguf_tensors: tuple[GgufTensor, ...] = ()  # where they lie in weight_files that are GGUF; () for others

    def __post_init__(self) -> None:
        check_options(self)
        if self.quantization is not None and self.spec.weight_formats != WeightFormats():
            raise ConfigError("quantization", self.quantization, "None: the checkpoint is quantized itself")
        if self.lm_head_quantization is not None and self.quantization is None:
            raise ConfigError("lm_head_quantization", self.lm_head_quantization, "None without quantization")

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

    block_size: Annotated[
        int, option("tokens in one block of the KV cache", choices=(8, 16, 32, 64, 128))
    ] = 16
    kv_cache_dtype: Annotated[
        KVCacheDtype,
        option("of the KV cache; auto: the model's; int8, fp8 (e4m3): 8 bits, and a scale a token and head"),
    ] = "auto"  # "fp8_e4m3" is "fp8" from here on
    enable_prefix_caching: Annotated[bool, option("share the KV blocks of equal prompt beginnings")] = True
    gpu_memory_utilization: Annotated[float, fraction("fraction of the device's memory that may be used")] = (
        0.9
    )
    kv_cache_memory_bytes: (
        Annotated[int, size("size of the KV cache, such as 2GiB; wins over the fraction")] | None
    ) = None
    num_gpu_blocks_override: Annotated[int, option("blocks of the KV cache; wins over both", 1)] | None = (
        None  # also on a CPU (vLLM's name)
    )
    num_state_slots: (
        Annotated[
            int,
            option(
                "of a model with recurrent layers: sequences' states that are kept, max_num_seqs for those "
                "that run and the rest for prefix hits; default: a quarter of the KV cache's bytes for these",
                1,
            ),
        ]
        | None
    ) = None

    def __post_init__(self) -> None:
        check_options(self)
        if self.kv_cache_dtype == "fp8_e4m3":
            msgspec.structs.force_setattr(self, "kv_cache_dtype", "fp8")


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How many requests and tokens a step may hold, and in which order requests run."""

    max_num_batched_tokens: Annotated[
        int,
        option(
            "most tokens in one step; default 2048, 8192 on a GPU of 70 GiB that is no A100", 1, default=None
        ),
    ] = 2048
    max_num_seqs: Annotated[
        int,
        option(
            "most sequences in one step; default 256, on such a GPU 1024, or as many whose recurrent states "
            "take 2 GiB",
            1,
            65536,
            default=None,
        ),
    ] = 256
    enable_chunked_prefill: Annotated[bool, option("split long prompts over steps")] = True
    long_prefill_token_threshold: Annotated[
        int, option("most prompt tokens of one request beside decodes; 0: a quarter of a step", 0)
    ] = 0
    max_gap_ms: (
        Annotated[
            int,
            option(
                "longest wait for a stream's next token while long prompts come in, which take longer then; "
                "default: twice a step without them, or 100; 0: any",
                0,
                3_600_000,
            ),
        ]
        | None
    ) = None  # at least a few prompt tokens are in each step
    policy: Annotated[
        SchedulingPolicy,
        option(
            "order of waiting requests; priority: low first; fair: who was served least first",
            name="scheduling_policy",
        ),
    ] = "fcfs"
    max_num_queued_reqs: (
        Annotated[int, option("most requests that wait, more are refused; default: no bound", 1)] | None
    ) = None  # one more is refused as OVERLOADED
    max_queued_bytes: (
        Annotated[
            int,
            size(
                "most memory for live requests' prompts and lists, such as 1GiB; more are refused; "
                "default: no bound"
            ),
        ]
        | None
    ) = None  # what each holds: request_price.py
    # Steps of a request before the oldest one's token is known; 1 is lock-step.
    run_ahead: Annotated[int, Meta(ge=1, le=2)] = 2
    # Of the worker, each of which computes another step: pipeline_parallel_size.
    num_stages: Annotated[int, Meta(ge=1, le=MAX_RANKS)] = 1

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def max_steps_in_flight(self) -> int:
        """Steps scheduled before the oldest one's tokens are known: one in each stage, and one that waits."""
        return self.num_stages + self.run_ahead - 1

    @property
    def max_prompt_tokens_beside_decodes(self) -> int:
        """The most tokens of long prompts in a step that also decodes; under `fair` also of a tenant's."""
        return self.long_prefill_token_threshold or max(1, self.max_num_batched_tokens // 4)


class ParallelConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Devices and processes."""

    # "uni" runs the worker inside the core's process, "ray" on a node that Ray chooses.
    executor_backend: ExecutorBackend = "mp"
    tensor_parallel_size: Annotated[
        int, option("processes (ranks) that share one model; each has a GPU or CPU cores", 1, MAX_RANKS)
    ] = 1
    pipeline_parallel_size: Annotated[
        int,
        option("stages of a model's layers, each of tensor_parallel_size processes, on a CPU", 1, MAX_RANKS),
    ] = 1
    data_parallel_size: Annotated[
        int,
        option(
            "engines that share the requests, each with the whole model", 1, MAX_ENGINES, alias="--engines"
        ),
    ] = 1
    data_parallel_rank: int = 0  # which of the shares of this machine an engine has
    device: Annotated[
        str, option("cpu, cuda, or a GPU by its number (cuda:1); auto takes a GPU if there is one")
    ] = "auto"  # with a number: the first of this engine's
    num_threads: (
        Annotated[int, option("threads of a CPU worker; default: by model and cores", 1, 1024)] | None
    ) = None

    def __post_init__(self) -> None:
        check_options(self)
        if not isinstance(self.device, str) or not _DEVICE.fullmatch(self.device):  # pyright: ignore[reportUnnecessaryIsInstance]
            text = "one of auto, cpu, cuda, or a GPU by its number such as cuda:1"
            raise ConfigError("device", self.device, text)
        if self.num_ranks > 1:
            self._check_ranks()
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
    def speaker(self) -> int:
        """The rank that answers for all: the first of the last stage."""
        return self.num_ranks - self.tensor_parallel_size

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

    max_core_restarts: Annotated[
        int, option("most lost engine cores that are replaced within restart_window_s", 0)
    ] = MAX_LOSSES
    # Without those that a request explains.
    max_worker_restarts: Annotated[
        int, option("most lost workers that one engine core replaces within the same time", 0)
    ] = MAX_WORKER_LOSSES
    restart_window_s: Annotated[float, seconds("seconds after which a loss is forgotten", 0.1)] = (
        LOSS_WINDOW_S
    )
    warm_spare: Annotated[
        bool, option("keep a process with torch loaded, so that a lost worker or core is back sooner")
    ] = False

    def __post_init__(self) -> None:
        check_options(self)

    def make_core_budget(self, journal_path: str) -> RestartBudget:
        """The budget for the core's losses, for its owner."""
        return RestartBudget(self.max_core_restarts, self.restart_window_s, journal_path)

    def make_worker_budget(self) -> RestartBudget:
        """The budget for the worker's losses, for the core."""
        return RestartBudget(self.max_worker_restarts, self.restart_window_s)


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Everything that core and workers need to know. Made by `EngineArgs.create_engine_config`."""

    model: ModelConfig
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    parallel: ParallelConfig = ParallelConfig()
    recovery: RecoveryConfig = RecoveryConfig()
    log_level: str = "WARNING"
    log_format: Annotated[LogFormat, option("lines of text or of JSON")] = "text"
    ready_timeout_s: Annotated[float, seconds("how long an engine may take to start", 1.0)] = 600.0
    # The default is vLLM's and SGLang's; a slow CPU's longest step of 2048 tokens of an 8B model is a minute.
    step_timeout_s: Annotated[
        float,
        seconds(
            "a worker whose step takes longer is hung and replaced; 0: no process is watched, for debuggers",
            0.1,
            zero="none",
        ),
    ] = 300.0
    exact: (
        Annotated[
            bool,
            option(
                "the same tokens bit for bit whatever else runs, or no start; "
                "default: where float32 allows it",
                group="model",
            ),
        ]
        | None
    ) = None
    fault_hooks: Annotated[str, option("")] = ""  # for tests; see fault_hooks.py
    logits_processors: tuple[str, ...] = ()  # classes that the worker loads, module:Class, in their order
    logits_processor_folders: tuple[str, ...] = ()  # where their modules lie; absolute
    # KV blocks of the lost worker whose place this one takes: as many again, whatever it finds free.
    num_blocks_before: int | None = None

    def __post_init__(self) -> None:
        check_options(self)
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
        if self.cache.kv_cache_dtype != "auto" and not self.model.spec.is_causal:
            text = "auto for an encoder, which keeps no KV cache"
            raise ConfigError("kv_cache_dtype", self.cache.kv_cache_dtype, text)
        spec = size_latents(self.model.spec, self.cache.kv_cache_dtype)
        if spec is not self.model.spec:
            model = msgspec.structs.replace(self.model, spec=spec)
            msgspec.structs.force_setattr(self, "model", model)
        most = self.model.spec.most_keys
        if most is not None and self.model.max_model_len > most:
            text = (
                f"at most {most}: among more tokens this model chooses some by an indexer, which is not read"
            )
            raise ConfigError("max_model_len", self.model.max_model_len, text)
        self._check_state_slots()
        self._check_ranks()

    def _check_state_slots(self) -> None:
        num_slots, num_rows = self.cache.num_state_slots, self.scheduler.max_num_seqs
        stage = self.model.spec.stage
        if num_slots is None or not (stage.is_first and stage.is_last):
            return
        if not self.model.spec.state_size:
            raise ConfigError("num_state_slots", num_slots, "None for a model without recurrent layers")
        if num_slots < num_rows:
            text = f"at least max_num_seqs={num_rows}, one for each, or max_num_seqs at most {num_slots}"
            raise ConfigError("num_state_slots", num_slots, text)

    def _check_ranks(self) -> None:
        size = self.parallel.tensor_parallel_size
        sizes = [1] if size == 1 else self.model.spec.find_tensor_parallel_sizes()
        if size not in sizes:
            allowed = f"one of {', '.join(map(str, sizes))}: what divides this model's heads and widths"
            if self.model.spec.generic is not None:
                allowed = "1 with a model that transformers computes"
            raise ConfigError("tensor_parallel_size", size, allowed)
        if size > 1 and self.model.dtype == "float16" and not self.parallel.is_on_gpu:
            text = "1 with dtype='float16', which only ranks with device='cuda' add up"
            raise ConfigError("tensor_parallel_size", size, text)
        num_stages, most = self.parallel.pipeline_parallel_size, self.model.spec.max_stages
        if num_stages > most and self.model.spec.generic is not None:
            raise ConfigError(
                "pipeline_parallel_size", num_stages, "1 with a model that transformers computes"
            )
        if num_stages > most == 1:
            text = "1 with this model, whose layers need what the first ones have computed"
            raise ConfigError("pipeline_parallel_size", num_stages, text)
        if num_stages > most:
            text = f"at most {most}: each stage has one of this model's layers or more"
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
        """The config of engine `rank` of `num_engines`."""
        parallel = msgspec.structs.replace(
            self.parallel, data_parallel_size=num_engines, data_parallel_rank=rank
        )
        return msgspec.structs.replace(self, parallel=parallel)

    def for_replacement(self) -> EngineConfig:
        """The config of a process that replaces a lost one."""
        return msgspec.structs.replace(self, fault_hooks=keep_lasting(self.fault_hooks))

    def for_next_worker(self, num_blocks: int, num_state_slots: int = 0) -> EngineConfig:
        """The config of a worker that replaces one with `num_blocks` blocks and so many state slots."""
        cache = msgspec.structs.replace(self.cache, num_state_slots=num_state_slots or None)
        return msgspec.structs.replace(self, num_blocks_before=num_blocks, cache=cache)

    def without_graphs(self) -> EngineConfig:
        """This config without CUDA graphs."""
        model = msgspec.structs.replace(self.model, enforce_eager=True)
        return msgspec.structs.replace(self, model=model)

    def for_stage(self, stage: int) -> EngineConfig:
        """The config of one stage of a pipeline, for all its ranks."""
        num_stages = self.parallel.pipeline_parallel_size
        if num_stages == 1:
            return self
        return self._for_part(self.model.spec.for_stage(stage, num_stages), pipeline_parallel_size=1)

    def for_rank(self) -> EngineConfig:
        """The config with which a rank plans: of an engine whose whole model is the rank's share."""
        size = self.parallel.tensor_parallel_size
        if size == 1:
            return self
        return self._for_part(self.model.spec.for_rank(size), tensor_parallel_size=1)

    def _for_part(self, spec: ModelSpec, **parallel: int) -> EngineConfig:
        change = msgspec.structs.replace
        model = change(self.model, spec=spec)
        return change(self, model=model, parallel=change(self.parallel, **parallel))

    @property
    def max_blocks_per_sequence(self) -> int:
        """Blocks one after the other that max_model_len tokens fill."""
        return -(-self.model.max_model_len // self.cache.block_size)

    @property
    def kv_dtype(self) -> str:
        """What the KV cache holds: 'int8', 'fp8', or the model's type."""
        kv_cache_dtype = self.cache.kv_cache_dtype
        return self.model.dtype if kv_cache_dtype == "auto" else kv_cache_dtype

    @property
    def max_blocks_per_request(self) -> int:
        """The most blocks that a request of max_model_len tokens holds at once, of all KV groups."""
        return self.count_blocks(self.model.max_model_len)

    def count_blocks(self, num_tokens: int) -> int:
        """The most blocks that a request which grows to so many tokens holds at once, of all KV groups."""
        size, budget = self.cache.block_size, self.scheduler.max_num_batched_tokens
        whole = -(-num_tokens // size)
        return sum(
            whole if window is None else min(whole, find_max_held(window, size, budget))
            for window in self.model.spec.kv_windows
        )

    def find_longest(self, num_blocks: int) -> int:
        """The most tokens of a request that is alone with `num_blocks` blocks."""
        most = max(self.model.max_model_len, num_blocks * self.cache.block_size)
        return bisect_right(range(most + 1), num_blocks, key=self.count_blocks) - 1

    def count_kv_tokens(self, num_blocks: int) -> int:
        """Tokens for which these blocks suffice; where windows free some, in requests of max_model_len."""
        if any(self.model.spec.kv_windows):
            return num_blocks * self.model.max_model_len // self.max_blocks_per_request
        return num_blocks * self.cache.block_size

    @property
    def state_bytes(self) -> int:
        """Bytes of a state slot."""
        return self.model.spec.state_size * DTYPE_SIZE_BYTES["float32"]

    @property
    def block_size_bytes(self) -> int:
        """Bytes of one KV block: of all layers, or of as many places as layers of a KV group have."""
        spec, kv_dtype = self.model.spec, self.cache.kv_cache_dtype
        if len(spec.kv_windows) == 1:
            return spec.kv_bytes_per_token(self.model.dtype, kv_dtype) * self.cache.block_size
        places = find_places(spec, kv_dtype)
        itemsize = DTYPE_SIZE_BYTES[self.model.dtype] if kv_dtype == "auto" else 1
        return 2 * places.count * places.size * itemsize * self.cache.block_size
