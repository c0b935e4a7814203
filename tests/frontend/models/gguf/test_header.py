"""The header of a GGUF file: what is read, and that nothing in it costs more than its bytes."""

from __future__ import annotations

import random
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from quire.frontend.models.gguf import folder
from quire.frontend.models.gguf.folder import open_gguf
from quire.frontend.models.gguf.header import MAX_ELEMENTS, read_header
from quire.frontend.text.tokenizer import load_tokenizer
from quire.ipc.errors import ModelError
from quire.ipc.spec.gguf_tensor import BLOCKS

from ....gguf_files import GgufWriter
from .files import make_tiny

NUM_MUTATIONS = 200
MANY_MUTATIONS = 10_000


def test_metadata_and_tensors_come_back(tmp_path: Path):
    writer = GgufWriter({"a": 3, "b": -1, "c": 0.5, "d": "text", "e": True, "f": [1, 2], "g": ["x", ""]})
    for type_ in BLOCKS:
        if type_ not in ("F32", "F16", "BF16"):
            writer.add_blocks(f"{type_}.weight", type_, (3, 512))
    header = read_header(writer.write(tmp_path / "a.gguf"))
    assert header.metadata == writer.metadata
    content = header.file.read_bytes()
    for name, (type_, shape, data) in writer.tensors.items():
        tensor = header.tensors[name]
        assert (tensor.type, tensor.shape) == (type_, shape)
        assert content[tensor.offset : tensor.offset + tensor.size_bytes] == data


def _pack(
    num_tensors: int, num_keys: int, rest: bytes = b"", version: int = 3, magic: bytes = b"GGUF"
) -> bytes:
    return magic + struct.pack("<IQQ", version, num_tensors, num_keys) + rest


def _key(name: str, kind: int, rest: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", kind) + rest


def _tensor(dims: tuple[int, ...] = (32,), type_id: int = 0, offset: int = 0, name: bytes = b"t") -> bytes:
    head = struct.pack("<Q", len(name)) + name + struct.pack("<I", len(dims))
    return head + struct.pack(f"<{len(dims)}Q", *dims) + struct.pack("<IQ", type_id, offset) + bytes(256)


_TOO_MANY = struct.pack("<IQ", 0, MAX_ELEMENTS + 1) + bytes(MAX_ELEMENTS + 1)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "magic='truncated'"),
        (_pack(0, 0, magic=b"GGML"), "b'GGUF'"),
        (_pack(0, 0, version=1), "2 or 3"),
        (_pack(0, 0, version=3 << 24), "little-endian"),
        (_pack(2**62, 0), "tensor_count=4611686018427387904"),
        (_pack(0, 2**62), "metadata_kv_count"),
        (_pack(0, 1, bytes(4)), "metadata_kv_count=1: expected at most"),
        (_pack(21, 1), "and 0 in what is left of the file's 24 bytes; truncated?"),
        (_pack(0, 1, struct.pack("<Q", 2**60) + bytes(99)), "key 0 length=1152921504606846976"),
        (_pack(0, 1, _key("k", 8, struct.pack("<Q", 2**40))), "k length"),
        (_pack(0, 1, _key("k", 8, struct.pack("<Q", 100))), "k='truncated'"),
        (_pack(0, 1, _key("k", 13, bytes(9))), "k type=13"),
        (_pack(0, 1, _key("k", 9, struct.pack("<IQ", 9, 1) + bytes(9))), "k element type=9"),
        (_pack(0, 1, _key("k", 9, struct.pack("<IQ", 8, 2**50))), "k length=1125899906842624"),
        (_pack(0, 1, _key("k", 9, _TOO_MANY)), "at most"),
        (_pack(0, 1, _key("k", 8, struct.pack("<Q", 2) + b"\xff\xfe")), "UTF-8"),
        (_pack(0, 2, _key("k", 0, b"\1") * 2), "comes once"),
        (_pack(1, 0, _tensor(type_id=16)), "tensor t type='IQ2_XXS': expected one of F32"),
        (_pack(1, 0, _tensor(type_id=99)), "tensor t type=99"),
        (_pack(1, 0, _tensor((1,) * 5)), "n_dims=5"),
        (_pack(1, 0, _tensor((0,))), "dims=[0]"),
        (_pack(1, 0, _tensor((2**63, 2**63))), "below 2**63"),
        (_pack(1, 0, _tensor((33,), type_id=2)), "a multiple of 32 numbers"),
        (_pack(1, 0, _tensor(offset=1)), "offset=1: expected a multiple of general.alignment=32"),
        (_pack(1, 0, _tensor(offset=2**40)), "truncated?"),
        (_pack(1, 0, _tensor((2**40,))), "truncated?"),
        (_pack(2, 0, _tensor()[:-256] + _tensor(name=b"u")), "tensor u offset=0: expected at least 128"),
        (_pack(0, 1, _key("general.alignment", 4, struct.pack("<I", 24))), "general.alignment=24"),
        (_pack(0, 1, _key("general.alignment", 4, struct.pack("<I", 0))), "general.alignment=0"),
        (_pack(0, 1, _key("general.alignment", 8, struct.pack("<Q", 1) + b"x")), "general.alignment='x'"),
    ],
)  # fmt: skip
def test_a_bad_header_is_one_line_with_file_field_and_value(content: bytes, words: str, tmp_path: Path):
    file = tmp_path / "bad.gguf"
    file.write_bytes(content)
    with pytest.raises(ModelError) as caught:
        read_header(file)
    text = str(caught.value)
    assert text.startswith("bad.gguf ")
    assert words in text
    assert "\n" not in text


