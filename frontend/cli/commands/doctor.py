"""`quire doctor`: can this machine do what a model does, with what, and what is missing. Else exit code 1.

torch is asked in a child process (`quire.tools.probe`), because a frontend never loads it.
"""

from __future__ import annotations

import functools
import platform
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from importlib import metadata
from typing import Any

import msgspec
from msgspec.structs import replace

from ....ipc.daemon.run_dir import RunDirectory
from ....ipc.errors import EngineStartError, QuireError
from ....ipc.processes.cgroup import count_processors
from ....ipc.processes.cpu_cores import describe_engines, describe_ranks, list_cores
from ....ipc.processes.process import module_command
from ....ipc.spec.config import EngineConfig, ModelConfig, ParallelConfig
from ....ipc.spec.linear_shapes import count_model_bytes
from ....ipc.spec.model_spec import ModelSpec, PoolingSpec, find_stages
from ....ipc.spec.weight_format import Quantization
from ...formats.known_formats import choose_output_format, summarize
from ...models.model_folder import inspect_model_folder, pocket_encoder_folder, pocket_folder
from ...options.engine_args import EngineArgs
from ...options.gpu_cards import find_card
from ...text.end_tokens import describe_ends
from ...text.tokenizer import load_tokenizer
from ..engine_choice import choose_model
from ..parser import ExitCode, Parser

MIN_PYTHON = (3, 11)
LOW_MEMORY_BYTES = 2 * 2**30
OPTIONAL_PACKAGES = {
    "transformers": "decoders that no family of Quire's reads; the peer of `quire bench offline`",
    "argcomplete": "`quire completion`",
    "grpcio": "`quire serve --grpc-port`",
    "ray": "distributed_executor_backend=ray",
}
_PACKAGE_NAME = re.compile(r"[^\w.-]")  # what comes after it
_RAY_TIMEOUT_S = 60.0
_PROBE_TIMEOUT_S = 300.0  # the native kernel may be compiled on the way


class Status(StrEnum):
    """How a check came out."""

    OK = "ok"
    NOTE = "note"  # works, but slower or with less than it could
    MISSING = "missing"  # generation cannot work


