"""vLLM's engine arguments that scripts and command lines carry along for what Quire does not have.

The values that leave it off are taken and dropped, so that a script runs unchanged; of another is said what
Quire lacks, or has instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from ...ipc.errors import ConfigError
from ...ipc.params.absent_arguments import NO_LORA, NO_MEDIA, drop_absent, read_rows

_LEVELS = ",".join(f'{{"{name}":{level}}}' for name in ("level", "mode") for level in range(4))
ENGINE_ARGUMENTS = read_rows(
    {
        NO_LORA: "enable_lora=false enable_lora_bias=false fully_sharded_loras=false max_loras=1 "
        'max_lora_rank=16 lora_extra_vocab_size=256 lora_dtype="auto" default_mm_loras={} max_cpu_loras '
        "enable_tower_connector_lora=false specialize_active_lora=false lora_modules lora_target_modules "
        "qlora_adapter_name_or_path",
        NO_MEDIA: "limit_mm_per_prompt={} mm_processor_kwargs={} media_io_kwargs={} "
        'allowed_local_media_path="" '
        "allowed_media_domains disable_mm_preprocessor_cache=false,true mm_processor_cache_gb=4,0 "
        'mm_processor_cache_type="lru" mm_shm_cache_max_object_size_mb=128 mm_encoder_only=false '
        'mm_encoder_tp_mode="weights","data" mm_encoder_attn_backend interleave_mm_strings=false '
        "skip_mm_profiling=false,true enable_mm_embeds=false language_model_only=false,true "
        "disable_chunked_mm_input=false,true video_pruning_rate",
        "Quire has no prompt adapters": "enable_prompt_adapter=false max_prompt_adapters=1",
        "Quire has no speculative decoding yet": "speculative_config={} speculative_model "
        "num_speculative_tokens num_lookahead_slots=0",
        "Quire has no models with such states yet": 'mamba_cache_dtype="auto" mamba_ssm_cache_dtype="auto" '
        'mamba_cache_mode="none" mamba_block_size disable_hybrid_kv_cache_manager=false,true',
        "Quire has no such plugins": "io_processor_plugin weight_transfer_config reasoning_parser_plugin "
        "tool_parser_plugin scheduler_cls worker_extension_cls additional_config={} logits_processor_pattern "
        'worker_cls="auto"',
        "a prompt is text or token ids": "enable_prompt_embeds=false",
        "a model is asked for vectors by runner='pooling'": 'task="auto","generate"',
        "weights and KV cache stay on the device": "cpu_offload_gb=0 swap_space=0,4 kv_offloading_size "
        'kv_offloading_backend="native" enable_sleep_mode=false offload_backend="auto" preemption_mode',
        "KV caches are not transferred": "kv_transfer_config={} ec_transfer_config={} kv_events_config={}",
        "kv_cache_dtype rules the KV cache, each of its tokens has scales": "calculate_kv_scales=false,true "
        "kv_sharing_fast_prefill=false override_attention_dtype",
        "blocks are known by content": 'prefix_caching_hash_algo="sha256","sha256_cbor","builtin"',
        "windows are the model's": "disable_sliding_window=false disable_cascade_attn=false,true",
        "Quire compiles its kernels itself": f"compilation_config={{}},0,1,2,3,{_LEVELS} "
        "optimization_level=0,1,2,3 attention_config={} kernel_config={} ray_workers_use_nsight=false "
        'moe_backend="auto" performance_mode="balanced"',
        "CUDA graphs are captured as needed, enforce_eager=True has none": "max_seq_len_to_capture=8192 "
        "cuda_graph_sizes=[] cudagraph_capture_sizes=[] max_cudagraph_capture_size",
        "tensor_parallel_size and its like share the work": "enable_dbo=false "
        "disable_custom_all_reduce=false,true max_parallel_loading_workers=1 ubatch_size all2all_backend "
        "prefill_context_parallel_size=1 decode_context_parallel_size=1 enable_expert_parallel=false "
        'enable_eplb=false eplb_config={} num_redundant_experts=0 expert_placement_strategy="linear"',
        "distributed_executor_backend='ray' has ranks on other machines": "nnodes=1 node_rank=0 master_addr "
        "master_port distributed_timeout_seconds data_parallel_rank data_parallel_start_rank "
        "data_parallel_size_local data_parallel_address data_parallel_rpc_port data_parallel_hybrid_lb=false "
        'data_parallel_external_lb=false data_parallel_backend="mp"',
        "scheduling_policy, max_num_seqs and max_num_batched_tokens rule it": "max_num_partial_prefills=1 "
        "max_long_partial_prefills=1 scheduler_delay_factor=0 num_scheduler_steps=1 stream_interval=1 "
        "multi_step_stream_outputs=false,true use_v2_block_manager=false,true "
        "disable_async_output_proc=false,true tokens_only=false",
        "llguidance follows every grammar": 'guided_decoding_backend="auto","guidance","llguidance" '
        'structured_outputs_config={},{"backend":"auto"},{"backend":"guidance"} '
        "guided_decoding_disable_fallback=false,true guided_decoding_disable_any_whitespace=false "
        "guided_decoding_disable_additional_properties=false",
        "reasoning_parser names the format": "enable_reasoning=false",
        "files are safetensors or GGUF, read where they lie": "model_loader_extra_config={} "
        "ignore_patterns=[] "
        'pt_load_map_location="cpu" config_format="auto","hf" safetensors_load_strategy="lazy" '
        "use_tqdm_on_load=true,false hf_config_path model_weights",
        "revision": "code_revision",
        "the tokenizer is the model's tokenizer.json": 'tokenizer_mode="auto","hf" tokenizer_pool_size=0 '
        'tokenizer_pool_type="ray" tokenizer_pool_extra_config',
        "the environment variable HF_TOKEN": "hf_token=false",
        "hf_overrides": "rope_scaling={} rope_theta",
        "generation_config": "override_generation_config={}",
        "pooler_config": "override_pooler_config={}",
        "quantization": "allow_deprecated_quantization=false,true",
        "logprobs are of the model's raw logits": 'logprobs_mode="raw_logprobs"',
        "log_level, and quire top": "disable_log_requests=false,true disable_log_stats=false,true "
        "enable_log_requests=false aggregate_engine_logging=false enable_logging_iteration_details=false "
        "enable_layerwise_nvtx_tracing=false max_log_len",
        "/metrics has what is counted": "enable_mfu_metrics=false kv_cache_metrics=false "
        "cudagraph_metrics=false "
        "show_hidden_metrics_for_version collect_detailed_traces",
        "LLM takes it": "profiler_config={}",
    }
)


class DropsOffValues(type):
    """A class whose keyword arguments are dropped where they leave off what Quire does not have."""

    if not TYPE_CHECKING:  # a type checker goes by the class' own fields

        def __call__(cls, *args: Any, **values: Any) -> Any:
            return super().__call__(*args, **drop_off_values(values))


def drop_off_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Without the arguments that ask for nothing. Raises ConfigError for one that asks for what is not "
    "here."""
    return drop_absent(values, ENGINE_ARGUMENTS, ConfigError)


def drop_off_options(words: Sequence[str], known: Mapping[str, Any]) -> list[str]:
    """As `drop_off_values`, of a command line's words before '--'; `known` options stay."""
    kept: list[str] = []
    rest = list(words)
    while rest and rest[0] != "--":
        word = rest.pop(0)
        flag, has_value, text = word.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        is_negated = name not in ENGINE_ARGUMENTS and name.startswith("no_")
        name = name.removeprefix("no_") if is_negated else name
        if flag in known or not flag.startswith("--") or name not in ENGINE_ARGUMENTS:
            kept.append(word)
            continue
        value: Any = not is_negated
        if has_value:
            value = _read_word(text)
        elif not any(isinstance(off, bool) for off in ENGINE_ARGUMENTS[name].off) and rest:
            value = _read_word(rest.pop(0))
        drop_off_values({name: value})
    return [*kept, *rest]


def _read_word(text: str) -> Any:
    """A value of a command line: JSON, as numbers and objects are, or else text."""
    try:
        return msgspec.json.decode(text.lower() if text in ("None", "True", "False") else text)
    except msgspec.DecodeError:
        return None if text.lower() == "none" else text