def test_a_truncated_file_is_refused_wherever_it_ends(tmp_path: Path):
    whole = make_tiny().encode()
    file = tmp_path / "cut.gguf"
    for size in {*range(0, len(whole) - 32, 97), len(whole) - 33}:
        file.write_bytes(whole[:size])
        with pytest.raises(ModelError):
            open_gguf([file])


def _mutate(content: bytes, dice: random.Random) -> bytes:
    """Some bytes changed, put in, taken out, or a number made extreme; mostly in the header."""
    data = bytearray(content)
    for _ in range(dice.randint(1, 4)):
        place = dice.randrange(len(data) if dice.random() < 0.1 else min(len(data), 6000))
        kind = dice.randrange(4)
        if kind == 0:
            data[place] = dice.randrange(256)
        elif kind == 1:
            extreme = dice.choice((0, 1, 2**31, 2**32 - 1, 2**62, 2**64 - 1, dice.randrange(2**64)))
            data[place : place + 8] = struct.pack("<Q", extreme)
        elif kind == 2:
            del data[place : place + dice.randint(1, 16)]
        else:
            data[place:place] = dice.randbytes(dice.randint(1, 16))
    return bytes(data)


def _fuzz(folder: Path, count: int) -> list[str]:
    """What was said of the mutations that were refused."""
    content, dice, texts = make_tiny().encode(), random.Random(0), list[str]()
    file = folder / "fuzz.gguf"
    for _ in range(count):
        file.write_bytes(_mutate(content, dice))
        try:
            load_tokenizer(open_gguf([file]).folder)
        except ModelError as error:
            texts.append(str(error))
    return texts


@pytest.fixture
def bounded_memory(monkeypatch: Any, tmp_path: Path):
    monkeypatch.setattr(folder, "cache_folder", lambda: tmp_path / "cache")
    tracemalloc.start()
    yield
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 64 << 20


@pytest.mark.usefixtures("bounded_memory")
@pytest.mark.parametrize(
    "count",
    [
        pytest.param(NUM_MUTATIONS),
        pytest.param(MANY_MUTATIONS, marks=[pytest.mark.slow, pytest.mark.timeout(600)]),
    ],
)
def test_mutated_files_end_with_one_line_and_little_memory(count: int, tmp_path: Path):
    texts = _fuzz(tmp_path, count)
    assert len(texts) > count // 2
    assert not [text for text in texts if "\n" in text or len(text) > 1000]
