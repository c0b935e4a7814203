"""Is it right on this GPU? A first answer, golden runs against transformers, crowds, graphs on and off."""

from __future__ import annotations

import os
import platform
import shutil
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch

from .rows import Row, Say, count_equal

_PROMPTS = ("Once upon a time", "The little fox", "What is 12 plus 30?", "In the morning, the")
_NUM_TOKENS = 48
_LONG = 40  # tokens, which need three or four blocks of 16
_LEAST_BLOCKS = 5  # for a request of 64 tokens, and the one that nobody has
# bfloat16 may be as far from float32 as transformers' own is, and half more.
_BFLOAT16_SLACK = 1.5


def check_environment(say: Say) -> None:
    """The machine, in rows that judge nothing."""
    import triton

    properties = torch.cuda.get_device_properties(0)
    say(
        Row(
            "device",
            f"{properties.name}, sm_{properties.major}{properties.minor}, "
            f"{properties.multi_processor_count} processors, {properties.total_memory / 2**30:.0f} GiB",
        )
    )
    versions = f"torch {torch.__version__}, triton {triton.__version__}, CUDA {torch.version.cuda}"
    say(Row("versions", f"{versions}, Python {platform.python_version()}"))
    from ...kernels.triton.triton_runtime import find_fault

    compiler = shutil.which(os.environ.get("CC", "gcc"))
    has_headers = Path(sysconfig.get_paths()["include"], "Python.h").exists()
    say(
        Row(
            "C compiler, Python.h", f"{compiler}, {has_headers}", "both", compiler is not None and has_headers
        )
    )
    fault = find_fault("cuda")
    say(Row("Triton's kernels", fault or "run", "run", fault is None))


def check_golden(say: Say, device: str = "cuda") -> None:
    """The packaged model's greedy tokens in float32, and its logprobs in bfloat16, beside transformers'."""
    import transformers

    from ...frontend.models.model_folder import POCKET, find_model_folder

    torch.backends.cuda.matmul.allow_tf32 = False
    folder = str(find_model_folder(POCKET))
    peer: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    peer.to(device)
    prompts = encode_prompts()
    outputs = _generate("float32", device, prompts)
    sequences = [prompt + tokens for prompt, tokens in zip(prompts, outputs, strict=True)]
    expected = [_generate_with_peer(peer, prompt, device) for prompt in prompts]
    say(count_equal("float32 greedy tokens, as transformers'", outputs, expected))
    exact = [_score_with_peer(peer, sequence, device) for sequence in sequences]
    ours = _score("bfloat16", device, sequences)
    half: Any = peer.to(torch.bfloat16)
    theirs = [_score_with_peer(half, sequence, device) for sequence in sequences]
    our_error, their_error = _mean_distance(ours, exact), _mean_distance(theirs, exact)
    say(
        Row(
            "bfloat16 logprobs",
            f"off by {our_error:.4f} in the mean, transformers by {their_error:.4f}",
            f"at most {_BFLOAT16_SLACK} times",
            our_error <= _BFLOAT16_SLACK * their_error,
        )
    )


def check_first_answer(say: Say, device: str = "cuda") -> None:
    """What a user does first: an engine in its own processes, and an answer; seconds of each."""
    from ...frontend.llm import LLM
    from ...ipc.params.sampling_params import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=_NUM_TOKENS)
    for dtype in ("float32", "bfloat16"):
        started = time.perf_counter()
        with LLM(dtype=dtype, device=device, kv_cache_memory_bytes="256MiB", log_level="WARNING") as llm:
            ready_s = time.perf_counter() - started
            text = llm.generate([_PROMPTS[0]], params, use_tqdm=False)[0].outputs[0].text
        seconds = time.perf_counter() - started
        detail = f"ready in {ready_s:.1f} s, ended after {seconds:.1f} s: {text[:40]!r}"
        say(Row(f"{dtype} first answer", detail, "text", bool(text.strip())))