class Check(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of the report."""

    name: str
    status: Status
    detail: str
    tasks: tuple[str, ...] = ()  # what a model that was looked at does


def run(argv: Sequence[str], parts: Mapping[str, Callable[[], Iterator[Check]]] | None = None) -> int:
    """Run `quire doctor`. parts: what is checked of the machine, by name; None: all of PARTS."""
    options = _make_parser().parse(argv)
    options.model = choose_model(argv, options.model_name, options.model)
    args = EngineArgs.from_cli_args(options)
    parts = dict(PARTS if parts is None else parts)
    if args.data_parallel_size != 1:
        parts["engines"] = functools.partial(check_engines, args.data_parallel_size)
    if (args.tensor_parallel_size, args.pipeline_parallel_size) != (1, 1):
        parts["ranks"] = functools.partial(
            check_ranks, args.tensor_parallel_size, args.pipeline_parallel_size
        )
    if args.model:
        parts["model"] = functools.partial(check_model, args)
    checks = [check for name, part in parts.items() for check in _run_part(name, part)]
    is_well = all(check.status is not Status.MISSING for check in checks)
    tasks = next((check.tasks for check in checks if check.tasks), ("generate",))
    if options.json:
        can_generate = is_well and "generate" in tasks
        print(msgspec.json.encode({"can_generate": can_generate, "checks": checks}).decode())
    else:
        print(_format_report(checks, tasks, is_well))
    return ExitCode.OK if is_well else ExitCode.FAILED


def check_system() -> Iterator[Check]:
    """Python, Quire, processor and memory."""
    import psutil

    from .... import __version__
    from ....tools.bench.machine import cpu_name, find_commit

    is_new_enough = sys.version_info[:2] >= MIN_PYTHON
    python = f"{platform.python_version()} ({sys.executable}), {platform.system()} {platform.release()}"
    yield Check("python", Status.OK if is_new_enough else Status.MISSING, python)
    yield Check("quire", Status.OK, f"{__version__}, commit {find_commit() or 'unknown'}")
    yield Check("cpu", Status.OK, f"{cpu_name()}, {count_processors()} cores usable")
    memory = psutil.virtual_memory()
    detail = f"{memory.available / 2**30:.1f} GiB free of {memory.total / 2**30:.1f} GiB"
    yield Check("memory", Status.OK if memory.available >= LOW_MEMORY_BYTES else Status.NOTE, detail)


def check_engines(num_engines: int) -> Iterator[Check]:
    """What each of several engines would compute on."""
    ParallelConfig(data_parallel_size=num_engines)  # says what is allowed
    cores = list_cores()
    status = Status.OK if num_engines <= len(cores) else Status.NOTE
    yield Check("engines", status, describe_engines(cores, num_engines))


def check_packages() -> Iterator[Check]:
    """Installed versions; a missing requirement is fatal, a missing extra is a note."""
    from ....tools.bench.machine import find_version

    versions = {name: find_version(name) for name in list_required_packages()}
    missing = [name for name, version in versions.items() if version is None]
    if missing:
        yield Check("packages", Status.MISSING, f"pip install {' '.join(missing)}")
    yield Check("packages", Status.OK, ", ".join(f"{name} {v}" for name, v in versions.items() if v))
    for name, purpose in OPTIONAL_PACKAGES.items():
        version = find_version(name)
        yield Check(name, Status.OK if version else Status.NOTE, version or f"not installed: {purpose}")


def list_required_packages() -> list[str]:
    """As the package itself says, without those of extras."""
    needed = [text for text in metadata.requires("quire") or () if "extra ==" not in text]
    return [_PACKAGE_NAME.split(text, maxsplit=1)[0] for text in needed]


@functools.cache
def probe() -> dict[str, Any]:
    """What torch says, in a child process. Raises EngineStartError with its last line if it cannot."""
    command = module_command("quire.tools.probe")
    done = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        raise EngineStartError(lines[-1] if lines else f"ended with code {done.returncode}")
    return msgspec.json.decode(done.stdout.splitlines()[-1])


def check_torch() -> Iterator[Check]:
    """What torch says: devices, threads and the attention that would run."""
    report = probe()
    threads = report["num_threads"]
    yield Check("torch", Status.OK, f"{report['torch']}, {report['cpu_capability']}, {threads} threads")
    gpus: list[dict[str, Any]] = report["gpus"]
    for index, gpu in enumerate(gpus):
        memory = f"{gpu['free_bytes'] / 2**30:.1f} GiB free of {gpu['memory_bytes'] / 2**30:.1f} GiB"
        detail = f"cuda:{index}: {gpu['name']}, compute capability {gpu['capability']}, {memory}"
        yield Check("gpu", Status.OK, detail)
    if report["gpu_fault"] is not None:
        yield Check("gpu", Status.NOTE, f"models run on the CPU: {report['gpu_fault']}")
    elif not gpus:
        built = f"CUDA {report['cuda_built']}" if report["cuda_built"] else "the CPU only"
        yield Check("gpu", Status.OK, f"none; models run on the CPU (this torch is built for {built})")
    kernels: dict[str, Any] = report["cpu_kernels"]
    yield Check("cpu kernels", Status.OK if kernels["is_native"] else Status.NOTE, kernels["detail"])
    for name in ("triton", "flashinfer"):
        library: dict[str, Any] = report[name]
        is_well = library["is_usable"] or not library["is_needed"]
        yield Check(name, Status.OK if is_well else Status.NOTE, library["detail"])


def check_ray() -> Iterator[Check]:
    """Which cluster this machine belongs to, and what its nodes have. It is asked in a child process."""
    from ....tools.bench.machine import find_version

    if find_version("ray") is None:
        return
    command = module_command("quire.core.network.ray.probe")
    done = subprocess.run(command, capture_output=True, text=True, timeout=_RAY_TIMEOUT_S)
    lines = done.stdout.strip().splitlines()
    detail = lines[-1] if lines else f"ended with code {done.returncode}"
    yield Check("ray cluster", Status.OK if done.returncode == 0 else Status.NOTE, detail)


def check_pocket_models() -> Iterator[Check]:
    """The models that ship with Quire."""
    for name, path in (("pocket model", pocket_folder()), ("pocket encoder", pocket_encoder_folder())):
        folder = inspect_model_folder(path)
        size = sum(file.stat().st_size for file in folder.path.rglob("*") if file.is_file())
        yield Check(name, Status.OK, f"{size / 1e6:.1f} MB in {folder.path}")


def check_run_directory() -> Iterator[Check]:
    """Whether an engine's sockets can be made."""
    directory = RunDirectory.create_private()
    try:
        directory.address_of("engine")
        yield Check("run directory", Status.OK, str(directory.path.parent))
    finally:
        directory.remove()


def check_ranks(stage_size: int, num_stages: int) -> Iterator[Check]:
    """Which GPU or cores each rank of `num_stages` stages, of `stage_size` ranks each, would compute on."""
    # It says what is allowed.
    parallel = ParallelConfig(tensor_parallel_size=stage_size, pipeline_parallel_size=num_stages)
    num_ranks, cores = parallel.num_ranks, list_cores()
    gpus: list[dict[str, Any]] = probe()["gpus"]
    if gpus and num_stages == 1:
        yield _check_gpu_ranks(gpus, num_ranks)
        return
    text = describe_ranks(cores, num_ranks)
    status = Status.OK if num_ranks <= len(cores) else Status.NOTE
    yield Check("ranks", status, f"with --device cpu, where stages run: {text}" if gpus else text)


def _check_gpu_ranks(gpus: Sequence[Mapping[str, Any]], num_ranks: int) -> Check:
    """A rank has a GPU of its own."""
    if num_ranks > len(gpus):
        shortage = f"{len(gpus)} GPU{'s' * (len(gpus) > 1)} for {num_ranks} ranks, which need one each"
        return Check("ranks", Status.MISSING, f"{shortage}; or --device cpu")
    parts = [f"rank {rank}: GPU {rank} ({gpu['name']})" for rank, gpu in enumerate(gpus[:num_ranks])]
    return Check("ranks", Status.OK, ", ".join(parts))


def check_model(args: EngineArgs) -> Iterator[Check]:
    """A model's folder: whether it can be served so, and how its thoughts and tool calls would be read."""
    engine, stage_size = args.create_engine_config(), args.tensor_parallel_size
    config = engine.model
    spec, num_stages = config.spec, args.pipeline_parallel_size
    place = ", ".join(config.weight_files) if config.gguf_tensors else config.model
    weights = f" ({config.weights_name} weights)" if config.weights_name else ""
    yield Check("model", Status.OK, f"{spec.architecture}, {config.dtype}{weights}, in {place}", spec.tasks)
    yield Check("layers", Status.OK if spec.generic is None else Status.NOTE, describe_layers(engine))
    if config.gguf_tensors:
        counts = Counter(tensor.type for tensor in config.gguf_tensors)
        shown = ", ".join(f"{count} {name}" for name, count in counts.most_common())
        yield Check("gguf", Status.OK, f"{shown}; its other files are in {config.model}")
    yield Check("weights", Status.OK, describe_sizes(config))
    yield from _check_card(config, stage_size)
    if num_stages > 1:
        yield Check("stages", Status.OK, describe_stages(spec, num_stages, stage_size))
    if spec.pooling is not None:
        yield Check("vectors", Status.OK, describe_vectors(spec.pooling, config))
    if not spec.has_logits:
        return
    tokenizer = load_tokenizer(config.tokenizer)
    known = choose_output_format(tokenizer, config.tool_call_parser, config.reasoning_parser)
    ends = describe_ends(tokenizer, config.eos_token_ids)
    yield Check("ends", Status.OK if config.eos_token_ids else Status.NOTE, ends)
    yield Check("formats", Status.OK if known else Status.NOTE, summarize(known, config))


def _check_card(config: ModelConfig, num_gpus: int) -> Iterator[Check]:
    """A line where the weights do not fit the GPU; the start of an engine refuses them."""
    card = find_card()
    size = count_model_bytes(config) // num_gpus
    if card is not None and size > card.memory_bytes:
        sizes = (
            f"{size / 1e6:,.0f} MB of weights do not fit {card.name} with {card.memory_bytes / 1e6:,.0f} MB"
        )
        yield Check("gpu memory", Status.NOTE, f"{sizes}: narrower ones, more GPUs, or --device cpu")


def describe_sizes(config: ModelConfig) -> str:
    """'1,524.4 MB in memory; 781.2 MB with quantization=int8, 500.1 MB with int4': as an engine's ledger."""
    packs_table = find_card() is None and config.dtype != "float16"  # of which the CPU's kernels are torch's
    shown = f"{count_model_bytes(config, packs_table=packs_table) / 1e6:,.1f} MB in memory"
    if config.weights_name:
        return shown
    names: tuple[Quantization, ...] = ("int8", "int4")
    sizes = {name: count_model_bytes(replace(config, quantization=name)) / 1e6 for name in names}
    return f"{shown}; " + ", ".join(
        f"{size:,.1f} MB with quantization={name}" for name, size in sizes.items()
    )


def describe_layers(config: EngineConfig) -> str:
    """'native: 24 layers of Quire's own, 12.0 KiB of KV cache a token (6.2 in int8)'; or generic, by whose
    code."""
    spec, kv_dtype = config.model.spec, config.cache.kv_cache_dtype
    own, int8 = (spec.kv_bytes_per_token(config.model.dtype, name) / 1024 for name in (kv_dtype, "int8"))
    shown = f" ({int8:,.1f} with kv_cache_dtype=int8)" if kv_dtype == "auto" else f" in {kv_dtype}"
    kept = f", {own:,.1f} KiB of KV cache a token{shown}" if own else ""
    if config.state_bytes:
        kept += f", {config.state_bytes / 1e6:,.2f} MB of states a request"
    if spec.generic is None:
        return f"native: {spec.num_layers} layers of Quire's own{kept}"
    by = f"generic: {spec.num_layers} layers by transformers {metadata.version('transformers')}"
    return f"{by} on Quire's cache and kernels{kept}; one process, no CUDA graphs"


def describe_vectors(pooling: PoolingSpec, config: ModelConfig) -> str:
    """'384 numbers, mean pooling, normalized; texts of up to 256 tokens'."""
    size = pooling.num_labels or pooling.count_width(config.spec.hidden_size)
    shown = f"{size} {'scores' if pooling.num_labels else 'numbers'}, {'+'.join(pooling.pools)} pooling"
    normalized = ", normalized" if pooling.normalize else ""
    return f"{shown}{normalized}; texts of up to {config.max_model_len} tokens"


def describe_stages(spec: ModelSpec, num_stages: int, stage_size: int) -> str:
    """'stage 0: layers 0-2 (rank 0), stage 1: layers 3-5 (rank 1)'."""
    parts: list[str] = []
    for stage, (first, end) in enumerate(find_stages(spec, num_stages)):
        ranks = ", ".join(str(stage * stage_size + rank) for rank in range(stage_size))
        parts.append(f"stage {stage}: layers {first}-{end - 1} (rank{'s' * (stage_size > 1)} {ranks})")
    return ", ".join(parts)


PARTS: dict[str, Callable[[], Iterator[Check]]] = {
    "system": check_system,
    "packages": check_packages,
    "torch": check_torch,
    "ray": check_ray,
    "pocket models": check_pocket_models,
    "run directory": check_run_directory,
}


def _run_part(name: str, part: Callable[[], Iterator[Check]]) -> list[Check]:
    """A part's checks; what it raises is a finding, not the end of the report."""
    try:
        return list(part())
    except (QuireError, OSError, ImportError, subprocess.SubprocessError) as error:
        return [Check(name, Status.MISSING, str(error) or type(error).__name__)]


def _format_report(checks: list[Check], tasks: Sequence[str], is_well: bool) -> str:
    width = max(len(check.name) for check in checks)
    lines = [f"{check.status:<8}{check.name:<{width}}  {check.detail}" for check in checks]
    done = ", ".join(tasks)
    verdict = f"Quire can {done} here." if is_well else f"Quire cannot {done} here; see 'missing'."
    return "\n".join([*lines, "", verdict])


def _make_parser() -> Parser:
    text = "Check this machine: versions, devices, what is missing; and an engine with these options."
    parser = Parser("quire doctor", text, arguments=" [MODEL]")
    text = "as --model: a model to look at, too; default: none"
    parser.add_argument("model_name", nargs="?", metavar="MODEL", help=text)
    parser.add_argument("--json", action="store_true", help="the report as one JSON object")
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(model="")
    return parser
