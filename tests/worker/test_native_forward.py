"""The native forward pass and the native steps give the bits of the path through Python, step by step."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from functools import lru_cache

import msgspec
import pytest
import torch
from checkpoints import RECIPES, Checkpoint, make_checkpoint
from paged import PagedRun
from quire.ipc.params.sampling_params import SamplingParams
from quire.ipc.protocol.step import GroupBlocks, NewRequestData, SchedulerOutput
from quire.ipc.protocol.token_ids import encode_token_ids
from quire.ipc.protocol.token_lists import TokenLists
from quire.ipc.spec.config import EngineConfig
from quire.kernels.program import program as program_kernel
from quire.worker.kv_cache import allocate_kv_caches
from quire.worker.layers.linear import TorchLinear
from quire.worker.models import load_model
from quire.worker.models.decoder import Decoder
from quire.worker.models.native_forward import make_native_forward
from quire.worker.steps.model_runner import GPUModelRunner
from torch import Tensor

pytestmark = pytest.mark.usefixtures("library")

CPU = torch.device("cpu")
DTYPES = ["float32", "bfloat16"]
NUM_BLOCKS = 40
# Prefill, chunks, decodes; steps in which all, some and none of the requests sample.
STEPS = (
    {"a": 17, "c": 1},
    {"b": 64, "a": 1, "c": 8},
    {"d": 33, "b": 5, "a": 20},
    {"c": 1, "d": 1, "b": 1, "a": 7},
    {"a": 1, "b": 1, "c": 1, "d": 1},
)
LENGTHS = {"a": 45, "b": 70, "c": 9, "d": 33}


@pytest.fixture(scope="module", params=RECIPES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), RECIPES[request.param])


def tokens_of(name: str) -> list[int]:
    generator = torch.Generator().manual_seed(LENGTHS[name])
    return torch.randint(131, (LENGTHS[name],), generator=generator).tolist()


def load(config: EngineConfig, is_native: bool = True) -> Decoder:
    """A decoder that computes its pass natively, or layer by layer in Python; tests leave it as it is."""
    return load_once(msgspec.json.encode(config), is_native)


@lru_cache(maxsize=8)  # those of a checkpoint
def load_once(config: bytes, is_native: bool) -> Decoder:
    decoder = load_model(msgspec.json.decode(config, type=EngineConfig), CPU)
    assert decoder.native is not None
    if not is_native:
        decoder.native = None
    return decoder


def compute_paged(config: EngineConfig, is_native: bool) -> Iterator[Tensor]:
    """Logits of every token of each step."""
    run = PagedRun(load(config, is_native), config)
    for name in LENGTHS:
        run.add(name, [*tokens_of(name), 1, 2])
    for step in STEPS:
        yield from run.step(step).values()


@pytest.mark.parametrize("dtype", DTYPES)
def test_hidden_states_have_the_same_bits_natively(checkpoint: Checkpoint, dtype: str) -> None:
    config = checkpoint.engine_config(dtype)
    pairs = list(zip(compute_paged(config, True), compute_paged(config, False), strict=True))
    assert len(pairs) == sum(map(len, STEPS))
    assert all(torch.equal(native, python) for native, python in pairs)


@pytest.mark.parametrize("quantization", ["int4", "fp8"])
def test_narrow_weights_have_the_same_bits_natively(checkpoint: Checkpoint, quantization: str) -> None:
    config = checkpoint.engine_config("bfloat16", quantization=quantization)
    pairs = zip(compute_paged(config, True), compute_paged(config, False), strict=True)
    assert all(torch.equal(native, python) for native, python in pairs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_that_share_a_steps_tokens_change_no_bit(
    checkpoint: Checkpoint, dtype: str, set_threads: Callable[[int], None]
) -> None:
    config = checkpoint.engine_config(dtype)
    results: list[list[Tensor]] = []
    for num_threads in (1, 2, 3):
        set_threads(num_threads)
        results.append(list(compute_paged(config, True)))
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


def test_a_step_stays_within_its_workspace_when_threads_are_added_meanwhile(
    checkpoint: Checkpoint, set_threads: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces: list[tuple[Tensor, int]] = []

    def reserve(_workspace: program_kernel.Workspace, size_bytes: int) -> int:
        set_threads(4)
        pieces.append((torch.full((size_bytes + (1 << 16),), 7, dtype=torch.uint8), size_bytes))
        return pieces[-1][0].data_ptr()

    monkeypatch.setattr(program_kernel.Workspace, "reserve", reserve)
    config = checkpoint.engine_config()
    set_threads(1)
    run = PagedRun(load(config), config)
    run.add("b", tokens_of("b"))
    run.step({"b": 64})
    assert all((memory[size_bytes:] == 7).all() for memory, size_bytes in pieces)
    assert len(pieces) == 1


def test_a_thread_reads_what_another_writes_in_the_same_step(
    checkpoint: Checkpoint, set_threads: Callable[[int], None]
) -> None:
    config = checkpoint.engine_config()
    results: list[dict[str, Tensor]] = []
    for num_threads in (1, 2):
        set_threads(num_threads)
        run = PagedRun(load(config), config)
        for name in ("reader", "writer"):
            run.add(name, tokens_of("b")[:64])
        reader, writer = run.requests["reader"], run.requests["writer"]
        writer.blocks = [run.take_block() for _ in range(3)]
        reader.blocks, reader.num_computed = list(writer.blocks), 48
        results.append(run.step({"reader": 16, "writer": 48}))
    assert all(torch.equal(results[0][name], results[1][name]) for name in ("reader", "writer"))


class RecordingRunner:
    """A GPUModelRunner whose logits are kept; requests get their rows and blocks by name."""

    def __init__(self, config: EngineConfig, is_native: bool, params: SamplingParams) -> None:
        caches = allocate_kv_caches(config, NUM_BLOCKS, CPU)
        self.runner = GPUModelRunner(config, load(config, is_native), caches, CPU)
        self.logits: list[Tensor] = []
        self._params = params
        self._rows = {name: row for row, name in enumerate(("d", "a", "c", "b"))}
        self._num_missing: dict[str, int] = {}  # tokens to compute until the next one is sampled
        sample = self.runner._sample

        def record(rows: object, logits: Tensor) -> object:
            self.logits += [logits.clone()] if len(logits) else []
            return sample(rows, logits)  # type: ignore[arg-type]

        self.runner._sample = record  # type: ignore[method-assign,assignment]

    def step(self, number: int, num_tokens: dict[str, int]) -> tuple[list[int], list[int]]:
        new = [self._request(name) for name in num_tokens if name not in self._num_missing]
        rows = [self._rows[name] for name in num_tokens]
        sampled_rows: list[int] = []
        for name, count in num_tokens.items():
            missing = self._num_missing.get(name, len(tokens_of(name))) - count
            self._num_missing[name] = missing or 1
            sampled_rows += [] if missing else [self._rows[name]]
        counts = list(num_tokens.values())
        output = self.runner.execute(SchedulerOutput(number, rows, counts, new, sampled_rows=sampled_rows))
        return output.rows, output.token_ids

    def _request(self, name: str) -> NewRequestData:
        row = self._rows[name]
        blocks = [(7 * (10 * row + block) + 3) % NUM_BLOCKS for block in range(10)]
        prompt = encode_token_ids(tokens_of(name))
        return NewRequestData(
            row, name, prompt, b"", self._params, [], TokenLists(), [GroupBlocks(blocks)], 0
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_steps_have_the_same_logits_and_tokens_natively(
    checkpoint: Checkpoint, dtype: str, temperature: float
) -> None:
    config, params = checkpoint.engine_config(dtype), SamplingParams(temperature=temperature, seed=5)
    native, python = (RecordingRunner(config, is_native, params) for is_native in (True, False))
    # Rotary angles that depend on a request's length are computed in Python.
    assert (native.runner._native_steps is None) == (config.model.spec.rope.type == "dynamic")
    for number, step in enumerate(STEPS):
        rows, tokens = native.step(number, step)
        assert (rows, tokens) == python.step(number, step)
    assert [len(logits) for logits in native.logits] == [1, 1, 4, 4]
    assert all(torch.equal(a, b) for a, b in zip(native.logits, python.logits, strict=True))


def test_prompt_logprobs_are_scored_where_the_model_has_a_native_pass(checkpoint: Checkpoint) -> None:
    config, params = checkpoint.engine_config(), SamplingParams(temperature=0.0, prompt_logprobs=2)
    native, python = (RecordingRunner(config, is_native, params).runner for is_native in (True, False))
    request = NewRequestData(
        0, "r", encode_token_ids(tokens_of("d")), b"", params, [], TokenLists(), [GroupBlocks([3, 4, 5])], 0
    )
    outputs = [runner.execute(SchedulerOutput(0, [0], [33], [request])) for runner in (native, python)]
    assert outputs[0].logprobs[0].prompt is not None
    assert outputs[0].logprobs == outputs[1].logprobs
    assert not native._rows.has_prompt_logprobs.any()  # the next steps take the short way


def test_a_piece_without_a_kernel_leaves_the_whole_pass_to_python(checkpoint: Checkpoint) -> None:
    decoder = load_model(checkpoint.engine_config(), CPU)
    table, ropes = decoder.embedding.table, decoder.ropes
    assert make_native_forward(decoder.emit, checkpoint.spec, table, ropes, decoder.head, True) is not None
    decoder.layers[1].mixer.o_proj = TorchLinear(torch.zeros(1, 1), None)  # pyright: ignore[reportAttributeAccessIssue]
    assert make_native_forward(decoder.emit, checkpoint.spec, table, ropes, decoder.head, True) is None


def test_structs_of_another_size_than_the_library_knows_are_refused(
    library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    class WrongTable(ctypes.Structure):
        _fields_ = (*program_kernel.StepTable._fields_, ("more", ctypes.c_void_p))

    program_kernel.check_layout(library)
    monkeypatch.setattr(program_kernel, "_TABLES", (*program_kernel._TABLES[:-1], WrongTable))
    with pytest.raises(RuntimeError, match=r"structs have .* bytes"):
        program_kernel.check_layout(library)


def test_the_workspace_grows_to_the_largest_step_and_stays() -> None:
    workspace = program_kernel.Workspace()
    large = workspace.reserve(1 << 20)
    assert large % 64 == 0
    assert workspace.reserve(1 << 10) == large
    assert workspace.reserve(1 << 20) == large