def check_crowds(say: Say, device: str = "cuda", sizes: tuple[int, ...] = (1, 3, 5, 33, 65, 256)) -> None:
    """An engine with run-ahead and padded graphs beside one in lock-step without graphs: the same tokens.

    Exact kernels, so that they must be; greedy, with filters and penalties by turns, and lengths that differ,
    so that rows end while others run. The largest crowd also where it has to be sent back for want of blocks.
    """
    from ...ipc.params.sampling_params import SamplingParams

    kinds = [
        {"temperature": 0.0},
        {"temperature": 0.8, "top_k": 20, "top_p": 0.95},
        {"temperature": 0.7, "repetition_penalty": 1.2, "logprobs": 2},
    ]
    prompts = encode_prompts()

    def run(llm: Any, number: int, least_tokens: int = 4) -> list[list[int]]:
        params = [
            SamplingParams(
                seed=i, max_tokens=least_tokens + i % 13, ignore_eos=True, detokenize=False, **kinds[i % 3]
            )
            for i in range(number)
        ]
        return generate(llm, [[*prompts[i % len(prompts)], 5 + i] for i in range(number)], params)

    common: dict[str, Any] = {"exact": True, "max_num_seqs": max(sizes)}
    room: dict[str, Any] = {"kv_cache_memory_bytes": "512MiB"}
    # A block each, of which all need three or four in the end; never less than one alone may have.
    most = max(sizes)
    num_blocks = max(_LEAST_BLOCKS, most + 1)
    little_room: dict[str, Any] = {"num_gpu_blocks_override": num_blocks, "max_model_len": 64}
    little_room["kv_cache_memory_bytes"] = None
    dtypes = ("float32", "bfloat16", "float16")
    for dtype in dtypes[:2] if device == "cpu" else dtypes:  # a CPU has no exact kernels for the last
        with (
            make_llm(dtype, device, **common, **room) as ahead,
            make_llm(
                dtype, device, enforce_eager=True, distributed_executor_backend="uni", **common, **room
            ) as eager,
            make_llm(dtype, device, **common, **little_room) as narrow,
        ):
            for size in sizes:
                name = f"{dtype}, {size} requests as in lock-step"
                say(count_equal(name, run(ahead, size), run(eager, size)))
            name = f"{dtype}, {most} requests in little memory"
            row = count_equal(name, run(narrow, most, _LONG), run(eager, most, _LONG))
            times = narrow.stats().num_preemptions_total
            value = f"{row.value}, sent back {times} times"
            say(Row(row.name, value, "all, sent back", bool(row.is_ok) and times > 0))


def check_graphs(say: Say, device: str = "cuda") -> None:
    """The same tokens with CUDA graphs and without. 8 requests are a size of the ladder: none pads."""
    for dtype in ("float32", "bfloat16"):
        prompts = [ids[:4] for ids in encode_prompts()] * 2
        eager = _generate(dtype, device, prompts, enforce_eager=True)
        graphed = _generate(dtype, device, prompts, enforce_eager=False)
        say(count_equal(f"{dtype} graphs on and off", graphed, eager))


def encode_prompts() -> list[list[int]]:
    """The tokens of a few prompts of the packaged model."""
    from ...frontend.models.model_folder import POCKET, find_model_folder
    from ...frontend.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(str(find_model_folder(POCKET)))
    return [tokenizer.encode(prompt) for prompt in _PROMPTS]


def make_llm(dtype: str, device: str, **engine_args: Any) -> Any:
    """The packaged model's engine, which says nothing but warnings."""
    from ...frontend.llm import LLM

    fields: dict[str, Any] = {"kv_cache_memory_bytes": "256MiB", "log_level": "WARNING"}
    return LLM(dtype=dtype, device=device, **(fields | engine_args))


def generate(llm: Any, prompts: list[list[int]], params: Any) -> list[list[int]]:
    """The tokens of each; `params`: one for all, or one a prompt."""
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def make_greedy(num_tokens: int = _NUM_TOKENS, **more: Any) -> Any:
    """So many tokens, the likeliest ones."""
    from ...ipc.params.sampling_params import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False, **more)


def _generate(dtype: str, device: str, prompts: list[list[int]], **engine_args: Any) -> list[list[int]]:
    """In this process: what a step holds then depends on nothing but the requests."""
    with make_llm(dtype, device, distributed_executor_backend="uni", **engine_args) as llm:
        return generate(llm, prompts, make_greedy())


def _score(dtype: str, device: str, sequences: list[list[int]]) -> list[list[float]]:
    """Logprob of each token of each sequence but the first."""
    from ...ipc.params.sampling_params import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    with make_llm(dtype, device, distributed_executor_backend="uni") as llm:
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in sequences], params, use_tqdm=False)
    return [
        [entry[token].logprob for token, entry in zip(ids[1:], output.prompt_logprobs[1:], strict=True)]
        for ids, output in zip(sequences, outputs, strict=True)
    ]


def _generate_with_peer(peer: Any, prompt: list[int], device: str) -> list[int]:
    ids = torch.tensor([prompt], device=device)
    out = peer.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=_NUM_TOKENS,
        min_new_tokens=_NUM_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


def _score_with_peer(peer: Any, sequence: list[int], device: str) -> list[float]:
    ids = torch.tensor([sequence], device=device)
    with torch.inference_mode():
        logprobs = peer(ids).logits[0].float().log_softmax(-1)
    return logprobs[:-1].gather(1, ids[0, 1:, None])[:, 0].tolist()


def _mean_distance(actual: list[list[float]], exact: list[list[float]]) -> float:
    pairs = [
        (a, e) for ours, other in zip(actual, exact, strict=True) for a, e in zip(ours, other, strict=True)
    ]
    return sum(abs(a - e) for a, e in pairs) / len(pairs)
